"""What a caller's loop has done to parameters between steps that a step cannot follow: gradients left in `.grad`, and
another choice of trained parameters.

A step trains on the gradients of its batch, or of its loss. Gradients that loss.backward() of the caller's has left
would be added to them, so they are refused.

What is trained is decided when a method is made: optimizer state, spans of weights and hooks exist for these parameters
only. One that is frozen later gets no gradient, and stays as it is; a method without gradients (`may_freeze` is False)
would go on to change it. One that requires gradients only later would never change. With all of them frozen, a step
would train nothing.
"""

from itertools import chain
from operator import attrgetter
from typing import TYPE_CHECKING

from keyhole.errors import UserError, listed

if TYPE_CHECKING:
    from keyhole.methods.base import Method

REQUIRED, GRAD = attrgetter("requires_grad"), attrgetter("grad")


def check_step(method: "Method") -> None:
    """UserError if gradients were left, or if other parameters are trained than when the method was made."""
    tensors = method.model.layout.tensors
    params = [tensor.param for tensor in tensors]
    before, now = method.model.methods.trained.get(method), list(map(REQUIRED, params))
    if before is not None and before != now:
        names = {
            was: [t.name for t, a, b in zip(tensors, before, now, strict=True) if a is was and a is not b]
            for was in (True, False)
        }
        if names[False]:
            raise UserError(
                f"requires_grad: {listed(names[False])} did not require gradients when {method.name} was made, and "
                "would not be trained. Make the method while everything requires gradients that will be trained, and "
                "freeze afterwards what begins later"
            )
        if names[True] and not method.may_freeze:
            raise UserError(
                f"requires_grad: {listed(names[True])} was frozen after {method.name} was made, which would still "
                "change it: make the method again, after flush(), and give it the state (load_state_dict)"
            )
        if method.addon is None and not any(now):
            raise UserError(
                f"requires_grad: all parameters were frozen after {method.name} was made, and a step would train "
                "nothing: call requires_grad_(True) on those that are to be trained"
            )
    beside = {} if method.addon is None else method.addon.params
    if method.may_freeze and any(grad is not None for grad in map(GRAD, chain(params, beside.values()))):
        left = [tensor.name for tensor in tensors if tensor.param.grad is not None]
        left += [name for name, param in beside.items() if param.grad is not None]
        raise UserError(
            f"gradients: loss.backward() has left some in {listed(left)}, and they would be added to those of this "
            f"step; call model.module.zero_grad() first. {method.name} updates in step(batch), or in backward(loss) "
            "where it has one, and keeps no gradients"
        )


def drop_gradients(method: "Method") -> None:
    """After a step that ended in an error: drops its gradients, which the next step would refuse."""
    beside = () if method.addon is None else method.addon.params.values()
    for param in chain((tensor.param for tensor in method.model.layout.tensors), beside):
        param.grad = None
