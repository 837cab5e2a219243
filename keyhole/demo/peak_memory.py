"""The memory of each method, measured in a separate process while the demo trains.

The process resets the peak resident size that Linux keeps (VmHWM) to the current size by writing 5 to
/proc/self/clear_refs, loads the embedded model, takes STEPS steps, and reads how far the size has risen:

    host = max over time of (resident now) - (resident before the model was loaded)         GPU = CUDA's own peak

This is correct only if freed pages are returned to the system at once; otherwise a method would reuse the memory of the
previous one and seem to need none. glibc returns them on request (malloc_trim); mimalloc, which torch uses on some
processors, must be configured before it starts (MIMALLOC_PURGE_DELAY=0), which makes every allocation slower. Hence the
separate process. Each method runs twice and the second run counts, because libraries that are loaded on first use do
not belong to the method. Without /proc the host's column stays empty.
"""

import ctypes
import gc
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
STEPS = 3
PURGING = {"MIMALLOC_PURGE_DELAY": "0"}
Peaks = dict[str, tuple[int, int]]  # method -> bytes on the host, bytes on the GPU


def begin_peak() -> int:
    """Gives freed memory back, resets the peak, and returns the resident bytes of now."""
    gc.collect()
    with suppress(AttributeError, OSError):  # not glibc
        ctypes.CDLL(None).malloc_trim(0)
    with suppress(OSError):  # not Linux, or forbidden by a sandbox: the peak then counts from the process start
        CLEAR.write_text("5")
    return resident_bytes("VmRSS")


def resident_bytes(key: str) -> int:
    """VmRSS (now) or VmHWM (highest) of this process; 0 without /proc."""
    lines = STATUS.read_text().splitlines() if STATUS.exists() else []
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(key + ":")), 0)


@contextmanager
def measured_beside(names: list[str], device: str | None) -> Iterator[Callable[[], Peaks]]:
    """Starts the process; the yielded function waits for the result, which is empty if there is none, for instance
    because the process was killed. The process is ended in any case."""
    code = f"import json; from keyhole.demo.run import measure; print(json.dumps(measure({names!r}, {device!r})))"
    none, env = subprocess.DEVNULL, os.environ | PURGING
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=none, stdout=subprocess.PIPE, stderr=none, text=True, env=env
    )

    def result() -> Peaks:
        try:
            found = json.loads(process.communicate()[0].splitlines()[-1])
            return {name: (host, gpu) for name, (host, gpu) in found.items()}
        except (IndexError, ValueError):
            return {}

    try:
        yield result
    finally:
        process.kill()
        process.wait()
