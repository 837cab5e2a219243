"""The passes of a step, in one sweep: every unit is updated and perturbed as it arrives, and all passes go through it.

The textbook loop perturbs in place by +1, -2, +1, then updates: four passes over w, 16 bytes per element in 16 bit.
Here all passes of a step, over all looks and micro-batches, run in lockstep (model/forward/lockstep.py). At each unit

    one fused pass over w applies the update of step t - 1 and writes w + eps z and w - eps z: 2 bytes read, 6 written
    for each further pair of looks, one pass over w writes its two copies
    the passes of each look run through its copy

The copies of a unit lie in memory that the next unit reuses (`copies`); those of the spine live through the step, since
every block needs them (`spines`, two per pair). The chunks of the head are visited in the same way after the last
block. Of the input embedding only the rows that the batch needs are perturbed: the pending update is applied to these
rows on the fly, with the same bits as the full update of the table at the end of the sweep.
With low-rank directions units are not copied: low_rank/passes.py runs the blocks.
Legend: M tokens looked up, N trained tokens, H width.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import cast

import torch

from keyhole.methods.zo.looks import Looks
from keyhole.methods.zo.low_rank import passes as shared_passes
from keyhole.methods.zo.perturbed import PerturbedWeights
from keyhole.model.structure.layout import Unit
from keyhole.ops.loss import RunningNLL


def run(perturbed: PerturbedWeights, looks: Looks, steady: bool = True) -> list[torch.Tensor]:
    """Visits every unit once: updates and perturbs it, and runs all passes through it. Returns their losses. steady:
    blocks may run as graphs of their own (Model.lockstep); False while the whole step is captured."""
    with perturbed.model.sweep("train", of_all=True):
        _perturb_spine(perturbed, looks)
        if (layers := perturbed.layers) is not None:
            hidden = shared_passes.run(perturbed, layers, looks, steady)
        else:
            serve, rows = _server(perturbed, looks), _rows(perturbed, looks)
            streams = perturbed.branches.of_passes([by_look for _, _, by_look in looks.visits])
            at_once = perturbed.block_at_once
            hidden = perturbed.model.lockstep(looks.passes, serve, rows, steady, at_once, streams)
        nll = _nll(perturbed, hidden, looks)
        perturbed.update.apply_to_rest()
        if layers is not None:
            shared_passes.fold_rest(perturbed, layers.factors)
    return nll


def _perturb_spine(perturbed: PerturbedWeights, looks: Looks) -> None:
    spine = perturbed.model.layout.spine
    w = perturbed.model.engine.acquire(spine.index)
    for p, pair, _ in looks.visits:
        how = perturbed.perturbation(pair)
        perturbed.update.perturb(
            spine, w, perturbed.spines[p, 0], perturbed.spines[p, 1], how, arrived=p == looks.first
        )


def _server(perturbed: PerturbedWeights, looks: Looks) -> Callable[[Unit | None, Callable[[int], None]], None]:
    """The function called at each unit: it loads, updates and perturbs the unit, and resumes every pass."""
    copies = _Copies(perturbed, looks)
    apart = len(perturbed.copies) >= len(looks.visits)  # every pair has copies of its own

    def serve(unit: Unit | None, resume: Callable[[int], None]) -> None:
        for pair, sides in enumerate(_arrive(perturbed, unit, looks, copies)):
            for side, (passes, weights, spine) in enumerate(sides):
                perturbed.model.binding.bind(unit, weights, spine)
                perturbed.branches.fork(pair, side)
                for index in passes:
                    resume(index)
                if unit is None:
                    perturbed.branches.join()
            if not apart:
                perturbed.branches.join()
        perturbed.branches.join()

    return serve


class _Copies:
    """Views of the perturbed copies, which units of the same size share: made once per sweep."""

    def __init__(self, perturbed: PerturbedWeights, looks: Looks) -> None:
        self.spines = {p: perturbed.spines[p].unbind() for p, _, _ in looks.visits}
        self._whole, self._views = perturbed.copies, dict[tuple[int, int], list[torch.Tensor]]()

    def of(self, unit: Unit, visit: int) -> list[torch.Tensor]:
        """plus and minus of a unit. visit: the number of the pair among those that are visited."""
        key = visit % len(self._whole), unit.numel
        if key not in self._views:
            self._views[key] = [copy[: unit.numel] for copy in self._whole[key[0]]]
        return self._views[key]


def _arrive(
    perturbed: PerturbedWeights, unit: Unit | None, looks: Looks, copies: _Copies
) -> Iterator[Iterable[tuple[range, torch.Tensor | None, torch.Tensor]]]:
    """Yields, per pair, (passes of a look, perturbed weights of a unit, perturbed spine) of its looks; releases the
    unit's slot as early as possible."""
    if not looks.visits:
        return
    engine, last = perturbed.model.engine, looks.visits[-1][0]
    w = None if unit is None else engine.acquire(unit.index)
    for i, (p, pair, by_look) in enumerate(looks.visits):
        weights: Sequence[torch.Tensor | None] = (None, None)
        if unit is not None and w is not None:
            weights = plus, minus = copies.of(unit, i)
            perturbed.update.perturb(unit, w, plus, minus, perturbed.perturbation(pair), arrived=p == looks.first)
            if p == last:
                engine.release(unit.index)
        yield zip(by_look, weights, copies.spines[p], strict=False)  # a pair may have one look


def _rows(perturbed: PerturbedWeights, looks: Looks) -> Callable[[int, torch.Tensor], torch.Tensor]:
    """Rows of the table for a pass: both looks of a pair are computed at once; the second waits for its pass."""
    is_trained = perturbed.model.layout.table.param.requires_grad
    waiting: dict[int, torch.Tensor] = {}
    pairs = {index: pair for _, pair, (first, *_) in looks.visits for index in first}
    partner: dict[int, int] = {}  # the pass of the other look
    for _, _, by_look in looks.visits:
        if len(by_look) == 2:
            partner |= zip(*by_look, strict=True)

    def rows(index: int, ids_M: torch.Tensor) -> torch.Tensor:
        if index in waiting:
            return waiting.pop(index)
        other = partner.get(index)
        stale_MH = perturbed.model.table_rows(ids_M)
        if not is_trained:
            plus_MH = minus_MH = stale_MH.to(perturbed.model.dtype)
        else:
            plus_MH, minus_MH = perturbed.rows(stale_MH, ids_M, pairs[index])
        if other is not None:
            waiting[other] = minus_MH
        return plus_MH

    return rows


def _nll(perturbed: PerturbedWeights, hidden: list[torch.Tensor], looks: Looks) -> list[torch.Tensor]:
    """The losses of the trained tokens (for a classifier: of the rows), per pass."""
    if not perturbed.model.classifies:
        return _visit_head(perturbed, hidden, looks)
    nll = [perturbed.model.head.nll(x, batch.target_N) for x, batch in zip(hidden, looks.passes, strict=True)]
    perturbed.model.binding.bind_homes()
    return nll


def _visit_head(perturbed: PerturbedWeights, hidden: list[torch.Tensor], looks: Looks) -> list[torch.Tensor]:
    """The nll of every trained token, per pass: each chunk of the head is visited once, for all passes."""
    running = [RunningNLL(batch.target_N) for batch in looks.passes]
    copies = _Copies(perturbed, looks)
    for unit in perturbed.model.layout.head_units:
        for sides in _arrive(perturbed, unit, looks, copies):
            for passes, weights, spine in sides:
                perturbed.model.binding.bind_head(unit, cast(torch.Tensor, weights), spine)  # None without a unit
                for index in passes:
                    perturbed.model.head.add_nll(running[index], hidden[index], unit.span[0])
    perturbed.model.binding.bind_homes()
    return [state.nll_N() for state in running]
