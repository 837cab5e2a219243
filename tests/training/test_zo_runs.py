"""Runs of zo's estimators: resumed from the journal alone, and replayed, to the bit."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import keyhole
from keyhole.checkpoint import journal
from keyhole.checkpoint.replay import replay
from keyhole.errors import UserError
from keyhole.loading import model as loading
from keyhole.methods.zo.traits import ZOConfig
from keyhole.model.structure.reach import is_left_out
from keyhole.training.start import train
from tests.matrix import in_every_run
from tests.training.runs import BF16, Make, losses, metrics, same, weights

CASES: dict[str, dict[str, Any]] = {
    "fzoo": {"learning_rate": 1e-3, "zo": ZOConfig(estimator="fzoo", directions=3), "weight_decay": 0.1},
    "low rank": {"learning_rate": 1e-2, "zo": ZOConfig(rank=2, refresh=3), **BF16},
    "low rank, kept": {"learning_rate": 1e-2, "zo": ZOConfig(rank=2, refresh=4, fold=False)},
    "low rank, folded sums": {"learning_rate": 1e-2, "zo": ZOConfig(rank=2, refresh=1, fold=False), **BF16},
    "fzoo, 16 bit": {"learning_rate": 1e-3, "zo": ZOConfig(estimator="fzoo", directions=2), "dtype": "bfloat16"},
}
STEPS = 6


def settings(case: str) -> dict[str, Any]:
    shared = {"method": "zo", "max_steps": STEPS, "batch_size": 2, "gradient_accumulation_steps": 2}
    return shared | {"lr_scheduler_type": "constant"} | CASES[case]


@in_every_run(lambda case: case in ("fzoo", "low rank, folded sums"))
@pytest.mark.parametrize("case", CASES)
def test_a_journal_is_the_run(make: Make, tmp_path: Path, case: str) -> None:
    """From the base and the journal's first records, at any step, a run goes on to the same bits; and replay gives
    them."""
    through = make("through", **settings(case))
    assert train(through) == 0
    out = Path(through.output_dir)
    replay(through.model, out, tmp_path / "again", device="cpu", say=lambda line: None)
    assert same(weights(out), weights(tmp_path / "again")) and not same(weights(out), weights(through.model))
    killed = Path(shutil.copytree(out, tmp_path / "killed"))
    for path in (killed / "model.safetensors", *killed.glob("checkpoint-*")):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    found = journal.read(killed / "run" / "journal")
    size = found.header.record.size + journal.CRC.size
    with open(killed / "run" / "journal", "r+b") as file:
        file.truncate(found.begin + 4 * size)
    again = replace(through, output_dir=str(killed))
    assert train(again, resume="") == 0
    assert same(weights(out), weights(killed)) and metrics(through) == metrics(again)


@pytest.mark.parametrize("dry", [True, False])
def test_shapes_that_no_direction_fits_are_refused_before_weights_are_read(
    make: Make, dry: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the model's config alone, so that nobody waits for the weights of a model to learn it."""
    monkeypatch.setattr(loading, "_fill", None)
    with pytest.raises(UserError, match="zo.rank: found 200, and no linear layer"):
        train(make("wide", **settings("low rank") | {"zo": ZOConfig(rank=200)}), dry_run=dry)


def test_long_runs_in_8_bits_are_wanted_by_somebody(make: Make, capsys: pytest.CaptureFixture) -> None:
    """Where the data decide on the steps, they are counted before anything is loaded; a number that allows them, kept
    factors or more bits let the run begin."""
    asked = settings("low rank") | {"wire": "fp8", "max_steps": None, "num_train_epochs": 2, "batch_size": 4}
    with pytest.raises(UserError, match=r"wire: fp8 .* 6 steps are more than zo.fp8_steps=5: .* zo.fp8_steps=6"):
        train(make("long", **asked | {"zo": ZOConfig(fp8_steps=5)}))
    for name, change in {
        "wanted": {"zo": ZOConfig(fp8_steps=6)},
        "kept": {"zo": ZOConfig(rank=2, fold=False, fp8_steps=5)},
        "bf16": {"zo": ZOConfig(fp8_steps=5), "wire": "bf16"},
    }.items():
        assert train(make(name, **asked | change), dry_run=True) == 0
    assert "6 (num_train_epochs=2)" in capsys.readouterr().out


def test_kept_factors_make_light_checkpoints(make: Make, tiny_data: Path, tmp_path: Path) -> None:
    """Where weights of blocks never change, checkpoints hold no model, also those written behind training; the run goes
    on from the original one, and from no other; the best step is published whole."""
    kept = settings("low rank") | {"zo": ZOConfig(rank=2, refresh=2, fold=False), "save_steps": 1, "eval_steps": 1}
    few = tmp_path / "few.jsonl"
    few.write_text("".join(tiny_data.read_text().splitlines(keepends=True)[:4]))
    kept |= {"eval_data": str(few), "save_total_limit": None, "load_best_model_at_end": True}
    kept |= {"warmup_ratio": 0.0, "max_steps": 4}
    through, stopped = make("through", **kept), make("stopped", **kept | {"max_steps": 3})
    assert train(through) == train(stopped) == 0
    root = Path(through.output_dir)
    for step in range(1, 5):
        path = root / f"checkpoint-{step}"
        assert (path / "config.json").exists() and not list(path.glob("model*.safetensors"))
    found = keyhole.load(str(root), device="cpu", dtype="bfloat16")
    assert type(found.module).__name__ == "LlamaForCausalLM"
    other = Path(shutil.copytree(through.model, tmp_path / "other"))
    replay(through.model, root, tmp_path / "trained", device="cpu", say=lambda line: None)
    shutil.copy(tmp_path / "trained" / "model.safetensors", other / "model.safetensors")
    state = root / "checkpoint-4" / "keyhole_state.json"
    text = state.read_text()
    for place, why in ((other, "holds other weights by now"), (tmp_path / "gone", "which cannot be read here")):
        state.write_text(text.replace(json.dumps(through.model), json.dumps(str(place))))
        with pytest.raises(UserError, match=f"factors alone, beside the weights of {place}.*{why}"):
            keyhole.load(str(state.parent), device="cpu")
    with pytest.raises(UserError, match="--resume: .*(beside the weights that it began with|cannot change)"):
        train(replace(stopped, model=str(other), max_steps=4), resume="")
    assert train(replace(stopped, max_steps=4), resume="") == 0
    assert same(weights(root), weights(stopped.output_dir)) and losses(through) == losses(stopped)


@pytest.mark.parametrize("placement", ["resident", "stream"])
def test_light_checkpoints_leave_frozen_weights_out(make: Make, placement: str) -> None:
    """With frozen embeddings a light checkpoint holds factors and norms alone, and is as good as a whole one: it is
    resumed and loaded as a model to the same numbers."""
    kept = settings("low rank") | {"zo": ZOConfig(rank=2, refresh=2, fold=False), "freeze": "embeddings"}
    kept |= {"placement": placement, "dtype": "float32", "save_steps": 2, "save_total_limit": None, "max_steps": 4}
    through, stopped = make("through", **kept), make("stopped", **kept | {"max_steps": 2})
    assert train(through) == 0 and train(stopped) == 0
    root, other = Path(through.output_dir), Path(stopped.output_dir)
    table = keyhole.load(through.model, device="cpu").module.get_input_embeddings().weight.shape
    assert all(tensor.numel() != table.numel() for tensor in saved(root / "checkpoint-2").values())
    assert train(replace(stopped, max_steps=4), resume="") == 0 and same(weights(root), weights(other))
    batch = {"input_ids": torch.tensor([[5, 6, 7, 8]]), "labels": torch.tensor([[5, 6, 7, 8]])}
    at_end = keyhole.load(str(root), device="cpu").nll(batch)[0]
    for path in (root, other):
        torch.testing.assert_close(keyhole.load(str(path / "checkpoint-4"), device="cpu").nll(batch)[0], at_end)


def saved(checkpoint: Path) -> dict[str, torch.Tensor]:
    return load_file(checkpoint / "optimizer.safetensors")


@pytest.mark.parametrize("fold", [True, False])
def test_a_checkpoint_within_a_period_can_be_loaded(make: Make, tmp_path: Path, fold: bool) -> None:
    """Loaded as a model, a checkpoint is the run at its step, factors included, also where the run has frozen layers,
    which stays the run's own affair; a method made on it finds them in the weights; what was edited is refused."""
    own = {"zo": ZOConfig(rank=2, refresh=2, fold=fold), "dtype": "float32", "placement": "resident"}
    own |= {"freeze": ["model.layers.0", "*.up_proj.*"]}
    config = make("run", **settings("low rank") | own | {"max_steps": 3, "save_steps": 3})
    assert train(config) == 0
    path, batch = Path(config.output_dir) / "checkpoint-3", {"input_ids": torch.tensor([[5, 6, 7, 8]])}
    batch["labels"] = batch["input_ids"]
    at_end, base = (keyhole.load(source, device="cpu").nll(batch)[0] for source in (config.output_dir, config.model))
    model = keyhole.load(str(path), device="cpu")
    torch.testing.assert_close(model.nll(batch)[0], at_end, rtol=1e-5, atol=1e-5)
    assert (at_end - base).abs() > 1e-3 and any("factors: of rank 2" in line for line in model.describe())
    assert all(param.requires_grad and not is_left_out(param) for param in model.module.parameters())
    rounded = keyhole.load(str(path), device="cpu", wire="bf16", freeze="lm_head").describe()
    assert any("wire: bf16, as asked; the factors beside these weights were learned over float32" in s for s in rounded)
    keyhole.LOMO(model, 1e-3)
    torch.testing.assert_close(model.nll(batch)[0], at_end, rtol=1e-5, atol=1e-5)
    state, tensors = (path / name for name in ("keyhole_state.json", "optimizer.safetensors"))
    text, content = state.read_text(), tensors.read_bytes()
    for words in ('rank": 3', 'rank": 99999', 'rank": -1', 'rank": "x"', 'step_count": []'):
        state.write_text(re.sub(rf"{words.split(':')[0]}: \d+", words, text))
        with pytest.raises(UserError, match="zo.rank|edited"):
            keyhole.load(str(path), device="cpu")
    edits = [('refresh": 2', 'refresh": 0'), ('"gaussian"', '"lognormal"'), ('"stochastic"', '"upwards"')]
    edits += [('"model.layers.0"', "0")]
    edits += [] if fold else [('step_count": 3', 'step_count": 1')]  # and a period is kept, of 2 steps
    for words, others in edits:
        assert words in text
        state.write_text(text.replace(words, others))
        with pytest.raises(UserError, match="edited|kept periods after 1 steps|freeze: found"):
            keyhole.load(str(path), device="cpu")
    state.write_text(text)
    for harm in (b"", content[:9], content[:-5], b"\xff" * 64):
        tensors.write_bytes(harm)
        with pytest.raises(UserError, match="optimizer.safetensors"):
            keyhole.load(str(path), device="cpu")
