"""What a budget decides: more of it streams less, and a plan that exceeds it is refused."""

import pytest
import torch

from keyhole.bench.shapes import llama_config, opt_config
from keyhole.errors import UserError
from keyhole.machine.sizes import GIB
from keyhole.methods import METHODS
from keyhole.methods.workload import Workload
from keyhole.model.structure.skeleton import build
from keyhole.model.weights.format import Wire
from keyhole.plan import placement
from keyhole.plan.placement import place


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
