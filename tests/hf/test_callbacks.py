"""Callbacks of the Trainer: the rate and the weights that they see and set, and steps that they end."""

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("accelerate")

from transformers import TrainerCallback

import keyhole
from tests.hf.runs import losses_of, trainer
from tests.methods.lomo.loops import weights as weights_of


class SetsRate(TrainerCallback):
    """A schedule of the user's own: half of the rate from the third step on."""

    def on_step_begin(self, args: Any, state: Any, control: Any, optimizer: Any = None, **more: Any) -> None:
        optimizer.param_groups[0]["lr"] = 1e-2 if state.global_step < 2 else 5e-3


def test_a_callback_sets_the_rate(tiny_model: Path, tmp_path: Path, batches: list[Any]) -> None:
    """What it writes into the optimizer's group is the rate of the step, as in the Trainer."""
    constant = {"lr_scheduler_type": "constant", "learning_rate": 1.0}
    made = trainer(tiny_model, tmp_path, batches, max_steps=4, callbacks=[SetsRate], **constant)
    made.train()
    model = keyhole.load(str(tiny_model), device="cpu", dtype="float32")
    opt = keyhole.LOMO(model, 1e-2, seed=42)
    for step, batch in enumerate(batches[:4]):
        opt.lr = 1e-2 if step < 2 else 5e-3
        opt.step(batch)
    a, b = weights_of(model), weights_of(made.keyhole)
    assert all(torch.equal(a[key], b[key]) for key in a)


def test_a_callback_sees_the_weights_after_the_step(tiny_model: Path, tmp_path: Path, batches: list[Any]) -> None:
    """zo defers its update; a callback that calls the module must not see weights from before it."""
    seen: list[tuple[float, float]] = []

    class Looks(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **more: Any) -> None:
            with torch.no_grad():
                nll_B, count_B = made.keyhole.nll(batches[0])
                seen.append((float(model(**batches[0]).loss), float(nll_B.sum() / count_B.sum())))

    made = trainer(tiny_model, tmp_path, batches, method="zo", learning_rate=1e-3, max_steps=2, callbacks=[Looks])
    made.train()
    assert [a for a, _ in seen] == pytest.approx([b for _, b in seen], abs=1e-5) and abs(seen[0][0] - seen[1][0]) > 1e-4


def test_a_step_that_a_callback_cut_off_is_dropped(tiny_model: Path, tmp_path: Path, batches: list[Any]) -> None:
    """Its micro-batches do not join the first step of the next call of train."""

    class Stops(TrainerCallback):
        def on_substep_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            control.should_training_stop = True

    made = trainer(tiny_model, tmp_path, batches, gradient_accumulation_steps=2, max_steps=1, callbacks=[Stops])
    made.train()
    made.remove_callback(Stops)
    made.train()
    fresh = trainer(tiny_model, tmp_path, batches, gradient_accumulation_steps=2, max_steps=1)
    fresh.train()
    assert losses_of(made) == losses_of(fresh)


def test_callbacks_evaluation_and_early_stopping_work(tiny_model: Path, tmp_path: Path, batches: list[Any]) -> None:
    """Hugging Face's own early stopping ends the run, the best checkpoint is loaded, and compute_metrics has logits."""
    from transformers import EarlyStoppingCallback

    shapes = []

    def metrics(found: Any) -> dict[str, float]:
        shapes.append(found.predictions.shape)
        return {"wrong": float((found.predictions[:, :-1].argmax(-1) != found.label_ids[:, 1:]).mean())}

    made = trainer(
        tiny_model, tmp_path, batches, placement="stream", learning_rate=30.0, lr_scheduler_type="constant",
        eval_dataset=batches[:2], compute_metrics=metrics, eval_strategy="steps", eval_steps=1, max_steps=6,
        save_strategy="steps", save_steps=1, load_best_model_at_end=True, metric_for_best_model="loss",
        callbacks=[EarlyStoppingCallback(early_stopping_patience=2)],
    )  # fmt: skip
    made.train()
    evaluated = [entry["eval_loss"] for entry in made.state.log_history if "eval_loss" in entry]
    assert len(evaluated) < 6 and shapes[0][:2] == (4, 12)
    best = made.state.best_model_checkpoint
    assert made.evaluate()["eval_loss"] == min(evaluated) and Path(best).is_dir()
