"""Batches for the trainers of tests/hf."""

import pytest
import torch


@pytest.fixture(scope="module")
def batches() -> list[dict[str, torch.Tensor]]:
    """For the steps of tests/hf/runs.py, two micro-batches each. Do not change them."""
    made = torch.Generator().manual_seed(3)
    ids = [torch.randint(5, 200, (2, 12), generator=made) for _ in range(12)]
    return [{"input_ids": x, "labels": x.clone(), "attention_mask": torch.ones_like(x)} for x in ids]
