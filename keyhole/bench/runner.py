"""Starts a worker for each group of cases, keeps the time limit, and writes what is known after every case.

A worker is a process of its own: memory is given back whole between models, the host peak is that of one
model, and a crash costs one case. When a worker dies, the case it was at is recorded as failed and another
worker takes the rest. A worker that does not stop by itself is killed GRACE_S seconds after the limit.
"""

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from keyhole.bench.cases import Case, grouped, select
from keyhole.bench.report import Report
from keyhole.errors import UserError

GRACE_S = 30.0
NO_LIMIT_S = 10 * 365 * 86400.0

Say = Callable[[str], None]
Receive = Callable[[dict[str, Any]], None]


def bench_zo(
    words: list[str],
    *,
    out: Path,
    command: str,
    device: str | None = None,
    quick: bool = False,
    steps: int = 5,
    warm_up: int = 6,
    time_limit_s: float | None = None,
    timeline: Path | None = None,
    say: Say = print,
) -> Report:
    """Runs the chosen cases and returns the report, which is on disk already."""
    tables, cases = select(words)
    job = {
        "device": choose_device(device, quick),
        "quick": quick,
        "warm_up": warm_up,
        "timed": steps,
        "deadline_s": time.time() + (NO_LIMIT_S if time_limit_s is None else time_limit_s),
        "timeline": str(timeline) if timeline else None,
    }
    report = Report(out, tables, cases, command, quick)

    def receive(found: dict[str, Any]) -> None:
        report.add(found)
        if line := one_line(found):
            say(line)
        if found["kind"] == "case" and found["case"]["system"] == "streamed" and found["status"] == "ok":
            job["timeline"] = None  # the worker of this case has saved it

    for group in grouped(cases):
        run = run_here if quick else run_apart
        run(receive, job, group, say)
    return report


def choose_device(device: str | None, quick: bool) -> str:
    """The device asked for; without one a GPU, or for a quick run whatever there is."""
    import torch

    if device not in (None, "cpu", "cuda"):
        raise UserError(f"--device: {device!r} is not one of cpu, cuda")
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError("--device: cuda was asked for, but PyTorch sees no CUDA GPU here; use --quick")
    if device == "cpu" and not quick:
        raise UserError(
            "bench zo: there is no GPU here, and full shapes would take days on a CPU; use --quick"
        )
    return device


def run_here(receive: Receive, job: dict[str, Any], cases: list[Case], say: Say) -> None:
    """In this process: for quick runs, where starting another would take longer than the work."""
    from keyhole.bench.worker import run_group

    run_group(receive, {**job, "cases": [asdict(case) for case in cases]})


def run_apart(receive: Receive, job: dict[str, Any], cases: list[Case], say: Say) -> None:
    """In workers, one after the other, until every case has a record."""
    left = {case.name: case for case in cases}

    def give_up(names: list[str], status: str, error: str) -> None:
        for name in names:
            case = asdict(left.pop(name))
            receive({"kind": "case", "name": name, "case": case, "status": status, "error": error})

    while left:
        if time.time() > job["deadline_s"]:
            give_up(list(left), "skipped", "the time limit has passed")
            return
        at, count, output = None, len(left), []
        for found in _records({**job, "cases": [asdict(case) for case in left.values()]}, output, say):
            if found["kind"] == "begin":
                at = found["name"]
                continue
            if found["kind"] == "case":
                left.pop(found["name"])
                at = None
            receive(found)
        died = f"the worker ended with exit code {output[-1]}: {' '.join(output[-8:-1])}"[:2000]
        if at is not None:
            give_up([at], "error", died)
        elif len(left) == count:
            give_up(list(left), "error", died)


def _records(job: dict[str, Any], output: list[str], say: Say) -> Iterator[dict[str, Any]]:
    """Yields a worker's records as they come; afterwards `output` ends with its exit code."""
    from keyhole.bench.worker import PREFIX

    worker = subprocess.Popen(
        [sys.executable, "-m", "keyhole.bench.worker"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    killer = threading.Timer(max(1.0, job["deadline_s"] + GRACE_S - time.time()), worker.kill)
    killer.daemon = True
    killer.start()
    try:
        with suppress(BrokenPipeError):  # it may have died at once
            worker.stdin.write(json.dumps(job))
            worker.stdin.close()
        for text in worker.stdout:
            if text.startswith(PREFIX):
                yield json.loads(text.removeprefix(PREFIX))
            elif text.strip():
                output.append(text.strip())
                say(f"  {text.rstrip()}")
        output.append(str(worker.wait()))
    finally:
        killer.cancel()
        worker.kill()


def one_line(found: dict[str, Any]) -> str:
    """What is said on the terminal about a record, as it comes in."""
    if found["kind"] == "link":
        rates = ", ".join(f"{name} {found[name]:.1f}" for name in ("up", "down", "duplex"))
        return f"link, copies of {found['unit_bytes'] / 2**20:.0f} MiB: {rates} GB/s"
    if found["kind"] != "case":
        return ""
    if found["status"] != "ok":
        return f"{found['name']:<40} {found['status']}: {found['error'][:300]}"
    reserved_gib, host_gib = found["device"]["reserved_bytes"] / 2**30, found["host_bytes"] / 2**30
    return (
        f"{found['name']:<40} {found['step_s']:.4f} s/step ({found['min_s']:.4f}-{found['max_s']:.4f}, wall "
        f"{found['wall_s']:.4f}), GPU {reserved_gib:.2f} GiB, host {host_gib:.1f} GiB, "
        f"loss {found['losses'][-1]:.4f}, loaded in {found['load_s']:.1f} s"
    )
