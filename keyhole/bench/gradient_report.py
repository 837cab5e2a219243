"""The tables of `keyhole bench lomo` and `keyhole bench lsp`: each record as JSON, the lines as Markdown."""

import json
from datetime import datetime
from pathlib import Path
from typing import Any

from keyhole.bench.gradient_trials import product_flop
from keyhole.bench.report import commit, grid
from keyhole.disk.files import write_text
from keyhole.machine.sizes import GIB
from keyhole.methods import METHODS

HEADER = (
    "trial|s/step|+-|tok/s|vs sgd|vs adamw|floor s|vs floor|bound by|GPU GiB (reserved)|planned|weights GiB|host GiB"
).split("|")

STEP_PARTS = (
    "forward_s", "reverse_s", "down_s", "update_s", "up_s",
    "exposed_down_s", "exposed_update_s", "exposed_up_s", "host_wait_s", "layer_update_s", "gpu_updates",
)  # fmt: skip
STEP_HEADER = (
    "trial|step|forward, GPU|reverse, GPU|down|updates, CPU|up|exposed: down|exposed: CPU|exposed: up|host waited|"
    "one update, CPU|updated by GPU|GiB up|GiB down"
).split("|")


class Report:
    """Collects records and keeps both files up to date."""

    def __init__(self, table: str, out: Path, command: str, quick: bool) -> None:
        self.table, self.out, self.quick = table, out, quick
        self.records: list[dict[str, Any]] = []
        self.about: dict[str, Any] = {"command": command, "commit": commit(), "quick": quick}
        self.about["date"] = datetime.now().isoformat(timespec="seconds")

    def add(self, record: dict[str, Any], say: Any) -> None:
        if record["kind"] == "machine":
            self.about["machine"] = record
            return
        self.records.append(record)
        say(" | ".join(self.cells(record)))
        self.save()

    def find(self, name: str | None) -> dict[str, Any] | None:
        return next((r for r in self.records if r["trial"]["name"] == name and "error" not in r), None)

    def cells(self, r: dict[str, Any]) -> list[str]:
        trial = r["trial"]
        if "error" in r:
            return [trial["name"], r["error"], *[""] * (len(HEADER) - 2)]
        same = f"{trial['shape']} native "
        ratios = [self.find(same + name) for name in ("sgd", "adamw")]
        floor_s, bound = self.floor(r)
        device, allocated = r["device"], r["device"]["allocated_bytes"]
        return [
            trial["name"],
            f"{r['step_s']:.4f}",
            f"{50 * (r['max_s'] - r['min_s']) / r['step_s']:.1f} %",
            f"{r['tokens'] / r['step_s']:,.0f}",
            *(f"{b['step_s'] / r['step_s'] * r['tokens'] / b['tokens']:.2f}x" if b else "" for b in ratios),
            f"{floor_s:.4f}" if floor_s else "",
            f"{r['step_s'] / floor_s:.2f}x" if floor_s else "",
            bound,
            f"{allocated / GIB:.2f} ({device['reserved_bytes'] / GIB:.2f})",
            f"{r['planned_bytes'] / GIB:.2f}" if trial["system"] in METHODS and METHODS[trial["system"]].streams else "",
            f"{r['weights_bytes'] / GIB:.2f}",
            f"{r['host_bytes'] / GIB:.1f}",
        ]

    def floor(self, r: dict[str, Any]) -> tuple[float | None, str]:
        """What the step could cost at best, and what that is."""
        rate = self.about.get("machine", {}).get("product_rate") or float("nan")
        products_s = None if self.quick else product_flop(r["trial"]["shape"], r["tokens"]) / rate
        if not r["trial"]["streamed"]:
            updates_s = r.get("updates_alone_s") or 0.0
            return (updates_s, "updates") if updates_s > (products_s or 0.0) else (products_s, "products")
        other = self.find(r["trial"]["compare"])
        compute_s = other["step_s"] if other else products_s
        link = r.get("link")
        crossed = max(2 * r.get("streamed_bytes", 0), r["bytes_up"], r["bytes_down"])
        link_s = crossed / link["duplex"] / 1e9 if link else 0.0
        if compute_s is None:
            return None, ""
        return max(compute_s, link_s), "link" if link_s > compute_s else "compute"

    def markdown(self) -> str:
        machine = self.about.get("machine", {})
        gpus = ", ".join(gpu["name"] for gpu in machine.get("gpus", [])) or "none"
        found = machine.get("versions", {})
        versions = ", ".join(f"{k} {found[k]}" for k in ("python", "torch", "triton", "transformers") if found.get(k))
        rate = machine.get("product_rate") or 0.0
        about = [f"- GPU: {gpus}; bf16 product of this run: {rate / 1e12:.0f} TFLOP/s", f"- versions: {versions}"]
        about += [f"- {key}: {self.about[key]}" for key in ("commit", "date")]
        about += [f"- reproduce: `{self.about['command']}`"]
        note = ["**Quick run on tiny shapes: its numbers mean nothing.**"] if self.quick else []
        rows = [self.cells(r) for r in self.records]
        parts = [f"# keyhole bench {self.table}", "\n".join(about), *note, grid(HEADER, rows), *self.breakdown()]
        return "\n\n".join(parts) + "\n"

    def breakdown(self) -> list[str]:
        """Seconds of each part of a step, where they were measured, and for how long the kernels stood still for it."""
        found = [r for r in self.records if {"host_wait_s", "reverse_s"} & r.get("parts", {}).keys()]
        rows = [
            [
                r["trial"]["name"],
                f"{r['step_s']:.4f}",
                *(f"{r['parts'][key]:.4f}" if key in r["parts"] else "" for key in STEP_PARTS),
                *(f"{r[key] / GIB:.2f}" for key in ("bytes_up", "bytes_down")),
            ]
            for r in found
        ]
        about = (
            "Seconds of the last step. Forward and reverse include what is exposed; the rest ran beside them. Updated "
            "by GPU: the share of parameters whose state crossed the link for that (adam-offload)."
        )
        return [about, grid(STEP_HEADER, rows)] if rows else []

    def save(self) -> None:
        self.out.mkdir(parents=True, exist_ok=True)
        stem = f"{self.table}_{self.about['date'][:10]}" + ("_quick" if self.quick else "")
        write_text(self.out / f"{stem}.json", json.dumps({**self.about, "records": self.records}, indent=1) + "\n")
        write_text(self.out / f"{stem}.md", self.markdown())
