"""Times first-order methods (`keyhole bench lomo`). Trials of a shape share a process; weights are drawn anew for each.

    native     torch's optimizer on the plain HF module, its own gradient checkpointing: the baseline
    the rest   methods of keyhole, resident or streamed in a budget

Floors:
    compute    operations of the matrix products (forward 2 P, second forward 2 P, backward 4 P a token, minus the one
               product of a block that is left out) at the rate of a large product of the same run
    link       two uploads of what is streamed, or the bytes that crossed if more (what is still there at the turn from
               forward to reverse does not cross again), at the duplex rate of the same run
    updates    of adam-offload: all updates of a step with nothing else at work in the machine
    a streamed step is compared with max(resident step of the same method, link)

Random weights of the true shapes; median of the timed steps. GPU GiB: peak handed out, and reserved, by the allocator.
"""

import json
import subprocess
import sys
import time
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import Any

from keyhole.bench.gradient_trials import Trial, config_of, trials_of
from keyhole.errors import UserError

PREFIX = "@record "


class Native:
    """The loop anyone would write, with Hugging Face's checkpointing."""

    def __init__(self, model: Any, optimizer: str) -> None:
        import torch

        self.module, self.device = model.module, model.device
        self.module.train()
        self.module.gradient_checkpointing_enable({"use_reentrant": False})
        make = {"sgd": torch.optim.SGD, "adamw": lambda p, lr: torch.optim.AdamW(p, lr=lr, fused=True)}[optimizer]
        self.optimizer = make(list(self.module.parameters()), lr=1e-5)

    def step(self, batch: dict[str, Any]) -> Any:
        loss = self.module(**{k: v.to(self.device) for k, v in batch.items()}, use_cache=False).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()


def run_trial(trial: Trial, device: Any, quick: bool, timed: int, warm_up: int) -> dict[str, Any]:
    """Loads, times, and says what was seen; nothing stays on the device."""
    from keyhole.bench.link import measure_link

    found = _timed(trial, device, quick, timed, warm_up)
    _clear(device)
    if device.type == "cuda" and trial.streamed:
        found["link"] = measure_link(192 * 2**20, rounds=3)
    return found


def _clear(device: Any) -> None:
    """Everything off the device, and no budget."""
    import torch

    from keyhole.bench import measure

    measure.clean_up(device)
    if device.type == "cuda":
        torch.cuda.set_per_process_memory_fraction(1.0, device)


def _timed(trial: Trial, device: Any, quick: bool, timed: int, warm_up: int) -> dict[str, Any]:
    import torch

    from keyhole.bench import measure
    from keyhole.bench.lsp import parts, updates_alone_s

    length = 16 if quick else trial.length
    begin_s = time.perf_counter()
    model = load_trial(trial, device, quick, trial.batch * length)
    found = {"load_s": time.perf_counter() - begin_s, "tokens": trial.batch * length}
    measure.clean_up(device)
    method = method_of(trial, model, quick)
    ids = torch.randint(4, model.config.vocab_size, (trial.batch, length), generator=torch.Generator().manual_seed(1))
    engine, before = model.engine, {}

    def mark() -> None:
        before.update(up=engine.bytes_up, down=engine.bytes_down)

    step = lambda: method.step({"input_ids": ids, "labels": ids})  # noqa: E731
    found |= measure.time_steps(step, device, warm_up, timed, mark)
    found["bytes_up"] = (engine.bytes_up - before["up"]) // timed
    found["bytes_down"] = (engine.bytes_down - before["down"]) // timed
    found["streamed_bytes"] = sum(engine.homes[i].numel() * engine.homes[i].element_size() for i in engine.streamed)
    found |= {"device": measure.device_memory(device), "host_bytes": measure.host_memory()}
    found |= {"weights_bytes": model.layout.numel * model.dtype.itemsize, "decided": model.describe()}
    found |= {"planned_bytes": model.placed.device_bytes.total, "parts": parts(method)}
    found["decided"] += getattr(method, "describe", list)()
    found["updates_alone_s"] = updates_alone_s(method)
    model.close()
    return found


def _quick_budget(trial: Trial) -> str | None:
    """Of tiny shapes: so little that of lsp's moments only those of the tables stay."""
    return "1560KiB" if trial.gpu_memory and not trial.streamed else None


def load_trial(trial: Trial, device: Any, quick: bool, tokens: int) -> Any:
    """The trial's model, with random weights, where the trial wants it."""
    import keyhole
    from keyhole.bench.lsp import adapted
    from keyhole.methods import METHODS
    from keyhole.methods.base import Workload

    own = None
    if trial.system in METHODS:
        cls, options = METHODS[trial.system].settings, adapted(trial.options, quick)
        own = cls(**{key: value for key, value in options.items() if key in cls.__dataclass_fields__})
    work = Workload(trial.system, tokens, 1, own, clips="max_grad_norm" in trial.options)
    where = {"placement": "stream"} if trial.streamed else {}
    where |= {"gpu_memory": _quick_budget(trial) if quick else trial.gpu_memory}
    where |= {"dtype": "float32" if quick else "bfloat16", "device": device, "workload": work}
    return keyhole.load(config_of("quick" if quick else trial.shape), init="random", **where)


def method_of(trial: Trial, model: Any, quick: bool) -> Any:
    """The trial's method on that model, or the baseline."""
    from keyhole.bench.lsp import adapted
    from keyhole.methods import METHODS

    options = adapted(trial.options, quick)
    return Native(model, **options) if trial.system == "native" else METHODS[trial.system].load()(model, 1e-5, **options)


def product_rate(device: Any) -> float:
    """FLOP/s of a large bf16 product of random matrices, the best of a few."""
    import torch

    if device.type != "cuda":
        return float("nan")
    a, b = (torch.randn(8192, 8192, device=device, dtype=torch.bfloat16) for _ in range(2))
    best_s = float("inf")
    for _ in range(6):
        torch.cuda.synchronize()
        begin_s = time.perf_counter()
        for _ in range(10):
            a @ b
        torch.cuda.synchronize()
        best_s = min(best_s, (time.perf_counter() - begin_s) / 10)
    return 2 * 8192**3 / best_s


def worker() -> None:
    """Reads a job from stdin, writes a record a line."""
    import torch

    from keyhole.machine.probe import environment

    job = json.loads(sys.stdin.read())
    device = torch.device("cpu") if job["quick"] else torch.device("cuda", 0)

    def emit(**record: Any) -> None:
        print("\n" + PREFIX + json.dumps(record), flush=True)

    emit(kind="machine", product_rate=product_rate(device), **environment())
    for given in job["trials"]:
        trial = Trial(**given)
        if time.time() > job["deadline_s"]:
            emit(kind="trial", trial=given, error="the time limit has passed")
            continue
        try:
            found = run_trial(trial, device, job["quick"], job["timed"], job["warm_up"])
        except Exception as error:
            found = {"error": f"{type(error).__name__}: {error}"[:600]}
        _clear(device)  # here, where no traceback holds on to tensors any more
        emit(kind="trial", trial=given, **found)


def bench_gradient(
    table: str,
    *,
    out: Path,
    command: str,
    only: str = "",
    quick: bool = False,
    steps: int = 5,
    warm_up: int = 2,
    time_limit_s: float | None = None,
    say: Any = print,
) -> str:
    """Runs the trials of a table, a process for each run of one shape, and writes JSON and Markdown after every one."""
    from keyhole.bench.gradient_report import Report

    trials = [t for t in trials_of(table) if only in t.name]
    if not trials:
        raise UserError(f"--only: no trial of {table} has {only!r} in its name")
    report = Report(table, out, command, quick)
    deadline_s = time.time() + (time_limit_s or 1e9)
    for _, members in groupby(trials, lambda t: "quick" if quick else t.shape):
        job = {"quick": quick, "timed": steps, "warm_up": warm_up, "deadline_s": deadline_s}
        job["trials"] = [asdict(t) for t in members]
        process = subprocess.Popen(
            [sys.executable, "-c", "from keyhole.bench.gradient import worker; worker()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        process.stdin.write(json.dumps(job))
        process.stdin.close()
        for line in process.stdout:
            if line.startswith(PREFIX):
                report.add(json.loads(line.removeprefix(PREFIX)), say)
        process.wait()
    return report.markdown()
