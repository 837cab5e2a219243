"""LOMO: gradient descent that keeps no gradients.

    w <- round(w - lr (c g + weight_decay w))            c: clipping, and 1 / loss scale

A gradient exists only until its matrix is updated, inside the reverse sweep (model/backward/reverse.py). The memory
beyond inference is one gradient, one block's activations, and the inputs of all blocks (which activations=host moves to
host memory). The semantics are those of plain PyTorch:

  - Accumulation: all micro-batches pass a block before its one update, which uses the gradient of their mean loss.
  - max_grad_norm clips by the exact norm of the whole gradient. That norm is known only after a backward pass, so there
    are two: the first sums squares and changes nothing, the second updates. Both use the same forward pass and the
    activations it kept. clip_value bounds each element, clip_group_norm the norm of each tensor; they need one
    backward pass.
  - float16 also needs two: the first shows whether the scaled loss overflowed, before anything changes.
  - The norm in the log is that of the whole, unclipped gradient.

Rounding of 16-bit weights: stochastic, nearest (small updates vanish), or kahan (the rounding error is kept beside the
weight, 2 bytes per parameter). wire=fp32 with a 16-bit dtype keeps fp32 weights at home, and so needs no rounding.

The update from a single gradient: sink.py.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from keyhole.errors import UserError
from keyhole.methods import shards
from keyhole.methods.base import Method, State
from keyhole.methods.dropout import ModelDropout
from keyhole.methods.lomo.loss_scale import LossScale
from keyhole.methods.lomo.shards import Shards
from keyhole.methods.lomo.sink import NormSink, UpdateSink
from keyhole.methods.lomo.squares import Squares
from keyhole.methods.lomo.traits import LOMO as ROW
from keyhole.methods.lomo.traits import LOMOConfig
from keyhole.methods.step_numbers import Flags, StepNumbers
from keyhole.methods.weight_decay import weight_decay_of
from keyhole.model.backward.reverse import Reverse
from keyhole.model.backward.sink import Sink
from keyhole.model.batch import Batch


class LOMO(Method, UpdateSink):
    """Gradient descent inside the reverse sweep. `lr` may be changed between steps."""

    row = ROW
    settings: LOMOConfig
    waits = False  # True: the host reads the loss before any weight changes, on a GPU too

    def _setup(self) -> None:
        model, own = self.model, self.settings
        self.decay = weight_decay_of(model.module, own)
        self.groups = own.groups or []
        if model.sharded:
            shards.check(own)
        model.methods.attach(self)
        self.reverse = Reverse(model, activations=own.activations, fused=own.fused, compiled=own.compile)
        self.dropout = ModelDropout(model, own.seed, own.model_dropout)
        self.loss_scale = LossScale() if model.dtype == torch.float16 else None
        self.step_count = 0
        self.trained = [t for t in model.layout.tensors if t.param.requires_grad]
        if not self.trained:
            raise UserError("every parameter is frozen: there is nothing to train")
        device = model.device
        self.squares = Squares(model.layout, device)
        self.bad = torch.zeros((), dtype=torch.int32, device=device)
        self.changed = torch.zeros((), dtype=torch.int64, device=device)
        self.grad_scale: torch.Tensor | None = None  # factor of the gradients
        self.norm: torch.Tensor | None = None
        matrices = [t.matrix for u in model.layout.of_kind("block") for t in u.tensors if len(t.matrix) == 2]
        offers = (own.fused and (own.activations != "none" or own.compile)) or model.layout.experts
        largest = max((shape.numel() for shape in matrices), default=0) if offers else 0
        self.buffer = torch.empty(largest, dtype=model.dtype, device=device)
        self.compensation: dict[str, torch.Tensor] = {}  # rounding errors kept by Kahan summation
        self.table_squares: dict[int, torch.Tensor] = {}
        self.received: set[str] = set()  # names of tensors that had a gradient in the last update
        launches_ahead = self.reverse.recorded is not None or (
            self.reverse.compiled is not None and device.type == "cuda"
        )
        self.numbers = StepNumbers(device) if launches_ahead and not self.waits and not model.sharded else None
        self.shards = Shards(model, self) if model.sharded else None
        self.static_scale = torch.ones((), device=device)  # at a fixed address, for CUDA graphs
        self.broken: Flags | None = None  # `bad` after the last step, on its way to the host

    # -- one step --------------------------------------------------------------------------------------------------

    def _step(self, batch: Batch | Sequence[Batch]) -> torch.Tensor:
        """One update from one batch or the micro-batches of one step. Returns the loss."""
        self.model.apply_deferred(before_step_of=self)
        if self.shards is None:
            batches, first, count, weight = self.model.to_device(batch), 0, None, 1.0
        else:
            batches, first, count, weight = shards.share(self.model, batch)
        reverses = 2 if self._norm_first else 1
        with self.dropout.step(), self.reverse.sweep(reverses, self.surveys):
            loss = self.reverse.forward(batches, lambda i: self.dropout.turn(first + i), count, weight)
            if self.shards is not None:
                loss = shards.total_loss(self.model, loss)

            def reverse(sink: Sink, last: bool) -> None:
                front: Any = sink if self.shards is None else self.shards.in_front_of(sink)
                self.reverse.reverse(front, loss_scale=self._factor, last=last)
                if self.shards is not None:
                    self.shards.add_up()
                    self._add_up_extra_gradients()

            if self.numbers is not None:
                self._update_unread(loss, reverse)
            elif self._may_update(loss):
                self._update(reverse)
        return loss

    @property
    def whole_tensors(self) -> bool:
        """Whether the rule needs a tensor's whole gradient, not only some of its elements."""
        return self.settings.clip_group_norm is not None

    @property
    def shares_matrices(self) -> bool:
        """Whether ranks can nevertheless update parts of matrices (matrix_parts.py)."""
        return False

    def _backward(self, loss: torch.Tensor) -> None:
        """Replaces loss.backward() in a training loop of your own over model.module: differentiates and updates."""
        self.reverse.check_loss(loss)
        if self._may_update(loss.detach()):
            self._update(lambda sink, last: self.reverse.walk(loss * self._factor, sink, last))

    @property
    def _norm_first(self) -> bool:
        return self.settings.max_grad_norm is not None or self.loss_scale is not None

    @property
    def _factor(self) -> float:
        return 1.0 if self.loss_scale is None else self.loss_scale.scale

    def _may_update(self, loss: torch.Tensor) -> bool:
        """Reads the loss; raises if the previous step was applied only in part."""
        self.raise_if_broken()
        for counter in (self.squares, self.changed):
            counter.zero_()
        self.norm = None
        return bool(torch.isfinite(loss))

    def _update_unread(self, loss: torch.Tensor, reverse: Any) -> None:
        """Like `_update`, but the host does not wait for the loss before it launches the backward pass. If the loss or
        the norm is not finite, the device multiplies gradients by nan, and then no weight changes; the host reads the
        flag after everything is launched, and does not count the step."""
        if self.broken is not None and self.broken.arrived:
            self.raise_if_broken()
        for counter in (self.squares, self.changed):
            counter.zero_()
        self.norm, fine = None, torch.isfinite(loss)
        self.grad_scale = self.static_scale
        self.grad_scale.copy_(torch.where(fine, 1 / self._factor, torch.nan))
        if self._norm_first:
            reverse(NormSink(self), False)
            self.norm = self.squares.total().sqrt()
            fine = fine & torch.isfinite(self.norm)
            limit = torch.inf if self.settings.max_grad_norm is None else self.settings.max_grad_norm
            clip = (limit / (self.norm + 1e-6)).clamp(max=1.0) / self._factor
            self.grad_scale.copy_(torch.where(fine, clip, torch.nan))
        found = Flags(fine)
        self.step_count += 1
        assert self.numbers is not None
        self.numbers.set(self.lr, self.step_count, self._beta)
        self._last_reverse(reverse)
        if self.norm is None and self.settings.grad_norm:
            self.norm = self.squares.total().sqrt()
        self.bad.mul_(fine)
        self.broken = Flags(self.bad)
        (applied,) = found.read()
        if self.loss_scale is not None:
            self.loss_scale.update(applied)
        if not applied:
            self.step_count -= 1
        elif self.step_count == 1:
            self._refuse_hidden_gradients()

    def _last_reverse(self, reverse: Any) -> None:
        """The backward pass that updates."""
        self.received.clear()
        self.table_squares.clear()
        try:
            reverse(self, True)
        except BaseException:  # out of memory, an interrupt: updates made so far stay
            if self.received:
                self.bad.fill_(1)
            else:
                self.step_count -= 1  # nothing was applied: the next step is this one
            raise

    @property
    def _beta(self) -> float:
        """Decay of moments in this step."""
        return 0.0

    def _update(self, reverse: Any) -> None:
        self._drop_extra_gradients()  # of a step that broke off
        self.grad_scale = None if self.loss_scale is None else torch.full_like(self.static_scale, 1 / self._factor)
        if self._norm_first:
            reverse(NormSink(self), False)
            self._add_extra_squares()
            self._drop_extra_gradients()
            self.norm = self.squares.total().sqrt()
            finite = bool(torch.isfinite(self.norm))
            if self.loss_scale is not None:
                self.loss_scale.update(finite)
            if not finite:
                return
            if self.settings.max_grad_norm is not None:
                clip = (self.settings.max_grad_norm / (self.norm + 1e-6)).clamp(max=1.0)
                self.grad_scale = clip if self.grad_scale is None else self.grad_scale * clip
        self.step_count += 1
        self._last_reverse(reverse)
        if self.norm is None and self.settings.grad_norm:
            self._add_extra_squares()
            self.norm = self.squares.total().sqrt()
        self._update_extra()
        if self.step_count == 1:
            self._refuse_hidden_gradients()

    def _add_up_extra_gradients(self) -> None:
        """Sums, over the ranks, gradients of parameters beside the model's (lomo_lora.py)."""

    def _add_extra_squares(self) -> None:
        """Adds the squares of the gradients of parameters beside the model's."""

    def _drop_extra_gradients(self) -> None:
        """Drops the gradients of parameters beside the model's."""

    def _update_extra(self) -> None:
        """Updates parameters beside the model's."""

    def _refuse_hidden_gradients(self) -> None:
        in_blocks = {t.name for t in self.trained if t.block is not None and t.param.requires_grad}
        if in_blocks and not in_blocks & self.received:
            raise UserError(
                f"{self.name}: no parameter of a block received a gradient; something around the model hides it "
                "(inference mode, a compiled or wrapped module, hooks that detach). Load it with keyhole.load."
            )

    # -- between steps ---------------------------------------------------------------------------------------------

    def raise_if_broken(self) -> None:
        """Raises if a non-finite gradient or an error came during a backward pass: blocks above were updated."""
        if not self.is_whole:
            raise UserError(
                f"step {self.step_count}: a gradient is not finite, or an error came in between, and part of the step "
                "had been applied: the weights in memory are not usable. Go on from the last checkpoint; with "
                "max_grad_norm set, gradients that are not finite are found before anything changes"
            )

    @property
    def is_whole(self) -> bool:
        """Whether no step was applied in part."""
        return not (self.step_count and int(self.bad))

    def _flush(self) -> None:
        """Nothing is deferred; raises if the weights are broken."""
        self.raise_if_broken()

    def metrics(self) -> dict[str, torch.Tensor | float]:
        """Numbers of the last step, on the device. grad_norm: of the whole gradient, unclipped; changed: share of
        weights."""
        found: dict[str, torch.Tensor | float]
        found = {} if self.norm is None else {"grad_norm": self.norm}
        if self.numbers is None and self._adds_directly(self.buffer):
            return found
        return found | {"changed": self.changed / sum(t.shape.numel() for t in self.trained)}

    def describe(self) -> list[str]:
        """Lines for the start block: the decisions made."""
        rounded = (
            self.settings.rounding
            if any(h.dtype != torch.float32 for h in self.model.engine.homes)
            else "none (float32)"
        )
        kept = {
            "none": "all kept",
            "block": "block inputs, blocks run twice",
            "host": "block inputs in host memory",
            "auto": "kept of as many blocks as fit, the others run twice",
        }
        clip = "the global norm, by a second reverse" if self.settings.max_grad_norm is not None else "none"
        clip = f"each element at {self.settings.clip_value:g}" if self.settings.clip_value is not None else clip
        clip = (
            f"each tensor's norm at {self.settings.clip_group_norm:g}"
            if self.settings.clip_group_norm is not None
            else clip
        )
        compiled = "; blocks compiled" if self.reverse.compiled is not None else ""
        return [
            f"rounding: {rounded}; activations: {kept[self.reverse.activations]}; clipping: {clip}{compiled}",
            *([] if self.loss_scale is None else ["loss scale: dynamic; every step looks for overflow first"]),
            *self.dropout.describe(),
        ]

    def _state(self) -> State:
        lost = {f"{name}/lost": tensor for name, tensor in self.compensation.items()}
        scale = {} if self.loss_scale is None else self.loss_scale.state_dict()
        return {"step_count": self.step_count, "seed": self.settings.seed, **self.dropout.state_dict(), **scale, **lost}

    def _load(self, state: Mapping[str, Any]) -> None:
        if self.reverse.recorded is not None:
            self.reverse.recorded.forget()  # the loaded moments have other addresses
        if state["seed"] != self.settings.seed:
            raise UserError(f"seed: the checkpoint was made with {state['seed']}, this run has {self.settings.seed}")
        self.dropout.load_state_dict(state)
        self.step_count = int(state["step_count"])
        self.bad.zero_()
        if self.loss_scale is not None:
            self.loss_scale.load_state_dict(state)
        self.compensation.clear()
        for name, value in state.items():
            if name.endswith("/lost"):
                self.compensation[name.removesuffix("/lost")] = value.to(self.model.device, copy=True)
