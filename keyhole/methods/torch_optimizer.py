"""A method as torch's schedulers and Hugging Face's Trainer see it: an Optimizer with one group and an empty step.

    scheduler = torch.optim.lr_scheduler.LambdaLR(opt.torch_optimizer, ...)
    loss = opt.step(batch); scheduler.step()

A method updates weights within its own step, so `step` here does nothing. The group's `lr` and the method's `lr` are
one number: the one that was changed since the last step of the method wins (the group's, if both were). Other numbers
of an update are the method's own settings; one that is written into the group would have no effect, and is refused.

Its state is the method's, and the group's rate:

    {"state": method.state_dict(), "param_groups": [{"lr": .., "params": [0, 1, ..], ..}], "method": name}

so that a loop that saves optimizer.state_dict(), as loops do, goes on where it was. (`method.state_dict()` alone holds
no rate.) States are views, as the method's are: save them before the next step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch

from keyhole.errors import UserError
from keyhole.methods.settings import checked_rate
from keyhole.model.model import Model

NOT_READ = ("weight_decay", "momentum", "betas", "eps", "dampening", "nesterov", "alpha", "amsgrad", "maximize")
METHOD = "method"


class Steppable(Protocol):
    """A method, as this shell of it needs it."""

    name: str
    model: Model
    lr: float
    params: dict[str, torch.nn.Parameter] | None

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class TorchOptimizer(torch.optim.Optimizer):
    """An Optimizer interface for a method."""

    def __init__(self, method: Steppable) -> None:
        params = list((method.params or {}).values())
        params = params or [t.param for t in method.model.layout.tensors if t.param.requires_grad]
        super().__init__([{"params": params}], {"lr": method.lr})
        self.method, self.seen = method, method.lr
        self._trained = list(map(id, params))

    def step(self, closure: Callable[[], object] | None = None) -> None:  # type: ignore[override]
        """Does nothing: the method makes its update in its own step. UserError if it would leave out gradients."""
        if any(param.grad is not None for group in self.param_groups for param in group["params"]):
            raise UserError(
                f"torch_optimizer.step: loss.backward() has left gradients that it does not apply; {self.method.name} "
                "updates in its own step(batch), or in backward(loss) where it has one"
            )

    def state_dict(self) -> dict[str, Any]:
        """The method's state, and the rate that schedulers have set. Flushes."""
        self._share_rate()
        groups = [{**group, "params": list(range(len(group["params"])))} for group in self.param_groups]
        return {"state": self.method.state_dict(), "param_groups": groups, METHOD: self.method.name}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads the state of a method with the same name. UserError if it holds a rate only, or is another's."""
        found = state_dict.get(METHOD) if isinstance(state_dict, dict) else None
        if found != self.method.name:
            what = "no method's" if found is None else f"that of {found}"
            raise UserError(
                f"torch_optimizer.load_state_dict: this state is {what}, expected one that torch_optimizer.state_dict "
                f"of {self.method.name} returned (those of keyhole 0.1 hold the rate only: the method would begin anew)"
            )
        (group,) = state_dict["param_groups"]
        if len(group["params"]) != len(self.param_groups[0]["params"]):
            raise UserError(
                f"torch_optimizer.load_state_dict: the state is of {len(group['params'])} parameters, this method "
                f"trains {len(self.param_groups[0]['params'])}"
            )
        self.method.load_state_dict(state_dict["state"])
        self.param_groups[0].update({key: value for key, value in group.items() if key != "params"})
        self._share_rate()

    def sync(self) -> None:
        """Called before a step of the method: makes both rates equal. UserError for a setting of the group that the
        method does not read, and for other groups than the one of its parameters."""
        if [list(map(id, group["params"])) for group in self.param_groups] != [self._trained]:
            raise UserError(
                f"param_groups: groups or parameters were added or taken out, which has no effect: {self.method.name} "
                "trains what required gradients when it was made, in one group. To leave a parameter out, "
                "requires_grad_(False) before the method is made; LOMO takes groups= with rates and decay by name"
            )
        unread = next((key for group in self.param_groups for key in NOT_READ if key in group), None)
        if unread is not None:
            raise UserError(
                f"param_groups: {unread} has no effect here, only lr has; give it to {type(self.method).__name__}, if "
                "it has such a setting"
            )
        self._share_rate()
        self._opt_called = True  # schedulers check this before they step

    def _share_rate(self) -> None:
        """Makes both rates equal."""
        (group,) = self.param_groups
        rate = checked_rate(group["lr"])
        if rate != self.seen:
            self.method.lr = rate
        group["lr"] = self.seen = self.method.lr
