"""Runs `keyhole bench lsp-bias`: all sizes and kinds of projectors on the gradients of one model and data."""

import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from keyhole.bench.bias.bias import Bias
from keyhole.bench.bias.gradients import Sampling, sample
from keyhole.bench.process import Say
from keyhole.bench.report import Report, grid
from keyhole.errors import UserError
from keyhole.machine.probe import environment
from keyhole.ops.lsp.projector import KINDS

D, R = (16, 32, 48), (1, 4, 16)
QUICK: dict[str, Any] = {"batch": 4, "micro_batch": 4, "calibration": 1, "held_out": 1, "matrices": 2}
HEADER = (
    "d|r|kind|random start|fitted, seen|fitted, held out|floor|vs floor|GaLore(r), seen|GaLore(r), held out|"
    "equal memory: rank|GaLore, seen|GaLore, held out|fit s"
).split("|")
NOTES = """\
Relative bias of compressed gradients, means over matrices and gradients; 0 is perfect, 1 as bad as no step at all.
Projectors are fitted to the gradients that were seen. GaLore(r): rank r, as in LSP-Offload's Figure 8; equal memory: at
the rank at which it needs the memory of the projectors. Floor: no pair of d columns, dense ones included, loses less on
the held-out gradients. Fit: seconds per matrix."""


class BiasReport(Report):
    """how: where the gradients come from."""

    def __init__(self, out: Path, command: str, quick: bool, how: Sampling) -> None:
        super().__init__("lsp-bias", out, command, quick)
        self.sampling = how

    def sections(self) -> list[str]:
        how = self.sampling
        shapes: dict[str, int] = next((r["shapes"] for r in self.records if r["kind"] == "gradients"), {})
        told = ", ".join(f"{count} of {shape}" for shape, count in shapes.items())
        gradients = (
            f"{how.model} on {how.data}: {how.calibration} gradients seen and {how.held_out} held out, each of "
            f"{how.batch} rows of at most {how.length} tokens; matrices: {told or 'not known yet'}."
        )
        rows = [cells(r) for r in self.records if r["kind"] == "line"]
        return [gradients, NOTES, *([grid(HEADER, rows)] if rows else [])]


def cells(r: dict[str, Any]) -> list[str]:
    def told(*keys: str) -> list[str]:
        return [f"{r[key]:.3f}" for key in keys]

    ratio = f"{r['held_out'] / r['floor']:.2f}x" if r["floor"] > 1e-6 else ""
    start = [str(r["d"]), str(r["r"]), r["projector"], *told("random", "seen", "held_out", "floor"), ratio]
    galore = [*told("galore_seen", "galore_held_out"), f"{r['rank']:.1f}", *told("equal_seen", "equal_held_out")]
    return [*start, *galore, f"{r['fit_s']:.2f}"]


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
        how, sizes = replace(how, **QUICK), (sizes[0][:1], sizes[1][:1])
    report = BiasReport(out, command, quick, how)
    seen, held = sample(how)
    report.add({"kind": "machine", "device": torch.device(how.device).type, **environment()})
    shapes: dict[str, int] = {}
    for grads in seen.values():
        shape = " x ".join(map(str, grads[0].shape))
        shapes[shape] = shapes.get(shape, 0) + 1
    say(f"gradients of {len(seen)} matrices in {time.perf_counter() - begin_s:.0f} s, loading included")
    report.add({"kind": "gradients", "sampling": asdict(how), "shapes": shapes, "names": list(seen)})
    table = Bias(seen, held)
    for d, r, kind in ((d, r, kind) for d in sizes[0] for r in sizes[1] for kind in kinds):
        if time_limit_s is not None and time.perf_counter() - begin_s > time_limit_s:
            say(f"d={d} r={r} {kind}: skipped, the time limit has passed")
            continue
        report.add(table.line(kind, d, r))
        say(" | ".join(f"{head}: {cell}" for head, cell in zip(HEADER, cells(report.records[-1]), strict=True)))
    return report
