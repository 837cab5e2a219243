"""The ranks of a run: the leader's commands, and the loop of the others.

Only the leader decides when to step, evaluate, save or stop, prints, and writes files of the run. The other ranks have
the model, the method and the data, wait for its command and carry it out together with it, so ranks cannot decide
differently; their step number and position in the data equal the leader's, since each STEP command is one step. A
command is three integers, all-gathered from all ranks on the host (24 bytes; a fraction of a millisecond; kernels keep
running meanwhile):

    leader    command, argument, 0
    others    0, 0, the signal that this rank has received (0: none)

So a signal to any rank ends the run in the same way as a signal to the leader; so does the end of torchrun.
"""

import signal
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

import torch

from keyhole.checkpoint.state import read_state
from keyhole.checkpoint.writer import method_state, split_state
from keyhole.data.batches import Loader
from keyhole.data.run import Data
from keyhole.methods import METHODS
from keyhole.methods.base import Method
from keyhole.model.batch import Batch
from keyhole.model.model import Model
from keyhole.model.weights.read import fill_from
from keyhole.model.weights.save import bad_tensor, write_parts, write_state_parts
from keyhole.ranks import Ranks
from keyhole.training.schedule import Schedule
from keyhole.training.signals import Interrupts
from keyhole.training.validation import Judge, evaluate

ORPHANED, END_OF_TORCHRUN = -1, "the end of torchrun"


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


class Commands:
    """The ranks of a run, and the signal handlers of this rank."""

    def __init__(self, ranks: Ranks, interrupts: Interrupts) -> None:
        self.ranks, self.interrupts = ranks, interrupts

    @property
    def is_asked(self) -> bool:
        """Whether a signal has asked the run to stop."""
        return self.interrupts.requested is not None

    def call(self, command: Command, argument: int = 0) -> None:
        """Called by the leader: all ranks start this command now. Collects signals that other ranks have received."""
        if not self.ranks.several:
            return
        if self.ranks.orphaned:
            self.interrupts.ask(END_OF_TORCHRUN)
        rows = self.ranks.gather(torch.tensor([command, argument, 0]))
        for rank, (_, _, number) in enumerate(rows.tolist()):
            if number:
                name = END_OF_TORCHRUN if number == ORPHANED else signal.Signals(number).name
                self.interrupts.ask(f"{name} on rank {rank}")

    def listen(self) -> tuple[Command, int]:
        """Called by the other ranks: returns the leader's command and its argument."""
        asked = self.interrupts.requested
        number = signal.Signals[asked] if asked is not None else ORPHANED if self.ranks.orphaned else 0
        command, argument, _ = self.ranks.gather(torch.tensor([0, 0, number]))[0].tolist()
        return Command(command), argument


@dataclass(kw_only=True)
class Follower:
    """The run on a rank that is not the leader; `first` steps are done already."""

    root: Path
    data: Data
    schedule: Schedule
    first: int
    model: Model
    method: Method
    judge: Judge

    def go(self) -> int:
        """Executes the leader's commands until END; returns the exit code."""
        step, interrupts = self.first, Interrupts(quiet=True)
        commands = Commands(self.model.ranks, interrupts)
        asked = lambda: commands.is_asked  # noqa: E731
        with interrupts:
            while True:
                command, argument = commands.listen()
                if command is Command.END:
                    return argument
                if command is Command.STEP:
                    step += 1
                    one_update(self.method, self.schedule, step, next_batches(self.method, self.data.train))
                elif command is Command.EVALUATE:
                    self.method.flush()
                    if evaluate(self.model, self.data.eval, asked) is not None:
                        self.judge.dev_metrics(self.model, asked)
                elif command is Command.TEST:
                    self.method.flush()
                    self.judge.test_metrics(self.model, asked)
                elif command is Command.FLUSH:
                    self.method.flush()
                elif command is Command.CHECK:
                    bad_tensor(self.model)
                elif command is Command.WRITE:
                    write_parts(self.model, None)
                elif command is Command.STATE:
                    write_state_parts(self.model, None, split_state(self.method.state_dict())[0])
                elif command is Command.GO_BACK:
                    take_weights(self.model, self.method, self.root / f"checkpoint-{argument}")


def next_batches(method: Method, loader: Loader) -> list[Batch]:
    """The batches of the next step. A method that asks for coming rows gets them first."""
    if (asked := method.rows_ahead) is not None:
        method.look_ahead(loader.coming(*asked))
    return next(loader)


def one_update(method: Method, schedule: Schedule, step: int, batches: list[Batch]) -> tuple[torch.Tensor, float]:
    """Queues the update of a step; returns its loss and its learning rate (0 during the rate search)."""
    method.lr = schedule.rate(step - 1)
    method.follow(lambda warmup_ratio: schedule.warmed_up_by(warmup_ratio).factor(step - 1))
    rate = method.rate
    return method.step(batches), rate


def take_weights(model: Model, method: Method, path: Path) -> None:
    """Loads the weights of a checkpoint of the same run into the model."""
    method.flush()
    model.engine.wait_for_homes()
    if not METHODS[method.name].keeps_base and not method.light:
        with model.rewriting_shared():
            fill_from(model, path, model.dtype)
        model.engine.invalidate()
    if model.addon is not None or model.low_rank is not None:
        method.load_state_dict(method_state(path, read_state(path)))
