"""What the leader has the other ranks do, one word at a time.

Only the leader decides: when to step, evaluate, save, stop. The others wait for its word and do the same with it
(follow.py), so no decision has to be made twice, and none can be made differently. A word is three integers, gathered
from all ranks in one exchange on the host (24 bytes; a fraction of a millisecond; kernels run on meanwhile):

    leader    command, argument, 0
    others    0, 0, the signal that one has heard (0: none)

So a signal that reaches any rank ends the run as one that reaches the leader does; and so does the end of torchrun.
"""

import signal
from enum import IntEnum

import torch

from keyhole.ranks import Ranks
from keyhole.training.signals import Interrupts

UNNAMED, ORPHANED = -1, -2
NAMES = {UNNAMED: "a signal", ORPHANED: "the end of torchrun"}


class Command(IntEnum):
    """END: argument is the exit code. STEP: the next one. EVALUATE, TEST. GO_BACK: argument is the step whose weights
    are loaded. FLUSH: deferred updates are applied. CHECK, WRITE, STATE: whether the weights that a rank keeps are
    finite; these weights into a checkpoint; its part of the method's state."""

    END = 0
    STEP = 1
    EVALUATE = 2
    TEST = 3
    GO_BACK = 4
    FLUSH = 5
    CHECK = 6
    WRITE = 7
    STATE = 8


class Crew:
    """The ranks of a run, and the signals of this one."""

    def __init__(self, ranks: Ranks, interrupts: Interrupts) -> None:
        self.ranks, self.interrupts = ranks, interrupts

    def call(self, command: Command, argument: int = 0) -> None:
        """Of the leader: all ranks begin this now. Learns of signals that others have heard."""
        if not self.ranks.several:
            return
        if self.ranks.orphaned:
            self.interrupts.ask(NAMES[ORPHANED])
        rows = self.ranks.gather(torch.tensor([command, argument, 0]))
        for rank, (_, _, number) in enumerate(rows.tolist()):
            if number:
                name = NAMES.get(number) or signal.Signals(number).name
                self.interrupts.ask(f"{name} on rank {rank}")

    def listen(self) -> tuple[Command, int]:
        """Of the others: what the leader calls, and its argument."""
        asked = self.interrupts.requested
        number = ORPHANED if self.ranks.orphaned else 0
        if asked is not None:
            number = signal.Signals[asked] if asked in signal.Signals.__members__ else UNNAMED
        command, argument, _ = self.ranks.gather(torch.tensor([0, 0, number]))[0].tolist()
        return Command(command), argument
