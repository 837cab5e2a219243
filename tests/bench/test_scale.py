"""Predictions on paper: limits that must hold whatever the rates."""

from dataclasses import replace

import pytest

from keyhole.bench.scale import COUNTS, Machines, parameters, replicas, shards, step_of, table
from keyhole.errors import UserError
from keyhole.methods import METHODS

FAST = Machines(tflops=1e9, memory=1e9)


def test_replicas_scale_with_their_links_and_need_no_network() -> None:
    """Streamed and bound by PCIe, N GPUs take no longer than one, on N times the tokens."""
    slow = replace(FAST, nvlink=40.0)
    one, many = (replicas(10**9, 1024, ranks, True, slow) for ranks in (1, 64))
    assert one.bound == many.bound == "pcie" and many.floor <= 1.05 * one.floor
    assert many.seconds["network"] == 0


def test_replicas_upload_parts_where_neighbours_are_near() -> None:
    """Each of eight takes an eighth over its link, and seven from the others; never slower than all of it."""
    near, far = (replicas(10**9, 1024, 8, True, replace(FAST, nvlink=rate)) for rate in (450.0, 40.0))
    more = 2 / (8 * 8)
    assert near.seconds["pcie"] == pytest.approx(2e9 * (1 / 8 + more) / 55e9) and near.seconds[
        "nvlink"
    ] == pytest.approx(2e9 * 7 / 8 / 450e9)
    assert near.floor < far.floor and far.seconds["nvlink"] == 0 and near.seconds["network"] == 0


def test_shards_need_a_part_of_the_memory_and_the_links_of_all() -> None:
    """Weights per GPU fall as 1 / N; one GPU sends nothing; the network counts only beyond a machine."""
    steps = [shards(10**9, 1024, ranks, False, Machines()) for ranks in COUNTS]
    assert [round(steps[0].gib / step.gib) for step in steps] == list(COUNTS)
    assert steps[0].seconds["nvlink"] == 0 and all(step.seconds["network"] == 0 for step in steps if step.ranks <= 8)
    assert steps[-1].seconds["network"] == pytest.approx(3 * 2e9 * (1 - 8 / 64) / 50e9)


def test_what_methods_exchange_beside_weights() -> None:
    """Compressed numbers travel in place of gradients; a host's memory is the bound of Adam there, until there are more
    machines; baselines send no weights."""
    of = {name: [step_of(METHODS[name], "13B", 2048, n, False, Machines()) for n in (8, 16)] for name in METHODS}
    assert of["lomo"][1] == shards(parameters("13B"), 2048, 16, False, Machines())
    assert (
        of["lsp"][1].seconds["network"]
        < 0.75 * of["lomo"][1].seconds["network"]
        < of["lomo"][1].seconds["network"]
        < of["apollo-mini"][1].seconds["network"]
    )
    assert (
        of["adam-offload"][0].bound == "host"
        and of["adam-offload"][1].seconds["host"] == of["adam-offload"][0].seconds["host"] / 2
    )
    assert (
        of["adamw"][1].seconds["network"] == pytest.approx(of["lomo"][1].seconds["network"])
        and of["lora"][1].seconds["network"] == 0
    )
    streamed, resident = (shards(10**9, 1, 4, s, FAST, through_host=(3.0, 0.0)) for s in (True, False))
    assert streamed.seconds["pcie"] == resident.seconds["pcie"]


def test_the_table_has_a_line_per_method_placement_and_count() -> None:
    lines = table("125M", 512, Machines()).splitlines()
    assert sum(line.startswith("| zo ") for line in lines) == sum(line.startswith("| lomo ") for line in lines) == 14
    assert parameters("7e9") == 7 * 10**9
    for wrong in ("big", "0", "-5", "inf", "nan"):
        with pytest.raises(UserError, match=f"--model: {wrong} is no number"):
            parameters(wrong)
