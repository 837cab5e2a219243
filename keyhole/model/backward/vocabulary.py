"""Loss, and gradients of embedding and head, in chunks of the vocabulary.

    loss       logits are computed chunk by chunk; per token only the running (max, sum) is kept
    head       the same logits are computed again, a chunk at a time, now with a graph: (softmax - onehot) times the
               weight of the token (objective.py) is differentiated with respect to hidden states and the chunk's rows
    embedding  a chunk's gradient is that of the tokens looked up in it, summed row by row. If the chunk is the head
               too (tied), the head's part is added: its logits are computed a third time, so that the gradient of the
               full vocabulary never exists.

If the head is resident and few tokens are trained (one-word answers, short batches), the logits of the loss are kept
with their graph, at most KEPT_BYTES of them, and nothing is computed again: the same bits, with a third of the
launches.

A vocabulary of one chunk uses torch's own cross entropy, with the same bits.
Legend: N trained tokens of a pass, M all tokens of a pass, H width, R rows of a chunk of the vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from keyhole.model.backward.sink import Sink, chunk
from keyhole.model.batch import DeviceBatch
from keyhole.model.forward.binding import rows_view
from keyhole.model.forward.head import HEAD_TOKENS
from keyhole.model.model import Model
from keyhole.model.structure.layout import Unit
from keyhole.ops.loss import RunningNLL

KEPT_BYTES = 64 * 2**20  # of logits, in float32
RowsGrad = Callable[[Unit, torch.Tensor], torch.Tensor | None]
"""(unit, its stored memory) -> grad_RH: the gradient of a chunk, if there is one."""


@dataclass
class _Embedded:
    """Rows of the table that a pass looked up, as a leaf, and their token ids."""

    ids_M: torch.Tensor
    rows_MH: nn.Parameter


@dataclass
class _Logits:
    """Logits of a chunk for a pass, with their graph and its leaves: hidden states, rows, bias."""

    logits_NR: torch.Tensor
    leaves: list[torch.Tensor | None]


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
        self.weights: list[torch.Tensor | None] = []  # weights of tokens in the loss, per pass; None: all 1
        self.scales: list[torch.Tensor] = []  # d loss / d nll of tokens: a scalar, or [N]
        self.embedded: list[_Embedded] = []  # a pass may look up twice
        self.labels: list[torch.Tensor] = []  # labels of a classifier, per pass
        self.kept: dict[tuple[int, int], _Logits] = {}  # by unit and pass

    def rows(self, index: int, ids_M: torch.Tensor) -> torch.Tensor:
        """[M, H] rows of the table for a pass, as a leaf if they are trained."""
        rows_MH = self.model.table_rows(ids_M).to(self.model.dtype)
        if not self.layout.table.param.requires_grad:
            return rows_MH
        self.embedded.append(_Embedded(ids_M, nn.Parameter(rows_MH)))
        return self.embedded[-1].rows_MH

    def drop_rows(self) -> None:
        """After the forward pass: the backward pass of a lookup needs only the shape of its rows. If the embedding
        does more, its graph may hold the rows, and they stay."""
        for one in self.embedded if is_plain_lookup(self.model.embedding) else ():
            one.rows_MH.data = one.rows_MH.new_zeros(()).expand(one.rows_MH.shape)

    def drop_hidden(self) -> None:
        """After the last gradient of the head. (A tied head's is computed with the embedding's.)"""
        if not self.layout.tied:
            self.hidden, self.kept = [], {}

    @torch.no_grad()
    def loss(
        self,
        hidden: list[torch.Tensor],
        batches: list[DeviceBatch],
        spine: torch.Tensor,
        loss_count: int | None = None,
        weight: float = 1.0,
    ) -> torch.Tensor:
        """The mean loss over all trained tokens, or all questions, of all passes; hidden: [N, H] per pass. loss_count:
        the number to divide by, if it is not theirs; weight: multiplies the loss and its gradients."""
        self.hidden, self.spine, self.weight = [x.detach() for x in hidden], spine, weight
        self.loss_count = loss_count or max(1, sum(b.loss.count for b in batches))
        if self.model.classifies:
            self.labels = [b.target_N for b in batches]
            nll = [self.model.head.nll(x, b.target_N) for x, b in zip(hidden, batches, strict=True)]
        else:
            nll = self._visit_head(batches)
        self.weights = [b.loss.weights(nll_N) for b, nll_N in zip(batches, nll, strict=True)]
        total = (
            torch.stack([b.loss.total(nll_N) for b, nll_N in zip(batches, nll, strict=True)]).sum() / self.loss_count
        )
        return total if weight == 1.0 else total * weight

    def _visit_head(self, batches: list[DeviceBatch]) -> list[torch.Tensor]:
        """The nll of every trained token, per pass."""
        self.running, keeps = [RunningNLL(b.target_N) for b in batches], self._keeps_logits()
        for unit in self.layout.head_units:
            weights = self.model.device_weights.acquire(unit)
            self.model.binding.bind_head(unit, weights, self.spine)
            for p, (state, hidden_NH) in enumerate(zip(self.running, self.hidden, strict=True)):
                if keeps:
                    trained = unit.tensors[0].param.requires_grad
                    made = self._logits(rows_view(unit, weights), hidden_NH, (True, trained, True))
                    self.kept[unit.index, p] = made
                    state.add(made.logits_NR.detach(), unit.span[0])
                else:
                    self.model.head.add_nll(state, hidden_NH.detach(), unit.span[0])
            self.model.engine.release(unit.index)
        return [state.nll_N() for state in self.running]

    def _keeps_logits(self) -> bool:
        """Whether the head is resident, in the dtype of compute, and its logits are few."""
        model, placed = self.model, self.model.placed
        moves = any(unit.index in model.engine.streamed for unit in self.layout.head_units) or model.sharded
        converts = model.formats.plain != model.dtype or model.formats.codec is not None or model.lens is not None
        budgeted = placed is not None and placed.budget_bytes is not None
        counts = [hidden_NH.shape[0] for hidden_NH in self.hidden]
        few = 4 * sum(counts) * self.layout.table.shape[0] <= KEPT_BYTES and max(counts) <= HEAD_TOKENS
        return few and not (moves or converts or budgeted)

    def _logits(self, weight_RH: torch.Tensor, hidden_NH: torch.Tensor, wants: tuple[bool, bool, bool]) -> _Logits:
        """Logits of the rows that the head is bound to; wants: which leaves need gradients. The rows may be updated
        once the gradient of the hidden states is computed: their own gradient does not need them, so autograd must not
        track their version (`.data`)."""
        head, bias = self.model.head, self.model.head.linear.bias
        x, leaf = hidden_NH.detach().requires_grad_(wants[0]), nn.Parameter(weight_RH.data, requires_grad=wants[1])
        bias = None if bias is None else nn.Parameter(bias.data, requires_grad=wants[2])
        with torch.enable_grad(), head.holding(leaf, bias):
            return _Logits(head.logits(x), [x, leaf, bias])

    def restart(self, loss_scale: float) -> None:
        """Prepares a backward pass of loss_scale * loss."""
        scale = torch.ones((), device=self.model.device) * (loss_scale * self.weight) / self.loss_count
        self.scales = [scale if weight_N is None else scale * weight_N for weight_N in self.weights]
        for embedded in self.embedded:
            embedded.rows_MH.grad = None

    def reverse_head(self, sink: Sink) -> list[torch.Tensor]:
        """Gradients of the hidden states, [N, H] per pass. Gradients of an untied head are handed over on the way. For
        a classifier: gradients of the logits."""
        if self.model.classifies:
            passes = zip(self.hidden, self.labels, self.scales, strict=True)
            return [self.model.head.nll_grad(*one).to(one[0].dtype) for one in passes]
        units, bias = self.layout.head_units, self.model.head.linear.bias
        bias_grad_V = None if bias is None else bias.new_zeros(units[-1].span[1])  # bias is bound to one chunk now
        trained = units[0].tensors[0].param.requires_grad and not self.layout.tied
        total: list[Any] = [None] * len(self.hidden)

        def rows_grad(unit: Unit, stored: torch.Tensor) -> torch.Tensor | None:
            weight_RH = rows_view(unit, self.model.device_weights.in_compute_dtype(unit, stored))
            dw_RH = db_R = None
            for p in range(len(self.hidden)):
                dx, dw, db = self._head_grads(unit, p, weight_RH, wants=(True, trained, bias is not None))
                total[p] = dx if len(units) == 1 else dx.float() if total[p] is None else total[p].add_(dx)
                dw_RH, db_R = _add(dw_RH, dw), _add(db_R, db)
            if bias_grad_V is not None:
                bias_grad_V[slice(*unit.span)] += db_R
            return dw_RH

        self._hand_over(units, rows_grad, sink, trained)
        if bias is not None and bias.requires_grad:
            self.model.binding.enter_block(None)  # binds the whole bias again: its gradient must have its size
            bias.grad = bias_grad_V
        for p, hidden_NH in enumerate(self.hidden):  # one by one: those in float32 are twice as large
            total[p] = total[p].to(hidden_NH.dtype)
        return total

    @torch.no_grad()
    def _hand_over(self, units: list[Unit], rows_grad: RowsGrad, sink: Sink, changes: bool = True) -> None:
        """Hands the gradient of each chunk of a table to the sink, under a name of its own."""
        engine = self.model.engine
        for unit in units:
            stored = engine.acquire(unit.index, changes=changes)
            if (grad_RH := rows_grad(unit, stored)) is not None:
                sink.gradient(chunk(unit), rows_view(unit, stored), grad_RH.contiguous())
                if sink.finished(unit):
                    engine.commit(unit.index)
            engine.release(unit.index)

    def hidden_grads(self) -> list[torch.Tensor]:
        """Gradients of the hidden states alone, [N, H] per pass: for methods that reverse nothing but the head."""
        total: list[Any] = [None] * len(self.hidden)
        for unit in self.layout.head_units:
            weight_RH = rows_view(unit, self.model.device_weights.acquire(unit))
            for p in range(len(self.hidden)):
                dx = self._head_grads(unit, p, weight_RH, wants=(True, False, False))[0]
                total[p] = dx.float() if total[p] is None else total[p].add_(dx)
            self.model.engine.release(unit.index)
        return total

    @torch.no_grad()
    def _head_rows_grad(self, unit: Unit, stored: torch.Tensor) -> torch.Tensor | None:
        """[R, H]: the gradient of a chunk of the head, over all passes."""
        weight_RH, grad_RH = rows_view(unit, self.model.device_weights.in_compute_dtype(unit, stored)), None
        for p in range(len(self.hidden)):
            grad_RH = _add(grad_RH, self._head_grads(unit, p, weight_RH, wants=(False, True, False))[1])
        return grad_RH

    def _head_grads(self, unit: Unit, p: int, weight_RH: torch.Tensor, wants: tuple[bool, bool, bool]) -> Any:
        """Gradients of the loss of pass p through one chunk of logits, with respect to hidden states, rows and bias."""
        first, kept = unit.span[0], self.kept.get((unit.index, p))
        if kept is None:
            self.model.binding.bind_head(unit, weight_RH.flatten(), self.spine)
        dx, dw, db = [], None, None
        slices, states, scale = self.hidden[p].split(HEAD_TOKENS), self.running[p].split(HEAD_TOKENS), self.scales[p]
        scales = scale.split(HEAD_TOKENS) if scale.ndim else [scale] * len(slices)
        for hidden_NH, state, scale in zip(slices, states, scales, strict=True):
            made = kept or self._logits(weight_RH, hidden_NH, wants)
            logits = made.logits_NR
            if len(self.layout.head_units) == 1:
                with torch.enable_grad():
                    reduction = "none" if scale.ndim else "sum"
                    logits = F.cross_entropy(logits.float(), state.targets_N, reduction=reduction)
                grad = scale
            else:
                grad = state.grad_(logits.detach().clone(), first, scale)
            inputs: list[Any] = [t for t, wanted in zip(made.leaves, wants, strict=True) if wanted]
            found = iter(torch.autograd.grad(logits, inputs, grad, retain_graph=kept is not None))
            if wants[0]:
                dx.append(next(found))
            dw = _add(dw, next(found)) if wants[1] else None
            db = _add(db, next(found)) if wants[2] else None
        return torch.cat(dx) if dx else None, dw, db

    @torch.no_grad()
    def reverse_embedding(self, sink: Sink) -> None:
        """Hands over gradients of the table, chunk by chunk, after the first block's."""
        if not self.layout.table.param.requires_grad:
            return
        looked_up = self._looked_up()

        def rows_grad(unit: Unit, stored: torch.Tensor) -> torch.Tensor | None:
            head_RH = self._head_rows_grad(unit, stored) if self.layout.tied else None
            return _add(head_RH, self._embedding_grad(unit, looked_up))

        self._hand_over(self.layout.of_kind("table"), rows_grad, sink)

    def _looked_up(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """([M] ids, [M, H] gradients) of all lookups of all passes; None: none has a gradient. Padding has the id -1:
        its lookup gives no gradient, as in torch's own embedding."""
        found = [e for e in self.embedded if e.rows_MH.grad is not None]
        if not found:
            return None
        ids_M = torch.cat([e.ids_M for e in found])
        if self.padding_idx is not None:
            ids_M = torch.where(ids_M == self.padding_idx, -1, ids_M)
        return ids_M, torch.cat([e.rows_MH.grad for e in found if e.rows_MH.grad is not None])

    def _embedding_grad(self, unit: Unit, looked_up: tuple[torch.Tensor, torch.Tensor] | None) -> torch.Tensor | None:
        """[R, H]: the gradients of the rows of this chunk that were looked up, summed row by row."""
        if looked_up is None:
            return None
        (ids_M, grad_MH), (first, end) = looked_up, unit.span
        ids_M = torch.where((ids_M < first) | (ids_M >= end), end - first, ids_M - first)  # other chunks: an extra row
        add_up = torch.ops.aten.embedding_dense_backward
        return add_up(grad_MH, ids_M, end - first + 1, -1, False)[: end - first]


def is_plain_lookup(module: nn.Module) -> bool:
    """Whether an embedding does nothing with its rows but return them."""
    plain = type(module).forward is nn.Embedding.forward and "forward" not in module.__dict__
    return plain and module.max_norm is None and not module._forward_hooks


def _add(total: torch.Tensor | None, more: torch.Tensor | None) -> torch.Tensor | None:
    if more is None or total is None:
        return more if total is None else total
    return total + more
