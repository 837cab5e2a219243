"""The tables of `keyhole bench lomo` and `keyhole bench lsp`.

Floors:
    products   operations of the trial's own matrix products at the rate of a large product of the same run
               (product_flop)
    updates    for offloaded Adam: all updates of a step with nothing else running
    link       bytes that crossed per step: each way at the rate of that way alone, and bytes that went both ways at
               the duplex rate of the same run; the longest of the three (zo/floors.py)
    compute    the resident step of the same method, or its products
    own        the same products as the step's, of the same shapes and without a pause, timed directly after the steps
               (own_products.py); beside "products", which is never reached by them

A resident step is compared with the larger of products and updates, a streamed one with max(compute, link). GPU GiB:
the allocator's peaks of allocated and of reserved memory.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from keyhole.bench.gradient.trials import NATIVE, Trial
from keyhole.bench.report import Record, Report, grid
from keyhole.bench.shapes import LLAMA, LLAMA_VOCABULARY
from keyhole.bench.zo.floors import link_seconds
from keyhole.machine.sizes import GIB
from keyhole.methods import METHODS

STEP_PARTS = {"update_s": "updates, CPU", "host_wait_s": "host waited", "gpu_updates": "updated by GPU"}
PARTS_NOTE = (
    "Seconds of the last step that the CPU updated, beside the GPU's work, and that launches waited for it. Updated by "
    "GPU: the share of parameters whose state crossed the link for that (adam-offload)."
)


def product_flop(trial: dict[str, Any], tokens: int) -> float:
    """Operations of the matrix products of a step, per parameter and token: 2 forward, 2 for the gradient of the
    inputs, 2 for that of the weights, or the share of it that the method computes, and, where only block inputs are
    kept, 2 recomputed, minus the one product of a block that need not be; the logits are made twice in any case."""
    width, blocks, _, mlp = LLAMA[trial["shape"]]
    block, gradients = 4 * width**2 + 3 * width * mlp, 2 * gradient_share(trial)
    again = 2 * block - 2 * width * mlp if recomputes(trial) else 0
    return tokens * (blocks * ((4 + gradients) * block + again) + (6 + gradients) * LLAMA_VOCABULARY * width)


def recomputes(trial: dict[str, Any]) -> bool:
    """Whether blocks run again in the backward pass. With `auto` as many as fit do not, so none is counted."""
    if trial["system"] == NATIVE:
        return bool(trial["options"].get("checkpointing", True))
    usual = getattr(METHODS[trial["system"]].settings(), "activations", "none")
    return trial["options"].get("activations", usual) in ("block", "host")


def gradient_share(trial: dict[str, Any]) -> float:
    """The share of the weights' gradients that is computed: none over a frozen base, d x d numbers of a matrix in a
    subspace of that size, all otherwise."""
    if trial["system"] == NATIVE:
        return 1.0
    row = METHODS[trial["system"]]
    if row.keeps_base:
        return 0.0
    width, _, _, mlp = LLAMA[trial["shape"]]
    d = trial["options"].get("d", getattr(row.settings(), "d", mlp))
    least, wide = min(d, width), min(d, mlp)
    return float((4 * least**2 + 3 * least * wide) / (4 * width**2 + 3 * width * mlp))


class GradientReport(Report):
    """One line per trial, beside torch's own optimizers on the same shape."""

    def __init__(self, name: str, out: Path, trials: list[Trial], command: str, quick: bool) -> None:
        super().__init__(name, out, command, quick)
        self.baselines = list(dict.fromkeys(t.options["optimizer"] for t in trials if t.system == NATIVE))
        self.header = ["trial", "s/step", "+-", "tok/s", *(f"vs {optimizer}" for optimizer in self.baselines)]
        self.header += (
            "floor s|vs floor|bound by|own products s|vs own|GPU GiB (reserved)|planned|weights GiB|host GiB".split("|")
        )

    def find(self, fits: Callable[[dict[str, Any]], bool]) -> Record | None:
        """The record of a trial that satisfies `fits`, if it was measured."""
        return next((r for r in self.records if r["status"] == "ok" and fits(r["case"])), None)

    def native(self, trial: dict[str, Any], optimizer: str) -> Record | None:
        """The record of torch's optimizer on the trial's shape, with as many micro-batches."""
        wanted = (NATIVE, trial["shape"], trial.get("micro_batches", 1), optimizer)
        return self.find(
            lambda t: (t["system"], t["shape"], t.get("micro_batches", 1), t["options"].get("optimizer")) == wanted
        )

    def cells(self, r: Record) -> list[str]:
        trial = r["case"]
        if r["status"] != "ok":
            return [trial["name"], f"{r['status']}: {r['error']}", *[""] * (len(self.header) - 2)]
        ratios = [self.native(trial, optimizer) for optimizer in self.baselines]
        floor_s, bound = self.floor(r)
        device, planned, own_s = r["device"], r["planned_bytes"], r.get("own_products_s")
        return [
            trial["name"],
            f"{r['step_s']:.4f}",
            f"{50 * (r['max_s'] - r['min_s']) / r['step_s']:.1f} %",
            f"{r['tokens'] / r['step_s']:,.0f}",
            *(f"{b['step_s'] / r['step_s'] * r['tokens'] / b['tokens']:.2f}x" if b else "" for b in ratios),
            f"{floor_s:.4f}" if floor_s else "",
            f"{r['step_s'] / floor_s:.2f}x" if floor_s else "",
            bound,
            f"{own_s:.4f}" if own_s else "",
            f"{r['step_s'] / own_s:.2f}x" if own_s else "",
            f"{device['allocated_bytes'] / GIB:.2f} ({device['reserved_bytes'] / GIB:.2f})",
            f"{planned / GIB:.2f}" if planned else "",
            f"{r['weights_bytes'] / GIB:.2f}",
            f"{r['host_bytes'] / GIB:.1f}",
        ]

    def floor(self, r: Record) -> tuple[float | None, str]:
        """The floor of the step in seconds, and its name."""
        rate, trial = self.machine.get("product_rate"), r["case"]
        products_s = product_flop(trial, r["tokens"]) / rate if rate else None
        if not trial["streamed"]:
            updates_s = r["updates_alone_s"] or 0.0
            return (updates_s, "updates") if updates_s > (products_s or 0.0) else (products_s, "products")
        other = self.find(lambda t: t["name"] == trial["compare"])
        compute_s = other["step_s"] if other else products_s
        link_s = link_seconds(r["bytes_up"], r["bytes_down"], r["link"]) if r.get("link") else 0.0
        if compute_s is None:
            return None, ""
        return max(compute_s, link_s), "link" if link_s > compute_s else "compute"

    def sections(self) -> list[str]:
        rate = f"bf16 product of this run: {(self.machine.get('product_rate') or 0.0) / 1e12:.0f} TFLOP/s"
        return [rate, grid(self.header, [self.cells(r) for r in self.records]), *self.breakdown()]

    def breakdown(self) -> list[str]:
        """Seconds of updates on the CPU, and how long launches waited for them."""
        rows = [
            [
                r["name"],
                f"{r['step_s']:.4f}",
                *(f"{r['parts'][key]:.4f}" if key in r["parts"] else "" for key in STEP_PARTS),
                *(f"{r[key] / GIB:.2f}" for key in ("bytes_up", "bytes_down")),
            ]
            for r in self.records
            if "host_wait_s" in r.get("parts", {})
        ]
        return [PARTS_NOTE, grid(["trial", "step", *STEP_PARTS.values(), "GiB up", "GiB down"], rows)] if rows else []
