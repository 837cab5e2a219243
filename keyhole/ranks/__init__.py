"""Several processes that train one model together: started by torchrun, one per GPU (a *rank*).

    torchrun --nproc-per-node 4 -m keyhole train my.yaml

single.py     what a rank can ask of the others; with one process the answers are trivial
group.py      the same over torch.distributed: gloo between CPUs, NCCL between GPUs
join.py       who am I? From the variables that torchrun sets
failures.py   an error on one rank ends all of them, and is said once, with its rank
alive.py      a rank that dies or hangs ends the others within a time limit

Rank 0 is the *leader*: it prints, logs, decides and saves. Numbers of several ranks are gathered, never reduced: every
rank then adds them up itself, in the order of ranks, so that all have the same bits, and the same as one process has.

Nothing but group.py and join.py touches torch.distributed, and they are imported only where torchrun has started
several processes.
"""

from keyhole.ranks.single import Ranks

__all__ = ["Ranks"]
