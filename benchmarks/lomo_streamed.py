"""Where a streamed LOMO step spends its time: kernels, uploads and write-backs over time.

    python benchmarks/lomo_streamed.py [--trial NAME] [--out DIR]

Runs one trial of `keyhole bench lomo` (7B shape in 4 GiB, compiled, unless another is named), prints seconds per step,
back to back and one at a time, and the share of each 20 ms in which kernels, uploads and write-backs were active; with
--out all kernels and copies as JSON. Floor: max(resident step, the bytes of a step at the link's rates).
"""

import argparse
import json
import tempfile
import time
from collections import Counter, defaultdict
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from keyhole.bench import measure
from keyhole.bench.gradient.trials import read_trials
from keyhole.bench.gradient.worker import load_trial, method_of
from keyhole.bench.rows import TABLES

STEPS, BIN_US = 4, 20e3


def lanes(events: list[list]) -> dict[int, Counter]:
    """Bin -> microseconds of each lane in it."""
    start, bins = min(event[2] for event in events), defaultdict(Counter)
    for name, kind, at, length, _ in events:
        lane = kind if kind == "kernel" else "up" if "HtoD" in name else "down" if "DtoH" in name else "other"
        begin, end = at - start, at - start + length
        while begin < end:
            place = int(begin // BIN_US)
            stop = min(end, (place + 1) * BIN_US)
            bins[place][lane] += stop - begin
            begin = stop
    return bins


def main() -> None:
    ask = argparse.ArgumentParser()
    ask.add_argument("--trial", default="7B lomo compiled streamed 4GiB")
    ask.add_argument("--out", type=Path)
    args = ask.parse_args()
    device = torch.device("cuda", 0)
    trial = next(t for t in read_trials(TABLES / "lomo.yaml", "", quick=False) if t.name == args.trial)
    model = load_trial(trial, device, trial.length)
    method = method_of(trial, model)
    batch = measure.random_batch(trial.batch, trial.length, model.config.vocab_size)

    def run(steps: int) -> float:
        begin_s = time.perf_counter()
        for _ in range(steps):
            method.step(batch)
        torch.cuda.synchronize()
        return (time.perf_counter() - begin_s) / steps

    run(STEPS)
    up_before = model.engine.bytes_up
    alone = [run(1) for _ in range(STEPS)]
    print(*model.describe(), sep="\n")
    print(f"one at a time {min(alone):.4f} to {max(alone):.4f} s, back to back {run(STEPS):.4f} s")
    up, peak = model.engine.bytes_up - up_before, torch.cuda.max_memory_allocated()
    print(f"up {up / 2 / STEPS / 2**30:.2f} GiB per step; peak {peak / 2**30:.2f} GiB handed out")
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiler:
        run(2)
    with tempfile.TemporaryDirectory() as scratch:
        profiler.export_chrome_trace(f"{scratch}/trace.json")
        found = json.loads(Path(f"{scratch}/trace.json").read_text())["traceEvents"]
    found = [e for e in found if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    events = [[e["name"][:60], e["cat"], e["ts"], e["dur"], e["args"].get("bytes")] for e in found]
    for place, busy in sorted(lanes(events).items()):
        shares = "  ".join(f"{lane} {100 * busy[lane] / BIN_US:3.0f} %" for lane in ("kernel", "up", "down"))
        print(f"{place * BIN_US / 1e3:6.0f} ms  {shares}")
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "lomo_streamed.json").write_text(json.dumps(events))


if __name__ == "__main__":
    main()
