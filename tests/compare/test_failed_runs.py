"""Runs of a comparison that fail or crash, models that cannot be scored, tables that cannot be written."""

from pathlib import Path
from typing import Any

import pytest

from keyhole.compare import execute
from keyhole.compare.execute import FAILED, compare
from keyhole.compare.file import read_comparison
from keyhole.errors import NonFinite, UserError
from keyhole.machine.out_of_memory import LOWER, MORE_ROOM
from keyhole.training import loop, model_and_method
from tests.compare.comparisons import TEXT, cell, run, write

LACKS = f"out of host memory; {LOWER}, {MORE_ROOM}"


def test_a_model_that_cannot_be_scored_untrained_stops_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, left = execute.Judge.test_metrics, [RuntimeError("no room")]

    def test_metrics(self: Any, *args: Any) -> Any:
        if left:
            raise left.pop()
        return real(self, *args)

    monkeypatch.setattr(execute.Judge, "test_metrics", test_metrics)
    path, out = write(tmp_path / "a.yaml"), tmp_path / "out"
    words = ("seeds=0", "methods=lomo", "learning_rate=1e-3", "max_steps=1")
    assert run(path, out, *words) == FAILED
    assert cell(out, "zero-shot")["errors"] == ["RuntimeError: no room"] and cell(out, "lomo")["mean"] is not None
    assert run(path, out, *words) == 0
    assert cell(out, "zero-shot")["mean"] is not None


@pytest.mark.parametrize(("wire", "untrained"), [("wire: int4, ", "int4"), ("", None)])
def test_a_model_is_scored_untrained_in_the_format_of_all_its_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wire: str, untrained: str | None
) -> None:
    """It may fit host memory in no other; if one run keeps the weights as they are, the model is scored as it is."""
    asked = []

    def load(source: str, **how: Any) -> Any:
        asked.append((how["workload"].method, how["wire"]))
        raise UserError("enough")

    for module in (model_and_method, execute):
        monkeypatch.setattr(module, "load", load)
    methods = f"{{a: {{method: lora, wire: int4}}, b: {{{wire}method: lora, lora.r: 4}}}}"
    text = TEXT[: TEXT.index("methods:")] + f"methods: {methods}\nseeds: [0]\n" + TEXT[TEXT.index("common:") :]
    assert run(write(tmp_path / "a.yaml", text), tmp_path / "out") == FAILED
    assert asked == [("eval", untrained), ("lora", "int4"), ("lora", untrained)]


def test_tables_that_cannot_be_written_are_shown_and_refused(tmp_path: Path) -> None:
    """A directory of the name of a table, or a full disk: the numbers are printed, and written by the next call."""
    path, out, told = write(tmp_path / "small.yaml"), tmp_path / "out", []
    (out / "table.md").mkdir(parents=True)
    (out / "comparison.json").write_text("{}")
    asked = read_comparison(path, (f"output_dir={out}", "seeds=0", "methods=adamw", "learning_rate=1e-3"))
    with pytest.raises(UserError, match=f"the tables in {out} cannot be written: .*the same command writes the tables"):
        compare(asked, say=told.append)
    assert "| adamw |" in told[-1] and any("1 run;" in line for line in told)
    (out / "table.md").rmdir()
    assert compare(asked, say=told.append) == 0 and "| adamw |" in (out / "table.md").read_text()


def test_a_failing_run_is_recorded_and_the_others_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NaN and a lack of memory are results of their cells; they stay until --retry; a crash is tried again."""
    errors = {
        "1e-05": NonFinite("step 2: the loss is nan\n  batch: a"),
        "0.002": MemoryError(),
        "0.05": ZeroDivisionError("oh"),
    }
    real = loop.Leader.step

    def step(self: loop.Leader, number: int) -> None:
        error = errors.get(f"{self.run.schedule.peak:g}")
        if error is not None and number == 2:
            raise error
        real(self, number)

    path, out = write(tmp_path / "small.yaml", TEXT.replace("max_steps: 4", "max_steps: 2")), tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(loop.Leader, "step", step)
        assert run(path, out, "seeds=0") == FAILED
    adamw, lomo = cell(out, "adamw"), cell(out, "lomo")
    assert adamw["errors"] == ["step 2: the loss is nan; batch: a", LACKS] and adamw["mean"] is None
    assert lomo["errors"] == ["ZeroDivisionError: oh"] and lomo["chosen"] == [["learning_rate", "1e-4"]]
    assert "the loss is nan" in (out / "table.md").read_text() and "failed" in (out / "report.html").read_text()
    assert run(path, out, "seeds=0") == FAILED, "also when the failure is one of before"
    assert cell(out, "adamw") == adamw, "it would fail again, so it is not run again"
    assert not cell(out, "lomo")["errors"]
    assert run(path, out, "seeds=0", retry=True) == 0
    assert cell(out, "adamw")["mean"] is not None and not cell(out, "adamw")["errors"]


def test_a_crashed_run_goes_on_from_its_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not from the beginning; after that its checkpoints are deleted."""
    real, steps = loop.Leader.step, []

    def step(self: loop.Leader, number: int) -> None:
        steps.append(number)
        if len(steps) == 4:
            raise ZeroDivisionError("oh")
        real(self, number)

    monkeypatch.setattr(loop.Leader, "step", step)
    path, out = write(tmp_path / "small.yaml"), tmp_path / "out"
    words = ("seeds=0", "methods=lomo", "learning_rate=1e-3", "save_steps=1")
    assert run(path, out, *words) == FAILED and run(path, out, *words) == 0
    assert steps == [1, 2, 3, 4, 4] and cell(out, "lomo")["mean"] is not None
    assert not list(out.glob("runs/*/checkpoint-*"))
