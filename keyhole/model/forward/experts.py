"""Mixtures of experts, computed one expert at a time: only that expert's matrices need be on the device.

For hidden states x_TH, the router's choice of k experts per token and their weights r_Tk (structure/find.py finds
these modules):

    y_TH = sum over chosen experts e, in ascending order, of    r[t, e] down_e(act(up_e(x[t])))    for its tokens t

Transformers computes the same within rounding: it runs one grouped product over all experts, whereas this code loops
over the experts that received tokens. Sums are in float32. An expert without tokens is not touched.

If the stacks are cut into units (plan/fit.py), a pass needs the upper matrix of an expert, then the lower one,
then those of the next expert. Passes in lockstep need different experts. All passes wait until the last of them has
routed its tokens; then experts are loaded in ascending order, each once, for the passes that need it (lockstep.py).
From then on the order is known and prefetch follows it (Engine.expect): experts without tokens do not cross the link.

A product of some tokens may differ in its last bits from a grouped product. To keep streamed and resident equal to the
bit, a module that is computed in this way is always computed so, wherever its weights live. The host reads the router's
choice once per layer and pass. With gradients: model/backward/experts.py.
Legend: T tokens, H width, k experts per token, M tokens of one expert.
"""

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.nn import functional as F

from keyhole.model.structure.find import Experts
from keyhole.model.structure.layout import Unit

Routed = tuple[int, torch.Tensor, torch.Tensor]  # (expert, its tokens, which of each token's k choices it is).
Weigh = Callable[[int], torch.Tensor]  # 0: up, 1: down -> the expert's matrix, valid until the next call.


def compute_by_expert(model: Any) -> None:
    """Gives every module of experts in the layout a forward that loops over experts."""
    units: dict[int, list[Unit]] = {}
    for unit in model.layout.units:
        if unit.expert is not None:
            units.setdefault(id(unit.tensors[0].param), []).append(unit)
    for experts in model.layout.experts:
        of_stacks = [units.get(id(stack)) for stack in experts.stacks]
        cut = None if None in of_stacks else of_stacks
        model.patches.forward(experts.module, _forward(weakref.ref(model), experts, cut))


def _forward(model: Callable[[], Any], experts: Experts, units: Any) -> Callable:
    """units: of both stacks, one per expert, if they are cut; None if the whole stacks are bound."""
    ordinary = experts.module.forward

    def forward(x_TH: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
        owner = model()
        with_gradients = torch.is_grad_enabled() and owner.expert_gradients is None
        if torch.compiler.is_compiling() or with_gradients:  # compiled code has no loop, autograd needs whole stacks
            return ordinary(x_TH, top_k_index, top_k_weights)
        routed = route(top_k_index, experts.count)
        if torch.is_grad_enabled():
            return owner.expert_gradients.run(experts, units, routed, x_TH, top_k_weights)
        current = None if units is None or owner.conductor is None else owner.conductor.current
        if current is not None:
            current.will_meet([units[side][e] for e, _, _ in routed for side in (0, 1)])

        def weigh(expert: int, side: int) -> torch.Tensor:
            stack = experts.stacks[side]
            if current is None:
                return stack[expert]
            if current.unit is not units[side][expert]:
                current.meet(units[side][expert])
            return stack[0]  # now bound to this expert

        y_TH = no_sum(x_TH)
        for one in routed:
            add_expert(y_TH, experts, one, partial(weigh, one[0]), x_TH, top_k_weights)
        return y_TH.to(x_TH.dtype)

    return forward


def route(top_k_index: torch.Tensor, count: int) -> list[Routed]:
    """The experts that received tokens, ascending, each with its tokens; the host waits for the router."""
    chosen = top_k_index.t().flatten()  # first choices first, then tokens in order
    order = chosen.argsort(stable=True)
    counts = torch.bincount(chosen, minlength=count).tolist()
    tokens = top_k_index.shape[0]
    parts = order.split(counts)
    return [(e, parts[e] % tokens, parts[e] // tokens) for e in range(count) if counts[e]]


def no_sum(x_TH: torch.Tensor) -> torch.Tensor:
    """Zeros for a sum over experts, at least in float32."""
    return torch.zeros(x_TH.shape, dtype=torch.promote_types(x_TH.dtype, torch.float32), device=x_TH.device)


def add_expert(
    y_TH: torch.Tensor, experts: Experts, routed: Routed, weigh: Weigh, x_TH: torch.Tensor, r_Tk: torch.Tensor
) -> None:
    """Adds the weighted output of an expert for its tokens."""
    expert, token_M, choice_M = routed
    hidden = activated(experts, product(experts, 0, expert, x_TH[token_M], weigh(0)))
    y_MH = product(experts, 1, expert, hidden, weigh(1)) * r_Tk[token_M, choice_M, None]
    y_TH.index_add_(0, token_M, y_MH.to(y_TH.dtype))  # deterministic: a token chooses an expert at most once


def activated(experts: Experts, x: torch.Tensor) -> torch.Tensor:
    """The activation between the two products of an expert."""
    module: Any = experts.module
    y: torch.Tensor = module._apply_gate(x) if module.has_gate else module.act_fn(x)
    return y


def product(experts: Experts, side: int, expert: int, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The first (0) or second (1) product of an expert, with its bias."""
    y = x @ weight if experts.module.is_transposed else F.linear(x, weight)
    return y + experts.biases[side][expert] if experts.biases else y
