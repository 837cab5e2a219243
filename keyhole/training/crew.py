"""How the leader makes the other ranks take part: one command at a time.

Only the leader decides when to step, evaluate, save or stop. The other ranks wait for its command and carry it out
together with it (follow.py), so ranks cannot decide differently. A command is three integers, all-gathered from all
ranks on the host (24 bytes; a fraction of a millisecond; kernels keep running meanwhile):

    leader    command, argument, 0
    others    0, 0, the signal that this rank has received (0: none)

So a signal to any rank ends the run in the same way as a signal to the leader; so does the end of torchrun.
"""

import signal
from enum import IntEnum

import torch

from keyhole.ranks import Ranks
from keyhole.training.signals import Interrupts

UNNAMED, ORPHANED = -1, -2
NAMES = {UNNAMED: "a signal", ORPHANED: "the end of torchrun"}


class Command(IntEnum):
    """END: argument is the exit code. STEP: one training step. EVALUATE, TEST. GO_BACK: argument is the step whose
    weights are loaded. FLUSH: apply deferred updates. CHECK, WRITE, STATE: check that the weights of this rank are
    finite; write them into a checkpoint; collect the rank's part of the method's state."""

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
    """The ranks of a run, and the signal handlers of this rank."""

    def __init__(self, ranks: Ranks, interrupts: Interrupts) -> None:
        self.ranks, self.interrupts = ranks, interrupts

    def call(self, command: Command, argument: int = 0) -> None:
        """Called by the leader: all ranks start this command now. Collects signals that other ranks have received."""
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
        """Called by the other ranks: returns the leader's command and its argument."""
        asked = self.interrupts.requested
        number = ORPHANED if self.ranks.orphaned else 0
        if asked is not None:
            number = signal.Signals[asked] if asked in signal.Signals.__members__ else UNNAMED
        command, argument, _ = self.ranks.gather(torch.tensor([0, 0, number]))[0].tolist()
        return Command(command), argument
