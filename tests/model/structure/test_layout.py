"""The flat array: every element placed once, units side by side, places that do not depend on the cut."""

import pytest
import torch
from torch import nn

from keyhole.model.structure import layout as layout_module
from keyhole.model.structure.find import find_blocks
from keyhole.model.structure.layout import ALIGN, Layout, find_layout
from keyhole.model.structure.skeleton import build
from tests.model.decoders import NAMES, VOCAB, config


def skeleton(name: str) -> nn.Module:
    return build(config(name), torch.float32)


def intervals(layout: Layout) -> list[tuple[int, int]]:
    return [(tensor.start, tensor.stop) for tensor in layout.tensors]


@pytest.mark.parametrize("name", NAMES)
def test_every_parameter_has_one_place(name: str) -> None:
    """Each parameter (a tied one once) has its own aligned range; padding is below ALIGN elements a tensor."""
    module = skeleton(name)
    layout = find_layout(module)
    assert sorted(t.name for t in layout.tensors) == sorted(name for name, _ in module.named_parameters())
    assert {id(t.param) for t in layout.tensors} == {id(p) for p in module.parameters()}
    end = 0
    for start, stop in intervals(layout):
        assert start % ALIGN == 0 and 0 <= start - end < ALIGN
        end = stop
    assert 0 <= layout.numel - end < ALIGN
    assert layout.block_count == module.config.num_hidden_layers


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("max_unit_numel", [None, 3000, 1])
def test_units_tile_the_array(name: str, max_unit_numel: int | None) -> None:
    """Units are contiguous, in order, without gap or overlap, and hold the tensors that lie in them."""
    layout = find_layout(skeleton(name), max_unit_numel)
    assert layout.units[0].start == 0 and layout.units[-1].stop == layout.numel
    for one, after in zip(layout.units, layout.units[1:], strict=False):
        assert one.stop == after.start
    assert [unit.index for unit in layout.units] == list(range(len(layout.units)))
    for unit in layout.units:
        for tensor in unit.tensors:
            if unit.rows is None:
                assert unit.start <= tensor.start and tensor.stop <= unit.stop
            else:
                assert tensor.start <= unit.start and unit.start < tensor.stop
    owners = [id(t) for u in layout.units if u.rows is None or u.rows[0] == 0 for t in u.tensors]
    assert len(owners) == len(set(owners)) == len(layout.tensors)


@pytest.mark.parametrize("name", NAMES)
def test_cut_does_not_move_elements(name: str) -> None:
    """An element's index, and so its noise, is the same however small the units are."""
    module = skeleton(name)
    whole, cut = find_layout(module), find_layout(module, max_unit_numel=1)
    assert whole.tensors == cut.tensors and whole.numel == cut.numel
    assert len(cut.of_kind("block")) >= len(whole.of_kind("block")) == whole.block_count
    assert whole.common.tensors == cut.common.tensors


@pytest.mark.parametrize(("name", "tied"), [("qwen2", True), ("llama", False), ("gpt2", True), ("phi", False)])
def test_tied_head_is_the_table(name: str, tied: bool) -> None:
    """A tied head has no units of its own; an untied one has."""
    layout = find_layout(skeleton(name))
    assert layout.tied == tied
    assert bool(layout.of_kind("head")) != tied
    assert layout.head_units == layout.of_kind("table" if tied else "head")


def test_tables_are_cut_by_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Row chunks cover the vocabulary once, in order, and meet at row boundaries."""
    monkeypatch.setattr(layout_module, "CHUNK_ROWS", 16)
    layout = find_layout(skeleton("llama"))
    for kind in ("table", "head"):
        units = layout.of_kind(kind)
        assert [unit.rows[0] for unit in units] == list(range(0, VOCAB, 16))
        assert [unit.rows[1] for unit in units] == [*range(16, VOCAB, 16), VOCAB]
        for unit in units:
            assert unit.start == unit.tensors[0].start + unit.rows[0] * 32


class _Block(nn.Module):
    def __init__(self, shared: nn.Linear | None = None) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), shared or nn.Linear(4, 4)
        self.c = nn.Linear(4, 4)
        self.c.weight = self.a.weight  # tied inside the block


class _Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        shared = nn.Linear(4, 4)
        self.embed, self.head = nn.Embedding(8, 4), nn.Linear(4, 8)
        self.layers = nn.ModuleList([_Block(shared), _Block(shared), _Block()])
        self.experts = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])

    def get_input_embeddings(self) -> nn.Module:
        return self.embed

    def get_output_embeddings(self) -> nn.Module:
        return self.head


@pytest.mark.parametrize("max_unit_numel", [None, 1])
def test_shared_matrices_stay_in_the_common_unit(max_unit_numel: int | None) -> None:
    """A matrix that two blocks, or two layers of a block, share is placed once and never travels."""
    module = _Decoder()
    assert find_blocks(module) == list(module.layers)
    layout = find_layout(module, max_unit_numel)
    names = [tensor.name for tensor in layout.tensors]
    assert len(names) == len(set(names)) == len(list(module.parameters()))
    common = {tensor.name for tensor in layout.common.tensors}
    assert {"layers.0.b.weight", "layers.0.a.weight", "experts.0.weight", "head.bias"} <= common
    assert "layers.2.b.weight" not in common


def test_model_without_blocks_is_all_common() -> None:
    """A single layer is not a list of like blocks: it is laid out, but there is nothing to stream."""
    layout = find_layout(build(config("llama", num_hidden_layers=1), torch.float32))
    assert layout.block_count == 0 and not layout.of_kind("block")
    assert any("q_proj" in tensor.name for tensor in layout.common.tensors)
