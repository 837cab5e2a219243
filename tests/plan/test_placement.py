"""Which units stay on the device, in which cut, and how they are spread."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from keyhole.bench.shapes import llama_config, opt_config
from keyhole.errors import UserError
from keyhole.machine.sizes import GIB
from keyhole.methods import METHODS
from keyhole.methods.workload import Workload
from keyhole.model.structure.layout import Unit
from keyhole.model.structure.skeleton import build
from keyhole.model.weights.format import Wire
from keyhole.plan import placement
from keyhole.plan.fit import _spread
from keyhole.plan.placement import place


def units_of(numels: list[int]) -> list[list[Unit]]:
    return [[Unit(i, f"unit {i}", "block", 0, numel, [])] for i, numel in enumerate(numels)]


@given(st.lists(st.integers(1, 1000), min_size=1), st.floats(0, 1))
def test_resident_units_are_spread_evenly(numels: list[int], share: float) -> None:
    """Up to any unit, what stays differs from its share by no more than half of the largest unit."""
    taken = _spread(units_of(numels), share)
    kept = whole = 0
    for i, numel in enumerate(numels):
        kept, whole = kept + (numel if i in taken else 0), whole + numel
        assert abs(kept - share * whole) <= max(numels) / 2 + 1e-6


@given(st.lists(st.integers(1, 1000), min_size=1))
def test_nothing_and_everything(numels: list[int]) -> None:
    """A share of 0 keeps no unit, a share of 1 all of them."""
    assert _spread(units_of(numels), 0.0) == set() and _spread(units_of(numels), 1.0) == set(range(len(numels)))


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
