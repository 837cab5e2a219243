"""A run, as its loops (loop.py) and everything that reacts to its steps know it: the same on every rank.

Only the leader decides when to step, evaluate, save or stop, prints, and writes files of the run. The other ranks have
the model, the method and the data, wait for its command and carry it out together with it, so ranks cannot decide
differently; their step number and position in the data equal the leader's, since each STEP command is one step. A
command is three integers, all-gathered from all ranks on the host (24 bytes; a fraction of a millisecond; kernels keep
running meanwhile):

    leader    command, argument, 0
    others    0, 0, the signal that this rank has received (0: none)

So a signal to any rank ends the run in the same way as a signal to the leader; so does the end of torchrun.

What reacts to steps is an Observer: the files that record steps, the page and trackers, checks, evaluations, saves. The
leader calls all of them, in the order of its list, and knows no other way to reach them.
"""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path

import torch

from keyhole.checkpoint.resume import Origin
from keyhole.checkpoint.state import read_state
from keyhole.checkpoint.writer import method_state
from keyhole.config import TrainConfig
from keyhole.data.run import Data
from keyhole.methods import METHODS
from keyhole.methods.base import Method
from keyhole.model.batch import Batch
from keyhole.model.model import Model
from keyhole.model.weights.read import fill_from
from keyhole.training.metrics import Reading, Recorder
from keyhole.training.rundir import RunDir
from keyhole.training.schedule import Schedule
from keyhole.training.signals import Interrupts
from keyhole.training.validation import Judge

ORPHANED, END_OF_TORCHRUN = -1, "the end of torchrun"


class Command(IntEnum):
    """END: argument is the exit code. STEP: one training step. EVALUATE, TEST. GO_BACK: argument is the step whose
    weights are loaded. FLUSH: apply deferred updates. WRITE, STATE: write the rank's part of the weights, or of the
    method's state, into a checkpoint."""

    END = 0
    STEP = 1
    EVALUATE = 2
    TEST = 3
    GO_BACK = 4
    FLUSH = 5
    WRITE = 6
    STATE = 7


class Observer:
    """Does nothing; each kind overrides what it reacts to."""

    def before_step(self, batches: list[Batch]) -> None: ...

    def note(self, reading: Reading) -> None:
        """The numbers of a step have been read (on a GPU one step late, metrics.py), or those of an evaluation."""

    def after_step(self) -> None:
        """A step has been queued; its numbers may be unread, and its update may be deferred (`Run.paused`)."""

    def close(self) -> None:
        """The run is over, also after an error."""


@dataclass(kw_only=True)
class Run:
    """A run on one rank. done: number of its steps so far, `first` of them before this process; rate: of the last step;
    ends: why it ends after this one. Only the leader has observers and a recorder."""

    config: TrainConfig
    directory: RunDir
    data: Data
    judge: Judge
    schedule: Schedule
    origin: Origin
    model: Model
    method: Method
    interrupts: Interrupts
    say: Callable[[str], None]
    observers: list[Observer] = field(default_factory=list)
    recorder: Recorder | None = None
    rate: float = 0.0
    ends: str | None = None

    def __post_init__(self) -> None:
        self.total, self.first, self.done = self.schedule.total, self.origin.step, self.origin.step

    @property
    def is_last(self) -> bool:
        return self.done >= self.total or self.ends is not None

    def is_asked(self) -> bool:
        return self.interrupts.requested is not None

    def checkpoint(self, step: int) -> Path:
        return self.directory.root / f"checkpoint-{step}"

    def call(self, command: Command, argument: int = 0) -> None:
        """Called by the leader: all ranks start this command now. Collects signals that other ranks have received."""
        ranks = self.model.ranks
        if not ranks.several:
            return
        if ranks.orphaned:
            self.interrupts.ask(END_OF_TORCHRUN)
        rows = ranks.gather(torch.tensor([command, argument, 0]))
        for rank, (_, _, number) in enumerate(rows.tolist()):
            if number:
                name = END_OF_TORCHRUN if number == ORPHANED else signal.Signals(number).name
                self.interrupts.ask(f"{name} on rank {rank}")

    def listen(self) -> tuple[Command, int]:
        """Called by the other ranks: returns the leader's command and its argument."""
        asked, ranks = self.interrupts.requested, self.model.ranks
        number = signal.Signals[asked] if asked is not None else ORPHANED if ranks.orphaned else 0
        command, argument, _ = ranks.gather(torch.tensor([0, 0, number]))[0].tolist()
        return Command(command), argument

    def next_batches(self) -> list[Batch]:
        """The batches of the next step. A method that asks for coming rows gets them first."""
        if (asked := self.method.rows_ahead) is not None:
            self.method.look_ahead(self.data.train.coming(*asked))
        return next(self.data.train)

    def update(self, batches: list[Batch]) -> torch.Tensor:
        self.method.lr = self.schedule.rate(self.done)
        self.method.follow(lambda warmup_ratio: self.schedule.warmed_up_by(warmup_ratio).factor(self.done))
        self.rate = self.method.lr
        loss = self.method.step(batches)
        self.done += 1
        return loss

    def note(self, reading: Reading) -> None:
        for observer in self.observers:
            observer.note(reading)

    def flush(self) -> None:
        """Applies deferred updates; all ranks do it together if they share host memory or hold shards."""
        if self.model.engine.shared or self.model.sharded:
            self.call(Command.FLUSH)
        self.method.flush()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Inside, all numbers are read and deferred updates are applied; its time counts towards no step."""
        assert self.recorder is not None  # the leader
        self.recorder.drain()
        self.flush()
        yield
        self.recorder.restart_clock()

    def go_back(self, step: int) -> None:
        """All ranks take the weights of a step, unless they have them."""
        if step != self.done:
            self.call(Command.GO_BACK, step)
            self.take_weights(step)

    def take_weights(self, step: int) -> None:
        model, method, path = self.model, self.method, self.checkpoint(step)
        method.flush()
        model.engine.wait_for_homes()
        if not METHODS[method.name].keeps_base and not method.light:
            with model.rewriting_shared():
                fill_from(model, path, model.dtype)
            model.engine.invalidate()
        if model.methods.addon is not None or model.methods.low_rank is not None:
            method.load_state_dict(method_state(path, read_state(path)))
