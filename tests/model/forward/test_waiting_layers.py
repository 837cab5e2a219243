"""Low-rank layers whose outputs wait for the addition that reads them: which ones, and the bits of whole runs."""

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import keyhole
from keyhole.methods.zo.low_rank import layers as zo_layers
from keyhole.methods.zo.low_rank.parts import find_parts, waiting
from keyhole.model.forward import low_rank, pending
from keyhole.model.forward.pending import finished
from tests.matrix import in_every_run
from tests.methods.zo.loops import equal, load, train, weights
from tests.model.decoders import LAYERS, batch
from tests.model.forward.op_calls import calls_of
from tests.model.streaming import streamed

LOW = {"rank": 2, "refresh": 3}
FUSED = "opt llama gpt2 bloom gpt_neox phi3 falcon gemma3 granite opt_projected".split()


def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on nothing waits for its reader: every product is finished where it is made."""
    wait = pending.wait
    monkeypatch.setattr(low_rank.pending, "wait", lambda *args: finished(wait(*args)))


@in_every_run(lambda name, dtype: name in ("opt", "llama", "gpt_neox", "gemma3") and dtype == "bfloat16")
@pytest.mark.parametrize("name", FUSED)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_waiting_changes_no_bit(name: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Losses and weights are those of products that are finished at once, whatever reads them, resident and streamed;
    and up to rounding those of products to which nothing is left to add."""
    model, plain, whole = (load(name, dtype=dtype) for _ in range(3))
    cut = streamed(model, max_unit_numel=1, slot_count=2, chaos=random.Random(1))
    options: dict[str, Any] = {"lr": 1e-2, "directions": 2, **LOW}
    batches = [batch(seed=1), batch(seed=2, length=6)]
    found = train(model, 4, batches, **options)
    assert model.low_rank.waiting and train(cut, 4, batches, **options) == found and equal(weights(model), weights(cut))
    with monkeypatch.context() as patch:
        at_once(patch)
        assert train(plain, 4, batches, **options) == found and equal(weights(model), weights(plain))
    monkeypatch.setattr(zo_layers, "waiting", lambda *args: set())
    limit = 1e-5 if dtype == "float32" else 3e-2
    assert train(whole, 4, batches, **options) == pytest.approx(found, rel=limit)


@pytest.mark.parametrize("name, sums, relus", [("opt", 2, 1), ("llama", 2, 0), ("gpt2", 2, 0), ("phi3", 2, 0)])
def test_what_a_step_adds_on_the_way(name: str, sums: int, relus: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Per block and pass; nothing is finished in place, and no other layer waits."""
    corrected, rectified = calls_of(monkeypatch), calls_of(monkeypatch, "narrow_relu")
    widened = calls_of(monkeypatch, "widen")
    model = load(name)
    train(model, 2, **LOW)
    assert corrected == [True] * 2 * LAYERS * sums and rectified == [True] * 2 * LAYERS * relus
    assert len(widened) == 2 * (len(model.low_rank.factors.parts.matrices) - LAYERS * (sums + relus))


@pytest.mark.parametrize("reads", [False, True])
@pytest.mark.parametrize("name, where", [("opt", "self_attn fc1 fc2 self_attn.out_proj"), ("llama", "self_attn mlp")])
def test_a_hook_finds_the_outputs(name: str, where: str, reads: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kept, and read at once or after the step: the numbers are those of outputs that did not wait, and the step has
    the same bits as without a hook."""

    def run() -> tuple[list[float], list[torch.Tensor]]:
        model, kept = load(name, dtype="bfloat16"), []

        def hook(module: nn.Module, args: tuple, output: Any) -> None:
            y = output[0] if isinstance(output, tuple) else output
            kept.append(y.float().mean() if reads else y)

        for block in model.blocks:
            for path in where.split():
                block.get_submodule(path).register_forward_hook(hook)
        return train(model, 2, **LOW), [one.clone() for one in kept]

    found, kept = run()
    assert found == train(load(name, dtype="bfloat16"), 2, **LOW)
    at_once(monkeypatch)
    expected, plain = run()
    assert found == expected and all(map(torch.equal, kept, plain)) and len(kept) == 2 * LAYERS * len(where.split())


CHANGES: list[Callable[[torch.Tensor], torch.Tensor]] = [
    lambda y: 0.9 * y,
    lambda y: y.mul_(0.9),
    lambda y: torch.cat(y.chunk(2, dim=-1)[::-1], dim=-1),
    lambda y: y.view(*y.shape[:-1], 4, -1).flip(-2).flatten(-2),
    lambda y: y.transpose(0, 1).contiguous().transpose(0, 1),
    lambda y: y + y.detach(),
    lambda y: F.layer_norm(y, y.shape[-1:]),
]


@pytest.mark.parametrize("change", range(len(CHANGES)))
@pytest.mark.parametrize("name, where", [("opt", "self_attn.out_proj fc1 fc2"), ("llama", "mlp.down_proj")])
def test_code_that_uses_an_output_otherwise(
    name: str, where: str, change: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the layer and what was expected to read it: multiplied, written in place, split, cut into heads."""

    def run() -> list[float]:
        model = load(name)
        for block in model.blocks:
            for path in where.split():
                block.get_submodule(path).register_forward_hook(lambda module, args, y: CHANGES[change](y))
        return train(model, 3, lr=1e-2, **LOW)

    found = run()
    with monkeypatch.context() as patch:
        at_once(patch)
        assert run() == found
    monkeypatch.setattr(zo_layers, "waiting", lambda *args: set())
    assert run() == pytest.approx(found, rel=1e-5)


@torch.no_grad()
def test_evaluation_and_direct_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outside of steps: losses, text, and a call of the module itself give plain tensors, those of products that are
    finished at once; a layer that is called by itself returns its whole output."""
    model = load("opt")
    train(model, 4, lr=1e-2, **LOW)
    ids = batch()["input_ids"]

    def look() -> list[torch.Tensor]:
        text = model.generate(ids[:, :4], max_new_tokens=4, do_sample=False)
        out = model.module(input_ids=ids, output_hidden_states=True, use_cache=False)
        return [model.nll(batch(seed=3))[0], text, out.logits, *out.hidden_states]

    pending._open.blocks, blocks = [], pending._open.blocks
    found = look()
    assert all(type(one) is torch.Tensor for one in found)
    assert type(model.blocks[0].fc2(torch.randn(2, 5, 64))) is torch.Tensor
    with monkeypatch.context() as patch:
        at_once(patch)
        assert all(map(torch.equal, look(), found))
    with torch.inference_mode():
        torch.testing.assert_close(model.module(input_ids=ids).logits, found[2], rtol=1e-4, atol=1e-5)
    pending._open.blocks = blocks


def test_which_layers_wait() -> None:
    """By structure alone: not those whose bias is frozen, and no experts."""
    expected = {
        "opt": "self_attn.out_proj fc1 fc2",
        "opt_projected": "self_attn.out_proj fc1 fc2",
        "llama": "self_attn.o_proj mlp.down_proj",
        "gpt2": "attn.c_proj mlp.c_proj",
        "gpt_neox": "attention.dense mlp.dense_4h_to_h",
        "bloom": "self_attention.dense mlp.dense_4h_to_h",
        "falcon": "self_attention.dense mlp.dense_4h_to_h",
        "phi": "self_attn.dense mlp.fc2",
        "phi3": "self_attn.o_proj mlp.down_proj",
        "gptj": "attn.out_proj mlp.fc_out",
    }

    def of(model: keyhole.Model) -> set[str]:
        matrices, block = find_parts(model, 2).matrices, model.blocks[0]
        layers = {id(layer): name for name, layer in block.named_modules()}
        chosen = waiting(model.blocks, matrices)
        return {layers[id(matrices[i].layer)] for i in chosen if id(matrices[i].layer) in layers}

    for name, layers in expected.items():
        assert of(load(name)) == set(layers.split()), name
    frozen = load("opt")
    for tensor in frozen.layout.tensors:
        tensor.param.requires_grad_(not tensor.name.endswith(("fc2.weight", "out_proj.bias")))
    assert of(frozen) == set()


def test_experts_do_not_wait() -> None:
    """A list of small networks within a block, beside a layer that does."""
    expert = [nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8)) for _ in range(2)]
    block = nn.ModuleDict({"q": nn.Linear(8, 8), "o": nn.Linear(8, 8), "experts": nn.ModuleList(expert)})
    layers = [layer for layer in block.modules() if isinstance(layer, nn.Linear)]
    matrices: Any = [SimpleNamespace(layer=layer, bias=slice(0, 8)) for layer in layers]
    assert [layers[i] for i in waiting([block], matrices)] == [block["o"]]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", ["opt", "llama", "gpt_neox", "gemma3"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_on_the_gpu(name: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Recorded steps, eager ones, streamed ones and products that are finished at once: the same bits."""
    small = {"device": "cuda", "dtype": dtype}
    models = load(name, **small), load(name, **small, graphs=False), load(name, **small, placement="stream")
    found = [train(model, 8, lr=1e-3, **LOW) for model in models]
    assert found[0] == found[1] == found[2] and equal(weights(models[0]), weights(models[2]))
    at_once(monkeypatch)
    plain = load(name, **small)
    assert train(plain, 8, lr=1e-3, **LOW) == found[0] and equal(weights(models[0]), weights(plain))
