"""LOMO: gradient descent that keeps no gradients.

    w <- round(w - lr (c g + weight_decay w))            c: clipping, and 1 / loss scale

A gradient exists only until its matrix is updated, inside the backward pass (update.py). The memory beyond inference is
one gradient, one block's activations, and the inputs of all blocks (which activations=host moves to host memory). The
semantics are those of plain PyTorch:

  - Accumulation: all micro-batches pass a block before its one update, which uses the gradient of their mean loss.
  - max_grad_norm clips by the exact norm of the whole gradient. That norm is known only after a backward pass, so there
    are two: the first sums squares and changes nothing, the second updates. Both use the same forward pass and the
    activations it kept. clip_value bounds each element, in one backward pass.
  - float16 also needs two: the first shows whether the scaled loss overflowed, before anything changes.
  - The norm in the log is that of the whole, unclipped gradient.

Rounding of 16-bit weights: stochastic, nearest (small updates vanish), or kahan (the rounding error is kept beside the
weight, 2 bytes per parameter). wire=fp32 with a 16-bit dtype keeps fp32 weights at home, and so needs no rounding.

On a GPU the host does not wait for loss and norm before it launches the updates. If they are not finite, the device
multiplies gradients by nan, and then no weight changes; the host reads the flag after everything is launched, and does
not count the step. Where moments would be spoiled (`waits`), on a CPU and on several ranks it is read at once.
"""

import torch

from keyhole.errors import UserError
from keyhole.machine.gpu import ACCELERATOR
from keyhole.methods.base import Saved, State
from keyhole.methods.frame import Backward, GradientMethod
from keyhole.methods.lomo.traits import LOMO as ROW
from keyhole.methods.lomo.traits import LOMOSettings
from keyhole.methods.lomo.update import Now, Shards, Update
from keyhole.methods.step_numbers import Flags, StepNumbers

KEPT = {
    "none": "all kept",
    "block": "block inputs, blocks run twice",
    "host": "block inputs in host memory",
    "auto": "kept of as many blocks as fit, the others run twice",
}


class LOMO(GradientMethod):
    """Gradient descent inside the backward pass. `lr` may be changed between steps."""

    row = ROW
    settings: LOMOSettings
    rule: type[Update] = Update
    waits = False  # True: the host reads loss and norm before any weight or moment changes, on a GPU too

    def _setup(self) -> None:
        model, own = self.model, self.settings
        self.trained = [t for t in model.layout.tensors if t.param.requires_grad]
        if not self.trained:
            raise UserError("every parameter is frozen: there is nothing to train")
        model.methods.attach(self)
        self._differentiate(own.fused)
        self.loss_scale = LossScale() if model.dtype == torch.float16 else None
        cuda = model.device.type == ACCELERATOR
        self.reads = self.waits or not cuda or model.sharded  # the flags of a step at once
        ahead = self.reverse.recorded is not None or (self.reverse.compiled is not None and cuda)
        numbers = StepNumbers(model.device) if ahead and not self.reads else None
        offers = own.fused and (own.activations != "none" or bool(own.compile))
        self.update = self.rule(model, own, numbers, offers)
        self.shards = Shards(model, self.update) if model.sharded else None
        self.step_count = 0
        self.norm: torch.Tensor | None = None
        self.broken: Flags | None = None  # `bad` after the last step, on its way to the host

    # -- one step --------------------------------------------------------------------------------------------------

    @property
    def norm_first(self) -> bool:
        return self.settings.max_grad_norm is not None or self.loss_scale is not None

    @property
    def backward_passes(self) -> int:
        return 2 if self.norm_first else 1

    def _update(self, loss: torch.Tensor, backward: Backward) -> None:
        if self.reads or (self.broken is not None and self.broken.arrived):
            self.model.methods.check_whole()
        update, factor = self.update, 1.0 if self.loss_scale is None else self.loss_scale.scale
        update.tally.zero_()
        self._drop_beside()  # gradients of a step that broke off
        self.norm, fine = None, torch.isfinite(loss)
        update.scale.copy_(torch.where(fine, 1 / factor, torch.nan))
        if self.norm_first and not (self.reads and not fine):
            update.now = Now(only_norm=True)
            self._run(backward, factor, last=False)
            self.norm = update.tally.norm()
            self._drop_beside()
            fine = fine & torch.isfinite(self.norm)
            limit = torch.inf if self.settings.max_grad_norm is None else self.settings.max_grad_norm
            clip = (limit / (self.norm + 1e-6)).clamp(max=1.0) / factor
            update.scale.copy_(torch.where(fine, clip, torch.nan))
        if self.reads and not fine:
            self._count(applied=False)
            return
        flags = Flags(fine)
        self.step_count += 1
        update.begin(Now(self.lr, self.step_count, self._beta, measures=self.norm is None))
        try:
            with update.applying():
                self._run(backward, factor, last=True)
        except BaseException:  # out of memory, an interrupt: updates made so far stay
            if update.now.received:
                self.broken = Flags(update.tally.bad.fill_(1))
            else:
                self.step_count -= 1  # nothing was applied: the next step is this one
            raise
        if self.norm is None:
            self.norm = update.tally.norm()
        self._update_beside()
        update.tally.bad.mul_(fine)
        self.broken = Flags(update.tally.bad)
        (applied,) = flags.read()
        self.step_count -= not applied
        self._count(applied)
        if self.model.device.type != ACCELERATOR:  # there it is asked before the next step, and before a save
            self.model.methods.check_whole()

    def _run(self, backward: Backward, factor: float, last: bool) -> None:
        """One backward pass, and what it adds up over ranks."""
        if self.shards is None:
            backward(self.update, loss_scale=factor, last=last)
        else:
            self.shards.begin()
            backward(self.shards, loss_scale=factor, last=last)
            self.shards.add_up()
        self._add_up_beside()

    def _count(self, applied: bool) -> None:
        if self.loss_scale is not None:
            self.loss_scale.update(applied)
        if applied and self.step_count == 1:
            in_blocks = {t.name for t in self.trained if t.block is not None and t.param.requires_grad}
            if in_blocks and not in_blocks & self.update.now.received:
                raise UserError(
                    f"{self.name}: no parameter of a block received a gradient; something around the model hides it "
                    "(inference mode, a compiled or wrapped module, hooks that detach). Load it with keyhole.load."
                )

    @property
    def _beta(self) -> float:
        """Decay of moments in this step."""
        return 0.0

    # -- parameters beside the model's (lomo_lora.py) --------------------------------------------------------------

    def _drop_beside(self) -> None:
        """Drops their gradients."""

    def _add_up_beside(self) -> None:
        """Sums their gradients over the ranks, and adds their squares to the tally."""

    def _update_beside(self) -> None:
        """Updates them."""

    # -- between steps ---------------------------------------------------------------------------------------------

    @property
    def is_whole(self) -> bool:
        """Whether no non-finite gradient and no error came during a backward pass: blocks above were updated."""
        return not (self.step_count and int(self.update.tally.bad))

    def metrics(self) -> dict[str, torch.Tensor | float]:
        """Numbers of the last step, on the device. grad_norm: of the whole gradient, unclipped; changed: share of
        weights."""
        changed = self.update.tally.changed / sum(t.shape.numel() for t in self.trained)
        return {"changed": changed} if self.norm is None else {"grad_norm": self.norm, "changed": changed}

    def describe(self) -> list[str]:
        """Lines for the start block: the decisions made."""
        own, homes = self.settings, self.model.engine.homes
        rounded = own.rounding if any(h.dtype != torch.float32 for h in homes) else "none (float32)"
        clip = "the global norm, by a second reverse" if own.max_grad_norm is not None else "none"
        clip = clip if self.update.clip_value is None else f"each element at {self.update.clip_value:g}"
        compiled = "; blocks compiled" if self.reverse.compiled is not None else ""
        return [
            *self.update.describe(),
            f"rounding: {rounded}; activations: {KEPT[self.reverse.activations]}; clipping: {clip}{compiled}",
            *([] if self.loss_scale is None else ["loss scale: dynamic; every step looks for overflow first"]),
            *self.dropout.describe(),
        ]

    def _state(self) -> State:
        found: State = {"step_count": self.step_count, "seed": self.settings.seed, **self.dropout.state_dict()}
        if self.loss_scale is not None:
            found |= {"loss_scale": self.loss_scale.scale, "loss_scale_good": self.loss_scale.good}
        return found | self.update.state()

    def _load(self, state: Saved) -> None:
        if self.reverse.recorded is not None:
            self.reverse.recorded.forget()  # the loaded moments have other addresses
        self.dropout.load_state_dict(state)
        self.step_count = int(state["step_count"])
        self.update.tally.bad.zero_()
        self.broken = None
        if self.loss_scale is not None:
            self.loss_scale.scale, self.loss_scale.good = float(state["loss_scale"]), int(state["loss_scale_good"])
        self.update.load(state, self.step_count)


class LossScale:
    """A dynamic loss scale for float16, whose gradients underflow below 6e-8. The loss is multiplied by a power of two
    before the backward pass, and the gradients are divided by it afterwards, in fp32. If one of them overflowed,
    nothing is updated and the scale is halved; after INTERVAL good steps in a row it is doubled, up to MOST."""

    FIRST, MOST, LEAST, INTERVAL = 2.0**16, 2.0**24, 1.0, 1000

    def __init__(self) -> None:
        self.scale, self.good = self.FIRST, 0

    def update(self, finite: bool) -> None:
        """Adjusts the scale after a step."""
        self.good = self.good + 1 if finite else 0
        if not finite:
            self.scale = max(self.scale / 2, self.LEAST)
        elif self.good == self.INTERVAL:
            self.scale, self.good = min(2 * self.scale, self.MOST), 0
