"""A step of every method with gradients, block by block: one rank's share of the micro-batches, forward, backward,
update. (Method.step in base.py takes up or refuses what a caller has changed, then calls `_step`.)

    settle      what other methods have deferred is applied to the weights
    share       the micro-batches of the step, split into passes that the budget has room for (batch.py), and of
                these this rank's (shards.py); a rank without any repeats one with weight 0
    forward     all passes go through a block while its weights are there; the loss is the mean over all trained tokens
                (or questions) of all ranks, so several passes are one large batch
    update      the method's part: it runs one backward pass or more over that one forward (model/backward/reverse.py).
                Each hands every gradient of a trained weight, summed over the micro-batches, perhaps as two factors, to
                a sink, an object of the method's (model/backward/sink.py). It changes the weight there and then, and
                the block goes home when its last gradient was used (LOMO); or passes the gradient to the host, which
                updates while the pass goes on and until the next forward (adam-offload); or adds it to .grad (LoRA).
                To clip by the norm of all gradients, LOMO makes a pass first that changes nothing (also in float16, to
                see an overflow); for adam-offload updates wait for the norm; LoRA has every .grad

Gradients are of this rank's share: the method adds those of all ranks where it has them. Nothing here looks for
numbers that are not finite: `_update` does. Where a norm is known first, nothing has changed by then; in a single pass
the blocks above are updated already (`is_whole` is false then, and nothing is saved). A method makes the objects that
run its passes in its `_setup` (`_differentiate`), defines `_update`, and what it keeps between steps (base.py).
"""

from collections.abc import Sequence
from typing import Protocol

import torch

from keyhole.methods import shards
from keyhole.methods.base import Method
from keyhole.methods.dropout import ModelDropout
from keyhole.model.backward.refusals import check_loss
from keyhole.model.backward.reverse import Reverse
from keyhole.model.backward.sink import Sink
from keyhole.model.batch import Batch


class Backward(Protocol):
    """A backward pass of the step: hands every gradient of loss_scale * loss, of this rank's share, to the sink. Called
    as often as the update needs it. last: no other follows."""

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
        """Backward passes of the next step, at most."""
        return 1

    def _step(self, batch: Batch | Sequence[Batch]) -> torch.Tensor:
        self.model.apply_deferred(before_step_of=self)
        own = shards.share(self.model, batch)
        self._begin(own)
        with self.dropout.step(), self.reverse.sweep(self.backward_passes):
            loss = self.reverse.forward(own.passes, lambda i: self.dropout.turn(own.first + i), own.count, own.weight)
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

    def _begin(self, own: shards.Share) -> None:
        """What comes before the forward pass."""

    def _update(self, loss: torch.Tensor, backward: Backward) -> None:
        """Updates from the gradients of a step whose loss is known."""
        raise NotImplementedError  # abstract
