"""Numbers that are not finite."""

import pytest
import torch

from keyhole.model.weights.finite import first_bad_tensor
from keyhole.training.guard import bad_numbers


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_finds_one_bad_element(dtype: torch.dtype, value: float) -> None:
    """One element among thousands is found, and its tensor named."""
    bad = torch.randn(100, 33).to(dtype)
    bad[57, 4] = value
    tensors = [("empty", torch.empty(0)), ("good", torch.ones(5, dtype=dtype)), ("bad", bad)]
    assert first_bad_tensor(tensors) == "bad"
    assert first_bad_tensor(tensors[:2]) is None


def test_names_bad_metrics() -> None:
    """Only what is not finite is named."""
    assert bad_numbers({"a": 1.0, "b": float("nan"), "c": -float("inf")}) == ["b is nan", "c is -inf"]
