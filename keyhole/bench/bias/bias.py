"""How much of a gradient projectors lose, on the gradients they were fitted to and on others (LSP-Offload's Figure 8).

    bias = ||P P^T G Q Q^T - G|| / ||G||        GaLore: ||G P P^T - G|| / ||G||, P the leading singular vectors

Means over matrices and gradients; 0 is perfect, 1 as bad as no step at all. GaLore is compared in two ways: at rank r,
as in the figure, and at equal memory, as the paper counts it (Table 2): m n + (m + n) r numbers for LSP, m n + (m + 3
n) rank numbers for GaLore (projector, Adam's state of the compressed gradient).

The floor: P P^T G Q Q^T has rank d at most, so no pair with d columns, dense ones included, can lose less than the best
matrix of rank d does, sqrt(1 - sum of the d largest squared singular values / ||G||^2) (Eckart and Young). A pair that
is used for many gradients cannot reach it.
"""

import time
from typing import Any

import torch

from keyhole.bench.bias.gradients import Grads
from keyhole.methods.baselines.galore import project, project_back, projector
from keyhole.methods.lsp.fit import bias, fit
from keyhole.ops.lsp.projector import random_projector

KEYS = ("random", "seen", "held_out", "floor", "galore_seen", "galore_held_out", "rank", "equal_seen", "equal_held_out")


def equal_rank(shape: torch.Size, r: int) -> int:
    """The rank at which GaLore needs as much memory as a (d, r)-sparse pair; at least 1."""
    short, long = sorted(shape)
    return max(1, (short + long) * r // (short + 3 * long))


class Bias:
    """Lines of the table, from gradients by matrix. Values that do not depend on the projectors are computed once."""

    def __init__(self, seen: Grads, held: Grads) -> None:
        self.seen, self.held = seen, held
        self.bases: dict[str, torch.Tensor] = {}  # GaLore's bases, of full rank
        self.spectra: dict[str, list[torch.Tensor]] = {}  # cumulative squared singular values of held-out gradients
        self.galore: dict[tuple[str, int], tuple[float, float]] = {}

    def line(self, kind: str, d: int, r: int) -> dict[str, Any]:
        """Means over all matrices, and each matrix."""
        rows, begin_s, fit_s = {}, time.perf_counter(), 0.0
        for i, (name, grads) in enumerate(self.seen.items()):
            shape, others, device = grads[0].shape, self.held[name], grads[0].device
            start = [
                random_projector(kind, size, d, r, seed=2 * i + side, device=device) for side, size in enumerate(shape)
            ]
            at_s = time.perf_counter()
            pair = fit(grads, *start)
            found = [mean_bias(others, *start), mean_bias(grads, *pair), mean_bias(others, *pair)]  # waits for the fit
            fit_s += time.perf_counter() - at_s
            columns, rank = min(side.d for side in pair), equal_rank(shape, r)
            found += [self._floor(name, columns), *self._galore(name, r), rank, *self._galore(name, rank)]
            rows[name] = dict(zip(KEYS, found, strict=True))
        means = {key: sum(row[key] for row in rows.values()) / len(rows) for key in KEYS}
        spent = {"fit_s": fit_s / len(rows), "line_s": time.perf_counter() - begin_s}
        return {"kind": "line", "projector": kind, "d": d, "r": r, **means, **spent, "matrices": rows}

    def _floor(self, name: str, d: int) -> float:
        """Mean over the held-out gradients."""
        if name not in self.spectra:
            self.spectra[name] = [squared_singular_values(grad).cumsum(0) for grad in self.held[name]]
        lost = [1 - sums[min(d, len(sums)) - 1] / sums[-1] for sums in self.spectra[name]]
        return float(torch.stack(lost).clamp(min=0).sqrt().mean())

    def _galore(self, name: str, rank: int) -> tuple[float, float]:
        """GaLore's bias with the subspace of the sum of the fitted gradients: on those, and on the others."""
        if name not in self.bases:
            total = torch.stack(self.seen[name]).sum(0)
            self.bases[name] = projector(total, min(total.shape))
        if (name, rank) not in self.galore:
            p = self.bases[name][:, :rank]
            self.galore[name, rank] = galore_bias(self.seen[name], p), galore_bias(self.held[name], p)
        return self.galore[name, rank]


def squared_singular_values(grad: torch.Tensor) -> torch.Tensor:
    """Squared singular values, largest first, in float64: eigenvalues of the smaller Gram matrix, which is faster."""
    g = grad.double() if grad.shape[0] <= grad.shape[1] else grad.double().T
    squares: torch.Tensor = torch.linalg.eigvalsh(g @ g.T).clamp(min=0).flip(0)
    return squares


def galore_bias(grads: list[torch.Tensor], p: torch.Tensor) -> float:
    """Mean over these gradients, with GaLore's basis p."""
    errors = [(project_back(project(g, p), p, g.shape) - g).norm() / g.norm() for g in grads]
    return float(torch.stack(errors).mean())


def mean_bias(grads: list[torch.Tensor], p: Any, q: Any) -> float:
    return float(torch.stack([bias(grad, p, q) for grad in grads]).mean())
