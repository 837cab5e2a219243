"""A run that is stopped and resumed is the run that was not, bit for bit."""

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from keyhole.errors import UserError
from keyhole.methods.baselines.traits import AdamWConfig
from keyhole.training.start import train
from tests.training.runs import VARIANTS, Make, losses, metrics, same, weights


@pytest.mark.parametrize("variant", VARIANTS)
def test_n_plus_m_equals_n_stop_resume_m(
    make: Make, tiny_data: Path, tmp_path: Path, variant: str, stop_after: Callable
) -> None:
    """A run that is interrupted and resumed has the weights and metrics of one that was not, bit for bit."""
    few = tmp_path / "few.jsonl"
    few.write_text("".join(tiny_data.read_text().splitlines(keepends=True)[:4]))
    settings = VARIANTS[variant] | {"eval_data": str(few), "eval_steps": 2}
    settings |= {"batch_size": 2, "gradient_accumulation_steps": 2}
    through, stopped = make("through", **settings), make("stopped", **settings)
    assert train(through) == 0
    stop_after(3)
    assert train(stopped) == 130
    assert (Path(stopped.output_dir) / "checkpoint-3").is_dir()
    assert not (Path(stopped.output_dir) / "model.safetensors").exists()
    assert train(stopped, resume="") == 0
    assert same(weights(through.output_dir), weights(stopped.output_dir))
    assert metrics(through) == metrics(stopped)
    assert len(losses(through)) == 6


def test_saves_and_evaluations_do_not_bend_the_curve(make: Make, tiny_data: Path) -> None:
    """Looking at a zeroth-order run (which applies its deferred update early) changes nothing."""
    plain = make("plain", method="zo")
    busy = make("busy", method="zo", save_steps=1, eval_steps=1, eval_data=str(tiny_data))
    assert train(plain) == train(busy) == 0
    assert same(weights(plain.output_dir), weights(busy.output_dir))
    assert metrics(plain) == [entry for entry in metrics(busy) if "loss" in entry]


def test_resume_from_a_path_into_another_directory(make: Make) -> None:
    """A checkpoint of one run can be gone on from elsewhere; the old run stays as it is."""
    first, second = make("first", save_steps=2), make("second", save_steps=2)
    train(first)
    before = sorted(str(path) for path in Path(first.output_dir).rglob("*"))
    assert train(second, resume=str(Path(first.output_dir) / "checkpoint-4")) == 0
    assert same(weights(first.output_dir), weights(second.output_dir))
    assert [entry["step"] for entry in metrics(second)] == [5, 6]
    assert before == sorted(str(path) for path in Path(first.output_dir).rglob("*"))


def test_a_finished_run_can_be_made_longer(make: Make, capsys: pytest.CaptureFixture) -> None:
    """With a constant rate, 4 steps and then 6 are the same as 6; the change is said."""
    whole = make("whole", lr_scheduler_type="constant", warmup_ratio=0.0)
    grown = make("grown", lr_scheduler_type="constant", warmup_ratio=0.0, max_steps=4)
    train(whole)
    train(grown)
    assert train(replace(grown, max_steps=6), resume="last") == 0
    assert "max_steps: 4 -> 6, from step 5 on" in capsys.readouterr().out
    assert same(weights(whole.output_dir), weights(grown.output_dir))


def test_resuming_a_finished_run_changes_nothing(make: Make) -> None:
    """There is nothing left to do: exit code 0, the same weights, the same metrics."""
    config = make()
    train(config)
    before, entries = weights(config.output_dir), metrics(config)
    assert train(config, resume="") == 0
    assert same(before, weights(config.output_dir)) and metrics(config) == entries


def test_resume_without_a_checkpoint_starts(make: Make, capsys: pytest.CaptureFixture) -> None:
    """A job that always passes --resume also starts the first time."""
    config = make(max_steps=2)
    assert train(config, resume="") == 0
    assert "no checkpoint" in capsys.readouterr().out
    assert len(losses(config)) == 2


@pytest.mark.parametrize("harm", ["truncated weights", "missing config", "bad state"])
def test_a_damaged_checkpoint_is_named_and_passed_over(make: Make, harm: str, capsys: pytest.CaptureFixture) -> None:
    """The run goes on from the one before, and ends where the undamaged run ended."""
    config = make(save_steps=2)
    train(config)
    before, last = weights(config.output_dir), Path(config.output_dir) / "checkpoint-6"
    if harm == "truncated weights":
        os.truncate(last / "model.safetensors", 1000)
    elif harm == "missing config":
        (last / "config.json").unlink()
    else:
        (last / "keyhole_state.json").write_text('{"step": 6')
    assert train(config, resume="") == 0
    assert "checkpoint-6 is damaged and passed over" in capsys.readouterr().out
    assert same(before, weights(config.output_dir)) and same(before, weights(last))
    assert len(losses(config)) == 6


def test_settings_that_may_not_change(make: Make) -> None:
    """What a run is cannot change on the way; the run stays as it was."""
    config = make(max_steps=2)
    train(config)
    before = sorted(Path(config.output_dir).rglob("*"))
    with pytest.raises(UserError, match="  batch_size: the run has 4, the config now says 2\n  seed: the run"):
        train(replace(config, seed=5, batch_size=2), resume="")
    with pytest.raises(UserError, match="adamw.beta1"):
        train(replace(config, adamw=AdamWConfig(beta1=0.5)), resume="")
    assert before == sorted(Path(config.output_dir).rglob("*"))
