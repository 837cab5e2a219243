"""Runs a program that a model wrote, in a process of its own that may do little.

Whoever runs such programs runs a stranger's code. Nothing here happens unless it was allowed by name
(--allow-code-execution). Each program has

    a process and session of its own, killed as a group at the end, whatever happened
    an empty temporary directory, which is its working directory and the only place where it may write
    no environment, no input, no output, no network, no further process (jail.py says how)
    limits on wall time (by the parent), CPU time, memory, size and number of files

A program passes if it runs to its end without an error. The parent recognises the end by a random word that the child
writes last.
"""

import json
import os
import secrets
import select
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

SECONDS, MEMORY_BYTES = 10.0, 2**30
JAIL = Path(__file__).with_name("jail.py")
MOST_VERDICT = 4096


@dataclass(frozen=True)
class Outcome:
    """Whether a program ran to its end, and what stopped it otherwise."""

    passed: bool
    reason: str = ""


def run_program(source: str, *, seconds: float = SECONDS, memory_bytes: int = MEMORY_BYTES) -> Outcome:
    """Runs the text of a Python program, within limits."""
    done = secrets.token_hex(16)
    job = {"source": source, "seconds": seconds, "memory_bytes": memory_bytes, "done": done}
    with tempfile.TemporaryDirectory(prefix="keyhole-program-", ignore_cleanup_errors=True) as directory:
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-B", "-X", "utf8", str(JAIL)],
            cwd=directory,
            env={"TMPDIR": directory},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            try:
                process.stdin.write(json.dumps(job).encode())
                process.stdin.close()
            except BrokenPipeError:
                pass
            said = _read(process.stdout.fileno(), time.monotonic() + seconds)
        finally:
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            code = process.wait()
            process.stdout.close()
    if said is None:
        return Outcome(False, f"not done after {seconds:g} s")
    if said == done:
        return Outcome(True)
    return Outcome(False, said or f"ended with {code}, before its end")


def _read(pipe: int, deadline: float) -> str | None:
    """What is written to a pipe until it is closed, or a few kilobytes of it; None where that takes too long."""
    got = b""
    while len(got) < MOST_VERDICT:
        ready, _, _ = select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            return None
        part = os.read(pipe, MOST_VERDICT)
        if not part:
            break
        got += part
    return got.decode("utf-8", "replace")
