"""A chain of blocks differentiated one at a time gives the gradients of one walk through the whole."""

from collections import UserDict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from keyhole.errors import UserError
from keyhole.model.backward.activation_store import ActivationStore
from keyhole.model.backward.tape import Tape

CPU = torch.device("cpu")


def tape_of(activations: str, to_host: bool = False) -> Tape:
    return Tape(ActivationStore(CPU, to_host), first_kept=0 if activations == "none" else 9)


class Block(nn.Module):
    """Two inputs, two outputs (one of them in a tuple), and an input that is no tensor."""

    def __init__(self, seed: int, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.linear, self.dropout = nn.Linear(4, 4), nn.Dropout(dropout)

    def forward(self, x: torch.Tensor, side: torch.Tensor, scale: float = 1.0) -> tuple[torch.Tensor, Any]:
        y = self.dropout(torch.tanh(self.linear(x)) * scale)
        return x + y, (side + y.detach() * 0 + y * 0.5,)


def chain(blocks: list[nn.Module], order: list[int], x: torch.Tensor) -> torch.Tensor:
    """A model that may use a block twice, and that computes between its blocks."""
    side = x * 2
    for i in order:
        x, (side,) = blocks[i](x, side, scale=1.0 + i)
        side = side.sin()  # a small graph between two blocks
    return (x * side).sum()


def plain(call: Callable[[nn.Module], Any]) -> Any:
    return call()


def reverse(tape: Tape, last: bool = True) -> None:
    for stop in reversed(tape.stops):
        for visit in stop.values():
            visit.reverse(visit.take_grads(), plain, last)


def grads(blocks: list[nn.Module], x: torch.Tensor) -> list[torch.Tensor]:
    found = [p.grad.clone() for block in blocks for p in block.parameters() if p.grad is not None] + [x.grad.clone()]
    for tensor in [x, *(p for block in blocks for p in block.parameters())]:
        tensor.grad = None
    return found


orders = st.lists(st.integers(0, 2), min_size=1, max_size=5)


@given(orders, st.sampled_from(["block", "host", "none"]))
def test_any_chain_has_the_gradients_of_one_walk(order: list[int], activations: str) -> None:
    """Also where blocks are used again, with several inputs and outputs, and twice in a row (exact clipping)."""
    blocks, x = [Block(seed) for seed in range(3)], torch.linspace(-1, 1, 8).view(2, 4).requires_grad_()
    chain(blocks, order, x).backward()
    expected = grads(blocks, x)
    tape = tape_of(activations)
    with tape.recording(blocks, lambda: 0):
        loss = chain(blocks, order, x)
    assert [next(iter(stop.values())).block for stop in tape.stops] == order
    for last in (False, True):
        tape.restart()
        loss.backward(retain_graph=not last)
        reverse(tape, last)
        for one, other in zip(grads(blocks, x), expected, strict=True):
            torch.testing.assert_close(one, other)


def test_passes_meet_at_a_stop() -> None:
    """Two passes through the same blocks make one stop per block, in whatever order they come."""
    blocks, passes = [Block(0), Block(1)], iter((0, 1, 1, 0))
    tape = tape_of("block")
    x = torch.ones(1, 4, requires_grad=True)
    with tape.recording(blocks, lambda: next(passes)):
        for block in (blocks[0], blocks[0], blocks[1], blocks[1]):
            block(x, x)
    assert [sorted(stop) for stop in tape.stops] == [[0, 1], [0, 1]]
    assert not any("forward" in block.__dict__ for block in blocks)


@pytest.mark.parametrize("activations", ["block", "none"])
def test_the_second_run_draws_the_same_random_numbers(activations: str) -> None:
    """Dropout in reverse is the dropout of the forward, and the caller's generator goes on as if nothing had been."""
    blocks, x = [Block(0, dropout=0.5).train()], torch.ones(2, 4, requires_grad=True)
    torch.manual_seed(3)
    chain(blocks, [0], x).backward()
    expected = grads(blocks, x)
    torch.manual_seed(3)
    tape = tape_of(activations)
    with tape.recording(blocks, lambda: 0):
        loss = chain(blocks, [0], x)
    state = torch.get_rng_state()
    loss.backward()
    reverse(tape)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(one, other) for one, other in zip(grads(blocks, x), expected, strict=True))


class Shelf(UserDict):
    """A mapping of a class of its own, as Transformers has them for keys and values that later blocks reuse."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name


class Drawer(UserDict):
    """A mapping that shares its entries with its copies."""

    def __copy__(self) -> "Drawer":
        found = Drawer()
        found.data = self.data
        return found


class Sharing(nn.Module):
    """Writes its projection where later blocks find it."""

    def __init__(self, seed: int, put: Callable[[Any, torch.Tensor], Any], get: Callable[[Any], Any]) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.linear, self.put, self.get = nn.Linear(4, 4), put, get

    def forward(self, x: torch.Tensor, shared: Any) -> torch.Tensor:
        found = self.get(shared)
        if found is None:
            self.put(shared, found := self.linear(x))
        return x + torch.tanh(found)


@pytest.mark.parametrize("activations", ["block", "none"])
@pytest.mark.parametrize("make", [dict, UserDict, lambda: Shelf("kv")])
def test_a_mapping_of_any_class_carries_gradients_between_blocks(activations: str, make: Callable[[], Any]) -> None:
    """The first block's weights get the gradients of all blocks that use what it has written."""
    blocks = [Sharing(seed, lambda at, y: at.update(y=y), lambda at: at.get("y")) for seed in range(3)]
    x = torch.linspace(-1, 1, 8).view(2, 4).requires_grad_()

    def run() -> torch.Tensor:
        shared, y = make(), x
        for block in blocks:
            y = block(y, shared)
        return (y * y).sum()

    run().backward()
    expected = grads(blocks, x)
    tape = tape_of(activations)
    with tape.recording(blocks, lambda: 0):
        loss = run()
    loss.backward()
    reverse(tape)
    for one, other in zip(grads(blocks, x), expected, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("activations", ["block", "none"])
def test_tensors_in_an_object_that_cannot_be_copied_are_refused(activations: str) -> None:
    """Their gradients would be lost at the cut between two blocks. An object that no block writes into may stay, and a
    mapping is refused if its copies share its entries."""
    writes = Sharing(0, lambda at, y: setattr(at, "y", [y]), lambda at: None)
    reads = Sharing(0, lambda at, y: None, lambda at: None)
    counts = Sharing(0, lambda at, y: setattr(at, "used", [y > 0, y.argmax()]), lambda at: None)
    x = torch.ones(1, 4, requires_grad=True)
    with tape_of(activations).recording([writes, reads, counts], lambda: 0):
        counts(x, SimpleNamespace())  # booleans and whole numbers have no gradients
        reads(x, SimpleNamespace(mask=torch.ones(4)))
        with pytest.raises(UserError, match="hand tensors to each other in an object .SimpleNamespace."):
            writes(x, SimpleNamespace(mask=torch.ones(4)))
        with pytest.raises(UserError, match="in an object .Drawer."):
            reads(x, Drawer(y=torch.ones(1, 4)))
