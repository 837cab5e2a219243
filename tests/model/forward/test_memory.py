"""The planned device peak against peaks that were measured."""

from functools import lru_cache

import pytest
import torch

from keyhole.bench.shapes import opt_config
from keyhole.machine.sizes import GIB, MIB
from keyhole.methods.workload import Room, Workload
from keyhole.methods.zo.memory import device_bytes
from keyhole.model.forward.memory import launched_as_graphs
from keyhole.model.structure.layout import find_layout
from keyhole.model.structure.skeleton import build
from keyhole.model.weights.format import Wire
from keyhole.plan.fit import UNIT_BYTES
from tests.matrix import in_every_run
from tests.planned import check

MEASURED = [  # GiB reserved by a step on an H200, bf16, 2048 tokens a row: model, blocks, rows, streamed, peak
    ("1.3B", None, 1, True, 1.189),  # launched as graphs
    ("1.3B", None, 1, False, 3.117),
    ("6.7B", None, 1, True, 1.531),
    ("6.7B", None, 4, True, 2.961),
    ("6.7B", None, 4, False, 15.207),
    ("13B", None, 1, True, 2.094),
    ("13B", None, 4, True, 3.875),
    ("175B", 4, 1, True, 7.314),
    ("175B", 4, 1, False, 22.756),
]


@lru_cache(maxsize=1)  # nothing changes it
def module_of(name: str, blocks: int | None) -> torch.nn.Module:
    return build(opt_config(name, blocks=blocks), torch.bfloat16, False)


@in_every_run(lambda name, streamed: name in ("1.3B", "13B", "175B"))
@pytest.mark.parametrize(("name", "blocks", "rows", "streamed", "peak_gib"), MEASURED)
def test_planned_is_near_measured(name: str, blocks: int | None, rows: int, streamed: bool, peak_gib: float) -> None:
    """Within 6 %, where 10 % are promised: no change of a formula may lose that unseen."""
    layout = find_layout(module_of(name, blocks), UNIT_BYTES // 2 if streamed else None, cut_rows=False)
    kept = ("common",) if name == "175B" else ("common", "table")
    away = {u.index for u in layout.units if streamed and u.kind not in kept}
    room, work = Room(Wire(torch.bfloat16, None), 32 * MIB), Workload(tokens=2048 * rows)
    planned = device_bytes(layout, away, work, room)
    assert planned.total / GIB == pytest.approx(peak_gib, rel=0.06)
    assert launched_as_graphs(layout, work.tokens) == (name == "1.3B")


@in_every_run(lambda blocks: blocks < 96)
@pytest.mark.parametrize("blocks", [6, 96])
def test_175b_in_4_gib(blocks: int) -> None:
    """OPT-175B, six of its blocks or all 96, one row of 2048 tokens: by row tiles it is planned in less than 4 GiB."""
    layout = find_layout(module_of("175B", blocks), UNIT_BYTES // 2)
    away = {unit.index for unit in layout.units[1:]}
    room = Room(Wire(torch.bfloat16, None), 32 * MIB)
    assert device_bytes(layout, away, Workload(), room).total < 3.3 * GIB
    assert all(unit.numel == 12288**2 for unit in layout.of_kind("block") if unit.rows)


def test_every_number_of_the_plan() -> None:
    """Those of tests/planned.txt."""
    check("zo")
