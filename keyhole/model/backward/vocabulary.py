"""Loss, and gradients of embedding and head, in chunks of the vocabulary.

    loss       logits are computed chunk by chunk; per token only the running (max, sum) is kept
    head       the same logits are computed again, a chunk at a time, now with a graph: (softmax - onehot) times the
               weight of the token (objective.py) is differentiated with respect to hidden states and the chunk's rows
    embedding  a chunk's gradient is that of the tokens looked up in it, summed row by row. If the chunk is the head
               too (tied), the head's part is added: its logits are computed a third time, so that the gradient of the
               full vocabulary never exists.

If the model is resident and few tokens are trained (one-word answers, short batches), the logits of the loss are kept
with their graph, at most KEPT_BYTES of them, and nothing is computed again: the same bits, with a third of the
launches.

A vocabulary of one chunk uses torch's own cross entropy, with the same bits.
Legend: N trained tokens of a pass, M all tokens of a pass, H width, R rows of a chunk of the vocabulary.
"""

from collections.abc import Iterator
from functools import reduce
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from keyhole.model.backward.activation_store import ActivationStore, HostActivation
from keyhole.model.backward.memory import GROUP
from keyhole.model.backward.sink import Sink, chunk
from keyhole.model.batch import DeviceBatch
from keyhole.model.forward.binding import rows_view
from keyhole.model.forward.evaluation import after_the_head
from keyhole.model.forward.head import HEAD_TOKENS
from keyhole.model.model import Model
from keyhole.model.structure.layout import Unit
from keyhole.ops.loss import RunningNLL

KEPT_BYTES = 64 * 2**20  # of logits, in float32
Grad = torch.Tensor | None
Logits = tuple[torch.Tensor, list[Grad]]  # [N, R] with their graph, and its leaves: hidden states, rows, bias


class VocabularyGradients:
    """Embedding, loss and head of the passes of one step, in forward and backward pass."""

    def __init__(self, model: Model) -> None:
        self.model, self.layout = model, model.layout
        self.padding_idx = model.embedding.padding_idx
        self.forget()

    def forget(self) -> None:
        """Drops all tensors of the last step."""
        self.hidden: list[torch.Tensor] = []
        self.running: list[RunningNLL] = []
        self.batches: list[DeviceBatch] = []
        self.weights: list[Grad] = []  # weights of tokens in the loss, per pass; None: all 1
        self.scales: list[torch.Tensor] = []  # d loss / d nll of tokens: a scalar, or [N]
        self.embedded: list[tuple[torch.Tensor, nn.Parameter]] = []  # ids [M] and rows [M, H] that a pass looked up
        self.kept: dict[tuple[int, int], Logits] = {}  # by unit and pass
        self.row_grads: list[tuple[torch.Tensor, HostActivation]] = []  # of rows that were looked up, in host memory

    def rows(self, index: int, ids_M: torch.Tensor) -> torch.Tensor:
        """[M, H] rows of the table for a pass, as a leaf if they are trained. (A pass may look up twice.)"""
        rows_MH = self.model.table_rows(ids_M).to(self.model.dtype)
        if not self.layout.table.param.requires_grad:
            return rows_MH
        leaf = nn.Parameter(rows_MH)
        self.embedded.append((ids_M, leaf))
        return leaf

    def drop_rows(self) -> None:
        """After the forward pass: the backward pass of a lookup needs only the shape of its rows. If the embedding
        does more, its graph may hold the rows, and they stay."""
        module = self.model.embedding
        plain = type(module).forward is nn.Embedding.forward and "forward" not in module.__dict__
        plain = plain and module.max_norm is None and not module._forward_hooks
        for _, leaf in self.embedded if plain else ():
            leaf.data = leaf.new_zeros(()).expand(leaf.shape)

    def drop_hidden(self) -> None:
        """After the last gradient of the head. (A tied head's is computed with the embedding's.)"""
        if not self.layout.tied:
            self.hidden, self.kept = [], {}

    @torch.no_grad()
    def loss(
        self,
        hidden: list[torch.Tensor],
        batches: list[DeviceBatch],
        common: torch.Tensor,
        loss_count: int | None = None,
        weight: float = 1.0,
    ) -> torch.Tensor:
        """The mean loss over all trained tokens, or all questions, of all passes; hidden: [N, H] per pass. loss_count:
        the number to divide by, if it is not theirs; weight: multiplies the loss and its gradients."""
        self.hidden, self.common, self.weight = [x.detach() for x in hidden], common, weight
        self.loss_count, self.batches = loss_count or max(1, sum(b.loss.count for b in batches)), batches
        if self.model.classifies:
            nll = [self.model.head.nll(x, b.target_N) for x, b in zip(hidden, batches, strict=True)]
        else:
            self.running = self._running(batches)
            nll = [one.nll_N() for one in self.running]
        self.weights = [b.loss.weights(nll_N) for b, nll_N in zip(batches, nll, strict=True)]
        totals = [b.loss.total(nll_N) for b, nll_N in zip(batches, nll, strict=True)]
        total = torch.stack(totals).sum() / self.loss_count
        return total if weight == 1.0 else total * weight

    def _running(self, batches: list[DeviceBatch]) -> list[RunningNLL]:
        """The loss of every trained token, per pass; the logits are kept if they are few."""
        if not self._keeps_logits():
            return after_the_head(self.model, self.hidden, batches, self.common)
        running = [RunningNLL(b.target_N) for b in batches]
        for unit, _, weight_RH in self._visited(self.layout.head_units, changes=False):
            wants = (True, unit.tensors[0].param.requires_grad, True)
            for p, (state, hidden_NH) in enumerate(zip(running, self.hidden, strict=True)):
                self.kept[unit.index, p] = made = self._logits(unit, weight_RH, hidden_NH, wants)
                state.add(made[0].detach(), unit.span[0])
        return running

    def _keeps_logits(self) -> bool:
        """Whether all weights are resident, in the dtype of compute, and the logits are few."""
        model, counts = self.model, [hidden_NH.shape[0] for hidden_NH in self.hidden]
        budgeted = model.placed is not None and model.placed.budget_bytes is not None
        few = 4 * sum(counts) * self.layout.table.shape[0] <= KEPT_BYTES and max(counts) <= HEAD_TOKENS
        return few and model.device_weights.is_plain and not (model.sharded or budgeted)

    def _logits(
        self, unit: Unit, weight_RH: torch.Tensor, hidden_NH: torch.Tensor, wants: tuple[bool, bool, bool]
    ) -> Logits:
        """Logits of a chunk; wants: which leaves need gradients. The rows may be updated once the gradient of the
        hidden states is computed: their own gradient does not need them, so autograd must not track their version
        (`.data`)."""
        self.model.binding.bind_head(unit, weight_RH.flatten(), self.common)
        head, bias = self.model.head, self.model.head.linear.bias
        x, leaf = hidden_NH.detach().requires_grad_(wants[0]), nn.Parameter(weight_RH.data, requires_grad=wants[1])
        own_bias = None if bias is None else nn.Parameter(bias.data, requires_grad=wants[2])
        with torch.enable_grad(), head.holding(leaf, own_bias):
            return head.logits(x), [x, leaf, own_bias]

    def restart(self, loss_scale: float) -> None:
        """Prepares a backward pass of loss_scale * loss."""
        scale = torch.ones((), device=self.model.device) * (loss_scale * self.weight) / self.loss_count
        self.scales = [scale if weight_N is None else scale * weight_N for weight_N in self.weights]
        self.row_grads = []
        for _, leaf in self.embedded:
            leaf.grad = None

    def move_row_grads(self, store: ActivationStore) -> None:
        """A pass is through the first block: the gradients of its rows wait in host memory."""
        for ids_M, leaf in self.embedded:
            if leaf.grad is not None:
                self.row_grads.append((ids_M, store.move(leaf.grad)))
                leaf.grad = None

    # -- head ------------------------------------------------------------------------------------------------------

    def reverse_head(self, sink: Sink, grouped: bool = False) -> Iterator[tuple[int, torch.Tensor]]:
        """Each pass with the gradient of its hidden states, [N, H]; of a classifier: that of the logits. Gradients of
        an untied head are handed over on the way. grouped: so many passes at a time that the gradients in float32 are
        of at most GROUP tokens; the head's own come last then, from logits that are computed again: the same bits."""
        if self.model.classifies:
            for p, (x, b, scale) in enumerate(zip(self.hidden, self.batches, self.scales, strict=True)):
                yield p, self.model.head.nll_grad(x, b.target_N, scale).to(x.dtype)
            return
        groups = self._groups() if grouped else [list(range(len(self.hidden)))]
        for group in groups:
            total = self.hidden_grads(sink, group, rows=len(groups) == 1)
            for p in group:  # one by one: those in float32 are twice as large
                yield p, total.pop(p).to(self.hidden[p].dtype)
        if len(groups) > 1:
            self.hidden_grads(sink, states=False)

    def _groups(self) -> list[list[int]]:
        """Consecutive passes."""
        groups: list[list[int]] = [[]]
        for p, hidden_NH in enumerate(self.hidden):
            if groups[-1] and sum(self.hidden[q].shape[0] for q in groups[-1]) + hidden_NH.shape[0] > GROUP:
                groups.append([])
            groups[-1].append(p)
        return groups

    @torch.no_grad()
    def hidden_grads(
        self, sink: Sink | None = None, passes: list[int] | None = None, states: bool = True, rows: bool = True
    ) -> dict[int, torch.Tensor]:
        """By pass, of these or of all: the gradient of the hidden states, [N, H] in float32 (states). sink: gets those
        of head and bias (rows); None: for methods that differentiate nothing but the hidden states."""
        passes = list(range(len(self.hidden))) if passes is None else passes
        units, bias = self.layout.head_units, self.model.head.linear.bias if sink is not None and rows else None
        trained = sink is not None and rows and units[0].tensors[0].param.requires_grad and not self.layout.tied
        bias_grad_V = None if bias is None else bias.new_zeros(units[-1].span[1])  # bias is bound to one chunk now
        total: dict[int, torch.Tensor] = {}
        if not (states or trained or bias is not None):
            return total
        for unit, stored, weight_RH in self._visited(units, changes=trained):
            dw_RH: Grad = None
            for p in passes:
                dx, dw, db = self._head_grads(unit, p, weight_RH, (states, trained, bias is not None))
                if states:
                    total[p] = total[p].add_(dx) if p in total else dx.float()
                dw_RH = _add(dw_RH, dw)
                if bias_grad_V is not None:
                    bias_grad_V[slice(*unit.span)] += db
            self._hand_over(unit, stored, dw_RH, sink)
        if bias is not None and bias.requires_grad:
            self.model.binding.enter_block(None)  # binds the whole bias again: its gradient must have its size
            bias.grad = bias_grad_V
        return total

    def _visited(self, units: list[Unit], changes: bool = True) -> Iterator[tuple[Unit, torch.Tensor, torch.Tensor]]:
        """Each unit of a table, while it is on the device: its memory, and its rows in the dtype of compute."""
        for unit in units:
            stored = self.model.engine.acquire(unit.index, changes=changes)
            yield unit, stored, rows_view(unit, self.model.device_weights.in_compute_dtype(unit, stored))
            self.model.engine.release(unit.index)

    def _hand_over(self, unit: Unit, stored: torch.Tensor, grad_RH: Grad, sink: Sink | None) -> None:
        """Hands the gradient of a chunk of a table, if there is one, to the sink, under a name of its own."""
        if grad_RH is not None and sink is not None:
            sink.gradient(chunk(unit), rows_view(unit, stored), grad_RH.contiguous())
            if sink.finished(unit):
                self.model.engine.commit(unit.index)

    def _head_grads(self, unit: Unit, p: int, weight_RH: torch.Tensor, wants: tuple[bool, bool, bool]) -> Any:
        """Gradients of the loss of pass p through one chunk of logits, with respect to hidden states, rows and bias."""
        kept, found = self.kept.get((unit.index, p)), []
        slices, states, scale = self.hidden[p].split(HEAD_TOKENS), self.running[p].split(HEAD_TOKENS), self.scales[p]
        scales = scale.split(HEAD_TOKENS) if scale.ndim else [scale] * len(slices)
        for hidden_NH, state, scale in zip(slices, states, scales, strict=True):
            logits_NR, leaves = kept or self._logits(unit, weight_RH, hidden_NH, wants)
            end, grad = logits_NR, scale
            if len(self.layout.head_units) > 1:
                grad = state.grad_(logits_NR.detach().clone(), unit.span[0], scale)
            else:
                with torch.enable_grad():
                    reduction = "none" if scale.ndim else "sum"
                    end = F.cross_entropy(logits_NR.float(), state.targets_N, reduction=reduction)
            wanted: list[Any] = [t for t, want in zip(leaves, wants, strict=True) if want]
            found.append(torch.autograd.grad(end, wanted, grad, retain_graph=kept is not None))
        parts = zip(*found, strict=True)
        dx = torch.cat(next(parts)) if wants[0] else None
        return dx, *(reduce(torch.add, next(parts)) if want else None for want in wants[1:])

    # -- embedding -------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def reverse_embedding(self, sink: Sink) -> None:
        """Hands over gradients of the table, chunk by chunk, after the first block's."""
        if not self.layout.table.param.requires_grad:
            return
        looked_up = [(ids_M, leaf.grad) for ids_M, leaf in self.embedded if leaf.grad is not None]
        for unit, stored, weight_RH in self._visited(self.layout.of_kind("table")):
            grad_RH: Grad = None
            for p in range(len(self.hidden)) if self.layout.tied else ():
                grad_RH = _add(grad_RH, self._head_grads(unit, p, weight_RH, (False, True, False))[1])
            of_rows = self._embedding_grad(unit, looked_up)
            for ids_M, moved in self.row_grads:  # one by one: together they are as large as the hidden states
                of_rows = _add(of_rows, self._embedding_grad(unit, [(ids_M, moved.get())]))
            self._hand_over(unit, stored, _add(grad_RH, of_rows), sink)
        for _, moved in self.row_grads:
            moved.release()

    def _embedding_grad(self, unit: Unit, found: list[tuple[torch.Tensor, torch.Tensor]]) -> Grad:
        """[R, H]: the gradients of the rows of this chunk, summed row by row over all lookups. Padding has none, as in
        torch's own embedding."""
        if not found:
            return None
        ids_M, (first, end) = torch.cat([ids_M for ids_M, _ in found]), unit.span
        elsewhere_M = (ids_M < first) | (ids_M >= end)
        if self.padding_idx is not None:
            elsewhere_M |= ids_M == self.padding_idx
        ids_M = torch.where(elsewhere_M, end - first, ids_M - first)  # an extra row
        add_up = torch.ops.aten.embedding_dense_backward
        return add_up(torch.cat([grad for _, grad in found]), ids_M, end - first + 1, -1, False)[: end - first]


def _add(total: Grad, more: Grad) -> Grad:
    if more is None or total is None:
        return more if total is None else total
    return total + more
