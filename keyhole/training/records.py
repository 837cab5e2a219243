"""The files that hold every step: run/metrics.jsonl, and the journal of a zeroth-order run (checkpoint/journal.py).

A line of metrics.jsonl is strict JSON, {"step", "loss", "learning_rate", "epoch", "tokens", "seconds",
"tokens_per_second", "gpu_gib" or "host_gib", and the method's own numbers}; an evaluation is a separate line,
{"step", "eval_loss", "perplexity", "eval_tokens", and the metrics of tasks}, and so is the test of a step's weights,
{"step", "test_accuracy", "test_questions"} (validation.py). A number that is not finite is written as null.
All numbers except seconds, rates and memory are the same, bit for bit, in a run that was stopped and resumed.

A record of the journal needs the projected gradients, which are on the device until the step is done. The recorder
reads them one step late anyway (metrics.py) and passes them on, so the journal adds no synchronisation. If the process
is killed, at most the step that the device was computing is lost, and the one queued behind it. What cannot be written
(on a full disk) is kept in memory and written with the next step; a failed flush is reported and does not count as
flushed. In all cases training continues.
"""

import errno
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from keyhole.checkpoint.journal import Header, Record, Writer
from keyhole.checkpoint.resume import continued
from keyhole.checkpoint.state import State
from keyhole.disk.files import open_regular, replacing
from keyhole.disk.json_text import json_text
from keyhole.methods.base import Method
from keyhole.methods.zo.method import ZO
from keyhole.model.structure.config_files import base_config
from keyhole.report.entries import Entry, is_test, read_lines
from keyhole.training.metrics import Reading
from keyhole.training.run import Observer, Run

PATIENCE_S = 60.0


class Trouble:
    def __init__(self, say: Callable[[str], None]) -> None:
        self.say, self.lasts = say, False

    def now(self, fault: str | None, over: str) -> None:
        if fault is not None and not self.lasts:
            self.say(f"warning: {fault}")
        elif fault is None and self.lasts:
            self.say(over)
        self.lasts = fault is not None


class MetricsFile(Observer):
    """run/metrics.jsonl. Opening it drops lines after `last_step`, because a resumed run repeats those steps. lacks:
    which lines of earlier steps are missing."""

    def __init__(self, path: Path, last_step: int, say: Callable[[str], None]) -> None:
        self.path, self.say, self.trouble = path, say, Trouble(say)
        entries, unreadable = read_lines(path)
        self.kept = [entry for entry in entries if entry["step"] <= last_step]
        self.lacks = _lacks(self.kept, unreadable, last_step)
        self.evaluated = {entry["step"] for entry in self.kept if "eval_loss" in entry}
        self.tested = {entry["step"]: entry for entry in self.kept if is_test(entry)}
        with replacing(path) as file:
            file.write("".join(_line(entry) for entry in self.kept).encode())
        self.file = open_regular(path, os.O_WRONLY)
        self.end, self.waiting = os.fstat(self.file).st_size, list[bytes]()

    def note(self, reading: Reading) -> None:
        fault = None
        self.waiting.append(_line(reading.entry).encode())
        try:
            self._write()
        except OSError as error:
            again = "entries are kept in memory and tried again at every step"
            fault = f"run/metrics.jsonl failed: {type(error).__name__}: {error}; {again}"
        self.trouble.now(fault, f"run/metrics.jsonl is complete again, up to step {reading.step}")

    def _write(self) -> None:
        """Appends the waiting lines. OSError: some still wait, and the file ends with a whole line."""
        while self.waiting:
            size = os.pwrite(self.file, self.waiting[0], self.end)
            if size < len(self.waiting[0]):
                with suppress(OSError):  # the next write begins there in any case
                    os.ftruncate(self.file, self.end)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self.end += len(self.waiting.pop(0))

    def close(self) -> None:
        """Writes what is left, says if it cannot be."""
        try:
            self._write()
        except OSError as error:
            what = f"{type(error).__name__}: {error}; some entries are lost"
            self.say(f"warning: closing run/metrics.jsonl failed: {what}")
        finally:
            os.close(self.file)


def _line(entry: Entry) -> str:
    return json_text(entry) + "\n"


def _lacks(entries: list[Entry], unreadable: int, last_step: int) -> str | None:
    """Which steps before a resume are missing in a metrics file; None if it is complete. A run that began in another
    directory has no lines from there."""
    steps = {entry["step"] for entry in entries if "loss" in entry}
    gone = last_step - min(steps) + 1 - len(steps) if steps else last_step
    lost = [f"{gone:,} of the steps up to {last_step:,} have no line"] if gone > 0 else []
    lost += [f"{unreadable:,} of its lines cannot be read, and are dropped"] if unreadable else []
    return " and ".join(lost) or None


class Journaling(Observer):
    def __init__(self, writer: Writer, method: ZO, say: Callable[[str], None]) -> None:
        self.writer, self.method, self.say = writer, method, say
        self.writing, self.flushing = Trouble(say), Trouble(say)

    def note(self, reading: Reading) -> None:
        if reading.update is None:
            return
        own, (epoch, row), device = self.method.settings, reading.position, self.method.model.device.type
        update = tuple(reading.update)
        fault = None
        try:
            self.writer.append(Record(reading.step, own.seed, epoch, row, own.weight_decay, device, update))
        except OSError as error:
            fault = f"the journal cannot be written: {error}; records are kept in memory and tried again every step"
        self.writing.now(fault, f"the journal is whole again, up to step {reading.step}")
        self.say_flushes()

    def say_flushes(self) -> None:
        """Prints a line when the writer's thread has failed to flush, or has recovered."""
        fault, synced = self.writer.fault, self.writer.synced
        lost = f"a power cut would lose the steps after {synced}; it is tried again at every step"
        told = None if fault is None else f"the journal cannot be flushed to the disk: {fault}; {lost}"
        self.flushing.now(told, f"the journal is flushed again, up to step {synced}")

    def flush_up_to(self, step: int) -> bool:
        """Returns when the records up to this step are on the disk, before a checkpoint of the step gets its name.
        False: the step was not good. OSError: the journal cannot be written or flushed."""
        if not self.writer.wait_for(step, timeout_s=PATIENCE_S):
            return False
        self.writer.sync()
        return True

    def close(self) -> None:
        """Writes and flushes the remaining records; prints a warning if that fails."""
        try:
            self.writer.close()
        except OSError as error:
            self.say(f"warning: the journal is on the disk up to step {self.writer.synced} only: {error}")


def journaled(method: Method) -> ZO:
    """The method, of a run that keeps a journal."""
    assert isinstance(method, ZO)  # the only one that does
    return method


def open_journal(run: Run, about: State) -> Journaling:
    """The journal of this run, new or continued, opened after the weights are loaded and the directory is created.
    about: what checkpoints say of the run."""
    method, data, path = journaled(run.method), run.data, run.origin.choice.path
    header = Header(
        base=about.base or "" if path is None else "",
        first=0,
        source=run.config.model if path is None else str(path),
        seed=method.settings.seed,
        directions=method.settings.count,
        distribution=str(method.settings.distribution),
        rounding=method.settings.rounding,
        eps=method.estimator.eps,
        dtype=str(run.model.dtype).removeprefix("torch."),
        wire=run.config.wire,
        frozen=[t.name for t in run.model.layout.tensors if not t.param.requires_grad],
        end_token_ids=list(data.end_token_ids),
        loader=data.train.state_dict(),
        config=about.config,
        versions=about.versions,
        run=about.run,
        base_config=about.base_config if path is None or method.light else base_config(path),
    )
    writer = continued(run.origin, header.source, run.directory.journal, header, run.config.journal_sync)
    return Journaling(writer, method, run.say)
