"""The tests of a GPU in a few processes side by side, in an order that a seed shuffles.

    python -m tests.processes [--seed 1] [--processes 8] [--seconds 540] [--logs DIR] [PYTEST ARGUMENT ...]

Every process begins with a test that fails while it holds a model with a budget (tests/fails_first.py), and ends with
a line about what it has left behind: memory of the GPU, threads, the allocator's limit. What fails is printed as it
comes; at the end, a line per process. A process that is ended by a signal, or leaves anything, fails the whole.
"""

import argparse
import os
import random
import re
import subprocess
import sys
import time
from pathlib import Path

FIRST = "tests/fails_first.py::test_that_fails_while_it_holds_a_model"


def pytest_sessionfinish(session: object) -> None:
    """As a plugin of each process (-p tests.processes): what it has left behind."""
    import gc
    import threading

    import torch

    from keyhole.machine.gpu import free_memory

    for name in ("last_exc", "last_type", "last_value", "last_traceback"):
        vars(sys).pop(name, None)
    gc.unfreeze()
    free_memory()
    mib = torch.cuda.memory_allocated() // 2**20 if torch.cuda.is_available() else 0
    limit = torch.cuda.get_per_process_memory_fraction() if torch.cuda.is_available() else 1.0
    ours = [thread.name for thread in threading.enumerate() if thread.name.startswith("keyhole")]
    print(f"\nleft behind: {mib} MiB, limit {limit:g}, threads {ours}", flush=True)


def collected(arguments: list[str]) -> list[str]:
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", "gpu and not matrix", "-o", "addopts="]
    command += ["-p", "no:logging", "--import-mode=importlib", *arguments]
    said = subprocess.run(command, capture_output=True, text=True, check=False)
    return [line for line in said.stdout.splitlines() if "::" in line]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=540)
    parser.add_argument("--logs", type=Path, default=Path("gpu-logs"))
    args, others = parser.parse_known_args()
    tests = collected(others)
    random.Random(args.seed).shuffle(tests)
    print(f"{len(tests)} tests, seed {args.seed}, {args.processes} processes", flush=True)
    args.logs.mkdir(parents=True, exist_ok=True)
    running, seen, begin = [], [0] * args.processes, time.monotonic()
    env = {"OMP_NUM_THREADS": "2"} | os.environ  # all processes side by side would have a thread per core each
    logs = [args.logs / f"{i}.log" for i in range(args.processes)]
    for i, log in enumerate(logs):
        names = args.logs / f"{i}.txt"
        names.write_text("\n".join([FIRST, *tests[i :: args.processes]]))
        command = [sys.executable, "-m", "pytest", "-v", "--tb=short", "--durations=25", "--import-mode=importlib"]
        command += ["-o", "addopts=", "-p", "no:logging", "-p", "no:cacheprovider", "-p", "tests.processes"]
        command.append(f"@{names}")
        running.append(subprocess.Popen(command, stdout=log.open("w"), stderr=subprocess.STDOUT, env=env))
    while True:
        alive = [process for process in running if process.poll() is None]
        for i, log in enumerate(logs):
            text = log.read_text(errors="replace")
            for line in text[seen[i] :].splitlines():
                told = re.search(r"::.*(FAILED|ERROR)|^(FAILED|ERROR) |^Fatal|left behind", line)
                if told and "fails_first" not in line:
                    print(f"[{i}] {line[:300]}", flush=True)
            seen[i] = text.rfind("\n") + 1
        if not alive:
            break
        if time.monotonic() - begin > args.seconds:
            for process in alive:
                process.kill()
        time.sleep(2)
    wrong = 0
    for i, (process, log) in enumerate(zip(running, logs, strict=True)):
        text = log.read_text(errors="replace")
        passed, failed = (len(re.findall(rf"::.* {word}", text)) for word in ("PASSED", "FAILED|ERROR"))
        lines = text.splitlines() or [""]
        last = next((line for line in reversed(lines) if "::" in line), "")
        print(f"process {i}: code {process.returncode}, {passed} passed, {failed} failed; {lines[-1]}; {last[:150]}")
        wrong += process.returncode not in (0, 1) or "left behind: 0 MiB, limit 1, threads []" not in text
    print(f"{time.monotonic() - begin:.0f} s; {wrong} processes were not as they should be", flush=True)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
