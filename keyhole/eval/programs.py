"""Runs a program that a model wrote, in a separate process with few rights.

Such a program is untrusted code, so nothing here runs unless it was explicitly allowed (--allow-code-execution). Each
program has

    its own process and session, killed as a group at the end in any case
    an empty temporary directory, which is its working directory and the only place where it may write
    no environment, no input, no output, no network, no further processes (see jail.py)
    limits on wall time (by the parent), CPU time, memory, size and number of files and directories

A program passes if it runs to its end without an error. The parent recognises the end by a random word that the child
writes last (jail.py says how far this can be trusted). The directory is deleted without recursion and within
CLEANING_SECONDS, however deep and full it is; a failed deletion never fails the evaluation.
"""

import json
import os
import secrets
import select
import signal
import stat
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from keyhole.eval.jail import FAILED

SECONDS, MEMORY_BYTES, CLEANING_SECONDS = 10.0, 2**30, 10.0
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
        clear(directory, time.monotonic() + CLEANING_SECONDS)
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


def clear(directory: str, deadline: float) -> None:
    """Deletes a directory with its contents, until the deadline; what cannot be deleted is left.

    Nested directories are first moved to the top, so that paths stay short and nothing recurses.
    """
    with suppress(OSError):
        top = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            while names := os.listdir(top):
                for name in names:
                    _unpack(name, top, deadline)
        finally:
            os.close(top)
        os.rmdir(directory)


def _unpack(name: str, top: int, deadline: float) -> None:
    """Deletes a file, or a directory after moving its subdirectories to the top under new names."""
    _hurry(deadline)
    if not stat.S_ISDIR(os.stat(name, dir_fd=top, follow_symlinks=False).st_mode):
        os.unlink(name, dir_fd=top)
        return
    os.chmod(name, 0o700, dir_fd=top)
    inside = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=top)
    try:
        with os.scandir(inside) as entries:
            found = [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries]
        for child, is_directory in found:
            _hurry(deadline)
            if is_directory:
                os.chmod(child, 0o700, dir_fd=inside)
                os.rename(child, secrets.token_hex(16), src_dir_fd=inside, dst_dir_fd=top)
            else:
                os.unlink(child, dir_fd=inside)
    finally:
        os.close(inside)
    os.rmdir(name, dir_fd=top)


def _hurry(deadline: float) -> None:
    if time.monotonic() > deadline:
        raise TimeoutError  # an OSError


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
