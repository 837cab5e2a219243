"""What the user sees: progress while a run starts, then plain lines, and on a terminal a progress bar below them.

    step   120/1000  loss 2.3145  lr 1.0e-06  12,345 tok/s  GPU 12.31 GiB  projected_grad 0.731  2 min, 15 min left

With logging_steps above 1 the line shows means over the steps since the last line; each number is averaged over the
steps that have it. rich is used on a terminal only, so a log file never contains control codes; without a bar, the line
ends with the time since the start and an estimate of the time left. Every line also goes to run/log.txt.

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
from typing import Any, TextIO

from keyhole.machine.progress import Total, listening
from keyhole.machine.sizes import GIB
from keyhole.machine.text import duration, printable
from keyhole.report.entries import Entry

CLOSED = (errno.EPIPE, errno.EIO, errno.EBADF, errno.ENXIO)  # the reader of a pipe, or the terminal, is gone
KNOWN = {
    "step", "loss", "learning_rate", "epoch", "tokens", "seconds", "tokens_per_second", "gpu_gib", "host_gib",
}  # fmt: skip
QUIET_S, EVERY_S, REDRAW_S = 2.0, 10.0, 0.1
CLEAR = "\r\x1b[2K"


class Display:
    """Prints lines; holds the progress bar when standard output is a terminal."""

    def __init__(self, total: int, every: int) -> None:
        self.total, self.every = total, every
        self.entries: list[Entry] = []
        self.bar: Any = None
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
        """Starts the clock, and shows the bar on a terminal. gone: called once the output is closed."""
        self.began_s, self.first_step, self.gone = time.monotonic(), first_step, gone
        if sys.stdout is not None and sys.stdout.isatty():
            from rich import progress as rich

            columns = (
                rich.BarColumn(),
                rich.MofNCompleteColumn(),
                rich.TimeElapsedColumn(),
                rich.TimeRemainingColumn(),
            )
            self.bar = rich.Progress(*columns, transient=True)
            self.task = self.bar.add_task("training", total=self.total, completed=first_step)
            self.bar.start()

    def close(self) -> None:
        """Removes the bar and shows the cursor again."""
        bar, self.bar = self.bar, None
        if bar is not None:
            with suppress(OSError):
                bar.stop()
        if self.losing:
            try:
                sys.stdout.flush()
            except OSError:
                _to_nowhere()

    def line(self, text: str) -> None:
        """One line of text, above the bar if there is one."""
        text = printable(text)
        self.heard(text)
        self._write_log(text)
        self._print(text)

    def _print(self, text: str) -> None:
        try:
            if self.bar is None:
                print(text, flush=True)
            else:
                self.bar.console.print(text, markup=False, highlight=False, soft_wrap=True)
        except UnicodeEncodeError:  # the locale lacks a character
            self._print(text.encode("ascii", "backslashreplace").decode())
        except (OSError, ValueError) as error:  # ValueError: closed in this process
            if self.gone is None:
                raise
            if isinstance(error, ValueError) or error.errno in CLOSED:
                self.close()
                _to_nowhere()
                _say_aside("keyhole: the output is closed: finishing this step and saving")
                self.gone()
            elif not self.losing:
                _say_aside(f"keyhole: the output cannot be written: {error}; lines are lost, training goes on")
                self.losing = True

    def lines(self, texts: list[str]) -> None:
        """Several lines."""
        for text in texts:
            self.line(text)

    def step(self, entry: Entry) -> None:
        """Counts a step; when a line is due, prints the one for the steps since the last line."""
        step = entry["step"]
        self.entries.append(entry)
        self.ends = [*self.ends[:1], entry]
        self.peak_gib = max(self.peak_gib, float(entry.get("gpu_gib") or entry.get("host_gib") or 0.0))
        if self.bar is not None:
            self.bar.update(self.task, completed=step)
        if step % self.every == 0 or step in (1, self.total):
            entries, self.entries = self.entries, []
            line, elapsed_s = step_line(entries, self.total), time.monotonic() - self.began_s
            left_s = elapsed_s / max(1, step - self.first_step) * (self.total - step)
            left = f", {duration(left_s)} left" if step < self.total else ""
            self.line(line if self.bar is not None else f"{line}  {duration(elapsed_s)}{left}")

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


def open_missing_streams() -> None:
    """Gives a process that was started without standard input, output or error /dev/null in their place: the next file
    that is opened would get their number, and a message would be written into it."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # opens the lowest free descriptor: the missing one


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
    """Progress during the start of a run: on a terminal one line that changes, elsewhere a plain line now and then.

        importing torch and transformers
        tokenising: 12,288 of 67,349 rows
        reading weights: 3.1 of 12.6 GiB

    The lines go to standard error, so that standard output is the same on fast and slow machines. Without a terminal,
    nothing is printed about work that takes less than QUIET_S seconds, and then one line every EVERY_S. The seconds of
    each phase are kept for the last line of the start block. silent: prints nothing; stream: None is standard error.
    """

    def __init__(
        self, silent: bool = False, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.stream, self.clock = None if silent else stream or sys.stderr, clock
        self.seconds: dict[str, float] = {}
        self.next_s = 0.0
        self.live = False  # the line can be overwritten
        with suppress(ValueError, OSError):  # closed
            self.live = self.stream is not None and self.stream.isatty()

    @contextmanager
    def phase(self, name: str, now: bool = False) -> Iterator[None]:
        """A phase with this name. now: printed at once also without a terminal, since the phase reports no progress."""
        began_s = self.clock()
        self.next_s = began_s + (0.0 if self.live else QUIET_S)
        if self.live or now:
            self._show(name)
        try:
            with listening(self._tell):
                yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + self.clock() - began_s
            if self.live:
                self._write(CLEAR)

    def _tell(self, what: str, done: int, total: Total, unit: str) -> None:
        now_s = self.clock()
        if self.stream is not None and now_s >= self.next_s:
            self.next_s = now_s + (REDRAW_S if self.live else EVERY_S)
            self._show(f"{what}: {amount(done, total() if callable(total) else total, unit)}")

    def _show(self, text: str) -> None:
        self._write(f"{CLEAR}{printable(text)}" if self.live else f"keyhole: {printable(text)}\n")

    def _write(self, text: str) -> None:
        with suppress(ValueError, OSError):  # closed output: nothing to report to
            if self.stream is not None:
                self.stream.write(text)
                self.stream.flush()

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {seconds:.1f}" for name, seconds in self.seconds.items())
        return f"start: {sum(self.seconds.values()):.1f} s ({parts})"


def amount(done: int, total: int | None, unit: str) -> str:
    """`12 of 30 rows`; `3.1 of 12.6 GiB`."""
    if unit == "bytes":
        return f"{done / GIB:.1f} of {total / GIB:.1f} GiB" if total else f"{done / GIB:.1f} GiB"
    return f"{done:,}{f' of {total:,}' if total else ''} {unit}".rstrip()
