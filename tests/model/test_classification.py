"""Classifiers: gradients as by autograd on Hugging Face's own loss, heads drawn or read, and what is refused."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf

import keyhole
from keyhole.errors import UserError
from tests.families.tiny import tiny_config
from tests.model.backward.gradients import assert_same, by_autograd, collected, joined
from tests.model.encoders import ENCODERS, batch, config, plain_loss


def load(name: str = "bert", labels: int = 3, **changes: Any) -> keyhole.Model:
    return keyhole.load(config(name, labels, **changes), init="random", device="cpu")


@pytest.mark.parametrize("labels", [3, 1], ids=["classification", "regression"])
@pytest.mark.parametrize("name", ENCODERS)
def test_gradients_equal_autograd(name: str, labels: int) -> None:
    batches = [batch(3, 1, labels), batch(2, 2, labels, types=name == "bert")]
    model = load(name, labels)
    expected = by_autograd(model, batches, plain_loss)
    assert_same(joined(collected(model, batches).found), expected)


@pytest.mark.parametrize("name", ["funnel", "longformer", "gemma3", "qwen3_5", "roc_bert"])
def test_gradients_of_other_families_equal_autograd(name: str) -> None:
    """Funnel has its layers in lists of lists. Longformer writes into the output of a linear layer. The others fill a
    cache unless told not to, and have no option for that; their configs are left as they were."""
    own = tiny_config(name)
    model = keyhole.load(own, init="random", device="cpu", head="classification", num_labels=3)
    pad = own.get_text_config().pad_token_id or 0
    batches = [batch(3, 1), batch(2, 2)]
    batches = [one | {"input_ids": one["input_ids"].where(one["attention_mask"] == 1, pad)} for one in batches]
    expected = by_autograd(model, batches, plain_loss)
    before = model.config.to_dict()
    assert_same(joined(collected(model, batches).found), expected)
    assert model.config.to_dict() == before


def test_several_labels_per_row() -> None:
    model = load(problem_type="multi_label_classification")
    one = batch(4) | {"labels": torch.tensor([[1.0, 0, 1], [0, 0, 0], [1, 1, 1], [0, 1, 0]])}
    nll_B, count_B = model.nll(one)
    with torch.no_grad():
        assert float(nll_B.mean()) == pytest.approx(float(model.module(**one).loss), rel=1e-5)
    assert count_B.tolist() == [1] * 4


def test_a_base_encoder_gets_a_head_by_seed(tmp_path: Path) -> None:
    """What the files hold is read, the rest is drawn: the same from the same seed, another from another."""
    torch.manual_seed(0)
    base = hf.BertModel(config("bert"))
    base.save_pretrained(tmp_path)
    with pytest.raises(UserError, match="make it a classifier: head=classification"):
        keyhole.load(tmp_path, device="cpu")
    found = [keyhole.load(tmp_path, device="cpu", head="classification", num_labels=2, seed=s) for s in (5, 5, 6)]
    heads = [model.module.classifier.weight.detach() for model in found]
    assert heads[0].shape == (2, 32) and float(heads[0].std()) > 0.05
    assert torch.equal(heads[0], heads[1]) and not torch.equal(heads[0], heads[2])
    theirs = dict(base.named_parameters())
    for name, tensor in found[0].named_tensors():
        if name.startswith("bert."):
            assert torch.equal(tensor, theirs[name.removeprefix("bert.")])
    assert any("classifier.weight" in line for line in found[0].describe())


@pytest.mark.gpu
def test_a_head_is_drawn_alike_on_every_device(tmp_path: Path) -> None:
    hf.BertModel(config("bert")).save_pretrained(tmp_path)
    found = [keyhole.load(tmp_path, device=device, head="classification", num_labels=2) for device in ("cpu", "cuda")]
    heads = [dict(model.named_tensors())["classifier.weight"].cpu() for model in found]
    assert torch.equal(*heads)


def test_a_lost_head_is_refused(tmp_path: Path) -> None:
    """Files that should have it and do not are damaged: nothing is drawn in silence."""
    hf.BertModel(config("bert")).save_pretrained(tmp_path)
    config("bert").save_pretrained(tmp_path)
    with pytest.raises(UserError, match="lacks classifier"):
        keyhole.load(tmp_path, device="cpu")


@pytest.mark.parametrize("name", ["bert", "roberta", "mpnet"])
def test_save_and_load(name: str, tmp_path: Path) -> None:
    model, one = load(name), batch()
    keyhole.LOMO(model, lr=0.1).step(one)
    model.save_pretrained(tmp_path / "out")
    theirs = hf.AutoModelForSequenceClassification.from_pretrained(tmp_path / "out", dtype=torch.float32)
    again = keyhole.load(tmp_path / "out", device="cpu")
    assert type(theirs) is type(again.module) is type(model.module)
    with torch.no_grad():
        expected = theirs.eval()(**one)
        assert torch.equal(model.module(**one).logits, expected.logits)
    assert float(again.nll(one)[0].mean()) == pytest.approx(float(expected.loss), rel=1e-5)


IDS = torch.full((2, 4), 5)
WRONG = {
    "labels is (2, 4)": {"labels": IDS},
    "labels is list": {"labels": [0, 1]},
    "labels holds 0 to 3; the model has labels 0 to 2": {"labels": torch.tensor([0, 3])},
    "labels is torch.float32": {"labels": torch.tensor([0.0, 1])},
    "input_ids holds 5 to 99": {"input_ids": torch.tensor([[5, 99, 5, 5]] * 2)},
    "token_type_ids holds 5 to 5; the model has types 0 to 1": {"token_type_ids": IDS},
    "position_ids: not used by BertForSequenceClassification": {"position_ids": IDS},
    "attention_mask holds 5 to 5": {"attention_mask": IDS},
    "rows have 41 tokens; the model has positions for 40": {"input_ids": torch.full((2, 41), 5)},
    "input_ids is torch.float32": {"input_ids": IDS.float()},
}


@pytest.mark.parametrize("says", WRONG)
def test_bad_batches_are_refused(says: str) -> None:
    with pytest.raises(UserError, match=re.escape(says)):
        load().to_device({"input_ids": IDS, "labels": torch.tensor([0, 1])} | WRONG[says])


@pytest.mark.parametrize(
    "options, says",
    [
        ({"head": "regression", "num_labels": 1}, "head=classification"),
        ({"num_labels": 2}, "head=classification"),
        ({"head": "classification", "num_labels": 0}, "num_labels: 0"),
    ],
)
def test_bad_heads_are_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=says):
        keyhole.load(config("bert"), init="random", device="cpu", **options)


def test_roberta_positions_begin_behind_the_padding() -> None:
    """40 rows of the table, of which two are taken: 38 tokens fit, and a classifier does not write."""
    model = load("roberta")
    assert model.head.longest == 38
    full = {"input_ids": torch.full((1, 38), 5), "labels": torch.tensor([0])}
    assert bool(model.nll(full)[0].isfinite())
    with pytest.raises(UserError, match="classifies texts"):
        model.generate(full["input_ids"])
