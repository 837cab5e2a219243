"""Several processes (*ranks*) that train one model together: started by torchrun, one per GPU.

    torchrun --nproc-per-node 4 -m keyhole train my.yaml

single.py     the operations between ranks; for one process they are trivial
group.py      the same over torch.distributed: gloo between CPUs, NCCL between GPUs
join.py       this process's rank, from the variables that torchrun sets
failures.py   an error on one rank ends all of them, and is reported once; one that dies or hangs ends them too

Rank 0 is the *leader*: it prints, logs, decides and saves. Numbers of several ranks are gathered, never reduced: every
rank then sums them itself, in the order of ranks, so that all ranks have the same bits, and the same as one process.
"""

from keyhole.ranks.single import Ranks

__all__ = ["Ranks"]
