"""Trackers: copies of the metrics in `report_to: [tensorboard, wandb, mlflow, trackio]`, each through its own library.

    tensorboard   run/tensorboard; a resumed run replaces the steps that it repeats
    wandb         the server that you are logged in to; else offline, in run/wandb (`wandb sync` sends it)
    mlflow        MLFLOW_TRACKING_URI, else run/mlflow.db (`mlflow ui --backend-store-uri sqlite:///...`)
    trackio       TRACKIO_SPACE_ID or TRACKIO_SERVER_URL, else its own directory (`trackio show`)

run/metrics.jsonl is always written; a tracker is opt-in, and its failure does not end the run. A library is imported
only if its tracker is configured. Names are those of metrics.jsonl; the libraries' own variables (WANDB_PROJECT,
MLFLOW_EXPERIMENT_NAME, TRACKIO_PROJECT, ...) are respected. A resumed run continues the same run in the tracker.

A tracker runs in a thread of its own: training passes an entry on and continues, however slow the tracker is. Entries
wait in a queue (a million of them take some hundred MiB). The first error ends the tracker: the next `write`, or
`close`, raises it, so that it is reported (reports.py).
"""

import importlib.util
import netrc
import os
import queue
import threading
import time
import urllib.parse
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from keyhole.errors import UserError
from keyhole.report.entries import Entry

PROJECT = "keyhole"  # default, if the library's own setting does not say otherwise
CLOSE_S = 30.0  # how long the end of a run waits for a tracker
MOST = 10**6  # entries in a queue
Write = Callable[[int, dict[str, float]], object]  # the numbers of a step
Opened = tuple[Write, Callable[[], object]]  # write, close


@dataclass(frozen=True)
class About:
    """A run, as described to a tracker. directory: its run/; first: steps that are done already; name: the shown
    name."""

    directory: Path
    run: str
    name: str
    first: int = 0
    config: dict[str, Any] = field(default_factory=dict)


def tensorboard(about: About) -> Opened:
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(  # by default it waits for a slow disk
        str(about.directory / "tensorboard"), purge_step=about.first + 1, max_queue=MOST
    )

    def write(step: int, numbers: dict[str, float]) -> None:
        for name, value in numbers.items():
            writer.add_scalar(name, value, step)

    return write, writer.close


def wandb(about: About) -> Opened:
    """There is no prompt for a key: without one the run is offline. Steps that the server has already are not replaced
    there (wandb keeps the first)."""
    import wandb

    mode = os.environ.get("WANDB_MODE") or (None if is_logged_in() else "offline")
    if mode == "offline":
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # it would send error reports
    run = wandb.init(
        project=os.environ.get("WANDB_PROJECT", PROJECT),
        name=about.name,
        id=about.run,
        dir=str(about.directory),
        config=about.config,
        resume=None if mode == "offline" else "allow",
        mode=mode,
        settings=wandb.Settings(console="off", silent=True),
        reinit="create_new",
    )
    return lambda step, numbers: run.log(numbers, step=step), run.finish


def is_logged_in() -> bool:
    """Whether wandb would find a login: a key or a token in the environment, or the server in ~/.netrc, where `wandb
    login` stores it. Otherwise wandb would prompt for one."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    server = urllib.parse.urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    for place in (os.environ.get("NETRC"), "~/.netrc", "~/_netrc"):
        with suppress(OSError, netrc.NetrcParseError, UnicodeDecodeError):
            if place and netrc.netrc(os.path.expanduser(place)).authenticators(server) is not None:
                return True
    return False


def mlflow(about: About) -> Opened:
    """The metrics of an entry are one request; the settings are parameters of the run, which is found again by a tag.
    Only the client API is used, so the caller's own MLflow settings and active run are not changed."""
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # set before the import; it would send usage data
    from mlflow import MlflowClient
    from mlflow.entities import Metric, Param

    server, name = os.environ.get("MLFLOW_TRACKING_URI"), os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
    client = MlflowClient(tracking_uri=server or f"sqlite:///{(about.directory / 'mlflow.db').absolute()}")
    found = client.get_experiment_by_name(name)
    files = None if server else (about.directory / "mlartifacts").absolute().as_uri()
    experiment = found.experiment_id if found else client.create_experiment(name, artifact_location=files)
    before = client.search_runs([experiment], f"tags.`keyhole.run` = '{about.run}'", max_results=1)
    if before:
        run = before[0].info.run_id
        client.update_run(run, status="RUNNING")
    else:
        run = client.create_run(experiment, tags={"keyhole.run": about.run}, run_name=about.name).info.run_id
        params = [Param(key, str(value)[:500]) for key, value in about.config.items()]
        for i in range(0, len(params), 100):  # the most that a request may have
            client.log_batch(run, params=params[i : i + 100])

    def write(step: int, numbers: dict[str, float]) -> None:
        now_ms = int(1000 * time.time())
        client.log_batch(run, metrics=[Metric(key, value, now_ms, step) for key, value in numbers.items()])

    return write, lambda: client.set_terminated(run)


def trackio(about: About) -> Opened:
    """trackio identifies runs by name: that of output_dir and the beginning of the run's id, so that only a resumed run
    continues an existing one."""
    import trackio

    run = trackio.init(
        project=os.environ.get("TRACKIO_PROJECT", PROJECT),
        name=f"{about.name}-{about.run[:8]}",
        config=about.config,
        resume="allow",
        embed=False,
        auto_log_gpu=False,
        auto_log_cpu=False,
    )
    return lambda step, numbers: run.log(numbers, step=step), trackio.finish  # ends the run of this thread


TRACKERS: dict[str, Callable[[About], Opened]] = {
    "tensorboard": tensorboard,
    "wandb": wandb,
    "mlflow": mlflow,
    "trackio": trackio,
}


def names_of(report_to: str | Sequence[str] | None) -> list[str]:
    return list(dict.fromkeys([report_to] if isinstance(report_to, str) else report_to or []))


def require(report_to: str | Sequence[str] | None) -> None:
    """Before anything is written: checks that the configured trackers are installed."""
    for name in names_of(report_to):
        if importlib.util.find_spec(name) is None:
            raise UserError(f"report_to: {name} is not installed: pip install {name}, or leave it out")


class Tracker:
    """A tracker in its thread, in which its library is imported and it is opened, too."""

    def __init__(self, name: str, open_it: Callable[[], Opened]) -> None:
        self.name = name
        self.entries: queue.Queue[Entry | None] = queue.Queue(MOST)
        self.error: Exception | None = None
        self.thread = threading.Thread(target=self._work, args=(open_it,), name=f"keyhole-{name}", daemon=True)
        self.thread.start()

    def write(self, entry: Entry) -> None:
        """Queues an entry; raises the tracker's error, if there was one."""
        if self.error is not None:
            raise self.error
        self.entries.put_nowait(dict(entry))

    def close(self, close_s: float = CLOSE_S) -> None:
        self.entries.put(None)
        self.thread.join(close_s)
        if self.error is not None:
            raise self.error
        if self.thread.is_alive():
            raise TimeoutError(f"{self.entries.qsize():,} entries are not sent after {close_s:.0f} s")

    def _work(self, open_it: Callable[[], Opened]) -> None:
        try:
            write, close = open_it()
            try:
                while (entry := self.entries.get()) is not None:
                    numbers = {name: float(value) for name, value in entry.items() if isinstance(value, int | float)}
                    write(int(numbers.pop("step")), numbers)
            finally:
                close()
        except Exception as error:  # libraries raise errors of any kind
            self.error = error


def open_trackers(report_to: str | Sequence[str] | None, about: About) -> list[Tracker]:
    return [Tracker(name, partial(TRACKERS[name], about)) for name in names_of(report_to)]
