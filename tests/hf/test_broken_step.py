"""Steps that are applied in part, or not at all: nothing is written from them, and nobody is left without a word."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("accelerate")

from keyhole.errors import Mixed
from tests.hf.runs import losses_of, trainer
from tests.methods.lomo.loops import weights as weights_of

HOW = {"max_steps": 3, "save_strategy": "steps", "save_steps": 1, "save_total_limit": 1}


def spoil(made: Any, step: int) -> None:
    """From this step on, gradients are NaN below the norm of layer 1, in the middle of a backward pass."""

    def watch(module: Any, args: Any, out: torch.Tensor) -> None:
        if out.requires_grad:
            out.register_hook(lambda grad: grad * float("nan") if made.state.global_step >= step - 1 else grad)

    made.keyhole.module.model.layers[1].input_layernorm.register_forward_hook(watch)


@pytest.mark.parametrize("name", ["lomo", "adalomo", "apollo-mini", "lomo-lora", "lsp", "adam-offload", "muon"])
def test_a_step_in_part_is_never_saved(tiny_model: Path, tmp_path: Path, batches: list[Any], name: str) -> None:
    """The step raises with the name of the sound checkpoint, which is still there, leaves no folder of its own, and
    the run that goes on is the one that never broke; nor is anything saved by hand."""
    how = HOW | {"method": name, "learning_rate": 1e-3, "settings": {"d": 8, "r": 2} if name == "lsp" else None}
    made = trainer(tiny_model, tmp_path / "out", batches, **how)
    spoil(made, 2)
    with pytest.raises(Mixed, match=r"(?s)a part of the last step.*the newest .if .* an older one.: .*checkpoint-1$"):
        made.train()
    for write in (made.save_model, made.keyhole.save_pretrained):
        with pytest.raises(Mixed):
            write(str(tmp_path / "out" / "by-hand"))
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["checkpoint-1"]
    again, whole = (trainer(tiny_model, tmp_path / where, batches, **how) for where in ("out", "whole"))
    again.train(resume_from_checkpoint=True)
    whole.train()
    assert losses_of(again) == losses_of(whole)
    ours, theirs = weights_of(whole.keyhole), weights_of(again.keyhole)
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)


def test_a_last_step_in_part_raises(tiny_model: Path, tmp_path: Path, batches: list[Any]) -> None:
    """Also where nothing is logged or saved, and its updates come late."""
    how = HOW | {"save_strategy": "no", "logging_strategy": "no", "method": "adam-offload"}
    made = trainer(tiny_model, tmp_path, batches, **how)
    spoil(made, 3)
    with pytest.raises(Mixed, match="none was written before it"):
        made.train()


@pytest.mark.parametrize(
    ("spoilt", "says"), [("norm", "NaN or infinite in 2 of the steps up to 3"), ("labels", "-100")]
)
def test_steps_that_learn_nothing_are_told(
    tiny_model: Path, tmp_path: Path, batches: list[Any], spoilt: str, says: str
) -> None:
    """A loss of NaN, from which nothing is saved in place of the sound checkpoint; labels of which none is trained."""
    made = trainer(tiny_model, tmp_path, batches, **HOW, logging_strategy="no")
    steps = [dict(batch) for batch in batches]
    made.train_dataset = steps if spoilt == "norm" else [one | {"labels": one["labels"] * 0 - 100} for one in steps]

    def loss(*args: Any) -> torch.Tensor:
        return forward(*args) * (float("nan") if made.state.global_step and spoilt == "norm" else 1)

    made.create_optimizer()
    forward, made.method.reverse.forward = made.method.reverse.forward, loss
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        made.train()
    assert any(says in str(one.message) for one in found)
    kept = [path.name for path in tmp_path.glob("checkpoint-*")]
    assert kept == ["checkpoint-1" if spoilt == "norm" else "checkpoint-3"]
