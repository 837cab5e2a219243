"""Baselines: torch's own AdamW and SGD, on a model that is resident on the device.

One step over micro-batches m with N trained tokens in all:   loss = (1/N) sum_m sum_tokens nll   (or the loss over
candidates, keyhole/model/objective.py). Each micro-batch has one backward pass; autograd accumulates the gradients,
which are clipped by their global norm; then torch's update follows. Bytes per parameter on the device, for weights and
gradients of b bytes: AdamW 4b (two moments in the weights' dtype), SGD 2b, with momentum 3b.

On several ranks each has all weights and its share of the micro-batches; gradients are summed tensor by tensor, in
float32 and in the order of ranks, and every rank makes the same update. A rank sends and receives 2 (N - 1) / N of the
gradients, in float32, after its backward pass: simple, and slower than buckets that overlap with the backward pass.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial

import torch
import torch.utils.checkpoint

from keyhole.errors import UserError, listed
from keyhole.methods.base import Saved, State
from keyhole.methods.baselines.traits import ADAMW, AdamWConfig, SGDConfig
from keyhole.methods.baselines.traits import SGD as ROW_OF_SGD
from keyhole.methods.by_torch import ByTorch, load_optimizer, optimizer_state, parameter_groups
from keyhole.methods.dropout import KEY, ModelDropout
from keyhole.methods.shards import share, sum_gradients, total_loss
from keyhole.methods.weight_decay import weight_decay_of
from keyhole.model.backward.attention import exact_attention
from keyhole.model.batch import Batch, DeviceBatch
from keyhole.model.structure.find import find_blocks


class TorchMethod(ByTorch):
    """Shared by the baselines here and in galore.py: the step, clipping, state by parameter name."""

    def _setup(self) -> None:
        model, own = self.model, self.settings
        if not model.device_weights.is_plain:
            raise UserError(
                f"method: {self.name} needs every weight on the device in the dtype it computes in; "
                "use placement=resident, or method=zo with placement=stream"
            )
        model.methods.attach(self)
        self.params = {t.name: t.param for t in model.layout.tensors if t.param.requires_grad}
        if not self.params:
            raise UserError("every parameter is frozen: there is nothing to train")
        self.dropout = ModelDropout(model, own.seed, own.model_dropout)
        self.optimizer = self._optimizer(
            parameter_groups(list(self.params.values()), weight_decay_of(model.module, own))
        )

    def _optimizer(self, groups: list[dict]) -> torch.optim.Optimizer:
        raise NotImplementedError  # abstract

    def call_before_update(self, callback: Callable[[], None]) -> None:
        self.optimizer.register_step_pre_hook(lambda *_: callback())

    def _step(self, batch: Batch | Sequence[Batch]) -> torch.Tensor:
        """One update from one batch or the micro-batches of one step. Returns the loss, on the device."""
        self.model.apply_deferred(before_step_of=self)
        ranks = self.model.ranks
        own = share(self.model, batch)
        total = torch.zeros((), device=self.model.device)
        try:
            with self.dropout.step():
                for k, b in enumerate(own.passes if own.weight else ()):
                    with self.dropout.turn(own.first + k):
                        total += self._differentiate(b, own.count)
                if ranks.several:
                    total = total_loss(self.model, total)
                    sum_gradients(ranks, list(self.params.values()), at_once=False)
                self._clip_and_step()
        finally:  # after an error too: a step that is tried again would add to these gradients
            self.optimizer.zero_grad(set_to_none=True)
        return total

    def _differentiate(self, batch: DeviceBatch, loss_count: int) -> torch.Tensor:
        """Adds the gradients of one micro-batch; returns its part of the loss."""
        longest, head = batch.inputs["input_ids"].shape[-1], self.model.head
        with exact_attention(self.model.device, longest) if self.settings.deterministic else nullcontext():
            with _checkpoint_blocks(self.model.module) if self.settings.keeps == "block" else nullcontext():
                hidden_NH = self.model.hidden(batch)
            if self.model.classifies:
                total = head.nll(hidden_NH, batch.target_N).sum()
            elif not batch.loss.entries:  # the sum over tokens
                total = head.loss_sum(hidden_NH, batch.target_N)
            else:
                total = batch.loss.total(head.nll_N(hidden_NH, batch.target_N))
            loss = total / loss_count
            loss.backward()
        return loss.detach()

    def describe(self) -> list[str]:
        """Lines for the start block."""
        return self.dropout.describe()

    def _state(self) -> State:
        return optimizer_state(self.optimizer, self.params) | self.dropout.state_dict()

    def _load(self, state: Saved) -> None:
        if foreign := [name for name in state if name.rpartition("/")[0] not in self.params and name != KEY]:
            raise UserError(f"{self.name}: the state is not of this model and method: it has {listed(foreign)}")
        self.dropout.load_state_dict(state)
        load_optimizer(self.optimizer, self.params, state)


@contextmanager
def _checkpoint_blocks(module: torch.nn.Module) -> Iterator[None]:
    """Activation checkpointing: a block is recomputed with its graph in the backward pass."""
    blocks = find_blocks(module)
    before = [block.__dict__.get("forward") for block in blocks]  # forwards set by blocks.py, for other methods
    for block in blocks:
        block.forward = partial(torch.utils.checkpoint.checkpoint, block.forward, use_reentrant=False)
    try:
        yield
    finally:
        for block, forward in zip(blocks, before, strict=True):
            del block.forward
            if forward is not None:
                block.forward = forward


class AdamW(TorchMethod):
    """torch.optim.AdamW."""

    row = ADAMW
    settings: AdamWConfig

    def _optimizer(self, groups: list[dict]) -> torch.optim.Optimizer:
        own = self.settings
        return torch.optim.AdamW(groups, lr=self.lr, betas=(own.beta1, own.beta2), eps=own.eps)


class SGD(TorchMethod):
    """torch.optim.SGD; its weight decay is added to the gradient, as torch does."""

    row = ROW_OF_SGD
    settings: SGDConfig

    def _optimizer(self, groups: list[dict]) -> torch.optim.Optimizer:
        return torch.optim.SGD(groups, lr=self.lr, momentum=self.settings.momentum)
