"""Runs a program that a model wrote, in a separate process with few rights.

Such a program is untrusted code, so nothing here runs unless it was explicitly allowed (--allow-code-execution). Each
program has

    its own process and session, killed as a group at the end in any case
    an empty temporary directory, which is its working directory and the only place where it may write
    no environment, no input, no output, no network, no further processes (see confined.py)
    limits on wall time (by the parent), CPU time, memory, size and number of files and directories
"""

import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from keyhole.eval.confined import FAILED

SECONDS, MEMORY_BYTES = 10.0, 2**30
CONFINED = Path(__file__).with_name("confined.py")
MOST_VERDICT = 4096
UNCAUGHT = 1  # Python's exit status after an exception that nobody caught, which also ends by `exit`


@dataclass(frozen=True)
class Outcome:
    """Whether a program ran to its end, and otherwise what stopped it."""

    passed: bool
    reason: str = ""


def run_program(source: str, *, seconds: float = SECONDS, memory_bytes: int = MEMORY_BYTES) -> Outcome:
    done, directory = secrets.token_hex(16), tempfile.mkdtemp(prefix="keyhole-program-")
    job = {"source": source, "seconds": seconds, "memory_bytes": memory_bytes, "done": done}
    with tempfile.TemporaryFile() as verdict:  # unlike a pipe, the limit on the size of files bounds it
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-B", "-X", "utf8", str(CONFINED)],
            cwd=directory,
            env={"TMPDIR": directory},
            stdin=subprocess.PIPE,
            stdout=verdict,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            process.communicate(json.dumps(job).encode(), timeout=seconds)
        except subprocess.TimeoutExpired:
            return Outcome(False, f"not done after {seconds:g} s")
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            with suppress(RecursionError):
                shutil.rmtree(directory, ignore_errors=True)
        verdict.seek(0)
        said = verdict.read(MOST_VERDICT).decode("utf-8", "replace")
    if said == done and process.returncode != UNCAUGHT:
        return Outcome(True)
    reason = "" if said == done else said.removeprefix(FAILED.decode())
    return Outcome(False, reason or f"ended with {process.returncode}, before its end")
