"""The planner against peaks and seconds that were measured on an H200 (benchmarks/), and what its parts say."""

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from benchmarks.plan_recorded import HERE, plan, records
from keyhole.bench.shapes import opt_config
from keyhole.methods import METHODS
from keyhole.methods.adam_offload.memory import waiting_bytes
from keyhole.methods.adam_offload.traits import AdamOffloadConfig
from keyhole.methods.base import Room, Workload
from keyhole.methods.lsp.traits import LSPConfig
from keyhole.model.structure.layout import Layout, find_layout
from keyhole.model.structure.skeleton import build
from keyhole.model.weights.format import Wire
from keyhole.plan.profiles import profile
from keyhole.plan.seconds import step_seconds
from keyhole.plan.table import Question, make_row, process_bytes

MODULES: dict[str, Any] = {}
BF16 = torch.bfloat16
H200 = profile("h200")


@pytest.mark.parametrize(("name", "only"), [("zo_h200_2026-11-15_h", "1.3B"), ("lomo_h200_2026-11-16", "7B")])
def test_planned_as_measured(name: str, only: str) -> None:
    """Within 10 % of memory and 15 % of time. Host memory of a case that keeps no inputs on the host is left out: the
    process still held those of the case before."""
    chosen = [record for record in records(HERE / f"{name}.json", False) if only in record.name]
    found = [(record, plan(record, H200, MODULES)) for record in chosen]
    assert found
    for record, each in found:
        for part, limit in (("gpu", 0.10), ("host", 0.10), ("seconds", 0.15)):
            if part != "host" or "inputs on the GPU" not in record.name:
                assert each["planned"][part] == pytest.approx(each["measured"][part], rel=limit), (record.name, part)


@cache
def opt() -> Layout:
    return find_layout(build(opt_config("1.3B"), BF16))


def work(method: str, **options: Any) -> Workload:
    return Workload(method, 4096, 1, METHODS[method].settings(**options), length=1024)


ROOM = Room(Wire(BF16), 32 * 2**20, 130 * 2**30)


def test_gradients_and_activations_of_a_baseline_are_not_added() -> None:
    """SGD on few tokens: weights, gradients and one block. On many: weights, activations and logits. Several
    micro-batches: all of it."""
    few = METHODS["sgd"].planned_bytes(opt(), set(), replace(work("sgd"), tokens=64), ROOM)
    assert few.during_a_step == few.gradients + few.block + few.workspace
    many = METHODS["sgd"].planned_bytes(opt(), set(), work("sgd"), ROOM)
    assert many.during_a_step == many.activations + many.logits + many.workspace
    twice = METHODS["sgd"].planned_bytes(opt(), set(), replace(work("sgd"), passes=2), ROOM)
    assert twice.total > many.total + 0.9 * many.gradients


def test_baselines_recompute_nothing_unless_asked() -> None:
    """Three products per matrix and as many launches fewer; galore with activations=block recomputes every block."""
    kept, again = (
        METHODS["galore"].planned_work(opt(), set(), work("galore", activations=how), ROOM, H200)
        for how in ("none", "block")
    )
    plain = METHODS["sgd"].planned_work(opt(), set(), work("sgd"), ROOM, H200)
    assert plain.kernels == kept.kernels < again.kernels
    assert plain.products == kept.products == pytest.approx(0.75 * again.products)


def test_waiting_gradients_are_those_of_two_blocks() -> None:
    """However the blocks are cut; of large blocks less, but room for the largest gradient."""
    whole, cut = opt(), find_layout(build(opt_config("1.3B"), BF16), 2**24)
    block = max(unit.numel for unit in whole.of_kind("block"))
    assert waiting_bytes(whole, 2) == waiting_bytes(cut, 2) == 4 * block
    large = find_layout(build(opt_config("13B", blocks=2), BF16))
    assert waiting_bytes(large, 2) == 512 * 2**20 > 2 * max(t.shape.numel() for t in large.tensors if t.block == 0)
    planned = METHODS["adam-offload"].planned_bytes(whole, set(), work("adam-offload"), ROOM)
    assert planned.updates > waiting_bytes(whole, 2)


def test_updates_that_nothing_hides_are_added_to_the_step() -> None:
    """All of adam-offload's if monolithic; of lsp the embedding's, if its moments are on the host."""

    def seconds(method: str, own: Any) -> Any:
        asked = METHODS[method].planned_work(opt(), set(), replace(work(method), settings=own), ROOM, H200)
        return step_seconds(asked, H200, rows=4096, itemsize=2)

    layerwise = seconds("adam-offload", AdamOffloadConfig(gpu_updates=False))
    monolithic = seconds("adam-offload", AdamOffloadConfig(schedule="monolithic"))
    assert layerwise.exposed == 0 and monolithic.cpu == 0 and monolithic.exposed == pytest.approx(layerwise.cpu)
    assert monolithic.total > layerwise.total
    on_gpu, on_cpu = (seconds("lsp", LSPConfig(optimizer_on=where)) for where in ("gpu", "cpu"))
    table = sum(unit.numel for unit in opt().of_kind("table"))
    assert on_gpu.exposed == 0 and on_cpu.exposed > table / (2 * H200.adam)


def test_the_process_by_what_it_loads() -> None:
    """More with autograd, with kernels of our own, and with a compiler; the least is that of a CPU."""
    rows = METHODS
    zo, sgd, lomo = (process_bytes(rows[name], rows[name].settings(), True) for name in ("zo", "sgd", "lomo"))
    compiled = process_bytes(rows["lomo"], rows["lomo"].settings(compile=True), True)
    assert process_bytes(rows["lomo"], None, False) < zo < sgd < lomo < compiled


def test_under_a_budget_blocks_are_not_recorded() -> None:
    """A run that sets gpu_memory launches kernel by kernel, which takes longer than on a card of that size."""
    module = build(opt_config("125M"), BF16)
    asked = Question(module, BF16, H200, 2**33, 2**40, 1, 64)
    layout = find_layout(module)
    on_card, in_budget = (
        make_row(each, METHODS["lomo"], "resident", None, layout, set()).step_seconds
        for each in (asked, replace(asked, is_budget=True))
    )
    assert on_card < 0.5 * in_budget
