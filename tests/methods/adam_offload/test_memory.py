"""Host memory of optimizer states: the bytes, and the refusal before a weight is read."""

from pathlib import Path

import pytest
import torch

import keyhole
from keyhole.bench.shapes import opt_config
from keyhole.errors import UserError
from keyhole.machine.host import HostMemory
from keyhole.methods import METHODS
from keyhole.methods.adam_offload.memory import host_state, waiting_bytes
from keyhole.methods.workload import Room, Workload
from keyhole.model.structure.layout import find_layout
from keyhole.model.structure.skeleton import build
from keyhole.model.weights.format import Wire
from tests.model.decoders import config


def test_14_bytes_a_parameter_wherever_it_lives() -> None:
    """State and staging of resident units, or state and homes of streamed ones: 12 + 2 in 16 bit."""
    layout = find_layout(build(config("llama"), torch.bfloat16))
    away = {unit.index for unit in layout.units[1:]}
    homes = 2 * sum(layout.units[i].numel for i in away)
    assert host_state(layout, set(), 2)[1] == 14 * layout.numel == host_state(layout, away, 2)[1] + homes


@pytest.mark.parametrize("placement", ["resident", "stream"])
def test_too_little_memory_is_refused_before_loading(
    placement: str, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error says what is missing, and no weight was read."""
    monkeypatch.setattr("keyhole.methods.work.host_memory", lambda: HostMemory(2**33, 2**30, None))
    monkeypatch.setattr("keyhole.loading.model.fill_from", lambda *args: pytest.fail("weights were read"))
    with pytest.raises(UserError, match="adam-offload keeps 16 bytes per parameter.*missing"):
        keyhole.load(tiny_model, placement=placement, device="cpu", workload=Workload("adam-offload"))


def test_waiting_gradients_are_those_of_two_blocks() -> None:
    """However the blocks are cut; of large blocks less, but room for the largest gradient."""
    module = build(opt_config("1.3B"), torch.bfloat16)
    whole, cut = find_layout(module), find_layout(module, 2**24)
    block = max(unit.numel for unit in whole.of_kind("block"))
    assert waiting_bytes(whole, 2) == waiting_bytes(cut, 2) == 4 * block
    large = find_layout(build(opt_config("13B", blocks=2), torch.bfloat16))
    assert waiting_bytes(large, 2) == 512 * 2**20 > 2 * max(t.shape.numel() for t in large.tensors if t.block == 0)
    room = Room(Wire(torch.bfloat16), 32 * 2**20, 130 * 2**30)
    planned = METHODS["adam-offload"].planned_bytes(whole, set(), Workload("adam-offload", tokens=2048), room)
    assert planned.updates > waiting_bytes(whole, 2)
