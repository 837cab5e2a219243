"""LOMO and AdaLOMO: torch's SGD by another road, exact accumulation and clipping, streamed == resident."""

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

import keyhole
from keyhole.errors import UserError
from keyhole.methods.adalomo import AdaLOMO
from keyhole.methods.lomo import LOMO
from keyhole.methods.loss_scale import FIRST, INTERVAL, LossScale
from keyhole.plan import placement
from keyhole.plan.memory import Workload
from tests.methods.test_first_order import plain_loss
from tests.model.decoders import NAMES, batch, config
from tests.model.streaming import streamed

SIX = ["llama", "opt", "gpt2", "gpt_neox", "qwen2", "mixtral"]


def load(name: str = "llama", **options: Any) -> keyhole.Model:
    return keyhole.load(config(name), init="random", device="cpu", **options)


def rate(t: int) -> float:
    """A schedule: linear decay from 0.05."""
    return 0.05 * (1 - t / 20)


def torch_sgd(name: str, steps: int, micro: int, clip: float | None, weight_decay: float) -> dict[str, torch.Tensor]:
    """The weights after the loop anyone would write."""
    module = load(name).module
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, weight_decay=weight_decay)
    for t in range(steps):
        plain_loss(module, micro_batches(t, micro)).backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(module.parameters(), clip)
        optimizer.param_groups[0]["lr"] = rate(t)
        optimizer.step()
        optimizer.zero_grad()
    return {key: value.data for key, value in module.named_parameters()}


def micro_batches(t: int, micro: int) -> list:
    return [batch(seed=10 * t + k, length=10 - k) for k in range(micro)]


def train(method: LOMO, steps: int, micro: int = 1, first: int = 0) -> list[float]:
    losses = []
    for t in range(first, first + steps):
        method.lr = rate(t) if isinstance(method, LOMO) and not isinstance(method, AdaLOMO) else rate(t) / 10
        losses.append(float(method.step(micro_batches(t, micro))))
    method.flush()
    return losses


def weights(model: keyhole.Model) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.named_tensors()}


def close(found: torch.Tensor, expected: torch.Tensor, rel: float) -> bool:
    """Within `rel` of the largest element (a bias that softmax ignores is rounding alone, 1e-7 of a gradient)."""
    return float((found - expected).abs().max()) <= rel * max(float(expected.abs().max()), 0.02)


@pytest.mark.parametrize("name", SIX)
def test_without_fusing_it_is_torch_sgd_to_the_bit(name: str) -> None:
    """Twenty steps with weight decay and a schedule."""
    model = load(name)
    train(LOMO(model, weight_decay=0.1, fused=False), 20)
    expected = torch_sgd(name, 20, 1, None, 0.1)
    assert all(torch.equal(tensor, expected[key]) for key, tensor in weights(model).items())


@pytest.mark.parametrize(
    "name, micro, clip, direct",
    [(name, *how) for how in [(1, None, True), (4, 0.5, False)] for name in SIX]
    + [("llama", 1, None, False), ("mixtral", 1, None, False), ("llama", 4, None, False)],
)
def test_fused_accumulated_and_clipped_it_is_torch_sgd(name: str, micro: int, clip: float | None, direct: bool) -> None:
    """Within 1e-6 after twenty steps: straight into the weight, by way of the buffer, accumulated, clipped."""
    model = load(name)
    train(LOMO(model, weight_decay=0.1, max_grad_norm=clip, grad_norm=not direct), 20, micro)
    expected = torch_sgd(name, 20, micro, clip, 0.1)
    assert all(close(tensor, expected[key], 1e-6) for key, tensor in weights(model).items())


@pytest.mark.parametrize(("name", "method"), [(n, LOMO) for n in NAMES] + [(n, AdaLOMO) for n in SIX])
def test_streamed_equals_resident(name: str, method: type) -> None:
    """Losses and weights, to the bit, with two micro-batches and the exact norm."""
    resident = load(name)
    other = streamed(resident, slot_count=2)
    runs = []
    for model in (resident, other):
        opt = method(model, max_grad_norm=0.7)
        runs.append((train(opt, 2, 2), weights(model), float(opt.norm)))
    assert runs[0][0] == runs[1][0] and runs[0][2] == runs[1][2]
    assert all(torch.equal(runs[0][1][key], runs[1][1][key]) for key in runs[0][1])


@pytest.mark.parametrize("options", [{}, {"dtype": "bfloat16", "wire": "fp32"}])
def test_blocks_cut_into_several_units(options: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Units smaller than a block, also with homes in another dtype: the same bits."""
    monkeypatch.setattr(placement, "UNIT_BYTES", 16384)
    found = []
    for where in ({}, {"placement": "stream"}):
        model = load("llama", workload=Workload(method="lomo", tokens=20, passes=1), **options, **where)
        train(LOMO(model), 3)
        found.append(weights(model))
    assert len(model.layout.of_kind("block")) > model.layout.block_count and model.engine.slot_count > 3
    assert all(torch.equal(found[0][key], found[1][key]) for key in found[0])


@pytest.mark.parametrize("activations", ["none", "host"])
def test_what_is_kept_changes_nothing(activations: str) -> None:
    """Graphs, inputs on the device, inputs in host memory: the same weights."""
    found = []
    for keep in ("block", activations):
        model = load()
        train(LOMO(model, activations=keep, fused=False), 3, 2)
        found.append(weights(model))
    assert all(torch.equal(found[0][key], found[1][key]) for key in found[0])


@pytest.mark.parametrize("clip, micro", [(None, 1), (0.5, 2)])
def test_compiled_blocks_stream_too(clip: float | None, micro: int) -> None:
    """Traced by torch.compile (without a compiler here): streamed, in whole blocks or cut, == resident, and torch's SGD
    within rounding. Nothing breaks the graph of a block."""
    found, counters = [], torch._dynamo.utils.counters
    counters.clear()
    for how in (None, {"slot_count": 2}, {"max_unit_numel": 1, "slot_count": 9}):
        model = streamed(load(), **how) if how else load()
        train(LOMO(model, compile="aot_eager", max_grad_norm=clip), 3, micro)
        found.append(weights(model))
    assert all(torch.equal(found[0][key], other[key]) for other in found[1:] for key in found[0])
    assert not counters["graph_break"]
    expected = torch_sgd("llama", 3, micro, clip, 0.0)
    assert all(close(tensor, expected[key], 1e-6) for key, tensor in found[0].items())


def test_a_micro_batch_without_labels_changes_nothing() -> None:
    """A sample whose answer was cut off: the step is that of the others."""
    found, nothing = [], batch(seed=9) | {"labels": torch.full_like(batch(seed=9)["labels"], -100)}
    for batches in ([batch(seed=1)], [batch(seed=1), nothing]):
        model = load()
        LOMO(model, fused=False).step(batches)
        found.append(weights(model))
    assert all(close(found[1][key], found[0][key], 1e-6) for key in found[0])
    model = load()
    before = weights(model)
    loss = LOMO(model).step([nothing])
    assert torch.isfinite(loss) and all(torch.equal(tensor, before[key]) for key, tensor in weights(model).items())


def test_dropout_is_replayed() -> None:
    """The second run of a block, and the second reverse, see the masks of the first."""
    found = []
    for keep in ("none", "block"):
        model = keyhole.load(config("opt", dropout=0.2), init="random", device="cpu")
        model.module.train()
        torch.manual_seed(3)
        train(LOMO(model, activations=keep, fused=False, max_grad_norm=0.5), 3)
        found.append(weights(model))
    assert all(torch.equal(found[0][key], found[1][key]) for key in found[0])


def test_the_norm_is_that_of_the_whole_gradient() -> None:
    """In the log with and without clipping, unclipped."""
    module = load().module
    plain_loss(module, micro_batches(0, 2)).backward()
    expected = float(torch.nn.utils.clip_grad_norm_(module.parameters(), float("inf")))
    for clip in (None, 0.01):
        opt = LOMO(load(), max_grad_norm=clip)
        opt.step(micro_batches(0, 2))
        assert float(opt.metrics()["grad_norm"]) == pytest.approx(expected, rel=1e-5)


def test_adalomo_equals_its_reference() -> None:
    """Each tensor by the textbook formulas from torch's gradients."""
    model, module = load(), load().module
    opt, states = AdaLOMO(model, weight_decay=0.1), {}
    for t in range(5):
        plain_loss(module, micro_batches(t, 2)).backward()
        for name, p in module.named_parameters():
            _adalomo_by_the_book(p, states.setdefault(name, {}), t + 1, lr=rate(t) / 10, weight_decay=0.1)
            p.grad = None
        opt.lr = rate(t) / 10
        opt.step(micro_batches(t, 2))
    expected = dict(module.named_parameters())
    assert all(close(tensor, expected[name].data, 1e-5) for name, tensor in weights(model).items())


def _adalomo_by_the_book(p: torch.nn.Parameter, state: dict, t: int, lr: float, weight_decay: float) -> None:
    g, w, beta = p.grad, p.data, 1 - t**-0.8
    square = g.square() + 1e-30
    if w.dim() == 1:
        state["v"] = beta * state.get("v", 0) + (1 - beta) * square
        u = g / state["v"].sqrt()
    else:
        state["row"] = beta * state.get("row", 0) + (1 - beta) * square.mean(-1, keepdim=True)
        state["col"] = beta * state.get("col", 0) + (1 - beta) * square.mean(-2, keepdim=True)
        u = g / (state["row"] / state["row"].mean() * state["col"]).sqrt()
    u = u / max(1.0, float(u.square().mean().sqrt()))
    step = lr * max(1e-3, float(w.square().mean().sqrt()))
    w.mul_(1 - step * weight_decay).sub_(step * u)


@pytest.mark.parametrize("clip", [None, 0.5])
def test_a_loop_of_ones_own(clip: float | None) -> None:
    """backward(loss) on the module's own loss: torch's SGD, tied weights once, no gradient left behind."""
    model = load("qwen2")
    opt = LOMO(model, max_grad_norm=clip)
    for t in range(5):
        opt.lr = rate(t)
        opt.backward(plain_loss(model.module, micro_batches(t, 2)))
    assert all(p.grad is None for p in model.module.parameters())
    expected = torch_sgd("qwen2", 5, 2, clip, 0.0)
    assert all(close(tensor, expected[key], 1e-6) for key, tensor in weights(model).items())


@pytest.mark.parametrize("method", [LOMO, AdaLOMO])
@pytest.mark.parametrize("options", [{}, {"dtype": "bfloat16"}, {"dtype": "bfloat16", "rounding": "kahan"}])
def test_stopped_and_resumed_is_uninterrupted(method: type, options: dict[str, str]) -> None:
    """State through a dict, weights as they are: the same bits."""
    rounding = {"rounding": options["rounding"]} if "rounding" in options else {}
    where = {"dtype": options.get("dtype", "float32")}
    straight, stopped = load(**where), load(**where)
    train(method(straight, **rounding), 6)
    first = method(stopped, **rounding)
    train(first, 3)
    second = method(stopped, **rounding)
    second.load_state_dict({key: value for key, value in first.state_dict().items()})
    train(second, 3, first=3)
    assert all(torch.equal(value, weights(stopped)[key]) for key, value in weights(straight).items())


def test_a_float32_home_beats_sixteen_bits() -> None:
    """wire=fp32: small steps add up in fp32 where nearest rounding loses all of them."""
    moved = {}
    for key, options in {"home": {"wire": "fp32"}, "nearest": {}}.items():
        model = load(dtype="bfloat16", **options)
        before = {n: t.clone() for n, t in model.named_tensors()}
        opt = LOMO(model, lr=1e-6, rounding="nearest")
        for t in range(4):
            opt.step(micro_batches(t, 1))
        matrix = "model.layers.0.mlp.up_proj.weight"
        moved[key] = float((dict(model.named_tensors())[matrix].float() != before[matrix].float()).float().mean())
    assert moved["home"] > 0.7 and moved["nearest"] < 0.1


def test_groups_frozen_parameters_and_clipping_by_value() -> None:
    """Each does what it says, and no more."""
    model = load()
    model.module.model.layers[1].mlp.up_proj.weight.requires_grad_(False)
    before = weights(model)
    opt = LOMO(model, lr=0.1, clip_value=1e-3, groups=[{"match": "norm", "lr_scale": 0.0}])
    opt.step(micro_batches(0, 1))
    for name, tensor in weights(model).items():
        moved = (tensor - before[name]).abs().max()
        still = "norm" in name or name == "model.layers.1.mlp.up_proj.weight"
        assert moved == 0 if still else 0 < moved <= 1.01e-4, name


def test_each_tensor_can_be_clipped_by_its_own_norm() -> None:
    """clip_group_norm: no step is longer than lr times the limit."""
    model = load()
    before = weights(model)
    LOMO(model, lr=1.0, clip_group_norm=1e-2).step(micro_batches(0, 1))
    lengths = [float((tensor - before[name]).norm()) for name, tensor in weights(model).items()]
    assert max(lengths) == pytest.approx(1e-2, rel=1e-3)


def test_float16_scales_its_loss() -> None:
    """Overflow changes nothing but the scale; after that it trains."""
    model = load(dtype="float16")
    opt = LOMO(model, lr=1e-2)
    opt.loss_scale.scale = 2.0**40
    before = weights(model)
    opt.step(micro_batches(0, 1))
    assert opt.loss_scale.scale == 2.0**39 and not torch.isfinite(opt.metrics()["grad_norm"])
    assert all(torch.equal(value, before[key]) for key, value in weights(model).items())
    opt.loss_scale.scale = FIRST
    opt.step(micro_batches(0, 1))
    assert torch.isfinite(opt.metrics()["grad_norm"]) and opt.step_count == 1


def test_the_loss_scale_grows_again() -> None:
    """Doubled after INTERVAL good steps in a row; its count survives a checkpoint."""
    scale, other = LossScale(), LossScale()
    for _ in range(INTERVAL - 1):
        scale.update(True)
    other.load_state_dict(scale.state_dict())
    other.update(True)
    assert other.scale == 2 * FIRST and scale.scale == FIRST


def test_a_loss_that_is_not_finite_changes_nothing() -> None:
    """No update; the loss is returned for the run to stop on."""
    model = load()
    dict(model.named_tensors())["model.norm.weight"].fill_(float("nan"))
    before = weights(model)
    assert not torch.isfinite(LOMO(model).step(micro_batches(0, 1)))
    after = weights(model)
    assert all(torch.equal(before[key].nan_to_num(), after[key].nan_to_num()) for key in before)


def test_a_gradient_that_is_not_finite_breaks_the_run() -> None:
    """Met in the middle of a reverse: no later step, and no save, uses those weights."""
    model = load()
    opt = LOMO(model)
    opt.step(micro_batches(0, 1))
    opt.bad.fill_(1)
    with pytest.raises(UserError, match="max_grad_norm"):
        opt.flush()
    with pytest.raises(UserError, match="last checkpoint"):
        opt.step(micro_batches(1, 1))


@pytest.mark.parametrize("at", [0, 3])
def test_an_error_in_the_reverse_is_not_silent(at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything was updated it costs a step; afterwards the weights are of two steps, and nobody may use them."""
    model = load()
    opt, update, updated = LOMO(model), LOMO.gradient, []
    before = weights(model)

    def unchanged() -> bool:
        return all(torch.equal(before[name], tensor) for name, tensor in weights(model).items())

    def gradient(self: LOMO, *args: Any) -> None:
        if len(updated) == at:
            raise torch.OutOfMemoryError("no room")
        updated.append(args[0].name)
        update(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(LOMO, "gradient", gradient)
        with pytest.raises(torch.OutOfMemoryError):
            opt.step(micro_batches(0, 1))
    if at == 0:
        assert unchanged()
        opt.step(micro_batches(0, 1))
        return
    assert not unchanged()
    with pytest.raises(UserError, match="an error came in between.*last checkpoint"):
        opt.step(micro_batches(1, 1))
    with pytest.raises(UserError, match="not usable"):
        opt.flush()
    opt.load_state_dict(opt.state_dict())
    opt.flush()


@pytest.mark.parametrize(
    "options, says",
    [
        ({"max_grad_norm": 1.0, "clip_value": 1.0}, "contradict"),
        ({"rounding": "up"}, "stochastic, nearest, kahan"),
        ({"activations": "some"}, "none, block, host"),
    ],
)
def test_bad_settings_are_refused(options: dict[str, Any], says: str) -> None:
    """With what to set instead."""
    with pytest.raises(UserError, match=says):
        LOMO(load(), **options)


def test_what_cannot_be_done_is_refused() -> None:
    """A bare module, fp8 homes, graphs or Kahan with streamed weights, one's own loop with them, a detached loss."""
    away = load(placement="stream")
    for make, says in [
        (lambda: LOMO(load().module), "keyhole.load"),
        (lambda: LOMO(load(placement="stream", wire="fp8")), "fp8"),
        (lambda: LOMO(away, activations="none"), "block or host"),
        (lambda: LOMO(away, rounding="kahan"), "stochastic"),
        (lambda: LOMO(away).backward(torch.ones(())), "step"),
        (lambda: LOMO(load()).backward(torch.ones(())), "no graph"),
    ]:
        with pytest.raises(UserError, match=says):
            make()


def test_gradients_that_are_hidden_are_noticed() -> None:
    """A wrapper that detaches everything leaves nothing to update, and the first step says so."""
    model = load()
    decoder = model.head.decoder
    inner = decoder.forward
    decoder.forward = lambda **inputs: (inner(**inputs)[0].detach().requires_grad_(),)
    with pytest.raises(UserError, match="hides"):
        LOMO(model).step(micro_batches(0, 1))


def test_a_dropped_method_leaves_nothing() -> None:
    """Neither hooks nor tapes keep the model alive."""
    for options in ({}, {"compile": "aot_eager"}):
        model = load()
        opt = LOMO(model, **options)
        opt.step(micro_batches(0, 1))
        gone = weakref.ref(model.module.get_input_embeddings())
        del model, opt
        gc.collect()
        assert gone() is None, options


def test_the_product_that_nobody_needs_is_left_out() -> None:
    """After the first reverse the last product of a Llama block is not made again; a Gemma 2 block needs it."""
    llama, gemma = LOMO(load()), LOMO(load("gemma2"))
    for opt in (llama, gemma):
        opt.step(micro_batches(0, 1))
    assert [again.useless[False] for again in llama.reverse.again] == [6, 6, 6]
    assert [again.useless[False] for again in gemma.reverse.again] == [None] * 3


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("method", [LOMO, AdaLOMO])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("name", ["llama", "opt", "qwen2", "mixtral", "gemma3"])
def test_streamed_equals_resident_on_a_gpu(name: str, dtype: str, method: type) -> None:
    """With streams delayed at random and freed slots poisoned; inputs in host memory or not."""
    import random

    runs = []
    for seed in range(3):
        engine = {"placement": "stream", "chaos": random.Random(seed), "slot_count": 2 + seed % 2} if seed else {}
        model = keyhole.load(config(name), init="random", device="cuda", dtype=dtype, **engine)
        opt = method(model, max_grad_norm=0.7, activations="host" if seed == 2 else "block")
        runs.append((train(opt, 4, 2), {k: v.cpu() for k, v in weights(model).items()}))
        model.close()
    for losses, found in runs[1:]:
        assert losses == runs[0][0]
        assert all(torch.equal(found[key], runs[0][1][key]) for key in found)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_gpu_follows_cpu() -> None:
    """fp32: the same weights within rounding."""
    found = []
    for device in ("cpu", "cuda"):
        model = keyhole.load(config("llama"), init="random", device="cpu")
        model = model if device == "cpu" else _on_gpu(model)
        train(LOMO(model), 5, 2)
        found.append(weights(model))
    assert all(close(found[1][key].cpu(), found[0][key], 1e-4) for key in found[0])


def _on_gpu(model: keyhole.Model) -> keyhole.Model:
    other = keyhole.load(model.config, init="random", device="cuda", dtype=model.dtype)
    for (_, mine), (_, theirs) in zip(other.named_tensors(), model.named_tensors(), strict=True):
        mine.copy_(theirs)
    return other


def test_save_and_load(tmp_path: Path) -> None:
    """What LOMO trained is an ordinary Hugging Face directory."""
    from transformers import AutoModelForCausalLM

    model = load("qwen2")
    train(LOMO(model), 2)
    model.save_pretrained(tmp_path / "out")
    theirs = dict(AutoModelForCausalLM.from_pretrained(tmp_path / "out").named_parameters())
    assert all(torch.equal(theirs[key].data, value) for key, value in weights(model).items())
