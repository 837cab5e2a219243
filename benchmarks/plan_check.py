"""Planned against measured: 20 cases over all methods, placements, two shapes, two batch sizes, with imitated budgets.

    python benchmarks/plan_check.py               # one GPU, about 7 minutes; rows are printed as they are measured
    python benchmarks/plan_check.py --quick       # tiny shapes on a CPU: shows that it runs; the ratios mean little
    python benchmarks/plan_check.py --dry         # plans only, with the rates of an H200: shows that every case fits

Each case loads random weights of the true shape, as `keyhole.load` places them, and takes a few steps. Printed: GPU
peak (what the allocator reserved), host peak (resident set of the process), and seconds per step, each planned,
measured, and their ratio; at the end the share of cases within 10 % (memory) and 15 % (time), and, of all pairs of
cases whose measured times differ by more than 2 %, the share with the right planned order. Rates are measured first, on
this machine (plan/measure.py). galore's SVDs and the fit of lsp's projectors are left out: neither is part of a usual
step.

Seconds and the host's rates (launch, called, reversed; plan/measure.py) are measured in turn, in ROUNDS: a burst of
rates, then ROUND steps without a pause, of which the LAST count. Their medians are the measurement and what it is
planned with: the check is of the planner, and the host's speed is not the same from process to process, nor from second
to second. Whether a process is on the GPU's socket, which core it is on, the clock of that core and who else uses it
change. When rates were measured once, `called` was 24, 15, 34 and 18 us in four runs in which plain `sgd`, whose step
is little else, took 55, 32, 49 and 55 ms. When they were measured after all steps, the least of five bursts, some
processes had 7 us for a launch and others 9.4, and it was not that of their steps: `sgd` began with 44 ms and ended
with 55, `apollo-mini` was planned at 1.31 of its time, `lora` at 0.68 (plan_check_h200_2026-11-17_d.json). Bursts of
one process still differ: `called` was 19 to 46 us in one of four rounds, and with the median of five rounds `reversed`
was 41.8 us beside `apollo-mini`, planned at 1.16, where the other processes of the run had 27 to 39
(plan_check_h200_2026-11-17_i.json). So there are nine, of two steps each. Where a step uses them, every other burst
also measures the link and the CPU's AdamW: measured once per run, the link was at 33 GB/s while steps uploaded at 53,
and `adam-offload` took 0.29, 0.40 and 0.47 s in three runs (plan_check_h200_2026-11-17_e.json). Before such a burst the
CPU finishes its updates. So they lag behind the first steps of a round, which do not count: those of `adam-offload`
took 0.186, 0.308, 0.344 and 0.370 s. Memory is measured before the first burst, because what a burst loads (autograd,
kernels in float32, another workspace of cuBLAS) would count in it. Rates are kept with the case, for plan_recorded.py.

A case runs in a process of its own, as a run does: what an earlier case left in an allocator, page-locked or in the
heap counts in none of the numbers, and a case that fails, hangs or is killed costs one row. The processes are started
together, import what they need, and wait for their turn on the GPU, one after the other. Nothing is measured before
they are idle, that is, before all of them together use less than IDLE of a core for IDLE_S: the first process once said
52 us for `called`, the next ones 16 to 20. (A quick run stays in one process.)
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

import keyhole
from keyhole.bench import measure
from keyhole.bench.gradient.worker import _leave_out_svd
from keyhole.bench.shapes import llama_config, opt_config
from keyhole.errors import UserError
from keyhole.machine.host import cpu_count
from keyhole.machine.probe import link_speed
from keyhole.machine.rates import Rates
from keyhole.machine.sizes import GIB, Bytes
from keyhole.methods import METHODS
from keyhole.methods.traits import Traits
from keyhole.methods.workload import Room, Workload
from keyhole.model.structure.layout import find_layout
from keyhole.model.structure.skeleton import build
from keyhole.model.weights.format import Wire
from keyhole.offload.engine import Engine
from keyhole.plan.costs import Costs
from keyhole.plan.fit import fit
from keyhole.plan.measure import ADAM_BYTES, HostRates, adam_rate, host_memory_rate
from keyhole.plan.measure import measure as measure_rates
from keyhole.plan.placement import USABLE
from keyhole.plan.profiles import profile
from keyhole.plan.table import Question, make_row

LIMIT_S = 480.0  # after which no case begins
CASE_S = 75.0  # of one case, after which its process is ended
WARM_UP, FIRST = 3, 3  # steps, before memory is measured
ROUNDS, ROUND, LAST = 9, 2, 1
MORE = 2  # steps of a round, if the CPU updates parameters
IDLE, IDLE_S, IDLE_LIMIT_S = 0.05, 0.5, 20.0
PREFIX = "@found "
HOST = "launch", "called", "reversed"
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


def work_of(case: Case, quick: bool) -> tuple[Traits, Any, int, int, Workload]:
    """The method's row, its settings, batch size and length, and the workload."""
    row = METHODS[case.method]
    own = row.settings(**case.options)
    batch_size, length = (1, 16) if quick else case.tokens
    return row, own, batch_size, length, Workload(case.method, batch_size * length, own.passes, own, length=length)


def planned(
    case: Case, module: Any, rates: Rates, dtype: torch.dtype, limit: int | None, layout: Any, streamed: set[int]
) -> dict[str, Any]:
    """The numbers of the planner's row. limit: the GPU memory that may be used; None without a GPU."""
    row, own, batch_size, length, work = work_of(case, quick=rates.gpu_bytes is None)
    gpu = limit if rates.gpu_bytes is not None else None
    budget = gpu is not None and case.gpu_memory is not None
    asked = Question(
        module, dtype, rates, gpu, 2**50, batch_size, length, settings={case.method: own}, is_budget=budget
    )
    plan = make_row(asked, row, case.placement, case.wire, layout, streamed)
    room = Room(Wire(dtype, case.wire), rates.workspace_bytes, limit, budget)
    moved = row.planned_work(layout, streamed, work, room, rates)
    assert plan.seconds is not None
    return {
        "planned": {"gpu": plan.gpu_bytes, "host": plan.host_bytes, "seconds": plan.step_seconds},
        "bound_by": plan.bound_by,
        "parts": {name: getattr(plan.seconds, name) for name in ("compute", "link", "cpu")},
        "bytes_planned": [moved.up, moved.down],
    }


def run(case: Case, device: torch.device, rates: Rates, quick: bool) -> dict[str, Any]:
    """Planned and measured numbers of one case."""
    row, own, batch_size, length, work = work_of(case, quick)
    dtype = torch.float32 if quick else torch.bfloat16
    where = {"placement": case.placement, "gpu_memory": None if quick else case.gpu_memory, "wire": case.wire}
    begin_s = time.perf_counter()
    model = keyhole.load(config_of(case, quick), init="random", dtype=dtype, device=device, workload=work, **where)
    measure.clean_up(device)
    method = row.load()(model, 1e-6, **vars(own))
    batch = measure.random_batch(batch_size, length, model.config.vocab_size)
    loaded_s = time.perf_counter() - begin_s
    warm_up = 8 if row.sweep == "forward" and model.engine.streamed else WARM_UP
    measure.time_steps(lambda: method.step(batch), model.engine, warm_up, FIRST)
    memory, host_bytes = measure.device_memory(device), measure.host_memory()
    updates = model.placed is not None and work_on_cpu(case, model, rates, dtype)
    settle = method.flush if updates else None
    found = in_rounds(lambda: method.step(batch), model.engine, 1 if quick else ROUNDS, settle)
    decided, module = model.describe() + method.describe(), model.module
    placed = model.placed.limit_bytes, model.layout, model.engine.streamed
    method.flush()
    if hasattr(method, "close"):
        method.close()
    model.close()
    measure.clear_device(device)
    return planned(case, module, replace(rates, **found["host_rates"]), dtype, *placed) | {
        "case": asdict(case),
        "measured": {"gpu": memory["reserved_bytes"], "host": host_bytes, "seconds": found.pop("seconds")},
        "allocated": memory["allocated_bytes"],
        **found,
        "loaded_s": loaded_s,
        "decided": decided,
    }


def work_on_cpu(case: Case, model: keyhole.Model, rates: Rates, dtype: torch.dtype) -> bool:
    """Whether the CPU updates parameters in this case."""
    row, _, _, _, work = work_of(case, quick=rates.gpu_bytes is None)
    room = Room(Wire(dtype, case.wire), rates.workspace_bytes, model.placed.limit_bytes, case.gpu_memory is not None)
    return row.planned_work(model.layout, model.engine.streamed, work, room, rates).adam > 0


class Bursts:
    """The host's rates, and where a step uses them, those of the link and of the CPU's updates."""

    def __init__(self, engine: Engine, updates: bool) -> None:
        self.host, self.found = HostRates(engine.device), list[dict[str, float]]()
        self.updates, self.copies = updates, engine.device.type == "cuda" and (updates or bool(engine.streamed))

    def burst(self, host_alone: bool = False) -> None:
        self.host.burst()
        found = dict(self.host.bursts[-1])
        self.found.append(found)
        if host_alone:
            return
        if self.updates:
            found["adam"] = adam_rate()
            found["host_memory"] = max(host_memory_rate(), ADAM_BYTES * found["adam"])
        if self.copies:
            with suppress(torch.OutOfMemoryError):  # a tight budget: the rates of the run stand
                link = link_speed()
                found |= {"up": 1e9 * link["host_to_device"], "down": 1e9 * link["device_to_host"]}
                found["both"] = 1e9 * link["both_ways"]

    def medians(self) -> dict[str, float]:
        names = dict.fromkeys(name for each in self.found for name in each)
        return {name: statistics.median(each[name] for each in self.found if name in each) for name in names}


def in_rounds(
    step: Callable[[], torch.Tensor], engine: Engine, rounds: int, settle: Callable[[], None] | None
) -> dict[str, Any]:
    """Seconds of a step and the rates around it, measured in turn. settle: finishes the CPU's updates, if it makes
    any."""
    rates, found = Bursts(engine, settle is not None), []
    rates.burst()  # loads what it needs: its `called` is up to twice that of the next
    rates.found.clear()
    for i in range(rounds):
        if settle is not None:
            settle()
        rates.burst(host_alone=i % 2 == 1)
        found.append(measure.time_steps(step, engine, 0, ROUND + (0 if settle is None else MORE)))
    return {
        "seconds": statistics.median(second for each in found for second in each["steps_s"][-LAST:]),
        "host_rates": rates.medians(),
        "bursts": rates.found,
        "steps_s": [second for each in found for second in each["steps_s"]],
        "used": [each["used"] for each in found],
        "bytes_measured": [sum(each[way] for each in found) // rounds for way in ("bytes_up", "bytes_down")],
    }


layout_of = cache(find_layout)  # the cases of many records share few modules


def dry(case: Case, rates: Rates, modules: dict[str, Any]) -> dict[str, Any]:
    """The planner's row alone, from the config, placed as loading would."""
    if case.shape not in modules:
        modules[case.shape] = build(config_of(case, False), torch.bfloat16)
    row, _, _, _, work = work_of(case, False)
    module = modules[case.shape]
    budget = int(Bytes.parse(case.gpu_memory)) if case.gpu_memory else None
    limit = int(USABLE * (rates.gpu_bytes or 0)) if budget is None else budget
    costs = Costs(work, Room(Wire(torch.bfloat16, case.wire), rates.workspace_bytes, limit, budget is not None), row)
    resident = case.placement == "resident"
    layout, streamed = (layout_of(module), set[int]()) if resident else fit(module, costs, budget, layout_of)
    found = planned(case, module, rates, torch.bfloat16, limit, layout, streamed)
    return found | {"measured": {"gpu": None, "host": None, "seconds": None}}


def ratio(found: dict[str, Any], name: str) -> float | None:
    measured = found["measured"][name]
    return found["planned"][name] / measured if measured else None


def microseconds(host: dict[str, float]) -> str:
    """The host's rates: launch, called, reversed; of the link and of the CPU's updates, where they were measured."""
    more = [f"{host[name] / 1e9:.2g} G/s {name}" for name in ("up", "adam") if name in host]
    return ", ".join([" ".join(f"{1e6 * host[name]:.1f}" for name in HOST) + " us", *more])


def line(title: str, found: dict[str, Any]) -> str:
    p, m = found["planned"], found["measured"]
    parts = []
    for name, unit, form in (("gpu", GIB, ".2f"), ("host", GIB, ".2f"), ("seconds", 1, ".4f")):
        share = ratio(found, name)
        shown = f"{share:5.2f}" if share is not None else "    -"
        measured = f"{m[name] / unit:8{form}}" if m[name] is not None else "       -"
        parts.append(f"{p[name] / unit:8{form}} {measured} {shown}")
    split = " ".join(f"{name} {value:.3f}" for name, value in found["parts"].items())
    if "host_rates" in found:
        split += f" | {microseconds(found['host_rates'])}"
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


class Process:
    """A process that imports what a case needs, and runs it when it is told to."""

    def __init__(self, case: Case | None) -> None:
        """case: None to measure the rates."""
        command = [sys.executable, str(Path(__file__).resolve()), "--wait", case.method if case else "rates"]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        self.is_ready = False
        self.process = subprocess.Popen(command, text=True, cwd=Path(__file__).resolve().parents[1], **pipes)

    def ready(self) -> None:
        """Waits until it has imported everything, or has ended."""
        while not self.is_ready and (text := self.process.stdout.readline()):
            self.is_ready = text.startswith(PREFIX)

    def ask(self, job: dict[str, Any], limit_s: float) -> dict[str, Any]:
        """Its answer; RuntimeError with its last lines if it has none."""
        self.ready()
        last: list[str] = []
        killer = threading.Timer(limit_s, self.process.kill)
        killer.start()
        try:
            with suppress(BrokenPipeError):
                self.process.stdin.write(json.dumps(job))
                self.process.stdin.close()
            while text := self.process.stdout.readline():
                if text.startswith(PREFIX):
                    return json.loads(text.removeprefix(PREFIX))
                last = [*last[-3:], text.strip()]
            raise RuntimeError(f"exit code {self.process.wait()}, after {limit_s:.0f} s at most: {' / '.join(last)}")
        finally:
            self.end()
            killer.cancel()

    def used_s(self) -> float:
        """Seconds that it has been on a core; 0 if it has ended."""
        with suppress(OSError):
            after_name = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
            return (int(after_name[11]) + int(after_name[12])) / os.sysconf("SC_CLK_TCK")
        return 0.0

    def end(self) -> None:
        """Ends it, and waits until its memory is free."""
        self.process.kill()
        self.process.wait()


def wait_until_idle(processes: list[Process]) -> None:
    """Waits until they use next to nothing, but not for ever."""
    begin_s = time.perf_counter()
    while time.perf_counter() - begin_s < IDLE_LIMIT_S:
        before = sum(process.used_s() for process in processes)
        time.sleep(IDLE_S)
        if sum(process.used_s() for process in processes) - before <= IDLE * IDLE_S:
            return


def wait_for_job(method: str) -> None:
    """The main program of such a process: imports what this method and no other needs."""
    if method in METHODS:
        METHODS[method].load()
        for config in (llama_config("3.5B", quick=True), opt_config("1.3B", quick=True)):
            keyhole.load(config, init="random", device="cpu").close()
    print(f"{PREFIX}ready", flush=True)
    job = json.loads(sys.stdin.read())
    device = torch.device(job["device"])
    found: dict[str, Any]
    try:
        if job["case"] is None:
            found = {"rates": measure_rates(device).to_dict()}
        else:
            _leave_out_svd()
            case = Case(**(job["case"] | {"tokens": tuple(job["case"]["tokens"])}))
            found = run(case, device, Rates.from_dict(job["rates"]), job["quick"])
    except Exception as error:
        found = {"error": f"{type(error).__name__}: {str(error)[:400]}"}
    print(f"\n{PREFIX}{json.dumps(found)}", flush=True)


def measured_apart(cases: list[Case], device: torch.device, quick: bool) -> Iterator[dict[str, Any]]:
    """First the rates, then the numbers of each case, or its error."""
    begin_s, jobs = time.perf_counter(), [None, *cases]
    ahead = len(jobs) if cpu_count() >= 8 else 2
    waiting = [Process(case) for case in jobs[:ahead]]
    for process in waiting:
        process.ready()
    if not quick:
        wait_until_idle(waiting)
    print(f"{len(waiting)} processes are ready after {time.perf_counter() - begin_s:.0f} s", flush=True)
    job: dict[str, Any] = {"device": str(device), "quick": quick, "rates": None}
    try:
        for i, case in enumerate(jobs):
            process = waiting.pop(0)
            if i and ahead < len(jobs) and not quick:  # another one has begun to import
                process.ready()
                wait_until_idle([process, *waiting])
            if case is not None and time.perf_counter() - begin_s > LIMIT_S:
                process.end()
                found = {"error": f"left out, {LIMIT_S:.0f} s have passed"}
            else:
                try:
                    found = process.ask(job | {"case": None if case is None else asdict(case)}, CASE_S)
                except RuntimeError as error:
                    found = {"error": str(error)}
            if case is None:
                if "error" in found:  # without rates there is nothing to check
                    raise SystemExit(f"rates: {found['error']}")
                job["rates"] = found["rates"]
            if i + ahead < len(jobs):
                waiting.append(Process(jobs[i + ahead]))
            yield found
    finally:
        for process in waiting:
            process.end()


def measured_here(cases: list[Case], device: torch.device, quick: bool) -> Iterator[dict[str, Any]]:
    """The same in this process."""
    _leave_out_svd()
    rates = measure_rates(device)
    yield {"rates": rates.to_dict()}
    for case in cases:
        try:
            yield run(case, device, rates, quick)
        except Exception as error:  # one case that fails costs one row
            yield {"error": f"{type(error).__name__}: {str(error)[:400]}"}
        measure.clear_device(device)


def planned_only(cases: list[Case]) -> Iterator[dict[str, Any]]:
    """The same without measurements, for an H200."""
    modules: dict[str, Any] = {}
    yield {"rates": profile("h200").to_dict()}
    for case in cases:
        try:
            yield dry(case, profile("h200"), modules)
        except UserError as error:
            yield {"error": str(error)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="tiny shapes, on a CPU too")
    parser.add_argument("--apart", action="store_true", help="a quick run with a process per case too")
    parser.add_argument("--dry", action="store_true", help="plan only")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--json", help="write all numbers there")
    parser.add_argument("--wait", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.wait:
        return wait_for_job(args.wait)
    begin_s, device = time.perf_counter(), torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu" and not (args.quick or args.dry):
        parser.error("full shapes need a GPU; use --quick")
    cases, results, errors = [case for case in CASES if args.only in case.name], [], 0
    if args.dry:
        found = planned_only(cases)
    else:
        found = (measured_here if args.quick and not args.apart else measured_apart)(cases, device, args.quick)
    rates = Rates.from_dict(next(found)["rates"])
    print("\n".join(rates.lines()))
    rows = ", ".join(f"{rows}: {rate / 1e12:.3g}" for rows, rate in rates.products.items())
    print(f"products by rows: {rows} TFLOP/s; device memory {rates.device_memory / 1e9:.0f} GB/s; ", end="")
    print(f"launch, called, reversed {microseconds(vars(rates))}; ", end="")
    print(f"{time.perf_counter() - begin_s:.0f} s so far", flush=True)
    print(f"{'case':50} {'GPU GiB planned, measured':25}  |  {'host GiB':23}  |  seconds per step", flush=True)
    for case in cases:
        answer = next(found)
        if "error" in answer:
            errors += 1
            print(f"{case.name}: {answer['error']}", flush=True)
        else:
            results.append(answer)
            print(f"{line(case.name, answer)} | {time.perf_counter() - begin_s:.0f} s", flush=True)
        if args.json:
            Path(args.json).write_text(json.dumps({"rates": rates.to_dict(), "results": results}, indent=1))
    if not args.dry:
        print("\n".join(summary(results)))
    print(f"{len(results)} cases, {errors} without a result; {time.perf_counter() - begin_s:.0f} s in all")


if __name__ == "__main__":
    main()
