"""Homes of weights of which a rank has a part."""

import pytest
import torch

from keyhole.model.structure.layout import find_layout
from keyhole.model.structure.skeleton import build
from keyhole.model.weights.format import Wire
from keyhole.model.weights.homes import Homes
from keyhole.offload.sharded import part_numel
from tests.model.decoders import config

CPU, BF16 = torch.device("cpu"), torch.bfloat16


@pytest.mark.parametrize("largest", [None, 1, 3000])
@pytest.mark.parametrize(("name", "size"), [("llama", 2), ("qwen2", 3), ("gpt2", 5), ("mixtral", 4)])
def test_the_parts_of_all_ranks_are_the_tensors(name: str, size: int, largest: int | None) -> None:
    """What is written into a tensor is read from the ranks' parts, side by side and each once; other units are whole,
    and a rank writes nothing into a foreign one."""
    layout = find_layout(build(config(name), BF16), largest)
    cut = {u.index for u in layout.units if u.kind in ("block", "head")}
    ranks = []
    for rank in range(size):
        flats = [torch.zeros(0 if u.index in cut else u.numel, dtype=BF16) for u in layout.units]
        lengths = {i: part_numel(layout.units[i].numel, size) for i in cut}
        parts = {i: (rank * n, torch.full((n,), -1.0, dtype=BF16)) for i, n in lengths.items()}
        ranks.append(Homes(layout, flats, Wire(BF16), CPU, frozenset({0}), parts))
    for number, tensor in enumerate(layout.tensors):
        values = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(number)).to(BF16)
        found = torch.full_like(values, torch.nan).view(-1)
        for homes in ranks:
            homes.fill(tensor, lambda memory, values=values: memory.copy_(values))
            apart = homes.unit_of(tensor).index in cut
            assert homes.is_apart(tensor) == apart and homes.is_foreign(tensor) == (homes.unit_of(tensor).index == 0)
            if apart:
                for begin, part in homes.own_parts(tensor):
                    assert found[begin : begin + part.numel()].isnan().all()
                    found[begin : begin + part.numel()] = part
            else:
                found = homes.read(tensor).reshape(-1)
                assert not homes.is_foreign(tensor) or not found.any()
        assert torch.equal(found.view(tensor.shape), values) or homes.is_foreign(tensor), tensor.name
