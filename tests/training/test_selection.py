"""The best step is published, a run ends when it has seen enough, and both are the same after a stop."""

import itertools
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keyhole.checkpoint import select
from keyhole.config import TrainConfig
from keyhole.errors import UserError
from keyhole.training import evaluation, loop
from keyhole.training.records import _line
from keyhole.training.start import train
from keyhole.training.validation import Selection
from tests.matrix import in_every_run
from tests.training.runs import Make, losses, metrics, same, weights

VALUES = [2.0, 1.5, 1.2, 1.4, 1.3, 1.2]  # evaluations of steps 1 to 6: the best is step 3, and step 6 is no better
CONFIG = TrainConfig(model="m", method="zo", output_dir="out")
BEST = {"eval_steps": 1, "load_best_model_at_end": True}


@pytest.fixture
def evaluations(monkeypatch: pytest.MonkeyPatch) -> Callable[[list[float]], None]:
    """Evaluations give these numbers, by step; everything around them is the real thing."""

    def arrange(values: list[float]) -> None:
        real = evaluation.Evaluation.evaluate

        def known(self: evaluation.Evaluation) -> None:
            found = {"eval_loss": values[self.run.done - 1], "perplexity": 1.0, "eval_tokens": 7}
            with monkeypatch.context() as patch:
                patch.setattr(evaluation, "evaluate", lambda *args: found)
                real(self)

        monkeypatch.setattr(evaluation.Evaluation, "evaluate", known)

    return arrange


def steps_on_disk(config: Any) -> list[int]:
    return [select.step_of(path) for path in select.checkpoints(Path(config.output_dir))]


@pytest.mark.parametrize("method", ["adamw", "zo"])
def test_the_best_weights_are_published(make: Make, tiny_data: Path, evaluations: Callable, method: str) -> None:
    """The model at the top is that of step 3, whose checkpoint survives save_total_limit; the last one is there too."""
    evaluations(VALUES)
    config = make(method=method, eval_data=str(tiny_data), save_steps=1, save_total_limit=1, **BEST)
    assert train(config) == 0
    root = Path(config.output_dir)
    assert steps_on_disk(config) == [3, 6]
    assert same(weights(root), weights(root / "checkpoint-3")) and not same(
        weights(root), weights(root / "checkpoint-6")
    )


@in_every_run(lambda method, stop: (method, stop) in {("adamw", 3), ("zo", 2)})
@pytest.mark.parametrize(("method", "stop"), itertools.product(["adamw", "zo"], [2, 3, 5]))
def test_a_stopped_run_chooses_as_one_that_was_not(
    make: Make, tiny_data: Path, evaluations: Callable, stopped_is_whole: Callable, method: str, stop: int
) -> None:
    """Best step, end by patience, weights and metrics are those of an undisturbed run."""
    evaluations(VALUES)
    settings = {"method": method, "eval_data": str(tiny_data), "early_stopping_patience": 2, **BEST}
    through, stopped = make("through", **settings), make("stopped", **settings)
    stopped_is_whole(through, stopped, stop)
    assert len(losses(through)) == 5, "two evaluations after step 3 were no better"
    assert same(weights(stopped.output_dir), weights(Path(stopped.output_dir) / "checkpoint-3"))


def test_losses_of_other_rows_are_not_compared(make: Make, tiny_data: Path, tmp_path: Path) -> None:
    """Another eval_data, or another file under its name, is refused where the best step is chosen, now or later."""
    held_out = tmp_path / "held_out.jsonl"
    held_out.write_text(tiny_data.read_text())
    settings = {"method": "adamw", "save_steps": 1, "eval_steps": 1, "eval_data": str(held_out)}
    assert train(make(**settings, max_steps=2, load_best_model_at_end=True)) == 0
    held_out.write_text("".join(held_out.read_text().splitlines(keepends=True)[1:]))
    chooses = ({"load_best_model_at_end": True}, {"early_stopping_patience": 1})
    for how in chooses:
        with pytest.raises(UserError, match="the rows of eval_data are not those of the run so far"):
            train(make(**settings, max_steps=4, **how), resume="")
    assert train(make(**settings, max_steps=4), resume="") == 0
    with pytest.raises(UserError, match="the rows of eval_data are not those of the run so far"):
        train(make(**settings, max_steps=6, load_best_model_at_end=True), resume="")


def test_a_run_that_has_ended_early_can_be_given_more(make: Make, tiny_data: Path, evaluations: Callable) -> None:
    """Resumed as it was, it publishes again and takes no step; with more patience it goes on."""
    evaluations(VALUES)
    config = make(eval_data=str(tiny_data), eval_steps=1, early_stopping_patience=1)
    assert train(config) == 0 and len(losses(config)) == 4
    assert train(config, resume="") == 0 and len(losses(config)) == 4
    assert train(replace(config, early_stopping_patience=3), resume="") == 0 and len(losses(config)) == 6


def test_a_best_step_that_the_disk_did_not_take(
    make: Make, tiny_data: Path, evaluations: Callable, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    evaluations([*VALUES[:-1], 1.25])
    real = loop.Saver._begin

    def full(self: Any, step: int, *args: Any, **options: Any) -> None:
        if step == 3:
            raise UserError("output_dir: no room")
        real(self, step, *args, **options)

    monkeypatch.setattr(loop.Saver, "_begin", full)
    config = make(eval_data=str(tiny_data), **BEST)
    assert train(config) == 0
    assert same(weights(config.output_dir), weights(Path(config.output_dir) / "checkpoint-6"))
    said = capsys.readouterr().out
    assert "checkpoint-3 NOT saved" in said and "the best that is saved was loss 1.2500, at step 6" in said


def test_a_damaged_best_checkpoint_is_not_published(
    make: Make, tiny_data: Path, evaluations: Callable, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """A bit of the best weights flips while the run goes on: this is said, and the last weights are published."""
    evaluations([*VALUES[:-1], 1.25])
    config = make(eval_data=str(tiny_data), save_steps=1, **BEST)
    root, real = Path(config.output_dir), loop.Leader.finish

    def finish(self: loop.Leader) -> int:
        path = root / "checkpoint-3" / "model.safetensors"
        content = bytearray(path.read_bytes())
        content[-3] ^= 1
        path.write_bytes(content)
        return real(self)

    monkeypatch.setattr(loop.Leader, "finish", finish)
    assert train(config) == 0
    said = capsys.readouterr().out
    assert "checkpoint-3, the best, is damaged" in said and "checksum" in said
    assert same(weights(root), weights(root / "checkpoint-6"))


def test_time_ends_a_run_with_its_evaluation(make: Make, tiny_data: Path, capsys: pytest.CaptureFixture) -> None:
    """After the time is over the step under way is the last: it is evaluated, saved and published."""
    config = make(eval_data=str(tiny_data), max_minutes=1e-9)
    assert train(config) == 0
    assert [set(entry) & {"loss", "eval_loss"} for entry in metrics(config)] == [{"loss"}, {"eval_loss"}]
    assert "max_minutes=1e-09 have passed" in capsys.readouterr().out
    assert (Path(config.output_dir) / "model.safetensors").exists()
    earlier = [{"step": 1, "loss": 1.0, "seconds": 61.0}]
    assert Selection(replace(CONFIG, max_minutes=1), entries=earlier).out_of_time() is not None


@pytest.mark.parametrize(("metric", "best"), [("loss", 2), ("eval_loss", 2), ("perplexity", 2), ("accuracy", 3)])
def test_each_metric_selects_its_own_step(metric: str, best: int) -> None:
    selection = Selection(replace(CONFIG, metric_for_best_model=metric))
    for step, (loss, accuracy) in enumerate([(2.0, 0.5), (1.0, 0.6), (1.5, 0.9)], 1):
        selection.note(step, {"eval_loss": loss, "perplexity": 2.7**loss, "eval_accuracy": accuracy})
    assert selection.best_steps()[0] == best


NUMBERS = st.lists(st.floats(-5, 5) | st.just(float("nan")), min_size=1, max_size=12)


@given(NUMBERS, st.integers(1, 4), st.booleans())
def test_best_and_patience_equal_the_textbook_loop(values: list[float], patience: int, greater: bool) -> None:
    """The running best and the counter that every trainer keeps, also when the numbers are read from run/metrics.jsonl,
    where one that is not finite is null."""
    config = replace(CONFIG, greater_is_better=greater, early_stopping_patience=patience)
    best, best_step, waited, entries = None, None, 0, []
    for step, value in enumerate(values, 1):
        found = {"eval_loss": 1.0, "eval_accuracy": value}
        selection = Selection(config, "accuracy", entries)
        selection.note(step, found)
        better = value == value and (best is None or (value > best if greater else value < best))
        best, best_step, waited = (value, step, 0) if better else (best, best_step, waited + 1)
        entries.append(json.loads(_line({"step": step, **found})))
        for each in (selection, Selection(config, "accuracy", entries)):
            assert each.best_steps()[:1] == ([] if best_step is None else [best_step])
            assert (each.out_of_patience() is not None) == (best is not None and waited >= patience)
