"""One command in this process, and what must hold however hostile the files are that it reads.

    ended = attempt(["train", "run.yaml", "--dry-run"], inside=tmp_path / "out", around=tmp_path)

Whatever the files hold: the exit code is 0 or 2, never the 1 of a traceback; a 2 comes with one message; nothing is
printed that a terminal would obey, and not much of anything; memory stays below MEMORY_BYTES and work below CPU_S
seconds; nothing changes outside `inside`. A command that waits for somebody (a pipe that nobody writes into) is ended
after WAIT_S.
"""

import faulthandler
import io
import os
import resource
import signal
import stat
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from keyhole.cli import main

MEMORY_BYTES, FUSE_BYTES = 2**29, 2**33
CPU_S, WAIT_S, HANGS_S = 20.0, 120.0, 240.0
MOST_PRINTED = 40_000


class TooLong(BaseException):
    """The command worked, or waited, for longer than any file may make it."""


@dataclass(frozen=True)
class Ended:
    """What a command left: its exit code, and what it printed."""

    code: int
    printed: str


def attempt(args: Sequence[str], inside: Path, around: Path, stdin: str = "") -> Ended:
    """Runs `keyhole ARGS...` and asserts everything that the top of this file says. `around` holds `inside`."""
    before = _tree(around, inside)
    begin_bytes = _resident("VmRSS", reset=True)
    with _captured(stdin) as read, _limited():
        code = main(list(args))
        printed = read()
    grown = _resident("VmHWM") - begin_bytes
    shown = f"keyhole {' '.join(args)}: exit code {code}\n{printed[:4000]}"
    assert code in (0, 2, 130), shown
    assert "Traceback" not in printed and "our mistake" not in printed, shown
    assert all(c.isprintable() or c in "\n\t" for c in printed), ascii(printed[:4000])
    assert len(printed) < MOST_PRINTED, f"{len(printed):,} characters printed: {shown}"
    assert code != 2 or "keyhole" in printed, shown
    assert grown < MEMORY_BYTES, f"{grown / 2**20:.0f} MiB: {shown}"
    assert _tree(around, inside) == before, shown
    return Ended(code, printed)


def _resident(key: str, reset: bool = False) -> int:
    """Bytes of memory that this process holds (VmRSS) or has held since the last reset (VmHWM)."""
    if reset:
        with suppress(OSError):  # a sandbox forbids it: the peak is then that of the whole process
            Path("/proc/self/clear_refs").write_text("5")
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:"))


def _tree(root: Path, but: Path) -> dict[str, tuple[Any, ...]]:
    """Everything below a directory, links not followed: what it is, its size and when it was changed."""
    found: dict[str, tuple[Any, ...]] = {}
    for directory, folders, files in os.walk(root):
        folders[:] = [name for name in folders if Path(directory, name) != but]
        for name in (*folders, *files):
            path = Path(directory, name)
            about = path.lstat()
            is_folder = stat.S_ISDIR(about.st_mode)
            found[str(path)] = (
                (about.st_mode, about.st_ino) if is_folder else (about.st_mode, about.st_size, about.st_mtime_ns)
            )
    return found


@contextmanager
def _captured(stdin: str) -> Iterator[Any]:
    """Everything printed, by Python or by a library below it."""
    kept, streams = [os.dup(number) for number in (1, 2)], (sys.stdin, sys.stdout, sys.stderr)
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        sys.stdin = io.StringIO(stdin)
        sys.stdout, sys.stderr = (
            open(number, "w", encoding="utf-8", errors="backslashreplace", closefd=False) for number in (1, 2)
        )

        def read() -> str:
            sys.stdout.flush()
            sys.stderr.flush()
            file.seek(0)
            return file.read(2**24).decode("utf-8", "surrogateescape")

        try:
            yield read
        finally:
            sys.stdin, sys.stdout, sys.stderr = streams
            for number, copy in zip((1, 2), kept, strict=True):
                os.dup2(copy, number)
                os.close(copy)


@contextmanager
def _limited() -> Iterator[None]:
    """Ends what computes or waits for too long; memory has a fuse, so that a failing test costs no machine."""

    def end(number: int, frame: Any) -> None:
        raise TooLong(signal.Signals(number).name)

    handlers = {number: signal.signal(number, end) for number in (signal.SIGPROF, signal.SIGALRM)}
    before = resource.getrlimit(resource.RLIMIT_AS)
    held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (held + FUSE_BYTES, before[1]))
    signal.setitimer(signal.ITIMER_PROF, CPU_S)
    signal.setitimer(signal.ITIMER_REAL, WAIT_S)
    faulthandler.dump_traceback_later(HANGS_S, exit=True)  # where no signal is heard: a library that waits in C
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        resource.setrlimit(resource.RLIMIT_AS, before)
        for number, handler in handlers.items():
            signal.signal(number, handler)
