"""What is known of a run before its model is loaded: what it goes on from, its data, and how long it is.

The cheap checks are here, and nothing is written: whoever made a mistake hears of it in seconds.
"""

import math
from dataclasses import dataclass

from keyhole.checkpoint.journal.resume_point import Origin, find_origin
from keyhole.config import TrainConfig
from keyhole.data import Data, from_config
from keyhole.training import rundir
from keyhole.training import start_block as start
from keyhole.training.display import Display
from keyhole.training.resume import resume_lines


@dataclass(frozen=True)
class Job:
    """What is known before the model is loaded. `first` steps are done, `total` there are."""

    config: TrainConfig
    directory: rundir.RunDir
    origin: Origin
    notes: list[str]
    data: Data
    first: int
    total: int
    display: Display

    def plan_lines(self) -> list[str]:
        return start.plan_lines(self.config, self.first, self.total, self.data.train.steps_per_epoch)


def look(config: TrainConfig, directory: rundir.RunDir, resume: str | None) -> Job:
    """Checks what to go on from, and the data. Writes nothing."""
    origin = find_origin(resume, directory.root, directory.journal, config)
    notes = resume_lines(resume, origin, config)
    data = from_config(config)
    if origin.state is not None:
        data.train.load_state_dict(origin.loader)
    total = total_steps(config, data.train.steps_per_epoch)
    return Job(config, directory, origin, notes, data, origin.step, total, Display(total, config.logging_steps))


def total_steps(config: TrainConfig, steps_per_epoch: int) -> int:
    """max_steps, or the steps of num_train_epochs passes over the data, rounded up as Hugging Face does."""
    if config.max_steps is not None:
        return config.max_steps
    return math.ceil(config.num_train_epochs * steps_per_epoch)
