"""What a caller does to the module between steps: weights, frozen parameters, gradients and hooks."""

import pytest
import torch

import keyhole
from keyhole.errors import UserError
from keyhole.methods import METHODS
from tests.methods.baselines.test_first_order import plain_loss
from tests.methods.lomo.loops import load, micro_batches, weights


@pytest.mark.parametrize("cls", [keyhole.LOMO, keyhole.LSP, keyhole.AdamOffload, keyhole.AdamW])
def test_gradients_that_the_caller_has_left_are_refused(cls: type) -> None:
    """They were added to those of the step, silently. Cleared, also through the optimizer's own zero_grad, the step is
    that of its batch."""
    found = []
    for looks in (False, True):
        model = load("llama")
        method = cls(model, 1e-3)
        if looks:
            plain_loss(model.module, micro_batches(5, 1)).backward()
            with pytest.raises(UserError, match=r"gradients: loss.backward\(\) has left some in .*zero_grad"):
                method.step(micro_batches(0, 1))
            method.torch_optimizer.zero_grad()
        method.step(micro_batches(0, 1))
        method.flush()
        found.append(weights(model))
    assert all(torch.equal(found[0][key], found[1][key]) for key in found[0])


@pytest.mark.parametrize("name", ["lomo", "lsp", "adam-offload", "adamw"])
def test_a_step_with_everything_frozen_is_refused(name: str) -> None:
    """It would return a loss and train nothing; thawed again, the step goes on."""
    own = {"d": 16, "r": 2, "learn": False} if name == "lsp" else {}
    model = load("llama")
    method = METHODS[name].load()(model, 1e-3, **own)
    model.module.requires_grad_(False)
    with pytest.raises(UserError, match=f"all parameters were frozen after {name} was made"):
        method.step(micro_batches(0, 1))
    model.module.requires_grad_(True)
    method.step(micro_batches(0, 1))


@pytest.mark.parametrize("name", ["lomo", "adalomo", "lomo-lora"])
def test_blocks_may_be_frozen_before_the_first_step(name: str) -> None:
    """What begins later is frozen after the method was made, and hides no gradient."""
    model = load("llama")
    method = METHODS[name].load()(model, 1e-3)
    model.module.model.layers.requires_grad_(False)
    before = weights(model)
    method.step(micro_batches(0, 1))
    model.module.model.layers.requires_grad_(True)
    method.step(micro_batches(0, 1))
    assert not any(torch.equal(before[key], now) for key, now in weights(model).items())


@pytest.mark.parametrize("name", ["zo", "lomo", "lsp", "adam-offload", "adamw"])
def test_a_parameter_that_is_trained_only_later_is_refused(name: str) -> None:
    """The method was made without it. Frozen later, it stays as it is, or is refused by a method without gradients."""
    own = {"d": 16, "r": 2, "learn": False} if name == "lsp" else {}
    later, frozen = load("llama"), load("llama")
    later.module.model.norm.weight.requires_grad_(False)
    methods = [METHODS[name].load()(model, 1e-3, **own) for model in (later, frozen)]
    later.module.model.norm.weight.requires_grad_(True)
    with pytest.raises(UserError, match="norm.weight did not require gradients when .* was made, and would not be"):
        methods[0].step(micro_batches(0, 1))
    frozen.module.model.norm.weight.requires_grad_(False)
    before = weights(frozen)["model.norm.weight"]
    if name == "zo":
        with pytest.raises(UserError, match="norm.weight was frozen after zo was made, which would still change it"):
            methods[1].step(micro_batches(0, 1))
        return
    methods[1].step(micro_batches(0, 1))
    methods[1].flush()
    assert torch.equal(before, weights(frozen)["model.norm.weight"])


@pytest.mark.parametrize("cls", [keyhole.LOMO, keyhole.LSP, keyhole.AdamOffload])
def test_a_gradient_hook_is_called_by_backward_and_refused_by_step(cls: type) -> None:
    """A step has gradients as factors and in chunks; the hook got None."""
    model = load("llama")
    method, calls = cls(model, 1e-3), []
    model.module.model.layers[0].mlp.up_proj.weight.register_hook(lambda grad: calls.append(grad.shape))
    with pytest.raises(UserError, match=r"up_proj.weight has a gradient hook \(register_hook\), which a step does not"):
        method.step(micro_batches(0, 1))
    method.backward(plain_loss(model.module, micro_batches(0, 1)))
    assert len(calls) == (2 if cls is keyhole.LSP else 1), "lsp learns its projectors from a pass of its own"


@pytest.mark.parametrize("cls", [keyhole.LOMO, keyhole.AdamOffload])
def test_a_hook_for_accumulated_gradients_is_refused(cls: type) -> None:
    """It would find none."""
    model = load("llama")
    method = cls(model, 1e-3)
    hook = model.module.model.norm.weight.register_post_accumulate_grad_hook(lambda param: None)
    with pytest.raises(UserError, match="norm.weight has a hook of yours"):
        method.step(micro_batches(0, 1))
    with pytest.raises(UserError, match="norm.weight has a hook of yours"):
        method.backward(plain_loss(model.module, micro_batches(0, 1)))
    hook.remove()
    method.step(micro_batches(0, 1))
