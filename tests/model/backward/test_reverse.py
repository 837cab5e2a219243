"""The reverse sweep hands over the gradients of plain autograd, wherever weights are, and announces every change."""

import random
from typing import Any

import pytest
import torch

import keyhole
from keyhole.errors import UserError
from keyhole.methods.adam_offload.method import AdamOffload
from keyhole.methods.lomo.adalomo import AdaLOMO
from keyhole.methods.lomo.method import LOMO
from keyhole.methods.lsp.method import LSP
from keyhole.model.backward.reverse import Reverse
from tests.matrix import in_every_run
from tests.model.backward.gradients import Collect, assert_same, by_autograd, collected, load
from tests.model.decoders import LAYERS, batch
from tests.model.streaming import streamed

FAMILIES = ["llama", "qwen2", "opt", "gpt2", "mixtral"]  # untied, tied, biases, tied with positions, experts
TWO = [batch(2, 10, seed=1), batch(1, 7, seed=2)]


@in_every_run(lambda options, count: count == 1 or options.get("activations") != "none")
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("options", [{}, {"fused": False}, {"activations": "none"}, {"activations": "host"}])
@pytest.mark.parametrize("count", [1, 2])
def test_gradients_are_those_of_autograd(name: str, options: dict[str, Any], count: int) -> None:
    """Of every tensor, tied or not, summed over micro-batches, whatever is kept between forward and reverse."""
    model = load(name)
    sink = collected(model, TWO[:count], **options)
    assert_same(sink.found, by_autograd(model, TWO[:count]))
    assert sorted(sink.finished_units) == sorted(unit.name for unit in model.layout.units)


@pytest.mark.parametrize("accepts, accumulates, count", [(True, False, 1), (True, True, 2), (False, True, 2)])
def test_what_is_offered_is_handed_over_once(accepts: bool, accumulates: bool, count: int) -> None:
    """Products of linear layers come by their factors, or, declined, as gradients; with several micro-batches only to a
    sink that adds them up."""
    model = load()
    sink = collected(model, TWO[:count], Collect(accepts, accumulates))
    assert sink.offers == 7 * LAYERS * count  # linear layers of the blocks
    assert_same(sink.found, by_autograd(model, TWO[:count]))
    assert collected(model, TWO, Collect(True, accumulates=False)).offers == 0


def test_a_second_reverse_gives_the_same() -> None:
    """Exact clipping walks back twice: the forward serves both, and scaling the loss scales the gradients."""
    model, first, second = load("qwen2"), Collect(), Collect()
    reverse = Reverse(model)
    with reverse.sweep(2):
        reverse.forward(model.to_device(TWO))
        reverse.reverse(first, last=False)
        reverse.reverse(second, loss_scale=4.0)
    assert_same({name: grad / 4 for name, grad in second.found.items()}, first.found)


@pytest.mark.parametrize("max_unit_numel, slot_count", [(None, 1), (None, 3), (1, 8)])
def test_streamed_gives_the_bits_of_resident(max_unit_numel: int | None, slot_count: int) -> None:
    """Blocks come over the link in one unit or many, with freed slots poisoned."""
    resident = load("opt")
    other = streamed(resident, max_unit_numel, slot_count=slot_count, chaos=random.Random(0))
    expected = collected(resident, TWO).found
    assert all(torch.equal(grad, expected[name]) for name, grad in collected(other, TWO).found.items())


def test_frozen_tensors_get_no_gradient() -> None:
    """They are not handed over, and the others are those of autograd."""
    model = load("llama")
    for name, param in model.module.named_parameters():
        param.requires_grad_("layers.1" in name or "norm" in name)
    found = collected(model, TWO).found
    assert_same(found, by_autograd(model, TWO))
    assert not any("layers.0.mlp" in name or "embed" in name for name in found)


def test_too_few_slots_are_refused_with_the_number_that_is_needed() -> None:
    """A reverse needs all units of a block at the same time."""
    model = streamed(load(), max_unit_numel=1, slot_count=3)
    with pytest.raises(UserError, match=r"slot_count: 3 is too few: a block has 7 streamed units.*slot_count=7"):
        Reverse(model)


class Log:
    """A watch that notes what it is told, and the home as it is then."""

    def __init__(self, model: keyhole.Model) -> None:
        self.told: list[tuple[str, int]] = []
        self.homes, self.copies = model.engine.homes, {}

    def before_change(self, page: int) -> None:
        self.told.append(("before", page))
        self.copies.setdefault(page, self.homes[page].clone())

    def changed(self, page: int, stream: object) -> None:
        assert ("before", page) in self.told, f"page {page} changed unannounced"
        self.told.append(("changed", page))

    def waits_for(self, page: int) -> bool:
        return False


@in_every_run(lambda clip, placement: placement == "stream" or clip is None)
@pytest.mark.parametrize("placement", ["resident", "stream"])
@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("method", ["lomo", "own loss", "adalomo", "adam-offload", "lsp gpu", "lsp cpu"])
def test_a_watch_learns_of_every_change(method: str, clip: float | None, placement: str) -> None:
    """Before any home changes, the common unit included, the watch is told, so that its copies are the weights before
    the step; and it is told when the change is done."""
    placement = "resident" if method == "own loss" else placement  # it needs all weights on the device
    model = keyhole.load(load().config, init="random", device="cpu", placement=placement)
    before = [home.clone() for home in model.engine.homes]
    options = {"max_grad_norm": clip}
    if method.startswith("lsp"):
        opt = LSP(model, 1e-2, d=16, r=2, optimizer_on=method.removeprefix("lsp "), **options)
    else:
        kinds = {"lomo": LOMO, "own loss": LOMO, "adalomo": AdaLOMO, "adam-offload": AdamOffload}
        opt = kinds[method](model, 1e-2, **options)
    loss = model.module(input_ids=TWO[0]["input_ids"], labels=TWO[0]["labels"]).loss if method == "own loss" else None
    model.engine.watch = log = Log(model)
    opt.step(TWO[0]) if loss is None else opt.backward(loss)
    opt.flush()
    common = model.layout.common.index
    assert log.told.count(("changed", common)) == 1 and ("before", common) in log.told
    for page, home in enumerate(model.engine.homes):
        changed = not torch.equal(home, before[page])
        assert changed == (("changed", page) in log.told), model.layout.units[page].name
        assert not changed or torch.equal(log.copies[page], before[page])
    assert changed
