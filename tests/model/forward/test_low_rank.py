"""What a pass that carries several looks does at once: the numbers of what it does one by one."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from keyhole import ops
from keyhole.methods.zo.low_rank import layers
from keyhole.model.forward import fused_relu, low_rank, pending
from keyhole.model.forward.low_rank import Share
from keyhole.model.forward.sketches import Readers, sketch
from keyhole.ops.backend import TRITON_MISSING
from keyhole.ops.lowrank import correct, norm, product, relu
from tests.matrix import in_every_run
from tests.methods.zo.loops import equal, load, train, weights
from tests.model.decoders import LAYERS, PROMPT, batch
from tests.model.streaming import streamed
from tests.ops.interpreted import replaced_once  # noqa: F401

LOW = {"rank": 2, "refresh": 3}
needs_triton = pytest.mark.skipif(bool(TRITON_MISSING), reason="needs Triton")


def count(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> list[int]:
    """[how often the function was called]."""
    calls, call = [0], getattr(owner, name)

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        return call(*args, **kwargs)

    monkeypatch.setattr(owner, name, counted)
    return calls


@in_every_run(lambda name, dtype: name in ("opt", "qwen3") and (dtype == "bfloat16") == (name == "qwen3"))
@pytest.mark.parametrize("name", ["opt", "llama", "qwen3", "gemma3", "cohere", "olmo2"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_norms_of_all_looks_equal_look_by_look(name: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every norm runs once per pass, with the vectors of each look; on the CPU with the bits of the module itself."""
    model, plain = load(name, dtype=dtype), load(name, dtype=dtype)
    options = {"lr": 1e-2, "directions": 2, **LOW}
    with monkeypatch.context() as patch:
        norms = count(patch, ops, "norm")
        found = train(model, 3, **options)
        assert norms[0] == 3 * sum("Norm" in type(module).__name__ for module in model.module.modules())
    monkeypatch.setattr(low_rank, "find_norm", lambda *args: None)
    expected = train(plain, 3, **options)
    if name == "cohere":  # its own code has another order of sums
        assert found == pytest.approx(expected, rel=1e-2 if dtype == "bfloat16" else 1e-5)
    else:
        assert found == expected and equal(weights(model), weights(plain))


@pytest.mark.parametrize("wrong", [lambda x: x[:3], lambda x: x.double(), lambda x: x[0, 0], lambda x: [x]])
def test_other_inputs_go_look_by_look(wrong: Callable[[torch.Tensor], Any]) -> None:
    """Rows that do not divide into looks, another dtype, a vector, no tensor: not for the kernel."""
    model = load()
    train(model, 1, **LOW)
    module, share = model.module.model.norm, Share(0, 2, rows=4, tokens=40)
    known = low_rank.Known(norm.Norm(False), "variance_epsilon")

    class Two:
        def vectors_at_looks(self, module: torch.nn.Module) -> dict[str, torch.Tensor]:
            return {"weight": torch.ones(2, 32)}

    x = torch.randn(4, 10, 32)
    assert low_rank._norm_at_once(x, module, known, Two(), share).shape == x.shape
    assert low_rank._norm_at_once(wrong(x), module, known, Two(), share) is None


@in_every_run(lambda name, narrows: name != "llama")
@pytest.mark.parametrize("name, narrows", [("opt", 3), ("llama", 4), ("gpt2", 4), ("qwen2", 4), ("bloom", 4)])
def test_layers_that_read_one_input_share_a_sketch(name: str, narrows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Per block: q, k and v at once, the output projection, and two for an MLP, gated or not (one, after a ReLU).
    Batches that take turns at every matrix of a streamed model do not disturb each other."""
    model, cut = load(name), streamed(load(name), max_unit_numel=1, slot_count=2, chaos=random.Random(1))
    batches = [batch(seed=1), batch(seed=2, length=6)]
    with monkeypatch.context() as patch:
        calls = count(patch, ops, "narrow")
        found = train(model, 3, batches, lr=1e-2, **LOW)
        assert calls[0] == 3 * len(batches) * LAYERS * narrows
        assert train(cut, 3, batches, lr=1e-2, **LOW) == found and equal(weights(model), weights(cut))
        assert calls[0] == 2 * 3 * len(batches) * LAYERS * narrows
    assert bool(model.low_rank.readers) == (name not in ("gpt2", "bloom"))  # those have one matrix for q, k and v
    monkeypatch.setattr(layers, "readers", lambda matrices: {})
    assert train(load(name), 3, batches, lr=1e-2, **LOW) == pytest.approx(found, rel=1e-5)


def test_a_sketch_holds_for_one_input_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another tensor, the same one written since, another view, pass or V: computed again, by the leader for all and by
    another layer for itself."""
    calls, x, v = count(monkeypatch, ops, "narrow"), torch.randn(2, 5, 8), torch.randn(6, 8)
    share, again = Share(0, 2, 2, 10), Share(0, 2, 2, 10)

    def made(x: torch.Tensor, layer: int, share: Share = share) -> int:
        """How many sketches it takes; the result is right in any case."""
        before, own = calls[0], v[2 * layer : 2 * layer + 2]
        p = sketch(x, own, Readers(v, 2 * layer, layer == 0, share))
        torch.testing.assert_close(p, x.view(-1, 8) @ own.t())
        return calls[0] - before

    assert [made(x, layer) for layer in (1, 0, 1, 2, 0)] == [1, 1, 0, 0, 0]
    assert [made(x.clone(), 1), made(x.view(2, 5, 8), 1), made(x, 1, again), made(x, 1)] == [1, 1, 1, 0]
    x.mul_(2)
    assert [made(x, 1), made(x, 0), made(x, 1)] == [1, 1, 0]
    v.mul_(2)
    assert [made(x, 1), made(x, 0), made(x, 1)] == [1, 1, 0]
    with torch.inference_mode():
        assert [made(y := x + 1, 0), made(y, 1)] == [1, 1]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_relu_sketches_for_the_layer_after_it(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once per block and pass; on the CPU with the bits of a ReLU and a sketch, and no other layer than that one reads
    what is left. Streamed too."""
    resident, plain = load("opt", dtype=dtype), load("opt", dtype=dtype)
    cut = streamed(resident, max_unit_numel=1, slot_count=2, chaos=random.Random(1))
    batches = [batch(seed=1), batch(seed=2, length=6)]
    with monkeypatch.context() as patch:
        calls = count(patch, ops, "narrow_relu")
        found = train(resident, 3, batches, lr=1e-2, **LOW)
        assert calls[0] == 3 * len(batches) * LAYERS
        assert train(cut, 3, batches, lr=1e-2, **LOW) == found
    monkeypatch.setattr(layers, "relu_reader", lambda block: None)
    assert train(plain, 3, batches, lr=1e-2, **LOW) == found
    assert equal(weights(resident), weights(plain)) and equal(weights(cut), weights(plain))


@pytest.mark.parametrize(
    "change, calls", [(lambda y: y * 0.9, 1), (lambda y: y.mul_(0.9), 1), (lambda y: y.clone(), 1), (None, 0)]
)
def test_code_between_a_relu_and_its_reader(
    change: Callable | None, calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hook that changes the ReLU's output, in place or not: the layer after it makes a sketch of what it reads."""
    model, plain = load("opt"), load("opt")
    for one in (model, plain) if change else ():
        for block in one.blocks:
            block.activation_fn.register_forward_hook(lambda module, args, y: change(y))
    with monkeypatch.context() as patch:
        narrows = count(patch, ops, "narrow")
        found = train(model, 2, lr=1e-2, **LOW)
        assert narrows[0] == 2 * LAYERS * (3 + calls)
    monkeypatch.setattr(layers, "relu_reader", lambda block: None)
    assert train(plain, 2, lr=1e-2, **LOW) == found


def test_a_relu_within_its_product_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first layer is frozen, so its product may apply the ReLU: the second makes its own sketch."""
    monkeypatch.setattr(fused_relu, "has_epilogue", lambda x: True)
    model = load("opt")
    for tensor in model.layout.tensors:
        tensor.param.requires_grad_("fc1" not in tensor.name)
    calls = count(monkeypatch, ops, "narrow_relu")
    losses = train(model, 3, lr=1e-2, **LOW)
    assert calls[0] == 0 and len(set(losses)) == 3


@needs_triton
@pytest.mark.skipif(torch.cuda.is_available(), reason="the GPU tests of low rank run the kernels")
@in_every_run(lambda name: name == "opt")
@pytest.mark.parametrize("name", ["opt", "llama"])
def test_kernels_streamed_equal_resident(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Interpreted: cut to single matrices, slots poisoned, or with every product finished where it is made, the same
    losses and weights to the bit; and those of the references up to rounding."""
    small = [batch(rows=2, length=PROMPT + 1)]
    resident, cut = load(name), streamed(load(name), max_unit_numel=1, slot_count=2, chaos=random.Random(1))
    expected = train(load(name), 2, small, **LOW)
    for module in (correct, norm, product, relu):
        monkeypatch.setattr(module, "use_kernel", lambda device: True)
    monkeypatch.setattr(relu, "COLUMNS", 32)  # several parts of a sketch
    found = train(resident, 2, small, **LOW)
    assert train(cut, 2, small, **LOW) == found and equal(weights(resident), weights(cut))
    assert found == pytest.approx(expected, rel=1e-5)
    plain, wait = load(name), pending.wait
    monkeypatch.setattr(pending, "wait", lambda *args: pending.finished(wait(*args)))
    assert train(plain, 2, small, **LOW) == found and equal(weights(resident), weights(plain))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", ["opt", "llama", "qwen3", "gemma3"])
def test_on_the_gpu_looks_at_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The losses of norms look by look, up to rounding; streamed as resident, to the bit."""
    resident = load(name, device="cuda")
    found = train(resident, 6, lr=1e-3, **LOW)
    away = load(name, device="cuda", placement="stream", chaos=random.Random(0))
    assert train(away, 6, lr=1e-3, **LOW) == found and equal(weights(resident), weights(away))
    monkeypatch.setattr(low_rank, "find_norm", lambda *args: None)
    assert train(load(name, device="cuda"), 6, lr=1e-3, **LOW) == pytest.approx(found, rel=1e-3)


@pytest.mark.parametrize("where", ["blocks", "mlp"])
def test_regions_of_autocast(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the model's own code: layers take what is there, return the dtype of the region, and learn what they learn
    elsewhere, up to rounding."""

    def losses(autocast: bool) -> list[float]:
        model = load("llama")
        for module in model.blocks if where == "blocks" else [block.mlp for block in model.blocks]:
            around = torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast)
            monkeypatch.setattr(module, "forward", around(module.forward))
        return train(model, 4, lr=1e-2, **LOW)

    found, expected = losses(True), losses(False)
    assert found != expected and found == pytest.approx(expected, rel=1e-3)
