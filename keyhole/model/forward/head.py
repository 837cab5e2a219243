"""From hidden states to logits, without the full logits tensor.

After its decoder, a causal LM computes a matrix product and sometimes a bias, a scale or a soft cap; this differs from
model to model. So the model's own forward is run with the decoder replaced, for that one call, by a stand-in that
returns the given hidden states. The head may hold only a chunk of the vocabulary's rows: everything after the product
is elementwise in the logits, so a chunk of rows gives a chunk of logits. A head with a layer of its own before the
product (BERT) runs in two parts, each with the model's own code: up to the product, once per pass, and from there on.
Legend: N tokens, D width of the decoder, H width of the head, R rows of the vocabulary.
"""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import nn

from keyhole.errors import UserError
from keyhole.model import batch as checks
from keyhole.model.batch import Batch, DeviceBatch
from keyhole.model.forward.hooks import replaced_forwards
from keyhole.model.structure.find import find_decoder
from keyhole.model.structure.reach import is_unreached
from keyhole.ops.loss import RunningNLL

HEAD_TOKENS = 4096  # logits are computed for this many tokens at a time


class _HiddenStates:
    """Stands in for any decoder output: item 0 is the hidden states, every other attribute is None."""

    def __init__(self, hidden_1NH: torch.Tensor) -> None:
        self.last_hidden_state = hidden_1NH

    def __getitem__(self, key: Any) -> Any:
        return self.last_hidden_state if key in (0, "last_hidden_state") else ()

    def __getattr__(self, name: str) -> None:
        return None


class _Reached(Exception):
    """Raised at the output matrix, so that nothing after it runs."""


class Head:
    """The part of an HF causal LM after its decoder."""

    to_device = staticmethod(checks.to_device)

    def __init__(self, module: Any) -> None:
        self.module = module
        self.decoder = find_decoder(module)
        self.linear = module.get_output_embeddings()
        known = {id(p) for part in (self.decoder, self.linear) for p in part.parameters()}
        self.transforms = any(id(p) not in known and not is_unreached(p) for p in module.parameters())

    def check(self, batches: list[Batch], row_count: int) -> None:
        """UserError if the batches cannot be trained on together. row_count: of the embedding."""
        for batch in batches:
            checks.check(batch, row_count)
        checks.check_alike(batches)
        checks.warn_if_untrained(batches)

    def states(self, batch: DeviceBatch) -> torch.Tensor:
        """[N, H] hidden states at the positions that predict a trained token, as the output matrix needs them."""
        try:
            hidden_BTD = self.decoder(**batch.inputs, use_cache=False)[0]
        except Exception as error:
            if not getattr(self.module, "keyhole_untried", ""):
                raise
            name, why = type(self.module).__name__, " ".join(str(error).split())
            raise UserError(f"model: {name} cannot be run on a batch of tokens: {why}") from error
        return self.transformed(hidden_BTD.flatten(0, 1)[batch.index_N])

    def transformed(self, hidden_ND: torch.Tensor) -> torch.Tensor:
        """[N, H] the input of the output matrix: the hidden states, or the output of the head's own layer (BERT and its
        kin), whose parameters are then part of the same graph as the decoder's."""
        if not self.transforms:
            return hidden_ND
        self._decoder_width = hidden_ND.shape[-1]
        seen: list[torch.Tensor] = []

        def stop(linear: nn.Module, args: tuple) -> None:
            seen.append(args[0][0])
            raise _Reached

        with suppress(_Reached), self.linear.register_forward_pre_hook(stop):
            self._run(hidden_ND)
        return seen[0]

    def logits(self, hidden_NH: torch.Tensor) -> torch.Tensor:
        """[N, V] logits (or [N, R] while the head holds a chunk), through the model's own code."""
        if not self.transforms:
            return self._run(hidden_NH)
        unused_ND = hidden_NH.new_zeros(()).expand(hidden_NH.shape[0], self._decoder_width)
        with self.linear.register_forward_pre_hook(lambda linear, args: (hidden_NH[None],)):
            return self._run(unused_ND)

    def _run(self, hidden_ND: torch.Tensor) -> torch.Tensor:
        token = torch.zeros((1, 1), dtype=torch.long, device=hidden_ND.device)
        with replaced_forwards([self.decoder], [lambda *args, **kwargs: _HiddenStates(hidden_ND[None])]):
            try:
                return self.module(input_ids=token, use_cache=False).logits[0]
            except (AttributeError, TypeError) as error:
                name = type(self.module).__name__
                raise UserError(
                    f"model: the head of {name} needs more of its decoder than hidden states, and such models are not "
                    f"supported ({' '.join(str(error).split())})"
                ) from error

    def bind(self, weight_RH: torch.Tensor, bias_R: torch.Tensor | None) -> None:
        """Points the head to these rows."""
        self.linear.weight.data = weight_RH
        if bias_R is not None:
            self.linear.bias.data = bias_R

    @contextmanager
    def holding(self, weight_RH: nn.Parameter, bias_R: nn.Parameter | None) -> Iterator[None]:
        """A context in which the head has other parameters, which are leaves of their own graph."""
        own = self.linear._parameters
        before = own["weight"], own.get("bias")
        own["weight"], own["bias"] = weight_RH, bias_R
        try:
            yield
        finally:
            own["weight"], own["bias"] = before

    def add_nll(self, running: RunningNLL, hidden_NH: torch.Tensor, first_row: int, tokens: int = HEAD_TOKENS) -> None:
        """Adds the bound rows' logits to a running loss, in slices of tokens if there are many."""
        for part, x in zip(running.split(tokens), hidden_NH.split(tokens), strict=True):
            part.add(self.logits(x), first_row)

    def loss_sum(self, hidden_NH: torch.Tensor, target_N: torch.Tensor, tokens: int = 1024) -> torch.Tensor:
        """Summed NLL with gradients, for a head that holds all rows; computes logits of `tokens` tokens at a time."""
        return torch.stack(self._parts(hidden_NH, target_N, tokens, "sum")).sum()

    def nll_N(self, hidden_NH: torch.Tensor, target_N: torch.Tensor, tokens: int = 1024) -> torch.Tensor:
        """Like `loss_sum`, but one NLL per token."""
        return torch.cat(self._parts(hidden_NH, target_N, tokens, "none"))

    def _parts(
        self, hidden_NH: torch.Tensor, target_N: torch.Tensor, tokens: int, reduction: str
    ) -> list[torch.Tensor]:
        def part(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return nn.functional.cross_entropy(self.logits(x).float(), y, reduction=reduction)

        parts = zip(hidden_NH.split(tokens), target_N.split(tokens), strict=True)
        if not torch.is_grad_enabled():
            return [part(x, y) for x, y in parts]
        return [torch.utils.checkpoint.checkpoint(part, x, y, use_reentrant=False) for x, y in parts]
