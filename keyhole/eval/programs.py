"""Runs a program that a model wrote, in a separate process with few rights.

Such a program is untrusted code, so nothing here runs unless it was explicitly allowed (--allow-code-execution). Each
program has

    its own process and session, killed as a group at the end in any case
    an empty temporary directory, which is its working directory and the only place where it may write
    no environment, no input, no output, no network, no further processes (see jail.py)
    limits on wall time (by the parent), CPU time, memory, size and number of files and directories

A program passes if it runs to its end without an error. The parent recognises the end by a random word that the child
writes last (jail.py says how far this can be trusted). Then the directory is deleted; what cannot be deleted is left.
"""

import json
import os
import secrets
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from keyhole.eval.jail import FAILED

SECONDS, MEMORY_BYTES = 10.0, 2**30
JAIL = Path(__file__).with_name("jail.py")
MOST_VERDICT = 4096
UNCAUGHT = 1  # Python's exit status after an exception that nobody caught, which also ends by `exit`


@dataclass(frozen=True)
class Outcome:
    """Whether a program ran to its end, and otherwise what stopped it."""

    passed: bool
    reason: str = ""


def run_program(source: str, *, seconds: float = SECONDS, memory_bytes: int = MEMORY_BYTES) -> Outcome:
    """Runs the text of a Python program, within limits."""
    done = secrets.token_hex(16)
    job = {"source": source, "seconds": seconds, "memory_bytes": memory_bytes, "done": done}
    directory = tempfile.mkdtemp(prefix="keyhole-program-")
    try:
        said, code = _confined(job, directory, seconds)
    finally:
        with suppress(RecursionError):
            shutil.rmtree(directory, ignore_errors=True)
    if said is None:
        return Outcome(False, f"not done after {seconds:g} s")
    if said == done and code != UNCAUGHT:
        return Outcome(True)
    reason = "" if said == done else said.removeprefix(FAILED.decode())
    return Outcome(False, reason or f"ended with {code}, before its end")


def _confined(job: dict[str, object], directory: str, seconds: float) -> tuple[str | None, int]:
    """The child's output, None if it takes too long; and its exit status."""
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", "-B", "-X", "utf8", str(JAIL)],
        cwd=directory,
        env={"TMPDIR": directory},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    assert process.stdin is not None and process.stdout is not None
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
    return said, code


def _read(pipe: int, deadline: float) -> str | None:
    """The data written to a pipe until it is closed, at most a few kilobytes; None if that takes too long."""
    got, ready = b"", select.poll()  # select.select takes no descriptor above 1023
    ready.register(pipe, select.POLLIN)
    while len(got) < MOST_VERDICT:
        if not ready.poll(1e3 * max(0.0, deadline - time.monotonic())):
            return None
        part = os.read(pipe, MOST_VERDICT)
        if not part:
            break
        got += part
    return got.decode("utf-8", "replace")
