"""The tables of `keyhole bench layers`: the memory of a model, and the times of one of its blocks on CPU and GPU."""

from pathlib import Path

from keyhole.bench.report import Record, Report, grid
from keyhole.machine.sizes import GIB

PARTS = ("FWD", "BWD", "UPD torch", "UPD")
STATE_BYTES = 12  # per parameter: fp32 master and moments
NOTES = """\
Milliseconds of one block; in brackets the floor, and the time over it. FWD and BWD: its products at the rate of one
large product in the same dtype; UPD: 28 bytes per parameter at the rate of one large copy; both rates measured in the
same process on the same device. "UPD torch" is torch's fused AdamW, all in fp32; "UPD" keyhole's, with 16-bit gradients
and weights. "all blocks": FWD + BWD + UPD times the number of blocks, in seconds."""
HELD = """\
What training the whole model holds: 16-bit weights, fp32 master and Adam's moments, and what all blocks keep of one
forward without checkpointing (counted on one block). Link: pinned copies, up / down / each way when both run, GB/s."""


class LayerReport(Report):
    """A line per block and device, and one per model."""

    def __init__(self, out: Path, command: str, quick: bool) -> None:
        super().__init__("layers", out, command, quick)
        self.header = ["model", "on", "dtype", "tokens", *(f"{part} ms" for part in PARTS), "all blocks s"]
        self.header += ["product TFLOP/s", "copy GB/s"]

    def sections(self) -> list[str]:
        lines = [self.cells(r) for r in self.records]
        return [NOTES, grid(self.header, lines), HELD, self.held(), *self.ratios()]

    def cells(self, r: Record) -> list[str]:
        case = r["case"]
        start = [case["model"], case["place"]]
        if r["status"] != "ok":
            return [*start, f"{r['status']}: {r['error'][:200]}", *[""] * (len(self.header) - 3)]
        parts, floors = r["parts"], r["floors"]
        on = "GPU" if case["place"] == "cuda" else f"CPU, {r['threads']} threads"
        return [
            case["model"],
            on,
            r["dtype"],
            str(r["tokens"]),
            *(
                f"{1e3 * parts[name]['s']:.3f} ({1e3 * floors[name]:.3f}, {parts[name]['s'] / floors[name]:.2f}x)"
                for name in PARTS
            ),
            f"{all_blocks_s(r):.3f}",
            f"{r['rates']['product'] / 1e12:.3g}",
            f"{r['rates']['copy'] / 1e9:.3g}",
        ]

    def held(self) -> str:
        link = self.machine.get("link")
        rates = f"{link['up']:.1f} / {link['down']:.1f} / {link['duplex']:.1f}" if link else ""
        gpus = self.machine.get("gpus") or []
        memory = f"{gpus[0]['total_bytes'] / GIB:.0f}" if gpus else ""
        rows = {}
        for r in self.records:
            if r["status"] == "ok" and r["case"]["model"] not in rows:
                sizes = (2 * r["parameters"], STATE_BYTES * r["parameters"], r["layers"] * r["kept_bytes"])
                cells = [f"{size / GIB:.2f}" for size in sizes]
                rows[r["case"]["model"]] = [r["case"]["model"], str(r["layers"]), *cells, rates, memory]
        header = ["model", "blocks", "weights GiB", "optimizer state GiB", "activations GiB", "link GB/s", "GPU GiB"]
        return grid(header, list(rows.values()))

    def ratios(self) -> list[str]:
        """How much slower the CPU is, part by part."""
        found = {(r["case"]["model"], r["case"]["place"]): r["parts"] for r in self.records if r["status"] == "ok"}
        lines = []
        for model, place in found:
            if place == "cuda" and (model, "cpu") in found:
                cpu, gpu = found[model, "cpu"], found[model, "cuda"]
                told = ", ".join(f"{part} {cpu[part]['s'] / gpu[part]['s']:.0f}x" for part in PARTS)
                lines.append(f"- {model}: the CPU takes {told} of the GPU's time")
        return ["\n".join(lines)] if lines else []


def all_blocks_s(r: Record) -> float:
    return float(r["layers"] * sum(r["parts"][part]["s"] for part in ("FWD", "BWD", "UPD")))
