"""A rank that is not the leader: it has the model, the method and the data, and executes the leader's commands
(crew.py).

It prints nothing and writes no file of its own. Its step number and its position in the data equal the leader's, since
all ranks begin at the same step of the same data and each STEP command is one step.
"""

from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import torch

from keyhole.checkpoint.state import read_state
from keyhole.checkpoint.writer import method_state, split_state
from keyhole.data.loader import Loader
from keyhole.data.run import Data
from keyhole.methods import METHODS
from keyhole.methods.base import Method
from keyhole.model.batch import Batch
from keyhole.model.model import Model
from keyhole.model.rank_duties import rewriting_shared
from keyhole.model.weights.read import fill_from
from keyhole.model.weights.save_parts import bad_tensor, write_parts, write_state_parts
from keyhole.training.crew import Command, Crew
from keyhole.training.schedule import Schedule
from keyhole.training.signals import Interrupts
from keyhole.training.validation import Judge, evaluate


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
    interrupts: Interrupts = field(default_factory=lambda: Interrupts(quiet=True))

    def go(self) -> int:
        """Executes the leader's commands until END; returns the exit code."""
        crew, step = Crew(self.model.ranks, self.interrupts), self.first
        with ExitStack() as stack:
            stack.callback(self.model.close)
            stack.enter_context(self.interrupts)
            while True:
                command, argument = crew.listen()
                if command is Command.END:
                    return argument
                if command is Command.STEP:
                    step += 1
                    one_update(self.method, self.schedule, step, next_batches(self.method, self.data.train))
                elif command is Command.EVALUATE:
                    self.method.flush()
                    if evaluate(self.model, self.data.eval, self.is_asked) is not None:
                        self.judge.dev_metrics(self.model, self.is_asked)
                elif command is Command.TEST:
                    self.method.flush()
                    self.judge.test_metrics(self.model, self.is_asked)
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

    def is_asked(self) -> bool:
        return bool(self.interrupts.requested)


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
        with rewriting_shared(model):
            fill_from(model, path, model.dtype)
        model.engine.invalidate()
    if model.addon is not None or model.low_rank is not None:
        method.load_state_dict(method_state(path, read_state(path)))
