"""Mixtures of experts in the plan: what a small GPU needs, and what is said about stacks."""

from functools import cache

import pytest
import torch
from transformers import GptOssConfig, MixtralConfig, PretrainedConfig

import keyhole
from keyhole.machine.sizes import GIB, MIB
from keyhole.methods import METHODS
from keyhole.methods.work import met_bytes, met_share
from keyhole.methods.workload import Room, Workload
from keyhole.model.structure import find as stacks
from keyhole.model.structure.skeleton import build
from keyhole.model.weights.format import Wire
from keyhole.plan.fit import Costs, fit
from tests.model.decoders import config

BF16 = torch.bfloat16
SHAPES: dict[str, PretrainedConfig] = {
    "mixtral-8x7b": MixtralConfig(num_hidden_layers=4),
    "gpt-oss-120b": GptOssConfig(num_hidden_layers=4, num_local_experts=128),
}


@cache
def module(shape: str) -> torch.nn.Module:
    """The widths of a published model in four blocks."""
    return build(SHAPES[shape], BF16)


def planned(shape: str, method: str, wire: str | None = None) -> Costs:
    row = METHODS[method]
    work = Workload(method, 2048, row.settings().passes, row.settings(), experts=0.25)
    return Costs(work, Room(Wire(BF16, wire), 32 * MIB), row)


@pytest.mark.parametrize(
    ("shape", "method", "gib"),
    [
        ("mixtral-8x7b", "zo", 4),
        ("mixtral-8x7b", "lomo", 6),
        ("mixtral-8x7b", "adalomo", 6),
        ("gpt-oss-120b", "zo", 2),
        ("gpt-oss-120b", "lomo", 3),
    ],
)
def test_experts_as_units_fit_small_gpus(shape: str, method: str, gib: int) -> None:
    """2048 tokens, everything streamed: what is on the device does not grow with the number of experts. (28 blocks
    more are 0.5 GiB of block inputs.)"""
    costs = planned(shape, method)
    layout, streamed = fit(module(shape), costs, gib * GIB)
    assert layout.has_expert_units and costs.of(layout, streamed).total <= gib * GIB
    smallest = costs.of(layout, {u.index for u in layout.units[1:]})
    assert smallest.total + 28 * 2048 * 4096 * 2 <= gib * GIB


@pytest.mark.parametrize(("method", "wire"), [("zo", "fp8"), ("lsp", None), ("adam-offload", None)])
def test_whole_stacks_where_experts_cannot_come_alone(method: str, wire: str | None) -> None:
    """Packed formats, and methods that want the gradient of a stack."""
    layout, _ = fit(module("mixtral-8x7b"), planned("mixtral-8x7b", method, wire), None)
    assert layout.experts and not layout.has_expert_units


def test_link_bytes_are_those_of_experts_that_tokens_meet() -> None:
    """If a token meets a quarter of them, one token brings a quarter, and many bring all."""
    costs = planned("mixtral-8x7b", "lomo")
    layout, streamed = fit(module("mixtral-8x7b"), costs, None)
    experts = [i for i in streamed if layout.units[i].expert is not None]
    one, many = (Workload("lomo", tokens, 1, experts=0.25) for tokens in (1, 2048))
    total = 2 * sum(layout.units[i].numel for i in experts)
    assert met_bytes(layout, experts, one, costs.room) == pytest.approx(total / 4)
    assert met_bytes(layout, experts, many, costs.room) == pytest.approx(total)
    assert met_share(Workload(tokens=2, experts=0.5)) == 0.75


def test_the_start_block_says_how_experts_are_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "experts" not in " ".join(keyhole.load(config("mixtral"), init="random", device="cpu").describe())
    monkeypatch.setattr(stacks, "STACK_NUMEL", 0)
    monkeypatch.setattr("keyhole.plan.placement.STACK_NUMEL", 0)
    monkeypatch.setattr("keyhole.plan.fit.UNIT_BYTES", 4096)

    def said(name: str, method: str) -> str:
        options = {"placement": "stream", "workload": Workload(method)}
        return " ".join(keyhole.load(config(name), init="random", device="cpu", **options).describe())

    assert "only experts that tokens meet cross the link" in said("mixtral", "zo")
    assert "only experts that tokens meet cross the link" in said("mixtral", "lomo")
    assert "moved as whole stacks" in said("mixtral", "lsp")
    assert "does not compute them expert by expert" in said("llama4", "zo")
