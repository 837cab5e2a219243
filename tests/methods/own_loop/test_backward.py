"""backward(loss) on what the module computed: the update of a step."""

import threading
from typing import Any

import pytest
import torch

import keyhole
from keyhole.errors import UserError
from keyhole.methods.adam_offload.method import AdamOffload
from keyhole.methods.lsp.method import LSP
from keyhole.model.structure import layout
from tests.matrix import in_every_run
from tests.methods.baselines.test_first_order import plain_loss
from tests.methods.lomo.loops import load, micro_batches, weights
from tests.methods.lsp.loops import EPS, SMALL, near
from tests.model.streaming import streamed

ADAM = {"lr": 1e-2, "weight_decay": 0.1, "beta2": 0.99, "eps": EPS}
SUBSPACE = SMALL | {"lr": 1e-2, "eps": EPS, "learn": False}
METHODS_WITH_BACKWARD = [
    (AdamOffload, ADAM),
    (AdamOffload, ADAM | {"max_grad_norm": 0.5}),
    (LSP, SUBSPACE | {"optimizer_on": "gpu"}),
    (LSP, SUBSPACE | {"optimizer_on": "cpu"}),
    (LSP, SUBSPACE | {"optimizer_on": "cpu", "max_grad_norm": 0.1}),
]


def trained(cls: type, options: dict[str, Any], by_backward: bool, name: str = "qwen2") -> dict[str, torch.Tensor]:
    model = load(name)
    method = cls(model, **options)
    for t in range(4):
        method.lr = 1e-2 * (1 - t / 10)
        if by_backward:
            method.backward(plain_loss(model.module, micro_batches(t, 1)))
            assert all(p.grad is None for p in model.module.parameters())
        else:
            method.step(micro_batches(t, 1))
    method.flush()
    found = weights(model)
    method.close()
    return found


@in_every_run(lambda cls, options, chunks: chunks or (cls is AdamOffload and options == ADAM))
@pytest.mark.parametrize(("cls", "options"), METHODS_WITH_BACKWARD)
@pytest.mark.parametrize("chunks", [False, True])
def test_backward_is_step(cls: type, options: dict[str, Any], chunks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same updates from the module's own loss, tied weights once, tables in one piece or several: adam-offload to
    the bit where the vocabulary is one chunk, as in the module's own loss."""
    if chunks:
        monkeypatch.setattr(layout, "CHUNK_ROWS", 40)
    for name in ("qwen2",) if chunks else ("qwen2", "llama"):
        expected, found = (trained(cls, options, by_backward, name) for by_backward in (False, True))
        exact = cls is AdamOffload and not chunks  # lsp compresses factors in a step, and gradients here
        for key in expected:
            assert torch.equal(found[key], expected[key]) if exact else near(found[key], expected[key]), (name, key)


def test_given_the_same_gradients_the_bits_are_those_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """What differs is the order of sums in the module's own backward; the update is the same code."""
    for cls, options in ((AdamOffload, ADAM), (LSP, SUBSPACE | {"optimizer_on": "gpu", "others": "adam"})):
        model, twin = load("llama"), load("llama")
        method, other = cls(model, **options), cls(twin, **options)
        sink = method if cls is AdamOffload else method.updates
        grads: dict[str, torch.Tensor] = {}
        gradient, linear = sink.gradient, sink.linear

        def keep(tensor: Any, w: Any, grad: torch.Tensor, then: Any = gradient, grads: dict = grads) -> None:
            grads[tensor.name] = grad.clone()
            then(tensor, w, grad)

        monkeypatch.setattr(sink, "gradient", keep)
        monkeypatch.setattr(sink, "linear", lambda *args: False)
        method.step(micro_batches(0, 1))
        loss = plain_loss(twin.module, micro_batches(0, 1))
        named = dict(twin.module.named_parameters())
        hooks = [p.register_hook(lambda g, n=n, grads=grads: grads.get(n, g)) for n, p in named.items()]
        other.backward(loss)
        method.flush()
        assert len(hooks) == len(named) and set(grads) <= set(named) and linear is not None
        ours, theirs = weights(model), weights(twin)
        assert all(torch.equal(ours[key], theirs[key]) for key in ours)


def test_projectors_are_learned_on_the_loss_of_the_user() -> None:
    """In the first step, of every matrix, before anything moves."""
    model = load("llama")
    method = LSP(model, **SUBSPACE | {"learn": True, "optimizer_on": "gpu"})
    method.backward(plain_loss(model.module, micro_batches(0, 1)))
    matrices = [target for target in method.targets.values() if target.p is not None]
    assert matrices and all(target.generation == 1 for target in matrices)
    assert set(method.check.biases) == {target.name for target in matrices} and 0 < method.metrics()["bias"] < 1


def test_a_scheduler_drives_backward_too() -> None:
    """The rate of the group is that of the next backward."""
    model = load("llama")
    method = AdamOffload(model, **ADAM)
    scheduler = torch.optim.lr_scheduler.LambdaLR(method.torch_optimizer, lambda step: 0.5**step)
    for t in range(3):
        method.backward(plain_loss(model.module, micro_batches(t, 1)))
        assert method.lr == method.current.lr == 1e-2 * 0.5**t
        scheduler.step()


@pytest.mark.parametrize(("cls", "options"), [(AdamOffload, ADAM), (LSP, SUBSPACE)])
def test_backward_is_refused_where_it_cannot_be_exact(cls: type, options: dict[str, Any]) -> None:
    """Streamed weights, and a loss without a graph."""
    model = load("llama")
    with pytest.raises(UserError, match="no graph"):
        cls(model, **options).backward(torch.ones(()))
    away = cls(streamed(load("llama")), **options)
    with pytest.raises(UserError, match="call step"):
        away.backward(torch.ones((), requires_grad=True))


def test_an_error_before_the_first_gradient_leaves_no_trace() -> None:
    """The count of steps, by which moments are corrected, is that of updates."""
    found = []
    for fails in (False, True):
        model = load("llama")
        method = keyhole.AdaLOMO(model, 1e-2)
        if fails:
            loss = plain_loss(model.module, micro_batches(0, 1))
            loss.register_hook(lambda grad: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                method.backward(loss)
        method.step(micro_batches(0, 1))
        found.append(weights(model))
    assert all(torch.equal(found[0][key], found[1][key]) for key in found[0])


def test_what_autograd_computes_again_in_a_thread_of_its_own_is_part_of_the_step() -> None:
    """As a checkpoint around the whole module on a GPU. Here: a thread that differentiates while a step is made."""
    model = load("llama")
    method, (batch,) = keyhole.LOMO(model, 1e-3), micro_batches(0, 1)
    losses: list[float] = []

    class Again(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            losses.append(plain_loss(model.module, [batch]).item())
            return grad

    def from_another_thread(grad: torch.Tensor) -> None:
        thread = threading.Thread(target=again.backward)
        thread.start()
        thread.join()

    again, loss = Again.apply(torch.ones((), requires_grad=True)), plain_loss(model.module, [batch])
    loss.register_hook(from_another_thread)
    method.backward(loss)
    assert losses == [loss.item()]
