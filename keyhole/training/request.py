"""What a run is asked to do: the request that start.py checks and build.py builds a run from. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from keyhole.checkpoint.resume import Origin
from keyhole.config import TrainConfig
from keyhole.data.settings import DataSettings
from keyhole.ranks import Ranks
from keyhole.training.display import Display, Waiting
from keyhole.training.rundir import Lock, RunDir

if TYPE_CHECKING:
    from keyhole.data.run import Data


@dataclass(frozen=True)
class Parts:
    """Parts that several runs of one process may share (keyhole/compare does), and permissions. None: the default of a
    single run. own_process: nothing else uses this process (machine/collector.py)."""

    load_data: Callable[[DataSettings], Data] | None = None
    display: Callable[[int, int], Display] = Display
    model_hash: Callable[[str], str | None] | None = None
    waiting: Waiting = field(default_factory=Waiting)
    allow_code_execution: bool = False
    ranks: Ranks = field(default_factory=Ranks)
    own_process: bool = False


@dataclass(frozen=True)
class Request:
    """A config, checked as far as possible without reading data and model, and where its run begins. base: the hash of
    the original model of a new run."""

    config: TrainConfig
    directory: RunDir
    lock: Lock
    origin: Origin
    notes: list[str]
    settings: DataSettings
    parts: Parts
    base: Callable[[], str | None]
