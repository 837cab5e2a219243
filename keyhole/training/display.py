"""What the user sees while a run goes on: plain lines, and on a terminal a progress bar below them.

    step   120/1000  loss 2.3145  lr 1.0e-06  12,345 tok/s  GPU 12.31 GiB  projected_grad 0.731

With logging_steps above 1 the line shows means over the steps since the last one. rich is used on a terminal
only, so a log file never holds control codes.

Nobody may be listening any more: the other end of a pipe has gone, or the terminal. Then `gone` is told, once, and
everything that would be printed goes nowhere; the run must not end in the middle of a step for it.
"""

import os
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from keyhole.machine.text import printable

Entry = dict[str, Any]
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

    def open(self, first_step: int) -> None:
        """Shows the bar, on a terminal."""
        if sys.stdout.isatty():
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

    def line(self, text: str) -> None:
        """One line of text, above the bar if there is one."""
        text = printable(text)
        try:
            if self.bar is None:
                print(text, flush=True)
            else:
                self.bar.console.print(text, markup=False, highlight=False, soft_wrap=True)
        except OSError:
            if self.gone is None:
                raise
            self._leave_terminal()

    def _leave_terminal(self) -> None:
        self.close()
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is in its buffer must not fail again
        with suppress(OSError):  # the terminal may be gone as well
            os.write(2, b"keyhole: nobody reads the output any more: finishing this step and saving\n")
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
            self.line(step_line(self.entries, self.total))
            self.entries = []


def step_line(entries: list[Entry], total: int) -> str:
    """The line of one or several steps: the last step and rate, means of the rest."""
    last = entries[-1]
    seconds = sum(entry["seconds"] for entry in entries)
    rate = sum(entry["tokens"] for entry in entries) / max(seconds, 1e-9)
    parts = [f"step {last['step']:>{len(str(total))}}/{total}", f"loss {_mean(entries, 'loss'):.4f}"]
    parts += [f"lr {last['learning_rate']:.1e}", f"{rate:,.0f} tok/s"]
    parts += [f"GPU {last['gpu_gib']:.2f} GiB" if "gpu_gib" in last else f"RAM {last['host_gib']:.2f} GiB"]
    parts += [f"{name} {_mean(entries, name):.4g}" for name in last if name not in KNOWN]
    return "  ".join(parts)


def _mean(entries: list[Entry], name: str) -> float:
    return sum(entry[name] for entry in entries) / len(entries)
