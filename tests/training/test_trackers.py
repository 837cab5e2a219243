"""Trackers, each through its real library, offline; and the thread between them and training.

Those that are not installed are skipped: `pip install wandb mlflow trackio`.
"""

import importlib.util
import json
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from keyhole.errors import UserError
from keyhole.training.start import train
from keyhole.training.trackers import TRACKERS, About, Opened, Tracker, require
from tests.training.runs import Make, losses

STEPS = [{"step": 1, "loss": 2.0, "learning_rate": 0.5}, {"step": 2, "loss": 1.0, "learning_rate": 0.25}]
AGAIN = [{"step": 3, "loss": 0.5, "learning_rate": 0.1}, {"step": 3, "eval_loss": 0.75, "note": None}]
RUN = "0123456789abcdef0123456789abcdef"


@pytest.fixture
def about(tmp_path: Path) -> Callable[..., About]:
    (tmp_path / "out" / "run").mkdir(parents=True)
    return lambda first=0: About(tmp_path / "out" / "run", RUN, "out", first, {"seed": 0, "model": "m", "task": None})


@pytest.fixture(autouse=True)
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody is logged in anywhere, and nothing is written outside of the test's directory."""
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_PROJECT", "MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME"):
        monkeypatch.delenv(name, raising=False)
    for name in ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL", "TRACKIO_PROJECT", "WANDB_BASE_URL", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR", "TRACKIO_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name.lower()))


def written(name: str, about: Callable[..., About]) -> None:
    """A run of two steps, and the same run, resumed, with a third one and an evaluation."""
    for first, entries in ((0, STEPS), (2, AGAIN)):
        tracker = Tracker(name, lambda first=first: TRACKERS[name](about(first)))
        for entry in entries:
            tracker.write(entry)
        tracker.close(120)


def test_tensorboard(about: Callable[..., About]) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    written("tensorboard", about)
    events = EventAccumulator(str(about().directory / "tensorboard")).Reload()
    assert [(e.step, e.value) for e in events.Scalars("loss")] == [(1, 2.0), (2, 1.0), (3, 0.5)]
    assert set(events.Tags()["scalars"]) == {"loss", "learning_rate", "eval_loss"}


def test_wandb_offline(about: Callable[..., About]) -> None:
    """Without a login: files for `wandb sync`, both of the run's id, with every number in them."""
    pytest.importorskip("wandb")
    written("wandb", about)
    files = sorted((about().directory / "wandb").glob("offline-run-*/*.wandb"))
    assert len(files) == 2 and {path.name for path in files} == {f"run-{RUN}.wandb"}
    assert all(name in b"".join(path.read_bytes() for path in files) for name in (b"eval_loss", b"learning_rate"))


def test_mlflow_in_a_file(about: Callable[..., About]) -> None:
    """One run in run/mlflow.db, finished, with its settings; the resumed one is the same."""
    pytest.importorskip("mlflow")
    from mlflow import MlflowClient

    written("mlflow", about)
    client = MlflowClient(tracking_uri=f"sqlite:///{about().directory / 'mlflow.db'}")
    (experiment,) = [each for each in client.search_experiments() if each.name == "keyhole"]
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED" and run.info.run_name == "out" and run.data.params["seed"] == "0"
    history = sorted((m.step, m.value) for m in client.get_metric_history(run.info.run_id, "loss"))
    assert history == [(1, 2.0), (2, 1.0), (3, 0.5)] and run.data.metrics["eval_loss"] == 0.75


def test_trackio_on_this_machine(about: Callable[..., About], tmp_path: Path) -> None:
    pytest.importorskip("trackio")
    code = (
        "import json, sys; from pathlib import Path; sys.path[:0] = json.loads(sys.argv[3])\n"
        "from keyhole.training.trackers import About, trackio\n"
        "write, close = trackio(About(Path('.'), sys.argv[1], 'out', 0, {'seed': 0}))\n"
        "rows = [{key: value for key, value in row.items() if value is not None} for row in json.loads(sys.argv[2])]\n"
        "[write(row.pop('step'), row) for row in rows]\n"
        "close()\n"
        "import trackio\n"
        "(run,) = trackio.Api().runs('keyhole')\n"
        "from trackio.sqlite_storage import SQLiteStorage\n"
        "rows = SQLiteStorage.get_logs('keyhole', run.name)\n"
        "print('found', json.dumps([run.name, [[row['step'], row.get('loss'), row.get('eval_loss')] for row in rows]]))"
    )  # its directory is read when it is imported: a process of its own
    found: Any = None
    for entries in (STEPS, AGAIN):
        words = [RUN, json.dumps(entries), json.dumps(sys.path)]
        done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        (line,) = [line for line in done.stdout.splitlines() if line.startswith("found ")]
        found = json.loads(line.removeprefix("found "))
    assert found == ["out-01234567", [[1, 2.0, None], [2, 1.0, None], [3, 0.5, None], [3, None, 0.75]]]
    assert (tmp_path / "trackio_dir").is_dir()


def test_a_run_with_trackers(make: Make) -> None:
    """Several at once, from the config; the losses in them are those of metrics.jsonl."""
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    also = ["mlflow"] if importlib.util.find_spec("mlflow") else []
    config = make(max_steps=3, report_to=["tensorboard", *also])
    assert train(config) == 0
    events = EventAccumulator(str(Path(config.output_dir) / "run" / "tensorboard")).Reload()
    assert [e.value for e in events.Scalars("loss")] == pytest.approx(losses(config))
    assert (Path(config.output_dir) / "run" / "mlflow.db").exists() is bool(also)


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The message says what to install; who did not ask for it is not bothered."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    require(None)
    for name in TRACKERS:
        with pytest.raises(UserError, match=rf"report_to: {name} is not installed: pip install {name}"):
            require([name])


def test_a_slow_tracker_holds_up_nobody() -> None:
    """Entries wait, in their order; the end of a run does not wait for ever, and says so."""
    go, got = threading.Event(), []
    tracker = Tracker(
        "slow", lambda: (lambda step, numbers: (go.wait(), got.append(step)), lambda: got.append("closed"))
    )
    for entry in STEPS:
        tracker.write(entry)
    with pytest.raises(TimeoutError, match="entries are not sent"):
        tracker.close(0.01)
    assert got == []
    go.set()
    tracker.thread.join()
    assert got == [1, 2, "closed"]


@pytest.mark.parametrize("at", ["open", "write", "close"])
def test_an_error_is_raised_once_to_the_caller(at: str) -> None:

    def fail(place: str) -> None:
        if place == at:
            raise RuntimeError(f"broken {place}")

    def broken() -> Opened:
        fail("open")
        return lambda step, numbers: fail("write"), lambda: fail("close")

    tracker = Tracker("broken", broken)
    if at != "open":
        tracker.write(STEPS[0])
    with pytest.raises(RuntimeError, match=f"broken {at}"):
        tracker.close()
    tracker.thread.join()
