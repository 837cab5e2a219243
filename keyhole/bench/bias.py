"""`keyhole bench lsp-bias`: how much of a gradient projectors lose, on the gradients they were fitted to and on others
(LSP-Offload's Figure 8), on any model and data.

    bias = ||P P^T G Q Q^T - G|| / ||G||        GaLore: ||G P P^T - G|| / ||G||, P the leading singular vectors

Means over matrices and gradients; 0 is perfect, 1 as bad as no step at all. GaLore is compared in two ways: at rank r,
as in the figure, and at equal memory, as the paper counts it (Table 2): m n + (m + n) r numbers for LSP, m n + (m + 3
n) rank numbers for GaLore (projector, Adam's state of the compressed gradient).

The floor: P P^T G Q Q^T has rank d at most, so no pair with d columns, dense ones included, can lose less than the best
matrix of rank d does, sqrt(1 - sum of the d largest squared singular values / ||G||^2) (Eckart and Young). A pair that
is used for many gradients cannot reach it.
"""

import random
import time
from collections import Counter
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

import keyhole
from keyhole import assets
from keyhole.bench.process import Say
from keyhole.bench.report import Cells, Record, Report, table
from keyhole.data.batches import Loader, Padding
from keyhole.data.prepare import prepare
from keyhole.errors import UserError
from keyhole.machine.probe import environment
from keyhole.methods.baselines.galore import project, project_back, projector
from keyhole.methods.lsp.fit import bias, fit
from keyhole.ops.lsp.projector import KINDS, Projector, random_projector

D, R = (16, 32, 48), (1, 4, 16)
KEYS = ("random", "seen", "held_out", "floor", "galore_seen", "galore_held_out", "rank", "equal_seen", "equal_held_out")
NOTES = """\
Relative bias of compressed gradients, means over matrices and gradients; 0 is perfect, 1 as bad as no step at all.
Projectors are fitted to the gradients that were seen. GaLore(r): rank r, as in LSP-Offload's Figure 8; equal memory: at
the rank at which it needs the memory of the projectors. Floor: no pair of d columns, dense ones included, loses less on
the held-out gradients. Fit: seconds per matrix."""
Grads = dict[str, list[torch.Tensor]]


@dataclass(frozen=True)
class Sampling:
    """Where gradients come from."""

    model: str = "demo"
    data: str = "demo"
    device: str = "cpu"
    batch: int = 16  # rows per gradient
    length: int = 128  # largest number of tokens of a row
    calibration: int = 4  # gradients to fit on
    held_out: int = 8  # held-out gradients
    matrices: int = 16  # number of matrices of the blocks; 0: all
    seed: int = 0


def sample(how: Sampling) -> tuple[Grads, Grads]:
    """Gradients by the name of their matrix: to fit on, and held out."""
    place = assets.locate(how.model, assets.MODEL)
    model = keyhole.load(place, dtype="float32", device=how.device, placement="resident")
    dataset = prepare(str(assets.locate(how.data, assets.TRAIN)), model.tokenizer, max_length=how.length)
    needed = (how.calibration + how.held_out) * how.batch
    if len(dataset) < needed:
        raise UserError(
            f"--data: {how.data} has {len(dataset)} rows, and {how.calibration} + {how.held_out} gradients of "
            f"{how.batch} rows need {needed}, none of them twice; give more data, or lower --batch, --calibration or "
            "--held-out"
        )
    chosen = [t for t in model.layout.tensors if t.block is not None and len(t.shape) == 2]
    if not chosen:
        raise UserError("--model: its blocks have no matrices")
    if 0 < how.matrices < len(chosen):
        chosen = random.Random(how.seed).sample(chosen, how.matrices)
    model.module.requires_grad_(False)
    for tensor in chosen:
        tensor.param.requires_grad_()
    loader, found = Loader(dataset, how.batch, seed=how.seed, padding=Padding(1)), list[dict[str, torch.Tensor]]()
    for _ in range(how.calibration + how.held_out):
        (batch,) = loader.next_step()
        model.module(**{key: x.to(model.device) for key, x in batch.items()}, use_cache=False).loss.backward()
        found.append({t.name: t.param.grad for t in chosen if t.param.grad is not None})
        model.module.zero_grad(set_to_none=True)
    model.close()
    seen, held = found[: how.calibration], found[how.calibration :]
    return {t.name: [each[t.name] for each in seen] for t in chosen}, {
        t.name: [h[t.name] for h in held] for t in chosen
    }


def equal_rank(shape: torch.Size, r: int) -> int:
    """The rank at which GaLore needs as much memory as a (d, r)-sparse pair; at least 1."""
    short, long = sorted(shape)
    return max(1, (short + long) * r // (short + 3 * long))


class Bias:
    """Lines of the table, from gradients by matrix. bases: GaLore's, of full rank, from the sum of the fitted
    gradients; spectra: cumulative squared singular values of held-out gradients."""

    def __init__(self, seen: Grads, held: Grads) -> None:
        self.seen, self.held = seen, held
        self.bases = {name: projector(torch.stack(g).sum(0), min(g[0].shape)) for name, g in seen.items()}
        self.spectra = {name: [squared_singular_values(grad).cumsum(0) for grad in g] for name, g in held.items()}

    def line(self, kind: str, d: int, r: int) -> Record:
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
            found += [self.floor(name, columns), *self._galore(name, r), rank, *self._galore(name, rank)]
            rows[name] = dict(zip(KEYS, found, strict=True))
        means = {key: sum(row[key] for row in rows.values()) / len(rows) for key in KEYS}
        spent = {"fit_s": fit_s / len(rows), "line_s": time.perf_counter() - begin_s}
        return {"kind": "line", "projector": kind, "d": d, "r": r, **means, **spent, "matrices": rows}

    def floor(self, name: str, d: int) -> float:
        """Mean over the held-out gradients."""
        lost = [1 - sums[min(d, len(sums)) - 1] / sums[-1] for sums in self.spectra[name]]
        return float(torch.stack(lost).clamp(min=0).sqrt().mean())

    def _galore(self, name: str, rank: int) -> tuple[float, float]:
        """GaLore's bias with the subspace of the sum of the fitted gradients: on those, and on the others."""
        p = self.bases[name][:, :rank]
        return galore_bias(self.seen[name], p), galore_bias(self.held[name], p)


def squared_singular_values(grad: torch.Tensor) -> torch.Tensor:
    """Squared singular values, largest first, in float64: eigenvalues of the smaller Gram matrix, which is faster."""
    g = grad.double() if grad.shape[0] <= grad.shape[1] else grad.double().T
    squares: torch.Tensor = torch.linalg.eigvalsh(g @ g.T).clamp(min=0).flip(0)
    return squares


def galore_bias(grads: list[torch.Tensor], p: torch.Tensor) -> float:
    errors = [(project_back(project(g, p), p, g.shape) - g).norm() / g.norm() for g in grads]
    return float(torch.stack(errors).mean())


def mean_bias(grads: list[torch.Tensor], p: Projector, q: Projector) -> float:
    return float(torch.stack([bias(grad, p, q) for grad in grads]).mean())


def cells(r: Record) -> Cells:
    three = {
        "random start": "random",
        "fitted, seen": "seen",
        "fitted, held out": "held_out",
        "floor": "floor",
        "GaLore(r), seen": "galore_seen",
        "GaLore(r), held out": "galore_held_out",
        "GaLore, seen": "equal_seen",
        "GaLore, held out": "equal_held_out",
    }
    found = {"d": str(r["d"]), "r": str(r["r"]), "kind": r["projector"]}
    found |= {head: f"{r[key]:.3f}" for head, key in three.items()}
    found["vs floor"] = f"{r['held_out'] / r['floor']:.2f}x" if r["floor"] > 1e-6 else ""
    return found | {"equal memory: rank": f"{r['rank']:.1f}", "fit s": f"{r['fit_s']:.2f}"}


class BiasReport(Report):
    def sections(self) -> list[str]:
        found = next((r for r in self.records if r["kind"] == "gradients"), None)
        if found is None:
            return [NOTES]
        how = Sampling(**found["sampling"])
        gradients = (
            f"{how.model} on {how.data}: {how.calibration} gradients seen and {how.held_out} held out, each of "
            f"{how.batch} rows of at most {how.length} tokens; matrices: "
            + ", ".join(f"{count} of {shape}" for shape, count in found["shapes"].items())
        )
        return [gradients + ".", NOTES, table([cells(r) for r in self.records if r["kind"] == "line"])]


def bench_bias(
    how: Sampling,
    *,
    out: Path,
    command: str,
    sizes: tuple[tuple[int, ...], tuple[int, ...]] = (D, R),
    kinds: tuple[str, ...] = tuple(KINDS),
    quick: bool = False,
    time_limit_s: float | None = None,
    say: Say = print,
) -> BiasReport:
    """Returns the report, which has been written to disk. sizes: every d with every r. quick: one size, few
    matrices."""
    begin_s = time.perf_counter()
    if wrong := [kind for kind in kinds if kind not in KINDS]:
        raise UserError(f"--kinds: {wrong[0]!r} is not one of {', '.join(KINDS)}")
    if quick:
        how, sizes = replace(how, batch=4, calibration=1, held_out=1, matrices=2), (sizes[0][:1], sizes[1][:1])
    report = BiasReport("lsp-bias", out, command, quick)
    seen, held = sample(how)
    report.add({"kind": "machine", "device": torch.device(how.device).type, **environment()})
    shapes = Counter(" x ".join(map(str, grads[0].shape)) for grads in seen.values())
    say(f"gradients of {len(seen)} matrices in {time.perf_counter() - begin_s:.0f} s, loading included")
    report.add({"kind": "gradients", "sampling": asdict(how), "shapes": dict(shapes), "names": list(seen)})
    table = Bias(seen, held)
    for d, r, kind in ((d, r, kind) for d in sizes[0] for r in sizes[1] for kind in kinds):
        if time_limit_s is not None and time.perf_counter() - begin_s > time_limit_s:
            say(f"d={d} r={r} {kind}: skipped, the time limit has passed")
            continue
        report.add(table.line(kind, d, r))
        say(" | ".join(f"{head}: {cell}" for head, cell in cells(report.records[-1]).items()))
    return report
