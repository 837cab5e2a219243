"""Low-rank directions that follow the error (zo.guide): V of a period from forward passes over some rows.

At the start of each period, before its first step, `zo.guide` rows pass the model without perturbation:

    1. the inputs of every trained linear layer are kept, at the positions that predict a trained token (with the loss
       over tokens, at MOST_POSITIONS of them)
    2. after the head, the gradient of the loss with respect to the hidden states before it, D: the head alone is
       reversed (head_errors.py)
    3. from both, V of every layer (error_directions.py), for layers of one width at once

If the inputs take more than KEPT_BYTES (those that several layers read count once), they are given up, and computed
again in a second sweep, in which V of a layer follows as soon as all passes have left it. A classifier always has two:
which positions its head reads is known after the first. A layer whose input is
something else than tokens in the order of the batch keeps its random V, and so does a column for which there is no
error: a rank above the number of its components has random directions beside those that follow the error.

The rows are those of the coming steps (the training loop looks ahead; their order is a function of the seed, so a
resumed run has the same), or in one's own loop those given to `look_ahead`, or those of the step itself. Of several
ranks, each passes all of them, as one process would, and takes the leader's V, since kernels of another machine may
round otherwise.

V depends on weights and data, so it cannot be drawn again. It is part of a checkpoint, and with a journal each period's
V is a file beside it (direction_files.py), which is on the disk before the first record of the period is: with these a
replay needs neither data nor passes.

Bytes on the device: hidden states of all guide rows; for N positions 4 N H (D); the inputs, b N I per layer, at most
KEPT_BYTES or those of one block; and 4 N I for the layers that are solved at once, at most SOLVED_BYTES or one layer.
"""

import math
from dataclasses import replace
from typing import Any

import torch

from keyhole import ops
from keyhole.errors import UserError
from keyhole.methods.zo.looks import send_options
from keyhole.methods.zo.low_rank.direction_files import DirectionFiles
from keyhole.methods.zo.low_rank.error_directions import predictors, principal_errors
from keyhole.methods.zo.low_rank.factors import Factors
from keyhole.methods.zo.low_rank.head_errors import class_errors, token_errors
from keyhole.methods.zo.low_rank.parts import ALIGN
from keyhole.model.batch import Batch, DeviceBatch
from keyhole.model.forward.evaluation import swept

KEPT_BYTES, SOLVED_BYTES = 256 * 2**20, 64 * 2**20
MOST_POSITIONS = 4096  # of the loss over tokens
PASS_BYTES = 128 * 2**20  # of the widest activation of a pass that looks ahead, unless a step's are larger


class Guide:
    """Computes the V of periods. files: where they are kept; None: nowhere."""

    def __init__(self, factors: Factors, rows: int) -> None:
        model = factors.model
        if not model.classifies and model.head.transforms:
            raise UserError("zo.guide: needs a head that is a matrix, or a classifier; set zo.guide=null")
        self.factors, self.rows = factors, rows
        self.files: DirectionFiles | None = None
        self.ahead: list[Batch] = []
        self.inputs: _Inputs | None = None  # during the passes
        self.lines: list[str] = []
        self.random: int | None = None  # number of layers that kept their random V, in the last period

    @property
    def is_due(self) -> bool:
        """Whether the next step begins a period whose V is not known."""
        return self.factors.found_for != self.factors.period

    @property
    def tokens(self) -> int:
        """The most tokens of a pass, unless those of a step have more."""
        return tokens_per_pass(self.factors.model.layout.widest, self.factors.model.dtype.itemsize)

    def read(self, period: int) -> torch.Tensor:
        """V of a period, from its file."""
        if self.files is None:
            raise UserError("zo.guide: directions are files beside the journal, and no journal is known")
        return self.files.read(period, self.factors.v, first_step=period * self.factors.refresh + 1)

    @torch.no_grad()
    def renew(self, batches: list[Batch]) -> None:
        """Before the first step of a period: computes V, from weights to which the update was applied. batches: those
        of the step; a closure has none."""
        period, rows = self.factors.period, self.ahead or batches
        if not rows:
            raise UserError(
                "closure: zo.guide finds the directions of a period from rows, and a closure has none; call "
                "look_ahead(batches) before a step, if rows_ahead is not None"
            )
        self.ahead = []
        v, ranks = self._find(rows, period), self.factors.model.ranks
        if ranks.several:
            v = ranks.from_leader(v.cpu).to(v.device)
        if self.files is not None and ranks.is_leader:
            self.files.write(v, period)
        self.factors.take_v(v, period)

    def _find(self, batches: list[Batch], period: int) -> torch.Tensor:
        model, factors = self.factors.model, self.factors
        sent = model.send(batches, **send_options(batches))
        sent = sent if model.classifies else _thinned(sent)
        self.inputs = inputs = _Inputs(factors, sent)
        try:
            if model.classifies:
                inputs.at, errors = class_errors(model, sent, MOST_POSITIONS)
            else:
                positions = [torch.unique(batch.index_N, return_inverse=True) for batch in sent]
                inputs.at = [at_N for at_N, _ in positions]
                inputs.keeps = may_keep(inputs.bytes)
                errors = token_errors(model, sent, positions)
            d_NH = torch.cat(errors)
            at, shape = _after(factors), (len(d_NH), factors.rank)
            start = ops.draw_noise(math.prod(shape), offset=at, step=period, device=model.device, **factors.noise)
            inputs.drawn, inputs.found = factors.draw_v(period), factors.draw_v(period)
            inputs.y_Nr = principal_errors(d_NH, start.view(shape))
            if inputs.keeps:
                inputs.solve()
            else:
                swept(model, sent, lambda hidden, spine: [], head=False)
            self._note(len(factors.parts.matrices) - len(inputs.solved))
            return inputs.found
        finally:
            self.inputs = None

    def _note(self, random: int) -> None:
        """Makes a line for the user of layers whose V could not be found, if their number is new."""
        if random and random != self.random:
            self.lines.append(
                f"zo.guide: V of {random} of {len(self.factors.parts.matrices)} layers is random in this period: their "
                "inputs are not the tokens of a batch, each once"
            )
        self.random = random

    def news(self) -> list[str]:
        """Lines for the user; each is returned once."""
        told, self.lines = self.lines, []
        return told


def may_keep(input_bytes: int) -> bool:
    """Whether inputs are kept, as far as KEPT_BYTES go. input_bytes: of all layers, as if each read its own; about half
    of them are the same (q, k and v, gate and up)."""
    return input_bytes <= 2 * KEPT_BYTES


def tokens_per_pass(widest: int, element_bytes: int) -> int:
    """So many that the widest activation takes PASS_BYTES."""
    return max(1, PASS_BYTES // (element_bytes * widest))


def _thinned(sent: list[DeviceBatch]) -> list[DeviceBatch]:
    """The batches with every k-th of the trained tokens only, if there are many (a choice needs all of a candidate)."""
    every = -(-sum(batch.token_count for batch in sent) // MOST_POSITIONS)
    if every <= 1 or sent[0].loss.entries:
        return sent
    names = ("index_N", "target_N", "row_N")
    fewer = [{name: getattr(batch, name)[::every] for name in names} for batch in sent]
    return [replace(b, **few, token_count=few["index_N"].numel()) for b, few in zip(sent, fewer, strict=True)]


def _after(factors: Factors) -> int:
    """The first index of noise after that of all V."""
    return factors.parts.v_start + -(-factors.parts.v_numel // ALIGN) * ALIGN


class _Inputs:
    """The inputs of layers at the positions `at` of each pass, by matrix and pass. keeps: they are kept until `solve`,
    unless they become too many; else, once the errors y_Nr are known, V of a layer is computed as soon as all its
    inputs are there."""

    def __init__(self, factors: Factors, sent: list[DeviceBatch]) -> None:
        self.factors = factors
        self.at: list[torch.Tensor] = []
        self.tokens = [batch.inputs["input_ids"].numel() for batch in sent]
        self.keeps, self.y_Nr = False, torch.empty(0)
        self.kept_bytes = 0
        self.drawn = self.found = torch.empty(0)  # all V: random, and what becomes of them
        self.seen: dict[int, dict[int, torch.Tensor]] = {}
        self.solved: set[int] = set()  # matrices with a V
        self.odd: set[int] = set()  # matrices whose inputs are not the tokens of a pass, once each
        self.last: tuple[Any, torch.Tensor] | None = None  # an input, and its part: several layers read the same

    @property
    def bytes(self) -> int:
        """What the inputs of all layers take, if each has its own."""
        inputs = sum(matrix.inputs for matrix in self.factors.parts.matrices)
        return self.factors.model.dtype.itemsize * sum(map(len, self.at)) * inputs

    def see(self, index: int, x: torch.Tensor) -> None:
        """Called with the input of a layer."""
        if not self.keeps and not self.y_Nr.numel():
            return
        conductor, parts = self.factors.model.conductor, self.seen.setdefault(index, {})
        assert conductor is not None  # a pass is running
        current = conductor.current.index
        again = current in parts or index in self.solved
        if x.shape[:-1].numel() != self.tokens[current] or again or index in self.odd:
            self._leave_random(index)
            return
        if self.last is None or self.last[0] is not x:
            self.last = x, x.reshape(self.tokens[current], -1)[self.at[current]]
            self.kept_bytes += self.last[1].nbytes if self.keeps else 0
        parts[current] = self.last[1]
        if self.keeps and self.kept_bytes > KEPT_BYTES:
            self.keeps, self.seen, self.last = False, {}, None
            return
        if not self.keeps and len(parts) == len(self.at):
            self.solve([index])
            self.seen[index] = {}

    def _leave_random(self, index: int) -> None:
        self.odd.add(index)
        self.solved.discard(index)
        if self.found.numel():
            at = self.factors.parts.matrices[index].v
            self.found[at] = self.drawn[at]

    def solve(self, indices: list[int] | None = None) -> None:
        """Computes V of layers: those of one width at once, those that read the same inputs as one."""
        readers: dict[tuple[int, ...], list[int]] = {}
        for index in indices or self.seen:
            if len(self.seen[index]) == len(self.at) and index not in self.odd:
                readers.setdefault(tuple(id(self.seen[index][i]) for i in range(len(self.at))), []).append(index)
        by_width: dict[int, list[list[int]]] = {}
        for group in readers.values():
            by_width.setdefault(self.factors.parts.matrices[group[0]].inputs, []).append(group)
        for width, groups in by_width.items():
            size = max(1, SOLVED_BYTES // (4 * width * max(1, len(self.y_Nr))))
            for begin in range(0, len(groups), size):
                self._solve(groups[begin : begin + size])

    def _solve(self, groups: list[list[int]]) -> None:
        """groups: layers that read the same inputs."""
        x_KNI = torch.stack([torch.cat([self.seen[group[0]][i] for i in range(len(self.at))]) for group in groups])
        for group, found_rI in zip(groups, predictors(x_KNI.float(), self.y_Nr), strict=True):
            found_rI = found_rI.to(self.found.dtype)  # where large numbers of float16 become infinite
            usable_r = torch.isfinite(found_rI).all(dim=1, keepdim=True) & found_rI.any(dim=1, keepdim=True)
            self.solved.update(group)
            for index in group:
                place_rI = self.factors.rows(self.found, self.factors.parts.matrices[index].v)
                place_rI.copy_(torch.where(usable_r, found_rI, place_rI))
