"""Packing is refused exactly where it would leak."""

import pytest
import torch

import keyhole
from keyhole.errors import UserError
from keyhole.model.packing import keeps_samples_apart, refuse_leaky_packing
from tests.model.decoders import NAMES, batch, config


@pytest.mark.parametrize("name", NAMES)
def test_packing_is_right_or_refused(name: str) -> None:
    """Either two packed samples cost what they cost alone, or the model is refused with the setting to change."""
    model = keyhole.load(config(name, initializer_range=0.1), init="random", device="cpu")
    first, second = batch(1, 6, seed=1), batch(1, 5, seed=2)
    packed = {key: torch.cat([first[key], second[key]], dim=1) for key in first}
    packed["position_ids"] = torch.tensor([[0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 4]])
    apart, together = model.nll(first)[0] + model.nll(second)[0], model.nll(packed)[0]
    is_right = torch.allclose(apart, together, rtol=1e-5)
    assert keeps_samples_apart(model) == is_right
    if is_right:
        refuse_leaky_packing(model)
    else:
        with pytest.raises(UserError, match="packing=false"):
            refuse_leaky_packing(model)


def test_llama_keeps_samples_apart_in_16_bit() -> None:
    """Rounding noise is not taken for a leak."""
    model = keyhole.load(config("llama"), init="random", device="cpu", dtype="bfloat16", placement="stream")
    assert keeps_samples_apart(model)
