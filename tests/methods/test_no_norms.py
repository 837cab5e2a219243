"""A model without a single vector (OLMo: its norms have no weights): its common is empty, and so are its packed blocks
between passes, to a program that counts their numbers."""

from typing import Any

import pytest
import torch

import keyhole
from keyhole.methods import METHODS
from tests.families.tiny import tiny_config
from tests.model.decoders import batch

BESIDE = {"rank": 2, "refresh": 2, "fold": False}
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "adam-offload": ("adam-offload", {"max_grad_norm": 0.5}, {}),
    "zo of low rank": ("zo", {"rank": 2, "refresh": 2}, {}),
    "zo over int4": ("zo", BESIDE, {"wire": "int4"}),
    "lora over int4": ("lora", {}, {"wire": "int4"}),
}


@pytest.mark.parametrize("case", CASES)
def test_a_model_without_norms_is_trained_streamed_as_resident(case: str) -> None:
    """Also where passes came before the method was made."""
    name, own, how = CASES[case]
    found = []
    for placement in ("resident", "stream"):
        model = keyhole.load(
            tiny_config("olmo", num_hidden_layers=2), init="random", device="cpu", placement=placement, **how
        )
        assert not model.layout.common.tensors
        model.nll(batch(seed=9))
        method = METHODS[name].load()(model, 1e-2, **own)
        found.append([float(method.step(batch())) for _ in range(3)])
        method.flush()
        found[-1].append({name: tensor.clone() for name, tensor in model.named_tensors()})
    assert found[0][:3] == found[1][:3] and len(set(found[0][:3])) == 3
    assert all(torch.equal(found[0][3][name], found[1][3][name]) for name in found[0][3])
