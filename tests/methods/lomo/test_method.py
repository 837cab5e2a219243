"""LOMO is torch's SGD by another road: fused, accumulated, clipped, in a loop of one's own, on either device."""

from typing import Any

import pytest
import torch

import keyhole
from keyhole.methods.lomo.method import LOMO
from keyhole.methods.workload import Workload
from tests.matrix import in_every_run
from tests.methods.baselines.test_first_order import plain_loss
from tests.methods.lomo.loops import SIX, close, load, micro_batches, rate, torch_sgd, train, weights
from tests.model.decoders import batch, config
from tests.traced import IN_PLACE


@in_every_run(lambda name: name not in ("opt", "gpt_neox"))
@pytest.mark.parametrize("name", SIX)
def test_without_fusing_it_is_torch_sgd_to_the_bit(name: str) -> None:
    """Eight steps with weight decay and a schedule."""
    model = load(name)
    train(LOMO(model, weight_decay=0.1, weight_decay_on="all", fused=False), 8)
    expected = torch_sgd(name, 8, 1, None, 0.1)
    assert all(torch.equal(tensor, expected[key]) for key, tensor in weights(model).items())


@in_every_run(lambda name, micro: name == "llama" or (name, micro) in {("qwen2", 1), ("gpt2", 4), ("mixtral", 4)})
@pytest.mark.parametrize(
    "name, micro, clip",
    [(name, *how) for how in [(1, None), (4, 0.5)] for name in SIX] + [("llama", 4, None), ("llama", 4, 1e3)],
)
def test_fused_accumulated_and_clipped_it_is_torch_sgd(name: str, micro: int, clip: float | None) -> None:
    """Within 1e-6 after eight micro-batches: by way of the buffer, accumulated, clipped."""
    model, steps = load(name), 8 // micro
    train(LOMO(model, weight_decay=0.1, weight_decay_on="all", max_grad_norm=clip), steps, micro)
    expected = torch_sgd(name, steps, micro, clip, 0.1)
    assert all(close(tensor, expected[key], 1e-6) for key, tensor in weights(model).items())


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


def test_the_buffer_is_that_of_a_block_s_largest_matrix() -> None:
    """Not of the embedding, 1 GiB of a Llama-3; and the plan counts the same, whatever the vocabulary."""
    planned = []
    for vocabulary in (99, 4096):
        work = Workload(method="lomo", tokens=20, passes=1)
        shape = config("llama", vocab_size=vocabulary)
        model = keyhole.load(shape, init="random", device="cpu", workload=work)
        buffer = LOMO(model).update.buffer
        assert buffer.numel() == shape.intermediate_size * shape.hidden_size
        planned.append(model.placed.device_bytes.gradients)
    assert buffer.numel() * buffer.element_size() <= planned[0] == planned[1]


def test_the_numbers_of_a_step_are_on_a_gpu_where_steps_run_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """For compiled and recorded blocks, unless the host reads flags at once, as it does on a CPU."""

    def has_numbers(waits: bool = False, **how: Any) -> bool:
        monkeypatch.setattr(LOMO, "waits", waits)
        return LOMO(load(), **how).update.numbers is not None

    assert not has_numbers() and not has_numbers(compile=IN_PLACE) and LOMO(load()).reads
    monkeypatch.setattr("keyhole.methods.lomo.method.ACCELERATOR", "cpu")
    assert not has_numbers() and has_numbers(compile=IN_PLACE) and not has_numbers(waits=True, compile=IN_PLACE)
    real = LOMO._differentiate
    monkeypatch.setattr(
        LOMO, "_differentiate", lambda self, fused: real(self, fused) or setattr(self.reverse, "recorded", object())
    )
    assert has_numbers() and not has_numbers(waits=True)


def test_the_norm_is_that_of_the_whole_gradient() -> None:
    """In the log with and without clipping, unclipped."""
    module = load().module
    plain_loss(module, micro_batches(0, 2)).backward()
    expected = float(torch.nn.utils.clip_grad_norm_(module.parameters(), float("inf")))
    for clip in (None, 0.01):
        opt = LOMO(load(), max_grad_norm=clip)
        opt.step(micro_batches(0, 2))
        assert float(opt.metrics()["grad_norm"]) == pytest.approx(expected, rel=1e-5)


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


@pytest.mark.gpu
def test_gpu_follows_cpu() -> None:
    """fp32: the same weights within rounding."""
    models = [load(), load(device="cuda")]
    for (_, theirs), (_, mine) in zip(*(model.named_tensors() for model in models), strict=True):
        mine.copy_(theirs)
    for model in models:
        train(LOMO(model), 5, 2)
    found = weights(models[1])
    assert all(close(found[key].cpu(), tensor, 1e-4) for key, tensor in weights(models[0]).items())
