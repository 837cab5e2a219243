"""What the user sees: progress while a run starts, then a line per step.

    step   120/1000  loss 2.3145  lr 1.0e-06  12,345 tok/s  GPU 12.31 GiB  projected_grad 0.731  2 min, 15 min left

With logging_steps above 1 the line shows means over the steps since the last line; each number is averaged over the
steps that have it. It ends with the time since the start and an estimate of the time left. Every line also goes to
run/log.txt.

The output may be closed: the reader of a pipe has exited, or the terminal was closed. Then `gone` is called, once, and
further output goes to /dev/null; the run must not end in the middle of a step. Any other failure (a log file on a full
disk) loses lines; it is reported once on standard error, and the run continues.
"""

import errno
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

from keyhole.machine.progress import Total, listening
from keyhole.machine.sizes import GIB
from keyhole.machine.text import duration, printable
from keyhole.report.entries import Entry

CLOSED = (errno.EPIPE, errno.EIO, errno.EBADF, errno.ENXIO)  # the reader of a pipe, or the terminal, is gone
KNOWN = {
    "step", "loss", "learning_rate", "epoch", "tokens", "seconds", "tokens_per_second", "gpu_gib", "host_gib",
}  # fmt: skip
QUIET_S, EVERY_S = 2.0, 10.0


class Display:
    def __init__(self, total: int, every: int) -> None:
        self.total, self.every = total, every
        self.entries: list[Entry] = []
        self.gone: Callable[[], None] | None = None
        self.heard: Callable[[str], None] = lambda text: None  # called with every line
        self.losing = False
        self.began_s, self.first_step = time.monotonic(), 0
        self.ends: list[Entry] = []  # of the first and the last step
        self.peak_gib = 0.0
        self.log: Path | None = None
        self.unlogged: list[str] = []

    def log_to(self, path: Path) -> None:
        """From now on lines also go to this file, beginning with those printed so far."""
        self.log, before = path, self.unlogged
        self._write_log("\n".join([f"--- {time.strftime('%Y-%m-%d %H:%M:%S')}", *before]))

    def _write_log(self, text: str) -> None:
        if self.log is None:
            self.unlogged.append(text)
            return
        try:
            how = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            with open(os.open(self.log, how, 0o644), "w", encoding="utf-8", errors="backslashreplace") as file:
                file.write(text + "\n")
        except OSError as error:  # a full disk: the lines are still on the screen
            _say_aside(f"keyhole: {self.log} cannot be written: {error}; it gets nothing more")
            self.log, self.unlogged = Path(os.devnull), []

    def open(self, first_step: int, gone: Callable[[], None] | None = None) -> None:
        """Starts the clock. gone: called once the output is closed."""
        self.began_s, self.first_step, self.gone = time.monotonic(), first_step, gone

    def close(self) -> None:
        if self.losing:
            try:
                sys.stdout.flush()
            except OSError:
                _to_nowhere()

    def line(self, text: str) -> None:
        text = printable(text)
        self.heard(text)
        self._write_log(text)
        self._print(text)

    def _print(self, text: str) -> None:
        try:
            print(text, flush=True)
        except UnicodeEncodeError:  # the locale lacks a character
            self._print(text.encode("ascii", "backslashreplace").decode())
        except (OSError, ValueError) as error:  # ValueError: closed in this process
            if self.gone is None:
                raise
            if isinstance(error, ValueError) or error.errno in CLOSED:
                _to_nowhere()
                _say_aside("keyhole: the output is closed: finishing this step and saving")
                self.gone()
            elif not self.losing:
                _say_aside(f"keyhole: the output cannot be written: {error}; lines are lost, training goes on")
                self.losing = True

    def lines(self, texts: list[str]) -> None:
        for text in texts:
            self.line(text)

    def step(self, entry: Entry) -> None:
        """Counts a step; when a line is due, prints the one for the steps since the last line."""
        step = entry["step"]
        self.entries.append(entry)
        self.ends = [*self.ends[:1], entry]
        self.peak_gib = max(self.peak_gib, float(entry.get("gpu_gib") or entry.get("host_gib") or 0.0))
        if step % self.every == 0 or step in (1, self.total):
            entries, self.entries = self.entries, []
            elapsed_s = time.monotonic() - self.began_s
            left_s = elapsed_s / max(1, step - self.first_step) * (self.total - step)
            left = f", {duration(left_s)} left" if step < self.total else ""
            self.line(f"{step_line(entries, self.total)}  {duration(elapsed_s)}{left}")

    def summary(self) -> str:
        """` in 12 min 3 s; loss 2.3145 at step 1, 1.0512 at step 1000; peak GPU memory 12.31 GiB`. A resumed run names
        the steps that the time is of: `, the last 400 in 5 min 1 s; ...`."""
        text = f" in {duration(time.monotonic() - self.began_s)}"
        if self.first_step:
            text = f", the last {self.ends[-1]['step'] - self.first_step}{text}" if self.ends else ", none of them now"
        if self.ends:
            losses = [f"{entry['loss']:.4f} at step {entry['step']}" for entry in self.ends]
            where = "GPU" if "gpu_gib" in self.ends[0] else "host"
            text += f"; loss {', '.join(losses)}; peak {where} memory {self.peak_gib:.2f} GiB"
        return text


def step_line(entries: list[Entry], total: int) -> str:
    """The line of one or several steps: the last step and rate, means of the rest over the steps that have them."""
    last, seconds = entries[-1], sum(entry["seconds"] for entry in entries)
    means: dict[str, float] = {}
    for name in dict.fromkeys(name for entry in entries for name in entry):
        values = [entry[name] for entry in entries if name in entry]
        means[name] = sum(values) / len(values)
    parts = [f"step {last['step']:>{len(str(total))}}/{total}", f"loss {means['loss']:.4f}"]
    rate = sum(entry["tokens"] for entry in entries) / max(seconds, 1e-9)
    parts += [f"lr {last['learning_rate']:.1e}", f"{rate:,.0f} tok/s"]
    parts += [f"GPU {last['gpu_gib']:.2f} GiB" if "gpu_gib" in last else f"RAM {last['host_gib']:.2f} GiB"]
    return "  ".join([*parts, *(f"{name} {mean:.4g}" for name, mean in means.items() if name not in KNOWN)])


def _to_nowhere() -> None:
    """Redirects standard output to /dev/null, so that flushing its buffer does not fail again."""
    sink = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.dup2(sink, sys.stdout.fileno())
    except (OSError, ValueError):  # no descriptor: closed, or not a real file
        sys.stdout = open(os.devnull, "w", encoding="utf-8")
    os.close(sink)


def _say_aside(text: str) -> None:
    with suppress(OSError):  # the terminal may be gone as well
        os.write(2, f"{text}\n".encode())


class Waiting:
    """Progress during the start of a run: a plain line now and then.

        importing torch and transformers
        tokenising: 12,288 of 67,349 rows
        reading weights: 3.1 of 12.6 GiB

    The lines go to standard error, so that standard output is the same on fast and slow machines. Nothing is printed
    about work that takes less than QUIET_S seconds, and then one line every EVERY_S. The seconds of each phase are kept
    for the last line of the start block. silent: prints nothing; stream: None is standard error.
    """

    def __init__(
        self, silent: bool = False, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.stream, self.clock = None if silent else stream or sys.stderr, clock
        self.seconds: dict[str, float] = {}
        self.next_s = 0.0

    @contextmanager
    def phase(self, name: str, now: bool = False) -> Iterator[None]:
        """A phase with this name. now: printed at once, since the phase reports no progress."""
        began_s = self.clock()
        self.next_s = began_s + QUIET_S
        if now:
            self._say(name)
        try:
            with listening(self._tell):
                yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + self.clock() - began_s

    def _tell(self, what: str, done: int, total: Total, unit: str) -> None:
        if self.stream is not None and self.clock() >= self.next_s:
            self.next_s = self.clock() + EVERY_S
            self._say(f"{what}: {amount(done, total() if callable(total) else total, unit)}")

    def _say(self, text: str) -> None:
        with suppress(ValueError, OSError):  # closed output: nothing to report to
            if self.stream is not None:
                print(f"keyhole: {printable(text)}", file=self.stream, flush=True)

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {seconds:.1f}" for name, seconds in self.seconds.items())
        return f"start: {sum(self.seconds.values()):.1f} s ({parts})"


def amount(done: int, total: int | None, unit: str) -> str:
    """`12 of 30 rows`; `3.1 of 12.6 GiB`."""
    if unit == "bytes":
        return f"{done / GIB:.1f} of {total / GIB:.1f} GiB" if total else f"{done / GIB:.1f} GiB"
    return f"{done:,}{f' of {total:,}' if total else ''} {unit}".rstrip()
