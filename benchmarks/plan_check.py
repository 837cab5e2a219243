"""Planned against measured: 20 cases over all methods, placements, two shapes, two batch sizes, with imitated budgets.

    python benchmarks/plan_check.py               # one GPU, about 6 minutes; rows are printed as they are measured
    python benchmarks/plan_check.py --quick       # tiny shapes on a CPU: shows that it runs; the ratios mean little

Each case loads random weights of the true shape, as `keyhole.load` places them, and takes a few steps. Printed: GPU
peak (what the allocator reserved), host peak (resident set of the process), and seconds per step, each planned,
measured, and their ratio; at the end the share of cases within 10 % (memory) and 15 % (time), and, of all pairs of
cases whose measured times differ by more than 2 %, the share with the right planned order. Rates are measured first, on
this machine (plan/measure.py). galore's SVDs and the fit of lsp's projectors are left out: neither is part of a usual
step.
"""

import argparse
import json
import statistics
import time
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

import keyhole
from keyhole.bench import measure
from keyhole.bench.gradient.worker import _leave_out_svd
from keyhole.bench.shapes import llama_config, opt_config
from keyhole.machine.sizes import GIB
from keyhole.methods import METHODS
from keyhole.methods.base import Workload
from keyhole.plan.measure import measure as measure_rates
from keyhole.plan.table import Question, make_row

LIMIT_S = 460.0
NEAR = 0.02  # pairs that differ by less have no order
LARGE, SMALL = "llama 3.5B", "opt 1.3B"
WIDE, NARROW = (4, 1024), (1, 512)


@dataclass(frozen=True)
class Case:
    method: str
    shape: str
    placement: str
    tokens: tuple[int, int]
    gpu_memory: str | None = None
    wire: str | None = None
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        extra = " ".join(text for text in (self.gpu_memory, self.wire) if text)
        return f"{self.method:12} {self.shape:10} {self.placement:8} {extra:5} {self.tokens[0]}x{self.tokens[1]}"


CASES = (
    Case("zo", LARGE, "resident", WIDE),
    Case("zo", LARGE, "stream", WIDE),
    Case("zo", LARGE, "stream", NARROW, "4GiB"),
    Case("zo", LARGE, "stream", NARROW, wire="fp8"),
    Case("zo", SMALL, "resident", NARROW),
    Case("lomo", LARGE, "resident", WIDE),
    Case("lomo", LARGE, "stream", WIDE, "5GiB"),
    Case("lomo", LARGE, "stream", NARROW),
    Case("sgd", SMALL, "resident", NARROW),
    Case("adalomo", LARGE, "resident", WIDE),
    Case("adalomo", LARGE, "stream", WIDE, options={"activations": "host"}),
    Case("apollo-mini", SMALL, "stream", WIDE),
    Case("lomo-lora", SMALL, "resident", WIDE),
    Case("lsp", LARGE, "resident", WIDE, options={"learn": False}),
    Case("lsp", LARGE, "stream", WIDE, "7GiB", options={"learn": False}),
    Case("adam-offload", SMALL, "resident", WIDE),
    Case("adam-offload", SMALL, "stream", NARROW),
    Case("adamw", SMALL, "resident", WIDE),
    Case("lora", SMALL, "resident", WIDE, options={"activations": "block"}),
    Case("galore", SMALL, "resident", NARROW),
)


def config_of(case: Case, quick: bool) -> Any:
    kind, size = case.shape.split()
    return llama_config(size, quick) if kind == "llama" else opt_config(size, quick=quick)


def run(case: Case, device: torch.device, rates: Any, quick: bool) -> dict[str, Any]:
    """Planned and measured numbers of one case."""
    row = METHODS[case.method]
    own = row.settings(**case.options)
    batch_size, length = (1, 16) if quick else case.tokens
    work = Workload(case.method, batch_size * length, row.passes(own), own, length=length)
    dtype = torch.float32 if quick else torch.bfloat16
    where = {"placement": case.placement, "gpu_memory": None if quick else case.gpu_memory, "wire": case.wire}
    measure.clear_device(device)
    base = measure.host_memory()
    model = keyhole.load(config_of(case, quick), init="random", dtype=dtype, device=device, workload=work, **where)
    measure.clean_up(device)
    method = row.load()(model, 1e-6, **vars(own))
    batch = measure.random_batch(batch_size, length, model.config.vocab_size)
    warm_up = 8 if row.sweep == "forward" and model.engine.streamed else 3
    found = measure.time_steps(lambda: method.step(batch), model.engine, warm_up, 4)
    memory, host = measure.device_memory(device), measure.host_memory()
    budget = model.placed.limit_bytes
    gpu = None if device.type != "cuda" else budget
    asked = Question(model.module, dtype, rates, gpu, 2**50, batch_size, length, settings={case.method: own})
    plan = make_row(asked, row, case.placement, case.wire, model.layout, model.engine.streamed)
    bytes_up, bytes_down = found["bytes_up"], found["bytes_down"]
    work_asked = row.planned_work(model.layout, model.engine.streamed, work, _room(model), rates)
    method.flush()
    if hasattr(method, "close"):
        method.close()
    model.close()
    return {
        "case": asdict(case),
        "planned": {"gpu": plan.gpu_bytes, "host": plan.host_bytes, "seconds": plan.step_seconds},
        "measured": {"gpu": memory["reserved_bytes"], "host": host, "seconds": found["step_s"]},
        "allocated": memory["allocated_bytes"],
        "host_before": base,
        "bound_by": plan.bound_by,
        "parts": {"compute": plan.seconds.compute, "link": plan.seconds.link, "cpu": plan.seconds.cpu},
        "link_bytes": {"planned": [work_asked.up, work_asked.down], "measured": [bytes_up, bytes_down]},
    }


def _room(model: keyhole.Model) -> Any:
    from keyhole.methods.base import Room

    return Room(model.formats, model.placed.workspace_bytes, model.placed.limit_bytes)


def ratio(found: dict[str, Any], name: str) -> float | None:
    measured = found["measured"][name]
    return found["planned"][name] / measured if measured else None


def line(title: str, found: dict[str, Any]) -> str:
    p, m = found["planned"], found["measured"]
    parts = []
    for name, unit, form in (("gpu", GIB, ".2f"), ("host", GIB, ".2f"), ("seconds", 1, ".4f")):
        share = ratio(found, name)
        shown = f"{share:5.2f}" if share is not None else "    -"
        measured = f"{m[name] / unit:8{form}}" if m[name] is not None else "       -"
        parts.append(f"{p[name] / unit:8{form}} {measured} {shown}")
    split = " ".join(f"{name} {value:.3f}" for name, value in found["parts"].items())
    return f"{title:50} {'  |  '.join(parts)}  | {found['bound_by']:7} {split}"


def summary(results: list[dict[str, Any]]) -> list[str]:
    lines = []
    for name, limit in (("gpu", 0.10), ("host", 0.10), ("seconds", 0.15)):
        shares = [share for found in results if (share := ratio(found, name)) is not None]
        if shares:
            within = sum(abs(share - 1) <= limit for share in shares)
            worst = max(shares, key=lambda share: abs(share - 1))
            lines.append(
                f"{name}: {within} of {len(shares)} within {limit:.0%}; median ratio {statistics.median(shares):.2f}, "
                f"worst {worst:.2f}"
            )
    times = [(found["planned"]["seconds"], found["measured"]["seconds"]) for found in results]
    pairs = [(a, b) for i, a in enumerate(times) for b in times[:i] if abs(a[1] - b[1]) > NEAR * max(a[1], b[1])]
    right = sum((a[0] < b[0]) == (a[1] < b[1]) for a, b in pairs)
    lines.append(f"pairs ordered right: {right} of {len(pairs)}" + (f", {right / len(pairs):.1%}" if pairs else ""))
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="tiny shapes, on a CPU too")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--json", help="write all numbers there")
    args = parser.parse_args()
    begin_s = time.perf_counter()
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cpu" and not args.quick:
        parser.error("full shapes need a GPU; use --quick")
    rates = measure_rates(device)
    print("\n".join(rates.lines()))
    print(
        f"products by rows: { {rows: f'{rate / 1e12:.3g}' for rows, rate in rates.products.items()} } TFLOP/s; ", end=""
    )
    print(f"device memory {rates.device_memory / 1e9:.0f} GB/s; launch {rates.launch * 1e6:.1f} us", flush=True)
    _leave_out_svd()
    print(f"{'case':46} {'GPU GiB planned, measured':25}  |  {'host GiB':23}  |  seconds per step", flush=True)
    results = []
    for case in CASES:
        if args.only not in case.name:
            continue
        if time.perf_counter() - begin_s > LIMIT_S:
            print(f"{case.name}: left out, {LIMIT_S:.0f} s have passed", flush=True)
            continue
        try:
            results.append(run(case, device, rates, args.quick))
            print(line(case.name, results[-1]), flush=True)
        except Exception as error:  # one case that fails costs one row
            print(f"{case.name}: {type(error).__name__}: {str(error).splitlines()[0][:300]}", flush=True)
        measure.clear_device(device)
        if args.json:
            with open(args.json, "w") as file:
                json.dump({"rates": rates.to_dict(), "results": results}, file, indent=1)
    print("\n".join(summary(results)))
    print(f"{time.perf_counter() - begin_s:.0f} s in all")


if __name__ == "__main__":
    main()
