"""What the user sees while a run goes on: plain lines, and on a terminal a progress bar below them.

    step   120/1000  loss 2.3145  lr 1.0e-06  12,345 tok/s  GPU 12.31 GiB  projected_grad 0.731

With logging_steps above 1 the line shows means over the steps since the last one, of each number over the steps that
have it. rich is used on a terminal only, so a log file never holds control codes.

The output may be closed: the other end of a pipe has gone, or the terminal. Then `gone` is called, once, and everything
else that is printed goes to /dev/null; the run must not end in the middle of a step. Any other failure (a log file on a
full disk) loses lines, is said once on the standard error, and the run goes on.
"""

import errno
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from keyhole.machine.text import printable

Entry = dict[str, Any]
CLOSED = (errno.EPIPE, errno.EIO, errno.EBADF, errno.ENXIO)  # nobody is at the other end
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
        self.losing = False

    def open(self, first_step: int) -> None:
        """Shows the bar, on a terminal."""
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
        """Takes the bar away and shows the cursor again."""
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
        try:
            if self.bar is None:
                print(text, flush=True)
            else:
                self.bar.console.print(text, markup=False, highlight=False, soft_wrap=True)
        except UnicodeEncodeError:  # a locale that lacks a letter
            self.line(text.encode("ascii", "backslashreplace").decode())
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
        self.gone()

    def lines(self, texts: list[str]) -> None:
        """Several lines."""
        for text in texts:
            self.line(text)

    def step(self, entry: Entry) -> None:
        """Counts a step; prints the line of the steps since the last one when it is due."""
        self.entries.append(entry)
        if self.bar is not None:
            self.bar.update(self.task, completed=entry["step"])
        if entry["step"] % self.every == 0 or entry["step"] in (1, self.total):
            entries, self.entries = self.entries, []
            self.line(step_line(entries, self.total))


def open_missing_streams() -> None:
    """Gives a process that was started without standard input, output or error /dev/null in their place: the next file
    that is opened would get their number, and a message would be written into it."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest number that is free: this one


def _to_nowhere() -> None:
    """What the standard output still has in its buffer must not fail again."""
    sink = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.dup2(sink, sys.stdout.fileno())
    except (OSError, ValueError):  # no descriptor: closed, or not of the system
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
    """Over the entries that have it: some numbers come with some steps only."""
    values = [entry[name] for entry in entries if name in entry]
    return sum(values) / len(values)
