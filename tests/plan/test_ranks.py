"""What one of several ranks needs: a part of the weights, of the state and of the passes."""

import pytest
import torch

from keyhole.errors import UserError
from keyhole.loading.model import _shared_work
from keyhole.methods import METHODS
from keyhole.methods.adam_offload.memory import host_state_bytes
from keyhole.methods.workload import Workload
from keyhole.model.structure.layout import Layout
from keyhole.model.structure.skeleton import build
from keyhole.model.weights.format import Wire
from keyhole.plan.placement import Costs, Placement, Room, place
from keyhole.ranks import Ranks
from tests.model.decoders import config

SHAPE = {"num_hidden_layers": 16, "hidden_size": 64, "intermediate_size": 256, "num_attention_heads": 4}


class Four(Ranks):
    """The first of four, two of which are on this machine."""

    size, local_size = 4, 2


def planned(
    method: str, ranks: Ranks, placement: str = "resident", budget: int | None = None
) -> tuple[Layout, Placement]:
    module, wire = build(config("llama", **SHAPE), torch.float32), Wire(torch.float32)
    work = _shared_work(Workload(method, tokens=16, passes=4), ranks)
    return place(module, placement, budget, wire, torch.device("cpu"), work)


def bytes_of(layout: Layout, kinds: tuple[str, ...]) -> int:
    return sum(4 * unit.numel for unit in layout.units if unit.kind in kinds)


@pytest.mark.parametrize("method", ["lomo", "adam-offload", "lsp"])
def test_a_rank_is_planned_for_its_part(method: str) -> None:
    """Resident: a quarter of blocks and head, all of the rest, and slots; passes are those of one micro-batch."""
    layout, alone = planned(method, Ranks())
    _, four = planned(method, Four())
    cut, rest = bytes_of(layout, ("block", "head")), bytes_of(layout, ("spine", "table"))
    assert alone.device_bytes.homes == cut + rest
    assert four.device_bytes.homes == pytest.approx(cut / 4 + rest, rel=0.01)
    assert four.device_bytes.slots == 3 * max(4 * unit.numel for unit in layout.of_kind("block"))
    assert four.device_bytes.kept == alone.device_bytes.kept / 4


def test_what_one_device_cannot_hold_four_can() -> None:
    """A budget below the weights is refused for one process, and enough for one of four."""
    layout, four = planned("lomo", Four())
    budget = four.device_bytes.total + 1024
    assert budget < 0.8 * 4 * layout.numel
    with pytest.raises(UserError, match="placement"):
        planned("lomo", Ranks(), budget=budget)
    assert planned("lomo", Four(), budget=budget)[1].streamed == set()


def test_host_memory_is_that_of_the_ranks_of_this_machine() -> None:
    """Streamed on four ranks, two of them here: twice a quarter of what is shared out, and a table each; replicas have
    their blocks once."""
    layout, placed = planned("adam-offload", Four(), "stream")
    costs = Costs(placed.work, Room(Wire(torch.float32), 0), METHODS["adam-offload"])
    streamed = {unit.index for unit in layout.units[1:]}
    cut, table = bytes_of(layout, ("block", "head")), bytes_of(layout, ("table",))
    assert costs.host_bytes(layout, streamed) == pytest.approx(2 * (cut / 4 + table), rel=0.01)
    state = 3 * ((cut + table) / 4 + bytes_of(layout, ("spine",)))
    assert host_state_bytes(layout, streamed, 4, costs.cut(layout), of=4) == pytest.approx(state, rel=0.01)
    layout, placed = planned("zo", Four(), "stream")
    costs = Costs(placed.work, Room(Wire(torch.float32), 0), METHODS["zo"])
    streamed = {unit.index for unit in layout.units[1:]}
    blocks, tables = bytes_of(layout, ("block",)), bytes_of(layout, ("table", "head"))
    assert costs.host_bytes(layout, streamed) == blocks + 2 * tables
