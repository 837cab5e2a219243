"""Muon against torch.optim.Muon and AdamW; streamed, resumed, clipped, in 16 bits, and learning."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

import keyhole
from keyhole.errors import UserError
from keyhole.machine.host import HostMemory
from keyhole.methods.muon.memory import host_state, is_matrix
from keyhole.methods.muon.method import Muon, newton_schulz
from keyhole.methods.muon.traits import MuonConfig
from tests.methods.baselines.test_first_order import plain_loss
from tests.methods.lomo.loops import close, load, micro_batches, weights
from tests.model.streaming import assert_trained_alike, streamed

LR = 1e-3


def train(opt: Muon, steps: int, first: int = 0) -> list[float]:
    return [float(opt.step(micro_batches(t, 2))) for t in range(first, first + steps)]


def by_torch(module: torch.nn.Module, matrices: set[str], **how: Any) -> Callable[[], None]:
    """One step of torch's own optimizers; eps is large enough for moments that begin near 0."""
    named = dict(module.named_parameters())
    own = [named[name] for name in sorted(matrices)]
    rest = [param for name, param in named.items() if name not in matrices]
    optimizers = [torch.optim.Muon(own, lr=LR, weight_decay=0.1, **how)]
    optimizers.append(torch.optim.AdamW(rest, lr=LR, weight_decay=0.1, eps=1e-5))

    def step() -> None:
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

    return step


@pytest.mark.parametrize(
    "name, clip, how",
    [
        ("llama", None, {}),
        ("llama", 0.5, {"adjust_lr_fn": "original", "nesterov": False, "momentum": 0.8}),
        ("gpt2", 0.5, {"ns_steps": 3, "ns_coefficients": [2.0, -1.5, 0.5]}),
    ],
)
def test_equals_torchs_optimizers(name: str, clip: float | None, how: dict[str, Any]) -> None:
    """In float32, over accumulated and clipped gradients, with weight decay: every tensor within rounding."""
    model, module = load(name), load(name).module
    opt = Muon(
        model, LR, moments="float32", weight_decay=0.1, weight_decay_on="all", max_grad_norm=clip, eps=1e-5, **how
    )
    matrices = {tensor.name for tensor in model.layout.tensors if is_matrix(tensor)}
    step = by_torch(module, matrices, **({"adjust_lr_fn": "match_rms_adamw"} | how))
    for t in range(5):
        plain_loss(module, micro_batches(t, 2)).backward()
        norm = float(torch.nn.utils.clip_grad_norm_(module.parameters(), clip or float("inf")))
        step()
        opt.step(micro_batches(t, 2))
        assert float(opt.metrics()["grad_norm"]) == pytest.approx(norm, rel=1e-3)
    expected = dict(module.named_parameters())
    assert all(close(tensor, expected[key].data, 2e-3) for key, tensor in weights(model).items())


def test_orthogonalises() -> None:
    """Singular values near 1, whatever they were, for matrices lying and standing."""
    for shape in ((24, 40), (40, 24)):
        found = newton_schulz(torch.randn(shape), (3.4445, -4.7750, 2.0315), 5, 1e-7)
        assert found.shape == shape and ((torch.linalg.svdvals(found.float()) - 0.9).abs() < 0.4).all()


@pytest.mark.parametrize(
    "name, dtype, moments, clip",
    [
        ("llama", "float32", "bfloat16", None),
        ("gpt2", "bfloat16", "bfloat16", 0.5),
        ("llama", "bfloat16", "float32", None),
    ],
)
def test_streamed_equals_resident(name: str, dtype: str, moments: str, clip: float | None) -> None:
    """Losses and weights to the bit, in units of whole blocks and in smaller ones."""
    resident = load(name, dtype=dtype)
    others = [streamed(resident, slot_count=3), streamed(resident, slot_count=9, max_unit_numel=4000)]
    how = {"moments": moments, "max_grad_norm": clip}
    expected, held = train(Muon(resident, LR, **how), 3), weights(resident)
    for model in others:
        opt = Muon(model, LR, **how)
        assert train(opt, 3) == expected and not opt.update.pages.engine.held
        assert all(torch.equal(tensor, weights(model)[key]) for key, tensor in held.items())


def test_a_loop_of_one_s_own_takes_the_same_steps() -> None:
    """backward(loss): gradients of all units arrive before the first is finished, and states make room."""
    stepped, own = load(), load()
    first, second = Muon(stepped, LR), Muon(own, LR)
    for t in range(2):
        first.step(micro_batches(t, 2))
        second.backward(plain_loss(own.module, micro_batches(t, 2)))
    assert all(close(tensor, weights(stepped)[key], 1e-3) for key, tensor in weights(own).items())


def test_sixteen_bits_learn_as_well_as_32() -> None:
    """One batch again and again: the loss falls, and about as far in either format."""
    found = []
    for moments in ("bfloat16", "float32"):
        opt, same = keyhole.Muon(load(), 5e-3, moments=moments), micro_batches(0, 1)
        losses = [float(opt.step(same)) for _ in range(12)]
        found.append(losses[-1])
        assert losses[-1] < losses[0] / 2
    assert found[0] == pytest.approx(found[1], rel=0.1)


def test_state_is_two_bytes_per_element_of_a_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    """In host memory, as planned; what does not fit is refused with what to do."""
    opt = Muon(load(), LR)
    numel = sum(tensor.shape.numel() for tensor in opt.model.layout.tensors if is_matrix(tensor))
    rest = sum(unit.numel for unit in opt.model.layout.units) - numel
    assert opt.update.pages.bytes == host_state(opt.model.layout, set(), 2, MuonConfig())[1]
    assert 2 * numel + 4 * rest <= opt.update.pages.bytes < 2 * numel + 4 * rest + 4000
    monkeypatch.setattr("keyhole.methods.work.host_memory", lambda: HostMemory(2**33, 100, None))
    with pytest.raises(UserError, match=r"muon keeps .* are missing. Free memory, or use method=lomo"):
        keyhole.Muon(load(), LR)
    with pytest.raises(UserError, match=r"muon keeps .*half: muon.moments=bfloat16"):
        keyhole.Muon(load(), LR, moments="float32")


@pytest.mark.gpu
@pytest.mark.parametrize("clip", [None, 0.5])
def test_streamed_equals_resident_on_a_gpu(clip: float | None) -> None:
    """bfloat16, states in slots of their own."""
    models = (load(device="cuda", dtype="bfloat16", placement=place) for place in ("resident", "stream"))
    make = partial(Muon, lr=LR, max_grad_norm=clip)
    assert_trained_alike(models, make, [micro_batches(t, 2) for t in range(4)])
