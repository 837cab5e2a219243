"""Planned against measured: bytes and seconds of cases over all methods, placements, two shapes and two batch sizes.

    python -m benchmarks.plan_check              one GPU, minutes; --quick: tiny shapes on a CPU, to see that it runs
    python -m benchmarks.plan_check FILE ...     today's planner against what these files of benchmarks/records/ hold
                                                 (of `keyhole bench zo | lomo | lsp`, of this script); without a GPU

A case is a row of `keyhole bench`, timed by the same harness; the planner's row is made as `keyhole plan` makes it,
from the config alone, with the rates of the machine, measured in the same process before (of a file: those that it has,
or profile h200, with the link of the case where it was measured). Printed are GPU peak (what the allocator reserved),
host peak (resident set of the process) and seconds per step, each planned, measured, and their ratio; at the end the
share of cases within 10 % (memory) and 15 % (time), and, of all pairs of cases whose measured times differ by more than
2 %, the share with the right planned order. galore's SVDs and the fit of lsp's projectors are left out: neither is part
of a usual step. Others at work on the host, or a clock that changes, show in steps that launches bound (`sgd`).
"""

import argparse
import json
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from keyhole.bench.cases import NATIVE, RESIDENT, STREAMED, TEXTBOOK, Case
from keyhole.bench.measure import device_of
from keyhole.bench.process import Emit, Job, make_job, run
from keyhole.bench.report import Cells, Record, Report, table
from keyhole.bench.shapes import model_config
from keyhole.bench.steps import DTYPES, measure_steps, settings_of
from keyhole.machine.rates import Rates
from keyhole.machine.sizes import GIB, Bytes
from keyhole.methods import METHODS
from keyhole.methods.workload import Room
from keyhole.model.structure.skeleton import build
from keyhole.model.weights.format import Wire
from keyhole.plan.fit import Costs, fit
from keyhole.plan.measure import measure as measure_rates
from keyhole.plan.placement import USABLE
from keyhole.plan.seconds import profile
from keyhole.plan.table import Question, make_row

RECORDS = Path(__file__).parent / "records"
LARGE, SMALL = "Llama-3.5B", "1.3B"
WIDE, NARROW = {"batch": 4, "length": 1024}, {"batch": 1, "length": 512}
RANDOM = {"learn": False}  # projectors
CASES = [
    Case(LARGE, RESIDENT, "zo", **WIDE),
    Case(LARGE, STREAMED, "zo", **WIDE),
    Case(LARGE, STREAMED, "zo", gpu_memory="4GiB", **NARROW),
    Case(LARGE, STREAMED, "zo", wire="fp8", **NARROW),
    Case(LARGE, RESIDENT, "lomo", **WIDE),
    Case(LARGE, STREAMED, "lomo", gpu_memory="5GiB", **WIDE),
    Case(LARGE, STREAMED, "lomo", **NARROW),
    Case(LARGE, RESIDENT, "adalomo", **WIDE),
    Case(LARGE, STREAMED, "adalomo", options={"activations": "host"}, **WIDE),
    Case(LARGE, RESIDENT, "lsp", options=RANDOM, **WIDE),
    Case(LARGE, STREAMED, "lsp", gpu_memory="7GiB", options=RANDOM, **WIDE),
    Case(SMALL, RESIDENT, "zo", **NARROW),
    Case(SMALL, RESIDENT, "sgd", **NARROW),
    Case(SMALL, STREAMED, "apollo-mini", **WIDE),
    Case(SMALL, RESIDENT, "lomo-lora", **WIDE),
    Case(SMALL, STREAMED, "muon", **WIDE),
    Case(SMALL, RESIDENT, "adam-offload", **WIDE),
    Case(SMALL, STREAMED, "adam-offload", **NARROW),
    Case(SMALL, RESIDENT, "adamw", **WIDE),
    Case(SMALL, RESIDENT, "lora", options={"activations": "block"}, **WIDE),
    Case(SMALL, RESIDENT, "galore", options={"svd": False}, **NARROW),
]
CASES = [replace(case, title=f"{case.method} {case.name}") for case in CASES]
STEPS = 20  # of a run, about: what grows with it is still small
NEAR = 0.02  # pairs that differ by less have no order
PARTS = {"gpu": (GIB, ".2f", 0.10), "host": (GIB, ".2f", 0.10), "seconds": (1, ".4f", 0.15)}  # unit, digits, limit


@dataclass(frozen=True)
class Line:
    """A case: what was planned and measured of it, by PARTS."""

    case: Case
    planned: dict[str, float]
    measured: dict[str, float]
    bound_by: str

    def ratio(self, part: str) -> float | None:
        return self.planned[part] / self.measured[part] if self.measured.get(part) else None


def line_of(case: Case, found: Record, rates: Rates) -> Line:
    """From a record of `keyhole bench`."""
    measured = {"gpu": found["device"]["reserved_bytes"], "host": found["host_bytes"], "seconds": found["step_s"]}
    if link := found.get("link"):
        rates = replace(rates, up=1e9 * link["up"], down=1e9 * link["down"], both=1e9 * link["duplex"])
    return planned_line(case, rates, measured)


module_of = cache(lambda model, blocks, dtype, quick: build(model_config(model, blocks=blocks, quick=quick), dtype))


def planned_line(case: Case, rates: Rates, measured: dict[str, float], quick: bool = False) -> Line:
    """The planner's row, from the config alone, placed as loading would."""
    row, dtype = METHODS[case.method], DTYPES[case.dtype]
    module = module_of(case.model, case.blocks, dtype, quick)
    budget = int(Bytes.parse(case.gpu_memory)) if case.gpu_memory and not quick else None
    limit = None if rates.gpu_bytes is None else int(USABLE * rates.gpu_bytes) if budget is None else budget
    clips, own = case.options.get("max_grad_norm") is not None, {case.method: settings_of(case)}
    asked = Question(
        module, dtype, rates, limit, 2**50, case.batch, case.length, case.micro_batches, STEPS, clips, settings=own,
    )  # fmt: skip
    layout, streamed = asked.find(module), set[int]()
    if case.system == STREAMED:
        room = Room(Wire(dtype, case.wire), rates.workspace_bytes, limit)
        layout, streamed = fit(module, Costs(asked.workload(row), room, row), budget, asked.find)
    found = make_row(asked, row, "stream" if streamed else "resident", case.wire, layout, streamed)
    planned = {"gpu": found.gpu_bytes, "host": found.host_bytes, "seconds": found.step_seconds}
    return Line(case, planned, measured, found.bound_by)


# -- measured now ------------------------------------------------------------------------------------------------------


@cache
def rates_of(device: str) -> Rates:
    return measure_rates(device_of(device))


def measure_beside_plan(case: Case, job: Job, emit: Emit) -> Record:
    """The numbers of `keyhole bench`, and the rates that the planner needs."""
    return {"rates": rates_of(job.device).to_dict()} | measure_steps(case, job, emit)


def _part(line: Line, part: str) -> str:
    unit, form, _ = PARTS[part]
    ratio = line.ratio(part)
    measured = "" if ratio is None else f", {line.measured[part] / unit:{form}}, {ratio:.2f}"
    return f"{line.planned[part] / unit:{form}}{measured}"


def cells(line: Line) -> Cells:
    return {
        "case": line.case.name,
        "GPU GiB planned, measured": _part(line, "gpu"),
        "host GiB": _part(line, "host"),
        "s per step": _part(line, "seconds"),
        "bound by": line.bound_by,
    }


class PlanReport(Report):
    """A line per case, and what they amount to."""

    def lines(self) -> list[Line]:
        by_name = {case.name: case for case in CASES}
        return [line_of(by_name[n], r, Rates.from_dict(r["rates"])) for n, r in self.ok().items() if n in by_name]

    def sections(self) -> list[str]:
        return [table(list(map(cells, self.lines()))), *summary(self.lines())] if not self.quick else []


def summary(lines: list[Line]) -> list[str]:
    told = []
    for part, (_, _, limit) in PARTS.items():
        ratios = [ratio for line in lines if (ratio := line.ratio(part)) is not None]
        if ratios:
            within, worst = sum(abs(r - 1) <= limit for r in ratios), max(ratios, key=lambda r: abs(r - 1))
            middle = statistics.median(ratios)
            told.append(f"{part}: {within} of {len(ratios)} within {limit:.0%}; median {middle:.2f}, worst {worst:.2f}")
    times = [(line.planned["seconds"], line.measured["seconds"]) for line in lines]
    pairs = [(a, b) for i, a in enumerate(times) for b in times[:i] if abs(a[1] - b[1]) > NEAR * max(a[1], b[1])]
    right = sum((a[0] < b[0]) == (a[1] < b[1]) for a, b in pairs)
    return [*told, f"pairs ordered right: {right} of {len(pairs)}" + (f", {right / len(pairs):.1%}" if pairs else "")]


# -- recorded before ---------------------------------------------------------------------------------------------------


def recorded(path: Path) -> Iterator[Line]:
    """The lines of a file, planned today. Left out: baselines, and parts of `zo` that were switched off."""
    found = json.loads(path.read_text())
    for each in found.get("results", []):  # of this script, before it was a table of the harness
        about, rates = each["case"], Rates.from_dict(found["rates"] | each.get("host_rates", {}))
        yield planned_line(
            as_case(about | {"system": about["placement"], "batch": about["tokens"][0]}), rates, each["measured"]
        )
    for each in found.get("records", []):
        about = each.get("case") or each.get("trial") or {}
        case = as_case(about) if "step_s" in each and about["system"] not in (TEXTBOOK, NATIVE) else None
        if case is not None and not about.get("load") and all(about.get(k, True) for k in SWITCHES):
            yield line_of(case, each, Rates.from_dict(each["rates"]) if "rates" in each else profile("h200"))


SWITCHES = ("overlap", "reuse_slots", "deferred_update", "rare_write_backs")  # of older records


def as_case(about: dict[str, Any]) -> Case:
    """A case of a record, in today's form or in an older one. A record that names no activations is of the time when
    block inputs stayed on the GPU."""
    if "title" in about:
        usual = {"activations": "block"} if METHODS[about.get("method", "zo")].sweep == "reverse" else {}
        return Case(**about | {"options": usual | about.get("options", {})})
    shape = about.get("shape", "").removeprefix("llama ").removeprefix("opt ")
    model = about.get("model") or (shape if "opt" in about["shape"] else f"Llama-{shape}")
    streamed = about.get("streamed") or about["system"] in ("stream", STREAMED)
    method = about.get("method") or ("zo" if about["system"] in (RESIDENT, STREAMED) else about["system"])
    usual = {"activations": "block"} if METHODS[method].sweep == "reverse" and method != "lora" else {}
    options = usual | about.get("options", {}) | ({"compile": True} if about.get("compiled") else {})
    length = about["tokens"][1] if "tokens" in about else about["length"]
    name = " ".join(
        [method, model, STREAMED if streamed else RESIDENT, about.get("gpu_memory") or about.get("wire") or ""]
    )
    return Case(
        model, STREAMED if streamed else RESIDENT, method, about.get("name", f"{name} {about['batch']}x{length}"),
        dtype=about.get("dtype", "bf16"), batch=about["batch"], length=length, blocks=about.get("blocks"),
        micro_batches=about.get("micro_batches") or 1, gpu_memory=about.get("gpu_memory"), wire=about.get("wire"),
        options=options,
    )  # fmt: skip


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path)
    parser.add_argument("--quick", action="store_true", help="tiny shapes, on a CPU too")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--out", type=Path, default=RECORDS)
    args = parser.parse_args(argv)
    for path in args.files:
        lines = [line for line in recorded(path) if args.only in line.case.name]
        print(path.stem, table(list(map(cells, lines))), *summary(lines), "", sep="\n")
    if not args.files:
        job = make_job(None, args.quick, warm_up=6, timed=5, time_limit_s=None)
        command = "python -m benchmarks.plan_check"
        report = PlanReport("plan-check", args.out, command, args.quick)
        cases = [replace(case, dtype="fp32") if args.quick else case for case in CASES if args.only in case.name]
        run(measure_beside_plan, cases, job, report, print)
        print(report.markdown())


if __name__ == "__main__":
    main()
