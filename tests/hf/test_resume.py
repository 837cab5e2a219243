"""resume_from_checkpoint: a run that stopped and went on is the run that did not stop."""

import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("accelerate")

from transformers import TrainerCallback

from tests.hf.runs import STEPS, losses_of, trainer
from tests.matrix import in_every_run
from tests.methods.lomo.loops import weights as weights_of


@in_every_run(lambda name, settings: name == "adam-offload" or bool(settings))
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("zo", {}),
        ("zo", {"rank": 2, "refresh": 2}),
        ("zo", {"rank": 1, "refresh": 2, "guide": 4}),
        ("lomo", {}),
        ("adam-offload", {}),
    ],
)
def test_a_resumed_run_is_the_same_run(
    tiny_model: Path, tmp_path: Path, batches: list[Any], name: str, settings: dict[str, Any]
) -> None:
    """Stopped at a checkpoint (of low rank: within a period) and resumed by another trainer: the losses of one run, to
    the bit."""
    rate = 1e-4 if name == "zo" else 1e-3
    whole = trainer(tiny_model, tmp_path / "whole", batches, method=name, learning_rate=rate, settings=settings)
    whole.train()
    how = {"method": name, "learning_rate": rate, "save_strategy": "steps", "save_steps": 3, "settings": settings}
    trainer(tiny_model, tmp_path / "parts", batches, **how).train()
    again = trainer(tiny_model, tmp_path / "parts", batches, **how)
    again.train(resume_from_checkpoint=str(tmp_path / "parts" / "checkpoint-3"))
    assert losses_of(again) == losses_of(whole)
    a, b = weights_of(whole.keyhole), weights_of(again.keyhole)
    assert all(torch.equal(a[key], b[key]) for key in a)


def test_a_checkpoint_that_was_written_twice_is_resumed(tiny_model: Path, tmp_path: Path, batches: list[Any]) -> None:
    """A script that is run again in its directory replaces the checkpoint of each step, and can go on from them."""
    how = {"save_strategy": "steps", "save_steps": 2}
    for method in ("adamw", "lomo"):  # the first leaves a file that the second does not write
        full = trainer(tiny_model, tmp_path, batches, method=method, **how)
        full.train()
    again = trainer(tiny_model, tmp_path, batches, **how)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert not (tmp_path / "checkpoint-2" / "optimizer.safetensors").exists()
    ours, theirs = weights_of(full.keyhole), weights_of(again.keyhole)
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)


@pytest.mark.parametrize("moment", ["on_step_begin", "on_pre_optimizer_step", "on_step_end"])
def test_a_checkpoint_on_a_signal_is_resumed(tiny_model: Path, tmp_path: Path, batches: list[Any], moment: str) -> None:
    """enable_jit_checkpoint: at none of its moments is a step lost or repeated."""

    class Asks(TrainerCallback):
        """Asks as the signal's timer does; it comes before the Trainer's own callback."""

    def ask(self: Any, args: Any, state: Any, control: Any, **more: Any) -> None:
        if state.global_step == 2:
            manager.is_checkpoint_requested = True

    setattr(Asks, moment, ask)
    made = trainer(tiny_model, tmp_path / "out", batches, enable_jit_checkpoint=True)
    manager = next(each.jit_manager for each in made.callback_handler.callbacks if hasattr(each, "jit_manager"))
    made.callback_handler.callbacks.insert(0, Asks())
    made.train()
    assert 2 <= made.state.global_step < STEPS
    again, full = (trainer(tiny_model, tmp_path / name, batches) for name in ("out", "full"))
    again.train(resume_from_checkpoint=True)
    full.train()
    assert losses_of(again)[-2:] == losses_of(full)[-2:]
    ours, theirs = weights_of(full.keyhole), weights_of(again.keyhole)
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)


def test_an_incomplete_checkpoint_is_passed_over(tiny_model: Path, tmp_path: Path, batches: list[Any]) -> None:
    """A kill in the middle of a save: the run goes on from the checkpoint before, and ends as it would have."""
    how = {"save_strategy": "steps", "save_steps": 1, "max_steps": 3}
    whole = trainer(tiny_model, tmp_path, batches, **how)
    whole.train()
    shutil.rmtree(tmp_path / "checkpoint-3")
    (tmp_path / "checkpoint-2" / "trainer_state.json").unlink()
    again = trainer(tiny_model, tmp_path, batches, **how)
    with pytest.warns(UserWarning, match=r"checkpoint-2 is incomplete and passed over: trainer_state.json is missing"):
        again.train(resume_from_checkpoint=True)
    before = weights_of(whole.keyhole)
    assert all(torch.equal(before[name], weight) for name, weight in weights_of(again.keyhole).items())


def test_a_rate_that_was_lowered_on_a_plateau_is_resumed(tiny_model: Path, tmp_path: Path, batches: list[Any]) -> None:
    """It is in no scheduler's state, only in the optimizer's group."""
    how = {
        "lr_scheduler_type": "reduce_lr_on_plateau", "metric_for_best_model": "loss", "max_steps": 4, "save_steps": 2,
        "lr_scheduler_kwargs": {"patience": 0, "threshold": 100.0}, "eval_dataset": batches[:1], "eval_steps": 1,
        "eval_strategy": "steps", "save_strategy": "steps",
    }  # fmt: skip
    whole = trainer(tiny_model, tmp_path, batches, **how)
    whole.train()
    again = trainer(tiny_model, tmp_path, batches, **how)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    rates = [entry["learning_rate"] for entry in whole.state.log_history if "loss" in entry]
    assert rates[2] < rates[0] and losses_of(again) == losses_of(whole)


@pytest.mark.parametrize(("rate", "warns"), [(1e-2, False), (1e-3, True)])
def test_another_rate_is_not_ignored_in_silence(
    tiny_model: Path, tmp_path: Path, batches: list[Any], rate: float, warns: bool
) -> None:
    """The Trainer goes on with the checkpoint's; a script that says another one is told so."""
    how = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    whole = trainer(tiny_model, tmp_path, batches, **how)
    whole.train()
    again = trainer(tiny_model, tmp_path, batches, learning_rate=rate, **how)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    told = [str(one.message) for one in found if "learning_rate" in str(one.message)]
    assert [line.startswith("learning_rate: 0.001 is not used") for line in told] == [True] * warns
    assert losses_of(again) == losses_of(whole)
