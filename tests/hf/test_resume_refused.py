"""Checkpoints that resume_from_checkpoint refuses: of another method, model or settings, or incomplete."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("accelerate")

from transformers import AutoConfig

import keyhole
from keyhole.checkpoint.state import dump
from keyhole.errors import UserError
from keyhole.hf import KeyholeArguments, KeyholeTrainer
from tests.hf.runs import trainer
from tests.matrix import in_every_run
from tests.methods.lomo.loops import weights as weights_of


def test_a_checkpoint_of_another_method_settings_or_model_is_refused(
    tiny_model: Path, tmp_path: Path, batches: list[Any]
) -> None:
    """Without `rank` the factors of the checkpoint would be left out, in silence. What may change, may."""
    how = {"method": "zo", "learning_rate": 1e-4, "save_strategy": "steps", "save_steps": 1, "max_steps": 1}
    trainer(tiny_model, tmp_path, batches, settings={"rank": 2}, **how).train()
    goes_on = {**how, "max_steps": 2}
    with pytest.raises(UserError, match="was made with rank=2 of zo, this run has None"):
        trainer(tiny_model, tmp_path, batches, **goes_on).train(resume_from_checkpoint=True)
    with pytest.raises(UserError, match="was made by method=zo, this run has lomo"):
        trainer(tiny_model, tmp_path, batches, max_steps=2).train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    again = trainer(tiny_model, tmp_path, batches, settings={"rank": 2, "clip": 5.0}, **goes_on)
    again.train(resume_from_checkpoint=True)
    assert again.state.global_step == 2
    args = KeyholeArguments(str(tmp_path), method="zo", method_settings={"rank": 2}, use_cpu=True, report_to=[])
    for key, value, says in (("intermediate_size", 16, "was 64 then"), ("rms_norm_eps", 0.5, "was .*, and is 0.5 now")):
        other = AutoConfig.from_pretrained(tiny_model, **{key: value})  # of the second all weights would fit
        with pytest.raises(UserError, match=f"another config.json: {key} {says}"):
            KeyholeTrainer(other, args, train_dataset=batches).train(resume_from_checkpoint=True)


@in_every_run(lambda name: name not in ("adalomo", "apollo-mini"))  # they sweep as lomo does
@pytest.mark.parametrize("name", ["lomo", "zo", "adalomo", "apollo-mini", "sgd", "lomo-lora"])
def test_a_checkpoint_of_other_trained_parameters_is_refused(
    tiny_model: Path, tmp_path: Path, batches: list[Any], name: str
) -> None:
    """It went on in silence. The weights stay as they were; a checkpoint that does not say is refused too."""
    args = KeyholeArguments(
        str(tmp_path), method=name, max_steps=1, save_steps=1, learning_rate=1e-4, max_grad_norm=0.0, use_cpu=True,
        report_to=[], remove_unused_columns=False,
    )  # fmt: skip

    def made(freeze: str | list[str] | None) -> KeyholeTrainer:
        model = keyhole.load(str(tiny_model), device="cpu", freeze=freeze)
        return KeyholeTrainer(model, args, train_dataset=batches, data_collator=lambda rows: dict(rows[0]))

    made("embeddings").train()
    args.max_steps = 2
    other = made(None)
    before = weights_of(other.keyhole)
    with pytest.raises(UserError, match=r"lm_head.weight was frozen and is trained now. .*freeze=.*requires_grad"):
        other.train(resume_from_checkpoint=True)
    assert all(torch.equal(tensor, before[key]) for key, tensor in weights_of(other.keyhole).items())
    with pytest.raises(UserError, match=r"layers.0.\S+ was trained and is frozen now"):
        made(["embeddings", "model.layers.0"]).train(resume_from_checkpoint=True)
    again = made("embeddings")
    again.train(resume_from_checkpoint=True)
    assert again.state.global_step == 2
    file = tmp_path / "checkpoint-1" / "keyhole_state.json"
    state = json.loads(file.read_text())
    del state["config"]["trained"]
    file.write_text(dump({key: value for key, value in state.items() if key != "crc32"}))
    with pytest.raises(UserError, match="is of another version of keyhole"):
        other.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))


@in_every_run(lambda name, half: half or name == "scheduler.pt")
@pytest.mark.parametrize("name", ["scheduler.pt", "rng_state.pth", "trainer_state.json", "keyhole_state.json"])
@pytest.mark.parametrize("half", [False, True])
def test_an_incomplete_checkpoint_is_refused(
    tiny_model: Path, tmp_path: Path, batches: list[Any], name: str, half: bool
) -> None:
    """A file that is missing or cut off, as a kill leaves it: by its name, with the model as it was."""
    how = {"save_strategy": "steps", "save_steps": 1, "max_steps": 1}
    trainer(tiny_model, tmp_path, batches, **how).train()
    file = tmp_path / "checkpoint-1" / name
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2]) if half else file.unlink()
    again = trainer(tiny_model, tmp_path, batches, **(how | {"max_steps": 2}))
    with pytest.raises(UserError, match=f"resume_from_checkpoint: .*{name}"):
        again.train(resume_from_checkpoint=True)
