"""Adam's state on the host: a tensor without a gradient is left alone, as torch leaves it."""

import pytest
import torch

from keyhole.errors import UserError
from keyhole.methods.adam_offload.method import AdamOffload
from tests.methods.adam_offload.test_method import HOW, load
from tests.model.decoders import batch


def test_tensors_without_a_gradient_keep_weight_moments_and_count() -> None:
    """Some steps with all gradients, some with every second: torch's weights, tensor by tensor."""
    model, grads = load(), {}
    method = AdamOffload(model, **HOW)
    gradient, tensors = method.gradient, model.layout.tensors
    params = {t.name: torch.nn.Parameter(model.home(t).clone()) for t in tensors}
    optimizer = torch.optim.AdamW(params.values(), lr=1e-2, betas=(0.9, 0.99), weight_decay=0.1, fused=True)
    names, given = [tensor.name for tensor in tensors], set[str]()

    def some(tensor: object, w: torch.Tensor, grad: torch.Tensor) -> None:
        if tensor.name in given:
            grads[tensor.name] = grad.clone()
            gradient(tensor, w, grad)

    method.gradient = some
    method.gradients_together = lambda found: [method.gradient(*one) for one in found]
    for t, some_names in enumerate((names, names[::2], names[:1], names)):
        given.clear()
        given.update(some_names)
        method.step(batch(seed=t))
        for name, param in params.items():
            param.grad = grads.pop(name, None)
        optimizer.step()
    method.flush()
    for name, tensor in model.named_tensors():
        assert torch.equal(tensor, params[name].data), name
    assert [method.updates.counts[tensor.start] for tensor in tensors[:3]] == [4, 2, 3]


def test_masters_keep_their_precision_where_nothing_else_changed_the_weights() -> None:
    """Rounded weights that are unchanged set no master; changed ones do."""
    model = load(dtype="bfloat16")
    method = AdamOffload(model, **HOW)
    method.step(batch())
    method.flush()
    unit = model.layout.of_kind("block")[0]
    home, before = model.engine.homes[unit.index], method.updates.of(unit)[0].clone()
    home.data[1::2] += 1
    method.updates.follow()
    after = method.updates.of(unit)[0]
    assert torch.equal(after[::2], before[::2]) and torch.equal(after[1::2], home[1::2].float())


def test_neighbours_with_equal_counts_are_one_range() -> None:
    """One pass over a unit whose tensors have all had the same; three ranges around one that has not."""
    model = load()
    updates, unit = AdamOffload(model, **HOW | {"weight_decay_on": "all"}).updates, model.layout.of_kind("block")[0]
    starts = [tensor.start for tensor in unit.tensors]
    assert [(part.begin, part.end) for part in updates.parts(starts)] == [(0, unit.numel)]
    updates.counts[starts[2]] = 1
    assert len(updates.parts(starts)) == 3


def test_state_of_another_model_is_refused() -> None:
    """A tensor that is missing is named."""
    method = AdamOffload(load(), **HOW)
    state = method.state_dict()
    with pytest.raises(UserError, match="has no model"):
        method.load_state_dict({key: value for key, value in state.items() if not key.endswith("/master")})
