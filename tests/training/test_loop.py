"""The loop: every method learns, batches and epochs add up, and numbers that are not finite stop it."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from keyhole.errors import NonFinite
from keyhole.methods import METHODS
from keyhole.methods.lsp.traits import LSPConfig
from keyhole.training.schedule import Schedule
from keyhole.training.start import train
from tests.training.runs import Make, losses, metrics, weights


@pytest.mark.parametrize("method", METHODS)
def test_training_learns(make: Make, method: str) -> None:
    rates = {"sgd": 0.1, "zo": 2e-3}
    steps = {"zo": 40, "lomo": 20, "adalomo": 12, "lomo-lora": 12}.get(method, 8)
    config = make(method=method, learning_rate=rates.get(method, 3e-3), max_steps=steps, batch_size=8)
    assert train(config) == 0
    curve = losses(config)
    assert sum(curve[-4:]) < 0.96 * sum(curve[:4])


def test_numbers_of_some_steps_only_can_be_logged(make: Make, capsys: pytest.CaptureFixture) -> None:
    """LSP measures its bias every few steps, and lines are printed at others."""
    settings = {"method": "lsp", "lsp": LSPConfig(d=16, r=4, check_freq=3, optimizer_on="cpu")}
    assert train(make(**settings, logging_steps=4, max_steps=8)) == 0
    assert "bias" in capsys.readouterr().out


@pytest.mark.parametrize("method", ["adamw", "zo"])
def test_accumulation_equals_one_large_batch(make: Make, method: str) -> None:
    """Two micro-batches of 2 are one batch of 4: the loss is weighted by trained tokens, not by batches."""
    whole, split = (
        make("whole", method=method),
        make("split", method=method, batch_size=2, gradient_accumulation_steps=2),
    )
    train(whole)
    train(split)
    assert losses(whole) == pytest.approx(losses(split), rel=1e-4)
    assert [e["tokens"] for e in metrics(whole)] == [e["tokens"] for e in metrics(split)]


def test_epochs_become_steps(make: Make) -> None:
    """24 samples in batches of 4 are 6 steps an epoch; half an epoch more is 3."""
    config = make(max_steps=None, num_train_epochs=1.5)
    train(config)
    assert [entry["epoch"] for entry in metrics(config)][-1] == 1.5
    assert len(losses(config)) == 9


BLOWS_UP = {"learning_rate": 1e12, "save_steps": 1, "lr_scheduler_type": "constant", "warmup_ratio": 0.0}


def test_non_finite_loss_stops_the_run(make: Make) -> None:
    """A rate that blows the weights up at once: the step and the samples are named, and no checkpoint as good."""
    config = make(method="sgd", **BLOWS_UP)
    with pytest.raises(NonFinite) as error:
        train(config)
    root, message = Path(config.output_dir), str(error.value)
    step = metrics(config)[-1]["step"]
    assert f"step {step}: the loss is nan" in message and "no good checkpoint was written" in message
    assert f"checkpoint-{step - 1} lead to it; begin anew" in message
    assert metrics(config)[-1]["loss"] is None
    assert all(tensor.isfinite().all() for tensor in weights(root / f"checkpoint-{step - 1}").values())
    assert not (root / "model.safetensors").exists()


@pytest.mark.parametrize("method", ["adamw", "lomo"])
def test_a_run_that_broke_goes_on_from_a_good_checkpoint(
    make: Make, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One step with an absurd rate: its checkpoint is finite and leads to NaN; the one before is kept whatever
    save_total_limit says, is named with what to do, and a resume that does so goes on."""
    config = make(method=method, save_steps=1, save_total_limit=1, **{"lr_scheduler_type": "constant"})
    config = replace(config, warmup_ratio=0.0)
    real = Schedule.rate
    monkeypatch.setattr(Schedule, "rate", lambda self, done: 1e30 if done == 2 else real(self, done))
    root = Path(config.output_dir)
    way_back = f"the last good checkpoint is {root}/checkpoint-2: the weights of checkpoint-3 lead to it"
    for resume in (None, ""):
        with pytest.raises(NonFinite) as error:
            train(config, resume=resume)
        assert f"{way_back}; delete what is newer, then --resume {root}/checkpoint-2" in str(error.value)
    monkeypatch.setattr(Schedule, "rate", real)
    shutil.rmtree(root / "checkpoint-3")
    assert train(config, resume=str(root / "checkpoint-2")) == 0
    assert [path.name for path in root.glob("checkpoint-*")] == ["checkpoint-6"]


def test_broken_weights_are_not_saved(make: Make, tmp_path: Path) -> None:
    """A NaN that no batch has met yet is found before it is written."""
    broken = tmp_path / "broken"
    model = AutoModelForCausalLM.from_pretrained(make().model)
    with torch.no_grad():
        model.model.embed_tokens.weight[2, 0] = float("nan")  # a byte that no row has
    model.save_pretrained(broken)
    AutoTokenizer.from_pretrained(make().model).save_pretrained(broken)
    with pytest.raises(NonFinite, match="embed_tokens.weight holds NaN or infinity"):
        train(make(model=str(broken), save_steps=2))
    assert not list(Path(make().output_dir).glob("checkpoint-*"))


def test_steps_lost_to_rounding_are_pointed_out(make: Make, capsys: pytest.CaptureFixture) -> None:
    """bfloat16 norms near 1 do not move at a small rate; the user is told which tensors stand still."""
    train(make(dtype="bfloat16", learning_rate=1e-5, max_steps=4))
    out = capsys.readouterr().out
    assert "trained tensors did not change in 3 steps" in out and "layernorm.weight" in out
