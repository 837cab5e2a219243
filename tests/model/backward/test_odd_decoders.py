"""Gradients of decoders that use their embedding and their blocks in unusual ways (odd_decoders.py), and what is left
of a step."""

import gc

import pytest
import torch

import keyhole
from keyhole.methods.lomo.adalomo import AdaLOMO
from keyhole.methods.lomo.method import LOMO
from keyhole.model.backward.reverse import Reverse
from tests.matrix import in_every_run
from tests.model.backward.gradients import Collect, assert_same, by_autograd, joined
from tests.model.backward.odd_decoders import OddConfig
from tests.model.decoders import batch

WAYS = ["normalised", "twice", "skips", "average", "between", "loops", "unused"]
PAIRS = ["skips, average", "skips, between", "twice, loops", "normalised, skips", "loops, between"]
TWO = [batch(2, 10, seed=1), batch(1, 7, seed=2)]


def load(ways: str, tied: bool = False) -> keyhole.Model:
    return keyhole.load(OddConfig(ways, tie_word_embeddings=tied), init="random", seed=3, device="cpu")


@in_every_run(lambda ways, tied, count: tied == (count == 2) or (not ways and not tied))
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("ways", ["", *WAYS, *PAIRS])
def test_gradients_are_those_of_autograd(ways: str, tied: bool, count: int) -> None:
    """In both of two backward passes, whatever is kept."""
    for activations in ("block", "host", "none"):
        model = load(ways, tied)
        reverse, sinks = Reverse(model, activations=activations), [Collect(), Collect()]
        with reverse.sweep(2):
            reverse.forward(model.to_device(TWO[:count]))
            reverse.reverse(sinks[0], last=False)
            reverse.reverse(sinks[1])
        expected = by_autograd(model, TWO[:count])
        for sink in sinks:
            assert_same(joined(sink.found), {name: expected[name] for name in joined(sink.found)})
            missing = expected.keys() - joined(sink.found).keys()
            assert all(float(expected[name].abs().max()) == 0 for name in missing), missing


def test_a_block_that_is_called_twice_has_one_update() -> None:
    """AdaLOMO, whose update is not linear in the gradient: one batch, and its rows as two micro-batches."""
    one = batch(2, 8, seed=7)
    rows = [{name: x[i : i + 1] for name, x in one.items()} for i in range(2)]
    after = []
    for batches in ([one], rows):
        model = load("loops")
        method = AdaLOMO(model, 1e-2)
        for _ in range(2):
            method.step(batches)
        method.flush()
        after.append([model.home(tensor).clone() for tensor in model.layout.tensors])
    for a, b in zip(*after, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("ways", ["", "between", "skips, between", "loops, between", "unused", "average"])
def test_nothing_of_a_step_is_left(ways: str) -> None:
    """However many steps: as many tensors as after the second one."""
    model = load(ways)
    method, counts = LOMO(model, 1e-3), []
    for _ in range(4):
        method.step(TWO)
        gc.collect()
        counts.append(sum(issubclass(type(one), torch.Tensor) for one in gc.get_objects()))
    assert counts[1] == counts[2] == counts[3]
