"""A comparison as a whole: what is chosen, what is read once, what survives a kill, what a new line runs."""

import json
import os
import signal
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from keyhole.compare import execute
from keyhole.compare import plan as plan_module
from keyhole.training import loop, model_and_method
from tests.compare.comparisons import TEXT, cell, run, table, write
from tests.training.children import server


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, int]]:
    """A finished comparison, how often data were prepared for it, and how many models and tokenizers
    were left when memory was given back."""
    root = tmp_path_factory.mktemp("undisturbed")
    counts = {"data": 0, "left": 0}
    left: weakref.WeakSet[Any] = weakref.WeakSet()
    load, free_memory = execute.load, execute.free_memory

    def loaded(*args: Any, **how: Any) -> Any:
        model = load(*args, **how)
        left.update((model, model.tokenizer))
        return model

    def freed() -> None:
        free_memory()
        counts["left"] += len(left)

    with pytest.MonkeyPatch.context() as patch:
        real = plan_module.load_data

        def counted(*args: Any) -> Any:
            counts["data"] += 1
            found = real(*args)
            left.add(found.tokenizer)
            return found

        patch.setattr(plan_module, "load_data", counted)
        for module in (model_and_method, execute):
            patch.setattr(module, "load", loaded)
        patch.setattr(execute, "free_memory", freed)
        assert run(write(root / "small.yaml"), root / "out") == 0
    return root / "out", counts


@pytest.mark.parametrize(("chosen_by", "runs"), [("first-seed", 6 + 2 * 2), ("every-seed", 18)])
def test_the_number_of_runs(chosen_by: str, runs: int) -> None:
    """Two grids of three points and three seeds: all of them, or of the other seeds only those of the best point."""
    groups: Any = 2 * [SimpleNamespace(points=range(3), trials=range(9))]
    comparison: Any = SimpleNamespace(choose_by=chosen_by, seeds=range(3))
    assert execute.number_of_runs(comparison, groups) == runs


def test_the_best_settings_by_dev_are_taken_and_tested(undisturbed: tuple[Path, dict[str, int]]) -> None:
    """Each grid is run with the first seed, its best point with the other; mean and spread are those of test."""
    out, _ = undisturbed
    for method, better in (("adamw", "2e-3"), ("lomo", "5e-2")):
        found = cell(out, method)
        devs = {dict(map(tuple, run["point"]))["learning_rate"]: run["dev"] for run in found["grid"] if not run["seed"]}
        assert len(devs) == 2 and found["chosen"] == [["learning_rate", max(devs, key=lambda rate: devs[rate])]]
        assert found["chosen"] == [["learning_rate", better]]
        first, second = [run["test"] for run in found["runs"]]
        assert found["mean"] == pytest.approx((first + second) / 2)
        assert found["spread"] == pytest.approx(abs(first - second) / 2**0.5)
        assert len(found["grid"]) == 3, "the worse point is not run with the second seed"
    assert cell(out, "zero-shot")["mean"] is not None


def test_data_are_read_once(undisturbed: tuple[Path, dict[str, int]]) -> None:
    """Six runs and a zero-shot in one process: two draws of data (one per seed). No model is there
    when the next one is loaded, and no tokenizer: data are kept without."""
    assert undisturbed[1] == {"data": 2, "left": 0}


def test_nothing_but_numbers_stays(undisturbed: tuple[Path, dict[str, int]]) -> None:
    out, _ = undisturbed
    assert not list(out.rglob("*.safetensors")) and not list(out.rglob("checkpoint-*"))
    assert {path.name for path in out.iterdir()} >= {"table.json", "table.md", "report.html", "runs", "results"}
    grid = "adamw: {learning_rate: [1e-5, 2e-3]}"
    assert grid in (out / "report.html").read_text(), "the first value alone would look like the one that was used"


def killed(path: Path, out: Path, at: int) -> None:
    """A comparison whose process dies before this step of all its steps."""
    real, steps = loop.Leader.step, []

    def step(self: loop.Leader, number: int) -> None:
        steps.append(number)
        if len(steps) == at:
            os.kill(os.getpid(), signal.SIGKILL)
        real(self, number)

    loop.Leader.step = step
    run(path, out)


def test_killed_in_the_middle_and_resumed(undisturbed: tuple[Path, dict[str, int]], tmp_path: Path) -> None:
    """A comparison whose process was killed inside its second run ends with the same table."""
    path, out = write(tmp_path / "small.yaml"), tmp_path / "out"
    child = server.Process(target=killed, args=(path, out, 7))
    child.start()
    child.join()
    assert child.exitcode == -signal.SIGKILL
    assert len(list((out / "results").glob("*.json"))) == 2, "zero-shot and the first run"
    assert run(path, out) == 0
    assert table(out) == table(undisturbed[0])


@pytest.mark.matrix
@pytest.mark.parametrize("stop", [3, 14])
def test_interrupted_and_resumed(
    undisturbed: tuple[Path, dict[str, int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop: int
) -> None:
    """A signal ends the step and the comparison with 130; the same command goes on from the checkpoint."""
    path, out = write(tmp_path / "small.yaml"), tmp_path / "out"
    real, steps = loop.Leader.step, []

    def step(self: loop.Leader, number: int) -> None:
        steps.append(number)
        if len(steps) == stop:
            signal.raise_signal(signal.SIGINT)
        real(self, number)

    monkeypatch.setattr(loop.Leader, "step", step)
    assert run(path, out) == 130
    assert (out / "report.html").exists() and list(out.rglob("checkpoint-*"))
    done = len(steps)
    assert run(path, out) == 0
    assert len(steps) == 24 and done == stop, "no step is taken twice"
    assert table(out) == table(undisturbed[0]) and not list(out.rglob("checkpoint-*"))
    steps.clear()
    assert run(path, out) == 0 and not steps, "everything is known"


def test_a_line_more_in_the_file_runs_what_is_new(undisturbed: tuple[Path, dict[str, int]], tmp_path: Path) -> None:
    """Finished runs are recognised by their settings, whatever file they came from."""
    out, _ = undisturbed
    before = {path.name: path.stat().st_mtime_ns for path in (out / "results").iterdir()}
    path = write(tmp_path / "more.yaml", TEXT.replace("  lomo:", "  sgd: {learning_rate: 5e-2}\n  lomo:"))
    try:
        assert run(path, out, "seeds=0") == 0
        after = {path.name: path.stat().st_mtime_ns for path in (out / "results").iterdir()}
        assert before.items() <= after.items() and len(after) == len(before) + 1
    finally:
        for name in {path.name for path in (out / "results").iterdir()} - before.keys():
            (out / "results" / name).unlink()
        assert run(write(tmp_path / "small.yaml"), out) == 0  # the table as it was


def test_the_day_of_templates_is_that_on_which_the_comparison_began(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a template that prints the date would make the data of tomorrow other data."""
    path, out, days = write(tmp_path / "a.yaml"), tmp_path / "out", []
    real = plan_module.load_data
    monkeypatch.setattr(plan_module, "load_data", lambda how: (days.append(how.template_date), real(how))[1])
    short = ("seeds=0", "methods=adamw", "learning_rate=1e-3", "max_steps=1")
    assert run(path, out, *short) == 0
    marker = json.loads((out / "comparison.json").read_text())
    (out / "comparison.json").write_text(json.dumps(marker | {"day": "2025-01-31"}))
    assert run(path, out, *short) == 0
    assert days == [marker["day"], "2025-01-31"]
