"""Adam's state on the host: a tensor without a gradient is left alone, as torch leaves it."""

import pytest
import torch

from keyhole.errors import UserError
from keyhole.methods.adam_offload.state import AdamState, trained_in
from keyhole.methods.weight_decay import WeightDecay
from keyhole.model.structure.layout import find_layout
from keyhole.model.structure.skeleton import build
from tests.model.decoders import config

RULE = {"beta1": 0.9, "beta2": 0.99, "eps": 1e-8}


def make() -> AdamState:
    state = AdamState(find_layout(build(config("llama"), torch.float32)), RULE, WeightDecay(0.1))
    for unit in state.units:
        state.start(unit, torch.linspace(-1, 1, unit.numel))
    return state


def test_tensors_without_a_gradient_keep_weight_moments_and_count() -> None:
    """Some steps with all gradients, some with every second: torch's weights, tensor by tensor."""
    state = make()
    unit = state.layout.of_kind("block")[0]
    starts = [t.start for t in trained_in(unit)]
    page = torch.empty(unit.numel)
    state.write(unit, page)
    params = {
        t.start: torch.nn.Parameter(page[t.start - unit.start : t.stop - unit.start].clone()) for t in unit.tensors
    }
    optimizer = torch.optim.AdamW(params.values(), lr=1e-2, betas=(0.9, 0.99), weight_decay=0.1, fused=True)
    generator = torch.Generator().manual_seed(0)
    for given in (starts, starts[::2], starts[:1], starts):
        optimizer.zero_grad()
        state.write(unit, page)
        for at in given:
            params[at].grad = torch.randn(params[at].shape, generator=generator)
            page[at - unit.start : at - unit.start + params[at].numel()] = params[at].grad
        optimizer.step()
        for part in state.parts(given):
            state.update(unit, part, page, lr=1e-2, clip=1.0)
            state.count(part)
        for at, param in params.items():
            assert torch.equal(page[at - unit.start : at - unit.start + param.numel()], param.data)
    assert [state.steps[at] for at in starts[:3]] == [4, 2, 3]


def test_masters_keep_their_precision_where_nothing_else_changed_the_weights() -> None:
    """Rounded weights that are unchanged set no master; changed ones do."""
    state = make()
    unit = state.layout.of_kind("block")[0]
    before = state.of(unit)[0].clone()
    page = before.bfloat16()
    page[1::2] += 1
    state.follow(unit, page)
    after = state.of(unit)[0]
    assert torch.equal(after[::2], before[::2]) and torch.equal(after[1::2], page[1::2].float())


def test_neighbours_with_equal_counts_are_one_range() -> None:
    """One pass over a unit whose tensors have all had the same; three ranges around one that has not."""
    state = make()
    unit = state.layout.of_kind("block")[0]
    starts = [t.start for t in trained_in(unit)]
    assert [(part.begin, part.end) for part in state.parts(starts)] == [(0, unit.numel)]
    state.steps[starts[2]] = 1
    assert len(state.parts(starts)) == 3


def test_state_of_another_model_is_refused() -> None:
    """A tensor that is missing is named."""
    with pytest.raises(UserError, match="has no model"):
        make().load_state_dict({})
