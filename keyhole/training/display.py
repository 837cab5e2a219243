"""What the user sees during a run: plain lines, and on a terminal a progress bar below them.

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
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from keyhole.machine.text import duration, printable

Entry = dict[str, Any]
CLOSED = (errno.EPIPE, errno.EIO, errno.EBADF, errno.ENXIO)  # the reader of a pipe, or the terminal, is gone
KNOWN = {
    "step",
    "loss",
    "learning_rate",
    "epoch",
    "tokens",
    "seconds",
    "tokens_per_second",
    "gpu_gib",
    "host_gib",
}


class Display:
    """Prints lines; holds the progress bar when standard output is a terminal."""

    def __init__(self, total: int, every: int) -> None:
        self.total, self.every = total, every
        self.entries: list[Entry] = []
        self.bar: Any = None
        self.gone: Callable[[], None] | None = None
        self.heard: Callable[[str], None] | None = None  # called with every line
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
            from rich.progress import (
                BarColumn,
                MofNCompleteColumn,
                Progress,
                TimeElapsedColumn,
                TimeRemainingColumn,
            )

            columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
            self.bar = Progress(*columns, transient=True)
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
        if self.heard is not None:
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
            if isinstance(error, OSError) and error.errno not in CLOSED:
                self._lose_lines(error)
            else:
                self._leave_terminal()

    def _lose_lines(self, error: OSError) -> None:
        if not self.losing:
            _say_aside(f"keyhole: the output cannot be written: {error}; lines are lost, training goes on")
        self.losing = True

    def _leave_terminal(self) -> None:
        self.close()
        _to_nowhere()
        _say_aside("keyhole: the output is closed: finishing this step and saving")
        assert self.gone is not None  # _print raises without it
        self.gone()

    def lines(self, texts: list[str]) -> None:
        """Several lines."""
        for text in texts:
            self.line(text)

    def step(self, entry: Entry) -> None:
        """Counts a step; when a line is due, prints the one for the steps since the last line."""
        self.entries.append(entry)
        self.ends = [*self.ends[:1], entry]
        used: Any = entry.get("gpu_gib", entry.get("host_gib", 0.0))
        self.peak_gib = max(self.peak_gib, used)
        if self.bar is not None:
            self.bar.update(self.task, completed=entry["step"])
        if entry["step"] % self.every == 0 or entry["step"] in (1, self.total):
            entries, self.entries = self.entries, []
            line = step_line(entries, self.total)
            self.line(line if self.bar is not None else f"{line}  {self._times(entry['step'])}")

    def _times(self, step: int) -> str:
        """The time since the start, and the estimated time left."""
        elapsed_s, done = time.monotonic() - self.began_s, max(1, step - self.first_step)
        left_s = elapsed_s / done * (self.total - step)
        return f"{duration(elapsed_s)}, {duration(left_s)} left" if step < self.total else duration(elapsed_s)

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


def step_line(entries: list[Entry], total: int) -> str:
    """The line of one or several steps: the last step and rate, means of the rest."""
    last = entries[-1]
    seconds = sum(entry["seconds"] for entry in entries)
    rate = sum(entry["tokens"] for entry in entries) / max(seconds, 1e-9)
    parts = [f"step {last['step']:>{len(str(total))}}/{total}", f"loss {_mean(entries, 'loss'):.4f}"]
    parts += [f"lr {last['learning_rate']:.1e}", f"{rate:,.0f} tok/s"]
    parts += [f"GPU {last['gpu_gib']:.2f} GiB" if "gpu_gib" in last else f"RAM {last['host_gib']:.2f} GiB"]
    names = dict.fromkeys(name for entry in entries for name in entry)
    parts += [f"{name} {_mean(entries, name):.4g}" for name in names if name not in KNOWN]
    return "  ".join(parts)


def _mean(entries: list[Entry], name: str) -> float:
    """Mean over the entries that have this number: some steps lack some numbers."""
    values = [entry[name] for entry in entries if name in entry]
    return float(sum(values) / len(values))
