"""What a backward pass holds while it goes through the blocks: nothing of what comes after the last block, and no rows
of the embedding. With many micro-batches that would be most of a budget."""

import weakref
from typing import Any

import pytest
import torch

from keyhole.model.backward.memory import reverse_bytes
from keyhole.model.backward.reverse import Reverse
from keyhole.model.structure.layout import Unit
from keyhole.model.weights.format import Wire
from tests.model.backward.gradients import Collect, assert_same, by_autograd, load
from tests.model.decoders import LAYERS, batch

THREE = [batch(2, 10, seed=seed) for seed in range(3)]


class Watch(Collect):
    """Notes, whenever a unit is finished, how many visits of each block and outputs of the last one are alive."""

    def __init__(self, reverse: Reverse) -> None:
        super().__init__()
        self.visits = [[weakref.ref(visit) for visit in stop.values()] for stop in reverse.tape.stops]
        self.outputs = [weakref.ref(x) for x in reverse.hidden]  # each holds the graph after the last block
        self.alive: dict[str, tuple[list[int], int]] = {}

    def finished(self, unit: Unit) -> bool:
        counts = [sum(ref() is not None for ref in refs) for refs in (*self.visits, self.outputs)]
        self.alive[unit.name] = counts[:-1], counts[-1]
        return super().finished(unit)


@pytest.mark.parametrize("activations", ["block", "host"])
@pytest.mark.parametrize("name", ["llama", "qwen2", "opt"])
def test_what_was_kept_goes_block_by_block(name: str, activations: str) -> None:
    """Outputs of the last block go before any block is finished, and what is kept of a block goes with that block; in
    a first backward pass of two nothing does. Both give the gradients of autograd."""
    model, count = load(name), len(THREE)
    reverse = Reverse(model, activations=activations)
    with reverse.sweep(2):
        reverse.forward(model.to_device(THREE))
        first, last = Watch(reverse), Watch(reverse)
        reverse.reverse(first, last=False)
        reverse.reverse(last)
    for unit in model.layout.of_kind("block"):
        below, above = [count] * (unit.block + 1), [0] * (LAYERS - 1 - unit.block)
        assert first.alive[unit.name] == ([count] * LAYERS, count)
        assert last.alive[unit.name] == (below + above, 0)
    for sink in (first, last):
        assert_same(sink.found, by_autograd(model, THREE))


def test_rows_of_the_embedding_go_after_the_forward_pass() -> None:
    """Their gradients need their shape only."""
    model = load("llama")
    reverse, sink = Reverse(model), Collect()
    with reverse.sweep():
        reverse.forward(model.to_device(THREE))
        rows = [leaf for _, leaf in reverse.vocabulary.embedded]
        assert [x.shape[0] for x in rows] == [20, 20, 20] and all(x.untyped_storage().nbytes() <= 8 for x in rows)
        reverse.reverse(sink)
    assert_same(sink.found, by_autograd(model, THREE))


def planned(passes: int, **how: Any) -> Any:
    layout = load("llama").layout
    made = {"tokens": 4096, "formats": Wire(torch.bfloat16), "workspace_bytes": 0, "on_host": True} | how
    return reverse_bytes(layout, set(), passes=passes, **made)


def test_plans_count_every_micro_batch() -> None:
    """Per token and micro-batch: block inputs wait in host memory, so three of them, or after the last block their 3 b
    bytes and 8 more; on the device, the inputs of all blocks and 8 + 3 b."""
    tokens, hidden = 4096, load("llama").layout.table.shape[1]
    one, many = planned(1), planned(16)
    assert many.kept - one.kept == 15 * tokens * hidden * LAYERS * 2
    assert many.kept + many.logits - one.kept - one.logits == 15 * tokens * hidden * (8 + 3 * 2)
    here = planned(16, on_host=False)
    assert (
        here.kept == 16 * tokens * hidden * LAYERS * 2
        and here.logits - many.logits == 16 * tokens * hidden * LAYERS * 2
    )


def test_a_compiled_backward_pass_returns_the_gradients_of_a_block_at_once() -> None:
    """So with several micro-batches two of each exist; one by one, those of a block and of one matrix."""
    layout = load("llama").layout
    block, largest = layout.blocks_numel // layout.block_count, max(shape.numel() for shape in layout.matrices)
    assert planned(2, compiled=True).gradients == 2 * 2 * block
    assert planned(2).gradients == 2 * (block + largest)
    assert planned(1).gradients == planned(1, compiled=True).gradients == 2 * 2 * largest
