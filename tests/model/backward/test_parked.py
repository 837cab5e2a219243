"""Passes that wait in host memory between blocks: the same bits, and the device memory of one pass."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from transformers.models.llama import modeling_llama

import keyhole
from keyhole.methods import METHODS
from keyhole.model.backward import activation_store, vocabulary
from tests.matrix import in_every_run
from tests.methods.test_objective import load, make
from tests.model.decoders import NAMES, batch, config

STEPS = [[batch(rows=2, length=9 + t, seed=10 * t + k) for k in range(3)] for t in range(2)]
GRADIENTS = [name for name in METHODS if METHODS[name].sweep == "reverse"]


def moving(opt: Any) -> list[int]:
    """Makes a method on a CPU move everything, as on a GPU whose budget has no room; counts the passes that waited."""
    model, store, count = opt.model, opt.reverse.store, [0, 0]
    model.placed.device_bytes = replace(model.placed.device_bytes, kept=0)
    store.may_move = True
    park, restore = store.park, store.restore

    def parked(index: int, block: int, held: Any) -> None:
        park(index, block, held)
        for one in store.parked.get(index, ()):
            count[0] += 1
            assert one.x.untyped_storage().nbytes() == 0

    def restored(index: int) -> None:
        held = list(store.parked.get(index, ()))
        restore(index)
        count[1] += len(held)
        assert all(one.x.untyped_storage().nbytes() == one.nbytes for one in held)

    store.park, store.restore = parked, restored
    return count


def results(
    name: str, method: str, parks: bool, monkeypatch: pytest.MonkeyPatch, device: str = "cpu", **own: Any
) -> list[torch.Tensor]:
    work = keyhole.Workload(method, tokens=20, passes=3)
    size = "128MiB" if device == "cpu" else "2GiB"
    model = load(name, placement="stream", gpu_memory=size, workload=work, device=device, reverse_graphs=False)
    opt = make(method, model, **own)
    count = moving(opt) if parks else [0, 0]
    if parks:
        monkeypatch.setattr(vocabulary, "GROUP", 30)  # two groups of passes behind the last block
    losses = [opt.step(step) for step in STEPS]
    opt.flush()
    blocks = len(model.blocks)
    assert not parks or count == [len(STEPS) * 3 * blocks] * 2 or model.layout.has_expert_units
    return losses + [home.clone() for home in model.engine.homes] + [p.detach() for p in (opt.params or {}).values()]


@in_every_run(lambda name: name in ("llama", "gpt2", "gemma2", "phi", "mixtral"))
@pytest.mark.parametrize("name", NAMES)
def test_parked_passes_change_no_bit(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Clipped, so that the backward pass runs twice over what waits. Rows of the table that several passes looked up
    are summed pass by pass: a sum in another order, which a tied table makes seen in two steps."""
    same = partial(results, name, "lomo", monkeypatch=monkeypatch, max_grad_norm=0.3)
    alike = torch.equal if name in ("llama", "phi", "mixtral") else partial(torch.allclose, rtol=1e-5, atol=1e-7)
    assert all(map(alike, same(parks=True), same(parks=False)))


@pytest.mark.parametrize("method", [name for name in GRADIENTS if name != "lomo"])
def test_with_every_method(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    same = partial(results, "llama", method, monkeypatch=monkeypatch)
    assert all(map(torch.equal, same(parks=True), same(parks=False)))


@pytest.mark.parametrize("skips", ["twice", "earlier"])
def test_a_block_that_gets_a_parked_tensor_again(skips: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last block also gets its own input once more, or that of the block before: each user has it to itself."""
    own = modeling_llama.LlamaDecoderLayer.forward

    def layer(self: Any, x: torch.Tensor, *args: Any, more: torch.Tensor | None = None, **how: Any) -> torch.Tensor:
        y = own(self, x, *args, **how)
        return y if more is None else y + 0.5 * more

    def forward(self: Any, input_ids: torch.Tensor, **unused: Any) -> Any:
        x, before = self.embed_tokens(input_ids), None
        where = torch.arange(x.shape[1])[None]
        how = {"position_ids": where, "position_embeddings": self.rotary_emb(x, position_ids=where)}
        for i, one in enumerate(self.layers):
            more = x if skips == "twice" else before
            before, x = x, one(x, more=more if i == len(self.layers) - 1 else None, **how)
        return modeling_llama.BaseModelOutputWithPast(last_hidden_state=self.norm(x))

    monkeypatch.setattr(modeling_llama.LlamaDecoderLayer, "forward", layer)
    monkeypatch.setattr(modeling_llama.LlamaModel, "forward", forward)
    same = partial(results, "llama", "lomo", monkeypatch=monkeypatch)
    assert all(map(torch.equal, same(parks=True), same(parks=False)))


def test_buffers_do_not_grow_with_the_shapes_of_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as the largest step needs at once."""
    work = keyhole.Workload("lomo", tokens=80, passes=3)
    opt = make("lomo", load("llama", placement="stream", gpu_memory="64MiB", workload=work))
    moving(opt)
    counts = []
    for length in (40, 7, 12, 39, 23, 31, 9, 40):
        opt.step([batch(rows=2, length=length, seed=k) for k in range(3)])
        counts.append(len(opt.reverse.store.free))
    assert max(counts) == counts[0] == counts[-1]


@pytest.mark.gpu
@pytest.mark.parametrize("method", ["lomo", "lsp", "lora"])
def test_the_same_on_a_gpu(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a stream of its own, with memory that is given back and taken again while copies run."""
    monkeypatch.setattr(activation_store, "SMALL", 1)
    same = partial(results, "llama", method, monkeypatch=monkeypatch, device="cuda")
    expected = same(parks=False)
    for _ in range(3):
        assert all(map(torch.equal, same(parks=True), expected))


def test_inputs_stay_as_far_as_there_is_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the last blocks: a plan with room for some of them; nothing is parked then, and a larger step moves more."""
    work = keyhole.Workload("lomo", tokens=18, passes=3)
    how: dict[str, Any] = {"placement": "stream", "gpu_memory": "64MiB", "workload": work, "init": "random"}
    model = keyhole.load(config("llama", num_hidden_layers=6), device="cpu", **how)
    opt = make("lomo", model)
    store, each = opt.reverse.store, 3 * 18 * model.layout.table.shape[1] * 4
    store.may_move = True
    for room, first, parks in ((6, 0, False), (5, 4, False), (3, 6, False), (2.9, 6, True), (0, 6, True)):
        model.placed.device_bytes = replace(model.placed.device_bytes, kept=int(room * each))
        opt.step([batch(rows=2, length=9, seed=k) for k in range(3)])
        assert (store.first_kept, store.parks) == (first, parks)


def test_the_plan_of_many_passes_is_that_of_one() -> None:
    """A step of 64 passes in the memory of one and a little more for each; without parking it grows by all."""
    work = keyhole.Workload("lomo", tokens=512, passes=64, length=32)
    tight, roomy = (
        load("llama", placement="stream", gpu_memory=size, workload=work).placed for size in ("12MiB", "64MiB")
    )
    assert (
        tight.device_bytes.total <= 12 * 2**20 < roomy.device_bytes.total
        and tight.device_bytes.kept < roomy.device_bytes.kept
    )
