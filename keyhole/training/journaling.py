"""Writes the journal of a zeroth-order run (checkpoint/journal.py) during training.

A record needs the projected gradients, which are on the device until the step is done. The recorder reads them one step
late anyway (metrics.py) and passes them on, so the journal adds no synchronisation. If the process is killed, at most
the step that the device was computing is lost, and the one queued behind it. Disk space is reserved ahead. A record
that cannot be written all the same (a disk that was full before) is kept in memory and written with the next one; a
failed flush is reported and does not count as flushed. In both cases training continues.
"""

from collections.abc import Callable
from pathlib import Path

from keyhole.checkpoint.journal import Header, Record, Writer
from keyhole.checkpoint.resume import Origin, continued
from keyhole.checkpoint.state import State
from keyhole.data.run import Data
from keyhole.methods.base import Method
from keyhole.methods.zo.method import ZO
from keyhole.training.observer import Observer, Reading

PATIENCE_S = 60.0


class Journaling(Observer):
    """The journal of one run."""

    def __init__(self, writer: Writer, method: ZO, say: Callable[[str], None]) -> None:
        self.writer, self.method, self.say = writer, method, say
        self.failing = self.flush_failing = False

    def note(self, reading: Reading) -> None:
        """Records a step whose numbers were read and are finite; its update is [lr, c_1 .. c_q] and the estimator's
        memory."""
        if reading.update is None:
            return
        epoch, row = reading.position
        decay, device = self.method.settings.weight_decay, self.method.model.device.type
        seed, split = self.method.settings.seed, 1 + self.method.settings.count
        update, memory = tuple(reading.update[:split]), tuple(reading.update[split:])[: self.writer.header.memory]
        memory += (0.0,) * (self.writer.header.memory - len(memory))  # the rate search is over: nothing to remember
        fault: OSError | None = None
        try:
            self.writer.append(Record(reading.step, seed, epoch, row, decay, device, update, memory))
        except OSError as error:
            fault = error
        if fault is not None and not self.failing:
            kept = "records are kept in memory and tried again every step"
            self.say(f"warning: the journal cannot be written: {fault}; {kept}")
        elif fault is None and self.failing:
            self.say(f"the journal is whole again, up to step {reading.step}")
        self.failing = fault is not None
        self.say_flushes()

    def say_flushes(self) -> None:
        """Prints a line when the writer's thread has failed to flush, or has recovered."""
        fault, synced = self.writer.fault, self.writer.synced
        if fault is not None and not self.flush_failing:
            self.say(
                f"warning: the journal cannot be flushed to the disk: {fault}; a power cut would lose the steps after "
                f"{synced}; it is tried again at every step"
            )
        elif fault is None and self.flush_failing:
            self.say(f"the journal is flushed again, up to step {synced}")
        self.flush_failing = fault is not None

    def flush_up_to(self, step: int) -> bool:
        """Returns when the records up to this step are on the disk, before a checkpoint of the step gets its name.
        False: the step was not good. OSError: the journal cannot be written or flushed."""
        if not self.writer.wait_for(step, timeout_s=PATIENCE_S):
            return False
        self.writer.sync()
        return True

    def has(self, step: int) -> bool:
        """Whether the journal is on the disk up to this step, so that a resume can replay it."""
        try:
            return self.flush_up_to(step)
        except OSError:
            return False

    def end(self) -> None:
        """Marks the end of the run: no more steps follow."""
        self.writer.end()

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


def open_journal(
    method: ZO,
    origin: Origin,
    path: Path,
    about: State,
    *,
    source: str,
    wire: str | None,
    data: Data,
    sync_every: int,
    say: Callable[[str], None],
) -> Journaling:
    """The journal of this run, new or continued, opened after the weights are loaded and the directory is created.

    about: what checkpoints say of the run; source: what the weights were loaded from."""
    model = method.model
    header = Header(
        base=about.base or "" if origin.choice.path is None else "",
        first=0,
        source=source,
        seed=method.settings.seed,
        directions=method.settings.count,
        distribution=str(method.settings.distribution),
        rounding=method.settings.rounding,
        eps=method.estimator.eps,
        dtype=str(model.dtype).removeprefix("torch."),
        wire=wire,
        frozen=[t.name for t in model.layout.tensors if not t.param.requires_grad],
        end_token_ids=list(data.end_token_ids),
        loader=data.train.state_dict(),
        config=about.config,
        versions=about.versions,
        run=about.run,
        memory=method.remembers,
    )
    return Journaling(continued(origin, source, path, header, sync_every), method, say)
