"""What a KeyholeTrainer is given: arguments, a model and batches that it cannot honour are refused."""

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("accelerate")

from transformers import Trainer

import keyhole
from keyhole.errors import UserError
from keyhole.hf import KeyholeArguments, KeyholeMixin, KeyholeTrainer
from tests.hf.runs import trainer


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"fp16": True}, "fp16: keyhole scales no loss"),
        ({"label_smoothing_factor": 0.1}, "label_smoothing_factor: losses are taken"),
        ({"optim": "adafactor"}, "optim: .*adafactor.* is not used"),
        ({"method": "sngd"}, "method: found 'sngd', expected one of zo"),
        ({"settings": {"rnk": 3}}, "settings: lomo has no rnk; it takes"),
        ({"learning_rate": "auto"}, "learning_rate: 'auto' is no learning rate; a number"),
        ({"bf16": True}, "bf16: the model computes in float32"),
        ({"neftune_noise_alpha": 5.0}, "neftune_noise_alpha: noise on embeddings"),
    ],
)
def test_what_cannot_work_is_refused(
    tiny_model: Path, tmp_path: Path, batches: list[Any], options: dict[str, Any], says: str
) -> None:
    with pytest.raises(UserError, match=says):
        trainer(tiny_model, tmp_path, batches, **options)


@pytest.mark.parametrize("tf32", [None, True])
def test_tf32_of_the_arguments_is_honoured(
    tiny_model: Path, tmp_path: Path, batches: list[Any], tf32: bool | None
) -> None:
    """The Trainer's own switch; loading turned it off again."""
    args = KeyholeArguments(str(tmp_path), method="lomo", use_cpu=True, report_to=[], learning_rate=1e-2)
    args.tf32 = tf32  # on a machine without a GPU the constructor refuses it
    made = KeyholeTrainer(str(tiny_model), args, train_dataset=batches)
    assert torch.get_float32_matmul_precision() == ("high" if tf32 else "highest")
    made.keyhole.close()


@pytest.mark.parametrize("key", ["gpu_memory", "wire", "model_dtype", "placement"])
def test_a_loaded_model_is_not_placed_again(tiny_model: Path, tmp_path: Path, key: str) -> None:
    value = {"gpu_memory": "1GiB", "wire": "bf16", "model_dtype": "bfloat16", "placement": "stream"}[key]
    args = KeyholeArguments(str(tmp_path), method="lomo", use_cpu=True, report_to=[], **{key: value})
    with pytest.raises(UserError, match=f"{key}: the model is loaded already"):
        KeyholeTrainer(keyhole.load(str(tiny_model), device="cpu"), args)


def test_a_trainer_that_resizes_the_model_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    """As TRL does for a chat template with tokens of its own: the new rows would not be trained."""

    class Resizes(Trainer):
        def __init__(self, model: Any, **options: Any) -> None:
            model.resize_token_embeddings(model.config.vocab_size + 2, mean_resizing=False)
            super().__init__(model=model, **options)

    args = KeyholeArguments(str(tmp_path), method="lomo", use_cpu=True, report_to=[], learning_rate=1e-2)
    with pytest.raises(UserError, match="the Trainer has replaced or resized it"):
        type("Both", (KeyholeMixin, Resizes), {})(str(tiny_model), args)


@pytest.mark.parametrize(("value", "says"), [(["a"], "meta is a list"), (torch.ones(2), "meta: not used here")])
def test_inputs_that_nothing_reads_are_refused(
    tiny_model: Path, tmp_path: Path, batches: list[Any], value: Any, says: str
) -> None:
    made = trainer(tiny_model, tmp_path, [dict(batch, meta=value) for batch in batches], max_steps=1)
    with pytest.raises(UserError, match=says):
        made.train()


def test_a_batch_that_is_no_dict_is_refused(tiny_model: Path, tmp_path: Path, batches: list[Any]) -> None:
    made = trainer(tiny_model, tmp_path, batches)
    made.data_collator = lambda rows: [rows[0]["input_ids"]]
    with pytest.raises(UserError, match="batch: found a list; data_collator must return a dict of tensors"):
        made.train()
