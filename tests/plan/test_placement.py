"""What a budget decides: more of it streams less, and a plan that exceeds it is refused; and what one of several ranks
needs: a part of the weights, of the state and of the passes."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from keyhole.bench.shapes import llama_config, opt_config
from keyhole.errors import UserError
from keyhole.loading.model import _shared_work
from keyhole.machine.sizes import GIB
from keyhole.methods import METHODS
from keyhole.methods.adam_offload.memory import host_state
from keyhole.methods.workload import Workload
from keyhole.model.forward.memory import evaluation_bytes
from keyhole.model.structure.layout import Layout
from keyhole.model.structure.skeleton import build
from keyhole.model.weights.format import Wire
from keyhole.plan import placement
from keyhole.plan.fit import _spread
from keyhole.plan.placement import SLACK_BYTES, Costs, Placement, Room, place
from keyhole.ranks import Ranks
from tests.model.decoders import config


@pytest.fixture
def much_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The shapes here are never filled."""

    class Plenty:
        available_bytes = 1 << 50

    monkeypatch.setattr(placement, "host_memory", Plenty)


@pytest.mark.usefixtures("much_host_memory")
def test_a_larger_budget_streams_less_and_spreads_it() -> None:
    """OPT-13B in 4 to 24 GiB: planned bytes fill the budget, fewer bytes stream, and no long run of units streams where
    many are resident, so that three slots suffice."""
    module, away = build(opt_config("13B"), torch.bfloat16, False), []
    for budget_gib in (4, 8, 16, 24):
        formats, device = Wire(torch.bfloat16, None), torch.device("cpu")
        layout, placed = place(module, "stream", f"{budget_gib}GiB", formats, device, Workload())
        assert budget_gib - 0.3 < placed.device_bytes.total / GIB <= budget_gib
        away.append(sum(layout.units[i].numel for i in placed.streamed))
        pattern = "".join("s" if u.index in placed.streamed else "." for u in layout.of_kind("block"))
        if budget_gib == 16:  # as many bytes on each side: they take turns
            assert "sss" not in pattern and "...." not in pattern
    assert away == sorted(away, reverse=True) and len(set(away)) == 4


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_activations_of_all_blocks_count_if_none_is_recomputed(micro_batches: int) -> None:
    """activations=none: a budget in which recomputed blocks fit is refused before anything is loaded."""
    module, device, formats = (
        build(llama_config("3.5B"), torch.bfloat16, False),
        torch.device("cpu"),
        Wire(torch.bfloat16, None),
    )
    own = METHODS["lomo"].settings
    again, kept = (Workload("lomo", 4096, micro_batches, settings=own(activations=how)) for how in ("block", "none"))
    layout, placed = place(module, "resident", None, formats, device, again)
    fits = placed.device_bytes.total
    assert place(module, "resident", fits + 2**20, formats, device, again)[1].device_bytes.total == fits
    with pytest.raises(UserError, match="gpu_memory"):
        place(module, "resident", fits + 2**20, formats, device, kept)
    more = place(module, "resident", None, formats, device, kept)[1].device_bytes.total - fits
    saved = 2 * 4096 * layout.counts.saved * micro_batches * layout.block_count
    assert 0.9 * saved < more < saved


@given(st.lists(st.integers(1, 1000), min_size=1), st.floats(0, 1))
def test_resident_units_are_spread_evenly(numels: list[int], share: float) -> None:
    """Up to any unit, what stays differs from its share by no more than half of the largest unit."""
    groups = [(numel, {i}) for i, numel in enumerate(numels)]
    taken = _spread(groups, share)
    kept = whole = 0
    for i, numel in enumerate(numels):
        kept, whole = kept + (numel if i in taken else 0), whole + numel
        assert abs(kept - share * whole) <= max(numels) / 2 + 1e-6
    assert _spread(groups, 0.0) == set() and _spread(groups, 1.0) == set(range(len(numels)))


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
    cut, rest = bytes_of(layout, ("block", "head")), bytes_of(layout, ("common", "table"))
    assert alone.device_bytes.homes == cut + rest
    assert four.device_bytes.homes == pytest.approx(cut / 4 + rest, rel=0.01)
    assert four.device_bytes.slots == 3 * max(4 * unit.numel for unit in layout.of_kind("block"))
    assert four.device_bytes.kept == alone.device_bytes.kept / 4


def test_what_one_device_cannot_hold_four_can() -> None:
    layout, four = planned("lomo", Four())
    budget = four.device_bytes.total + 1024
    assert budget < 0.8 * 4 * layout.numel
    with pytest.raises(UserError, match="placement"):
        planned("lomo", Ranks(), budget=budget)
    assert planned("lomo", Four(), budget=budget)[1].streamed == set()


def test_an_evaluation_takes_as_many_batches_as_have_room() -> None:
    """Beside the weights, in what the step leaves of the budget; without a budget as many as are wanted, one by one
    where nothing is streamed."""
    layout, placed = planned("zo", Ranks(), "stream")
    placed.work = replace(placed.work, tokens=4096)
    assert placed.evaluation_passes(layout, 16) == 16 and planned("zo", Ranks())[1].evaluation_passes(layout, 16) == 1
    sizes = {"tokens": 4096, "formats": placed.formats, "workspace_bytes": placed.workspace_bytes}
    room = evaluation_bytes(layout, passes=9, **sizes) - placed.device_bytes.during_a_step
    assert room > 0
    for more, passes in ((room, 9), (room - 1, 8), (2**40, 16), (0, 1), (-(2**40), 1)):
        for limit in ("budget_bytes", "limit_bytes"):
            limited = replace(placed, **{limit: placed.device_bytes.total + more})
            assert limited.evaluation_passes(layout, 16) == passes


@pytest.mark.parametrize("method", ["zo", "adam-offload"])
def test_what_is_streamed_must_fit_host_memory(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With what the machine needs beside it, to the byte."""
    layout, placed = planned(method, Ranks(), "stream")
    needed = Costs(placed.work, Room(placed.formats, 0), METHODS[method]).host_bytes(layout, placed.streamed)
    have = SimpleNamespace(available_bytes=needed + SLACK_BYTES)
    monkeypatch.setattr(placement, "host_memory", lambda: have)
    assert planned(method, Ranks(), "stream")[1].streamed == placed.streamed
    have.available_bytes -= 1
    with pytest.raises(UserError, match="placement: stream keeps weights in host memory"):
        planned(method, Ranks(), "stream")


def test_host_memory_is_that_of_the_ranks_of_this_machine() -> None:
    """Streamed on four ranks, two of them here: twice a quarter of what is shared out, and a table each; replicas have
    their blocks once."""
    layout, placed = planned("adam-offload", Four(), "stream")
    costs = Costs(placed.work, Room(Wire(torch.float32), 0), METHODS["adam-offload"])
    streamed = {unit.index for unit in layout.units[1:]}
    cut, table = bytes_of(layout, ("block", "head")), bytes_of(layout, ("table",))
    assert costs.host_bytes(layout, streamed) == pytest.approx(2 * (cut / 4 + table), rel=0.01)
    state = 3 * (cut / 4 + table + bytes_of(layout, ("common",)))
    assert host_state(layout, streamed, 4, None, costs.cut(layout))[1] == pytest.approx(state, rel=0.01)
    layout, placed = planned("zo", Four(), "stream")
    costs = Costs(placed.work, Room(Wire(torch.float32), 0), METHODS["zo"])
    streamed = {unit.index for unit in layout.units[1:]}
    blocks, tables = bytes_of(layout, ("block",)), bytes_of(layout, ("table", "head"))
    assert costs.host_bytes(layout, streamed) == blocks + 2 * tables
