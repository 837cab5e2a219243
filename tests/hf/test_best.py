"""load_best_model_at_end: weights and state of one checkpoint, and what is said where it cannot be loaded."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("accelerate")

from safetensors.torch import load_file
from transformers import TrainerCallback

from keyhole.hf import KeyholeTrainer
from tests.hf.runs import trainer
from tests.methods.lomo.loops import weights as weights_of


class FirstIsBest(KeyholeTrainer):
    """Evaluates to the number of evaluations so far."""

    count = 0

    def evaluate(self, *args: Any, **options: Any) -> dict[str, float]:
        self.count += 1
        return super().evaluate(*args, **options) | {"eval_count": float(self.count)}


EVERY_STEP = {"eval_strategy": "steps", "save_strategy": "steps", "load_best_model_at_end": True}
EVERY_STEP |= {"eval_steps": 1, "save_steps": 1}
FIRST_IS_BEST = EVERY_STEP | {"base": FirstIsBest, "max_steps": 4, "eval_steps": 2, "save_steps": 2}
FIRST_IS_BEST |= {"metric_for_best_model": "count", "greater_is_better": False}


def test_the_best_model_has_the_adapters_of_its_step(tiny_model: Path, tmp_path: Path, batches: list[Any]) -> None:
    made = trainer(tiny_model, tmp_path, batches, method="lomo-lora", eval_dataset=batches[:2], **FIRST_IS_BEST)
    made.train()
    first = next(entry["eval_loss"] for entry in made.state.log_history if "eval_loss" in entry)
    assert made.evaluate()["eval_loss"] == first


@pytest.mark.parametrize("method", ["adam-offload", "adamw"])
def test_training_goes_on_from_the_best_model(
    tiny_model: Path, tmp_path: Path, batches: list[Any], method: str
) -> None:
    """Also if the method has a copy of the weights of its own: a step at no rate leaves the best weights."""
    how = FIRST_IS_BEST | {"learning_rate": 5e-4, "model_dtype": "bfloat16", "eval_dataset": batches[:2]}
    made = trainer(tiny_model, tmp_path, batches, method=method, **how)
    made.train()
    best = weights_of(made.keyhole)
    made.method.param_groups[0]["lr"] = 1e-30
    made.method.step([batches[0]])
    made.method.flush()
    after = weights_of(made.keyhole)
    assert all(torch.equal(best[name], after[name]) for name in best)


def test_a_best_checkpoint_that_is_gone_is_told(tiny_model: Path, tmp_path: Path, batches: list[Any]) -> None:
    """The weights stay those of the last step, which is not what was asked for."""

    class Deletes(TrainerCallback):
        def on_save(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            shutil.rmtree(tmp_path / f"checkpoint-{state.global_step}")

    made = trainer(
        tiny_model, tmp_path, batches, eval_dataset=batches[:1], max_steps=1, callbacks=[Deletes], **EVERY_STEP
    )
    with pytest.warns(UserWarning, match="load_best_model_at_end: the best checkpoint, .*checkpoint-1, is not loaded"):
        made.train()
    plain = trainer(tiny_model, tmp_path / "plain", batches, max_steps=1)
    plain.train()
    last, after = weights_of(plain.keyhole), weights_of(made.keyhole)
    assert all(torch.equal(last[name], after[name]) for name in last)


def test_a_damaged_best_checkpoint_is_not_loaded(tiny_model: Path, tmp_path: Path, batches: list[Any]) -> None:
    """A bit of its weights flips: this is told, and the weights stay those of the last step."""

    class Damages(TrainerCallback):
        def on_save(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            file = tmp_path / "checkpoint-1" / "model.safetensors"
            if state.global_step == 2:
                file.write_bytes(file.read_bytes()[:-1] + bytes([file.read_bytes()[-1] ^ 1]))

    class Worse(KeyholeTrainer):
        def evaluate(self, *args: Any, **options: Any) -> dict[str, float]:
            found = {"eval_loss": float(self.state.global_step)}
            self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, found)
            return found

    how = {"base": Worse, "eval_dataset": batches[:1], "callbacks": [Damages]}
    made = trainer(tiny_model, tmp_path, batches, **how, max_steps=2, **EVERY_STEP)
    with pytest.warns(UserWarning, match=r"checkpoint-1, is not loaded: .*model.safetensors was changed"):
        made.train()
    last = load_file(tmp_path / "checkpoint-2" / "model.safetensors")
    assert all(torch.equal(weight, last[name]) for name, weight in weights_of(made.keyhole).items() if name in last)
