"""A ReLU within the product before it: taken once, with the ordinary numbers, and only where it may be.

The library's product on the CPU does the same in two steps, with the bits of the ordinary layers: so the decisions are
tested there, with `has_epilogue` saying yes."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

import keyhole
from keyhole.bench.gradient.traced import IN_PLACE
from keyhole.methods.lomo.method import LOMO
from keyhole.model.backward.compiled_linear import linears_offer
from keyhole.model.forward import fused_relu
from keyhole.model.structure import find as blocks
from tests.matrix import in_every_run
from tests.model.decoders import LAYERS, batch, config
from tests.model.streaming import streamed

BATCHES = [batch(2, 8, seed=1), batch(1, 5, seed=2)]


def load(name: str = "opt", changes: dict[str, Any] | None = None, **options: Any) -> keyhole.Model:
    made = config(name, initializer_range=0.1, **changes or {})
    return keyhole.load(made, init="random", **{"device": "cpu", **options})


def ordinary(monkeypatch: pytest.MonkeyPatch, *args: Any, **options: Any) -> keyhole.Model:
    """The same model with its layers as Transformers made them."""
    with monkeypatch.context() as patch:
        patch.setattr(blocks, "PAIRS", {})
        return load(*args, **options)


def train(model: keyhole.Model, **options: Any) -> torch.Tensor:
    method = keyhole.ZO(model, 1e-3, directions=2, **options)
    losses = torch.stack([method.step(BATCHES) for _ in range(3)])
    method.flush()
    return losses


def equal(a: keyhole.Model, b: keyhole.Model) -> bool:
    pairs = zip(a.named_tensors(), b.named_tensors(), strict=True)
    return all(torch.equal(mine.cpu(), theirs.cpu()) for (_, mine), (_, theirs) in pairs)


class Calls:
    """How often a ReLU was taken, within a product and apart from one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.within = self.apart = 0
        monkeypatch.setattr(torch, "_addmm_activation", self._counted(torch._addmm_activation, "within"))
        monkeypatch.setattr(torch.nn.functional, "relu", self._counted(torch.nn.functional.relu, "apart"))

    def _counted(self, call: Callable, where: str) -> Callable:
        def counted(*args: Any, **kwargs: Any) -> Any:
            if not torch.compiler.is_compiling():  # a number that grows would have every block compiled anew
                setattr(self, where, getattr(self, where) + 1)
            return call(*args, **kwargs)

        return counted


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    return Calls(monkeypatch)


@pytest.fixture
def epilogue(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_relu, "has_epilogue", lambda x: True)


def test_on_the_cpu_nothing_changes(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    """Losses and weights are the bits of a model whose layers were left alone, and so are the calls."""
    plain, model = ordinary(monkeypatch), load()
    calls.apart = 0  # loading has asked the module which weights it reaches
    assert torch.equal(train(plain), train(model)) and equal(plain, model)
    assert calls.within == 0 and calls.apart == 2 * 3 * 4 * len(BATCHES) * LAYERS


@in_every_run(lambda name, how: (name == "opt") == (how is None or "max_unit_numel" in how))
@pytest.mark.usefixtures("epilogue")
@pytest.mark.parametrize("name", ["opt", "opt_projected"])
@pytest.mark.parametrize("how", [None, {"slot_count": 2}, {"max_unit_numel": 1, "slot_count": 2}])
def test_every_relu_is_taken_once_within_its_product(
    name: str, how: dict | None, calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Zeroth-order steps and evaluation, resident, streamed and cut: the ordinary bits, and no ReLU apart."""
    plain = ordinary(monkeypatch, name)
    model = load(name) if how is None else streamed(load(name), **how, chaos=random.Random(0))
    losses, nll_B = train(plain), plain.nll(BATCHES[0])[0]
    calls.apart = 0
    assert torch.equal(train(model), losses) and torch.equal(model.nll(BATCHES[0])[0], nll_B)
    assert equal(plain, model)
    assert calls.apart == 0 and calls.within == (3 * 4 * len(BATCHES) + 1) * LAYERS


@pytest.mark.usefixtures("epilogue")
def test_what_comes_out_is_not_negative(calls: Calls) -> None:
    """The second layer gets zeros where the product was negative, in any shape: of the product, the ReLU or both."""
    model = load()
    block, seen = model.module.model.decoder.layers[0], []
    block.fc2.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    model.nll(BATCHES[0])
    assert (seen[0] == 0).any() and (seen[0] > 0).any() and not (seen[0] < 0).any()
    expected = torch.nn.functional.linear(x := torch.randn(2, 3, 32), block.fc1.weight, block.fc1.bias)
    model.conductor, calls.within = model._lockstep, 0
    with torch.no_grad():
        for shape in ((2, 3), (6,), (0, 3)):
            y = block.activation_fn(block.fc1(x[: shape[0]].reshape(*shape, 32)))
            torch.testing.assert_close(y, expected[: shape[0]].reshape(*shape, 64).clamp(min=0))
        assert calls.within == 3
        torch.testing.assert_close(block.activation_fn(expected), expected.clamp(min=0))  # not from the product
    model.conductor = None


@pytest.mark.usefixtures("epilogue")
def test_with_gradients_all_is_ordinary(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the first run of a block, nor the second, nor a loss of one's own; compiled blocks hand over their
    gradients as before."""
    for options in ({}, {"compile": IN_PLACE}):
        plain, model = ordinary(monkeypatch), load()
        for one in (plain, model):
            method = LOMO(one, 1e-2, **options)
            for _ in range(2):
                method.step(BATCHES[0])
        assert equal(plain, model)
    layer = model.module.model.decoder.layers[0].fc1
    with torch.enable_grad(), linears_offer(model.device):
        assert "keyhole_linear" in layer(torch.ones(1, 32)).grad_fn.name()
    with torch.enable_grad():
        model.module(**BATCHES[0]).loss.backward()
    assert layer.weight.grad is not None and calls.within == 0


@pytest.mark.usefixtures("epilogue")
def test_outside_of_the_lockstep_all_is_ordinary(calls: Calls) -> None:
    """Generation, resident and streamed, and calls of the module itself; also when the model is gone."""
    model, ids = load(), BATCHES[0]["input_ids"]
    tokens = [m.generate(ids, max_new_tokens=3, do_sample=False) for m in (model, streamed(model))]
    assert torch.equal(*tokens)
    module = model.module
    with torch.no_grad():
        logits = module(ids).logits
        del model
        assert torch.equal(module(ids).logits, logits)
    assert calls.within == 0 < calls.apart


@pytest.mark.matrix
@pytest.mark.usefixtures("epilogue")
def test_compiled_blocks_are_the_compilers(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiler sees the same operations as without, in as many graphs: all blocks share the code as before."""
    counters, stats = torch._dynamo.utils.counters, []
    plain, model = ordinary(monkeypatch), load()
    expected = train(ordinary(monkeypatch))
    for one in (plain, model):
        torch._dynamo.reset()
        counters.clear()
        torch.testing.assert_close(train(one, compile="aot_eager"), expected, rtol=1e-5, atol=1e-5)
        stats.append(dict(counters["stats"]))
        assert not counters["graph_break"]
    assert stats[0] == stats[1] and stats[0]["unique_graphs"] > 0 and calls.within == 0


@pytest.mark.usefixtures("epilogue")
def test_tiles_are_ordinary(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer that is computed in tiles of rows still is."""
    monkeypatch.setattr(blocks, "TILE_NUMEL", 1000)
    monkeypatch.setattr(blocks, "TILE_ROWS", 8)
    plain, model = ordinary(monkeypatch), load()
    assert torch.equal(train(plain), train(model)) and calls.within == 0 < model.layout.tiled_layers


@pytest.mark.parametrize("changes", [{"activation_function": "gelu"}, {"enable_bias": False}])
def test_other_pairs_are_left_alone(changes: dict[str, Any]) -> None:
    """Another activation, or a layer without a bias."""
    block = load(changes=changes).module.model.decoder.layers[0]
    assert "forward" not in block.fc1.__dict__ and "forward" not in block.activation_fn.__dict__


@pytest.mark.usefixtures("epilogue")
@pytest.mark.parametrize("between", ["hook", "activation", "adapter"])
def test_what_comes_between_is_minded(between: str, calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hook that changes the layer's output, another activation, an adapter beside the layer: evaluated as without."""
    plain, model = ordinary(monkeypatch), load()
    before_B, found = plain.nll(BATCHES[0])[0], []
    for one in (plain, model):
        blocks = one.module.model.decoder.layers
        if between == "adapter":
            pytest.importorskip("peft")
            method = keyhole.methods.METHODS["lora"].load()(one, target_modules=["fc1"])
            for param in method.params.values():
                param.data.normal_(generator=torch.Generator().manual_seed(0))
        for block in blocks:
            if between == "hook":
                block.fc1.register_forward_hook(lambda module, args, y: y - 0.1)
            if between == "activation":
                block.activation_fn = torch.nn.GELU()
        found.append(one.nll(BATCHES[0])[0])
    assert torch.equal(*found) and not torch.equal(found[0], before_B) and calls.within == 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype, rtol", [("bfloat16", 1e-2), ("float16", 2e-3), ("float32", 1e-4)])
def test_on_a_gpu(dtype: str, rtol: float, calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within rounding the ordinary losses; streamed under random delays the resident model's bits."""
    options = {"device": "cuda", "dtype": dtype}
    plain, model = ordinary(monkeypatch, **options), load(**options)
    nll_B = plain.nll(BATCHES[0])[0]
    assert calls.within == 0
    torch.testing.assert_close(model.nll(BATCHES[0])[0], nll_B, rtol=rtol, atol=0)
    assert calls.within == LAYERS
    expected = train(model)
    for schedule in range(5):
        other = load(**options, placement="stream", chaos=random.Random(schedule))
        assert torch.equal(train(other), expected) and equal(model, other)
        other.close()
