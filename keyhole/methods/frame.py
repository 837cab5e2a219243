"""A step of every method with gradients, block by block: one rank's share of the rows, forward, backward, update.

    settle      what other methods have deferred
    share       this rank's micro-batches (shards.py)
    forward     all micro-batches pass each block; the loss is the mean over all trained tokens of the step
    update      the method's part: it runs one backward pass or more (model/backward/reverse.py), each of which hands
                every complete gradient to a sink, and uses the gradients there and then (LOMO; once more before that
                where it must know the norm of all), on the host (adam-offload), or from .grad (LoRA)

A method defines `_update`, and what it keeps between steps.
"""

from collections.abc import Sequence
from typing import Protocol

import torch

from keyhole.methods import shards
from keyhole.methods.base import Method
from keyhole.methods.dropout import ModelDropout
from keyhole.model.backward.reverse import Reverse, check_loss
from keyhole.model.backward.sink import Sink
from keyhole.model.batch import Batch, DeviceBatch


class Backward(Protocol):
    """A backward pass of the step: hands every gradient of loss_scale * loss to the sink. last: no other follows."""

    def __call__(self, sink: Sink, *, loss_scale: float = 1.0, last: bool = True) -> None: ...


class GradientMethod(Method):
    """Forward and backward pass block by block, and an update that needs the gradient of one tensor at a time."""

    reverse: Reverse
    dropout: ModelDropout

    def _differentiate(self, fused: bool = True) -> None:
        """Makes what runs the passes of a step. fused: see Reverse."""
        model, own = self.model, self.settings
        if model.sharded:
            shards.check(own)
        self.reverse = Reverse(
            model,
            activations=own.keeps or "block",
            fused=fused,
            compiled=vars(own).get("compile", False),
            deterministic=own.deterministic,
        )
        self.dropout = ModelDropout(model, own.seed, own.model_dropout)

    @property
    def backward_passes(self) -> int:
        """Backward passes of the next step."""
        return 1

    def _step(self, batch: Batch | Sequence[Batch]) -> torch.Tensor:
        self.model.apply_deferred(before_step_of=self)
        batches, first, count, weight = shards.share(self.model, batch)
        self._begin(batch, batches)
        with self.dropout.step(), self.reverse.sweep(self.backward_passes):
            loss = self.reverse.forward(batches, lambda i: self.dropout.turn(first + i), count, weight)
            if self.model.ranks.several:
                loss = shards.total_loss(self.model, loss)
            self._update(loss, self.reverse.reverse)
        return loss

    def _backward(self, loss: torch.Tensor) -> None:
        """Replaces loss.backward() in a training loop of your own over model.module: differentiates and updates."""
        check_loss(self.model, loss)

        def backward(sink: Sink, *, loss_scale: float = 1.0, last: bool = True) -> None:
            self.reverse.walk(loss * loss_scale, sink, last)

        self._update(loss.detach(), backward)

    def _begin(self, batch: Batch | Sequence[Batch], batches: list[DeviceBatch]) -> None:
        """What comes before the forward pass. batches: this rank's share of the batch."""

    def _update(self, loss: torch.Tensor, backward: Backward) -> None:
        """Updates from the gradients of a step whose loss is known."""
        raise NotImplementedError  # abstract
