"""Random weights: the right spread, no two alike, and the same for every placement."""

import pytest
import torch

import keyhole
from keyhole.model.weights import read
from tests.model.decoders import config


@pytest.mark.parametrize("pooled", [False, True])
def test_matrices_are_normal_and_differ(pooled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mean 0, std as the config says, no two matrices equal, vectors as the model's own code makes them."""
    if pooled:  # as tens of billions of parameters on a CPU are filled
        monkeypatch.setattr(read, "POOLED_NUMEL", 0)
        monkeypatch.setattr(read, "CHUNK", 1 << 10)
    made = config("llama", initializer_range=0.05)
    model = keyhole.load(made, init="random", device="cpu")
    matrices = {name: x for name, x in model.named_tensors() if x.ndim > 1}
    for name, x in matrices.items():
        assert abs(float(x.mean())) < 0.01 and abs(float(x.std()) - 0.05) < 0.005, name
    firsts = [tuple(x.flatten()[:64].tolist()) for x in matrices.values()]
    assert len(set(firsts)) == len(firsts)
    assert all(torch.equal(x, torch.ones_like(x)) for _, x in model.named_tensors() if x.ndim == 1)
    other = keyhole.load(made, init="random", device="cpu", placement="stream")
    assert all(torch.equal(x, matrices[name]) for name, x in other.named_tensors() if x.ndim > 1)


def test_parts_of_a_large_matrix_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    """A matrix larger than the pool is not the pool over and over."""
    monkeypatch.setattr(read, "POOLED_NUMEL", 0)
    monkeypatch.setattr(read, "CHUNK", 1 << 8)
    model = keyhole.load(config("llama"), init="random", device="cpu")
    parts = model.home(model.layout.table).flatten()[: 8 << 8].view(8, 1 << 8)
    assert len({tuple(part.tolist()) for part in parts}) == 8
