"""The check that every trained tensor changes."""

from pathlib import Path

import torch
import transformers as hf

import keyhole
from keyhole.training.change_check import SAMPLE, ChangeCheck, sample
from tests.training.classifiers import save_encoder


def test_names_the_tensors_that_stood_still(tiny_model: Path) -> None:
    """Tensors that are not touched are named; the embedding counts as moved if a row of the batch did."""
    model = keyhole.load(tiny_model, device="cpu")
    table = model.layout.table.name
    check = ChangeCheck(model, torch.tensor([[5, 7, 7]]))
    for name, tensor in model.named_tensors():
        if name == table:
            tensor[7, 3] += 1.0
        elif name != "model.norm.weight":
            tensor.view(-1)[:1] += 1.0
    still, share = check.unchanged()
    assert still == ["model.norm.weight"]
    assert 0 < share < 1
    line = check.verdict(3)
    assert "1 of 21 trained tensors did not change in 3 steps (model.norm.weight)" in line


def test_biases_of_keys_may_stand_still(tmp_path: Path) -> None:
    """Their gradient is 0 up to rounding, so there is nothing to warn of; any other tensor is still named."""
    save_encoder("bert", tmp_path)
    model = keyhole.load(tmp_path, head="classification", num_labels=2, device="cpu")
    module = hf.BertModel.from_pretrained(tmp_path)
    module(torch.tensor([[5, 7, 9]])).last_hidden_state.square().sum().backward()
    size = {name: float(param.grad.abs().max()) for name, param in module.named_parameters() if param.grad is not None}
    keys = [name for name in size if name.endswith(".key.bias")]
    assert len(keys) == 2 and all(size[key] < 1e-4 * size[key.replace(".key.", ".query.")] for key in keys)
    check = ChangeCheck(model, torch.tensor([[5, 7, 7]]))
    for name, tensor in model.named_tensors():
        if not name.endswith((".key.bias", "classifier.bias")):
            tensor.view(-1)[...] += 1.0
    assert "1 of" in check.verdict(3) and "(classifier.bias)" in check.verdict(3)
    dict(model.named_tensors())["classifier.bias"].add_(1.0)
    assert check.verdict(3).startswith("check: all") and "the 2 biases of keys" in check.verdict(3)


def test_frozen_tensors_are_not_asked(tiny_model: Path) -> None:
    """A frozen tensor may stand still."""
    model = keyhole.load(tiny_model, device="cpu")
    model.module.lm_head.weight.requires_grad_(False)
    assert "lm_head.weight" not in ChangeCheck(model, torch.tensor([1])).before


def test_sample_is_small_and_compares_bits() -> None:
    """A sample never holds more than SAMPLE elements, and -0.0 differs from 0.0."""
    big = torch.zeros(1000, 1000, dtype=torch.bfloat16)
    before = sample(big)
    assert SAMPLE // 2 < before.numel() <= SAMPLE
    big[0, 0] = -0.0
    assert int((sample(big) != before).sum()) == 1
    assert sample(big, torch.arange(900)).numel() <= SAMPLE
