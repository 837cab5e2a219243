"""When a checkpoint is written, whether the disk has room for it, and what happens when it fails.

During training, checkpoints are written in the background (checkpoint/writer.py), one at a time. If that is impossible
or switched off, and at the end of a run, training waits for the write.

A checkpoint needs   weights + the method's tensors + MARGIN_BYTES   on the disk before the oldest one is deleted. If
there is less room, the oldest is deleted first, as long as one good checkpoint remains. If there is still not enough
room, or the write fails, a save during training is skipped with a warning and tried again after RETRY_STEPS steps
(training is worth more than a checkpoint). After the last step there is no other save: it waits up to WAIT_S seconds,
with the weights in memory, for somebody to free some space, and then raises; a signal ends the wait. Only a lack of
room is waited for: a disk that is read-only or broken will not recover by itself. Weights are checked to be finite
before they are written.

Finite weights may be broken all the same: a rate that is too high leaves some that every later pass turns into NaN. So
a checkpoint is good when a step that began with its weights had finite numbers: only such a one is named as the way
back, and one of them is never deleted for one that has not been tried.

A checkpoint gets its name when the journal is on the disk up to its step. If the journal cannot be written, a save
during training is tried again later; the save that ends a run is made nevertheless, with a warning.
"""

import errno
import math
import os
import shutil
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from safetensors import SafetensorError

from keyhole.checkpoint import select
from keyhole.checkpoint.snapshot import Cancelled
from keyhole.checkpoint.state import OWN_FILES, Damaged, State, read_state
from keyhole.checkpoint.writer import MARGIN_BYTES, Writer, Writing, saved_bytes
from keyhole.config import TrainConfig
from keyhole.errors import NonFinite, UserError, listed
from keyhole.machine.out_of_memory import out_of_memory
from keyhole.machine.sizes import GIB
from keyhole.model.model import Model
from keyhole.model.weights import save as hf
from keyhole.training.metrics import Reading
from keyhole.training.records import Journaling, MetricsFile
from keyhole.training.run import Observer, Run
from keyhole.training.validation import Selection

RETRY_STEPS = 10
WAIT_S, PAUSE_S = 3600.0, 10.0  # of the save that ends a run
FULL = (errno.ENOSPC, errno.EDQUOT)
# Training continues after these errors, and if there is no memory for copies.
CANNOT_SAVE = (OSError, Cancelled, SafetensorError, torch.AcceleratorError)


class NoRoom(UserError):
    """The disk, or the user's share of it, is full."""


def free_bytes(path: Path) -> int:
    """Free space on the file system that holds (or will hold) the path."""
    try:
        while not path.exists():
            path = path.parent
        return shutil.disk_usage(path).free
    except OSError as error:
        raise UserError(f"output_dir: {path} cannot be reached any more: {error.strerror}") from error


def describe(config: TrainConfig, writer: Writer) -> list[str]:
    """For the start block: how checkpoints are written, and the host memory that this needs."""
    if config.save_steps is None:
        return []
    if not config.background_save:
        return ["checkpoints: training waits for each (background_save=false)"]
    if writer.waits:
        why = "ranks write or share the weights" if writer.model.ranks.several else "tensors are stored in another form"
        return [f"checkpoints: training waits for each ({why})"]
    most = f"at most {writer.pool_bytes / GIB:.2f} GiB more"
    return [f"checkpoints: written while training goes on; host memory meanwhile: {most}"]


def refuse_full_disk(root: Path, model: Model) -> None:
    """Before training starts: refuses a disk without room for the weights."""
    need, free = saved_bytes(model, {}), free_bytes(root)
    if need > free:
        raise UserError(
            f"output_dir: saving the model takes {need / GIB:.2f} GiB, and {root} has "
            f"{free / GIB:.2f} GiB free; free some space, or set output_dir on another disk"
        )


class Saver(Observer):
    """Writes checkpoints of one run into its directory and keeps the newest few.

    about describes the run in every checkpoint; metrics and the journal, if there is one, are flushed before a
    checkpoint gets its name; the checkpoint of the best step of `selection` is kept; begin: the checkpoint that the run
    resumes from.
    """

    def __init__(
        self,
        run: Run,
        writer: Writer,
        about: State,
        *,
        metrics: MetricsFile,
        journal: Journaling | None,
        selection: Selection,
        begin: Path | None,
    ) -> None:
        self.run, self.writer, self.about, self.selection = run, writer, about, selection
        self.metrics, self.journal = metrics, journal
        self.config, self.root, self.say = run.config, run.directory.root, run.say
        self.waits = writer.waits or not self.config.background_save
        own = run.checkpoint(run.first)  # a step whose checkpoint is the last good one is not saved again
        self.last_saved = own if begin is not None and begin.resolve() == own.resolve() else begin
        self.proven = run.first - 1  # the last step whose weights are known to give finite numbers
        self.retry_at: int | None = None

    def best_saved(self, coming: Collection[int] = ()) -> int | None:
        """The best step whose weights are, or are coming, in the output directory, or, if no model is saved, were
        tested; None if the last weights are wanted."""
        if not self.config.load_best_model_at_end:
            return None
        there = {*coming, *(select.step_of(path) for path in select.checkpoints(self.root))}
        best = self.selection.best_steps()
        return next((step for step in best if step in there or not self.config.save_model), None)

    def after_step(self) -> None:
        """Saves if that is due, or the step is the best so far; save_last ends a run."""
        self._report(self.writer.poll())
        step, every = self.run.done, self.config.save_steps
        keeps_best = self.config.load_best_model_at_end and self.config.save_model
        is_best = keeps_best and self.selection.best_steps()[:1] == [step]
        is_due = (every is not None and step % every == 0) or step == self.retry_at or is_best
        if not is_due or self.last_saved == self.run.checkpoint(step) or self.run.is_last or self.run.is_asked():
            return
        with self.run.paused() if self.waits or self.journal is None else nullcontext():
            self.wait()
            self.retry_at = None
            with self._trying(step):
                self._begin(step)
            if self.waits:
                self.wait()

    @contextmanager
    def _trying(self, step: int) -> Iterator[None]:
        """A save that fails in here is said, and another is tried later."""
        try:
            yield
        except NonFinite:
            raise
        except UserError as error:
            self.retry_at = self.run.done + RETRY_STEPS
            kept = f"{self.last_saved} stays" if self.last_saved else "there is no checkpoint yet"
            self.say(f"warning: checkpoint-{step} NOT saved ({error}); {kept}; trying again by step {self.retry_at}")

    def wait(self) -> None:
        self._report(self.writer.wait())

    def note(self, reading: Reading) -> None:
        if "loss" in reading.entry and all(map(math.isfinite, reading.entry.values())):
            self.proven = reading.step - 1

    def way_back(self) -> str:
        """No step follows: waits for a checkpoint that is being written, and says from which one to go on."""
        if self.journal is not None:
            self.journal.writer.end()
        with suppress(NonFinite):
            self.wait()
        found = {select.step_of(path): path for path in select.checkpoints(self.root)}
        good = max((step for step in found if step <= self.proven), default=None)
        broken = listed(path.name for step, path in sorted(found.items()) if step > self.proven)
        said = "no good checkpoint was written before it"
        said = said if good is None else f"the last good checkpoint is {found[good]}"
        way = "begin anew" if good is None else f"delete what is newer, then --resume {found[good]}"
        return f"{said}: the weights of {broken} lead to it; {way}" if broken else said

    def close(self) -> None:
        """Ends a background save after an error in training."""
        if self.journal is not None:
            self.journal.writer.end()
        self.writer.abandon()

    def _begin(self, step: int, last: bool = False) -> None:
        """Starts the checkpoint of a step. last: it ends the run, and is written when this returns."""
        about = replace(self.about, step=step, loader=self.run.data.train.state_dict())
        keep, best = self.config.save_total_limit, self.best_saved([step])
        kept = keep if keep is None or last else max(2, keep)  # beside one that no step has begun with

        def prune(keep: int | None, say: Callable[[str], None]) -> None:
            select.prune(self.root, keep, step, say, best)

        def make_room(need: int) -> None:
            """The save that ends a run is tried with a little less room: the need is an estimate, and nothing is lost
            by a save that fails."""
            if need > free_bytes(self.root) and keep is not None:
                prune(keep - 1, self.say)
            if need - (MARGIN_BYTES if last else 0) > (free := free_bytes(self.root)):
                raise NoRoom(
                    f"output_dir: a checkpoint takes {need / GIB:.2f} GiB, and {self.root} has "
                    f"{free / GIB:.2f} GiB free; free some space"
                )

        flush = partial(self._flush, step, last)
        self.writer.begin(self.run.checkpoint(step), about, make_room, flush, partial(prune, kept), last or self.waits)

    def _report(self, done: Writing | None) -> None:
        """Says what became of a checkpoint that has been written meanwhile. A failed one is tried again."""
        if done is None:
            return
        with self._trying(done.about.step):
            self._written(done)
            copied, waited_s = done.snapshot.peak_bytes / GIB, done.snapshot.waited_s
            cost = f"copies took {copied:.2f} GiB, training waited {waited_s:.2f} s"
            how = "" if done.thread is None else f" in {done.seconds:.1f} s behind training ({cost})"
            self.say(f"saved {done.path}{how}")

    def _written(self, done: Writing | None) -> None:
        """Notes a checkpoint that was written. UserError if it failed."""
        assert done is not None
        step, error = done.about.step, done.error
        if isinstance(error, NonFinite):
            good = f"the last good checkpoint is {self.last_saved}" if self.last_saved else "there is no checkpoint"
            raise NonFinite(f"step {step}: {error}, so it is not saved; {good}") from error
        if isinstance(error, CANNOT_SAVE) or out_of_memory(error) is not None:
            # safetensors reports the system's error as text
            full = (isinstance(error, OSError) and error.errno in FULL) or "No space left" in str(error)
            raise (NoRoom if full else UserError)(f"output_dir: {done.path} could not be written: {error}") from error
        if error is not None:
            raise error
        self.last_saved = done.path
        for line in done.lines:
            self.say(line)

    def _flush(self, step: int, last: bool) -> None:
        """Before a checkpoint gets its name: metrics and the journal, if there is one, are on the disk up to this
        step."""
        try:
            os.fsync(self.metrics.file)
            if self.journal is not None and not self.journal.flush_up_to(step):
                raise OSError(f"it has no record of step {step}")
        except OSError as error:
            what = f"the journal is not on the disk up to step {step}: {error}"
            if not last:
                raise OSError(what) from error
            self.say(f"warning: {what}; the checkpoint is saved without")

    def save_last(self) -> Path:
        """The save that ends the run. On a full disk it waits for room; a new signal, or too long a wait, gives up."""
        run, until_s, told = self.run, time.monotonic() + WAIT_S, False
        before, path = run.interrupts.requested, run.checkpoint(run.done)
        while self.last_saved != path:
            try:
                self._begin(run.done, last=True)
                self._written(self.writer.wait())
                break
            except NonFinite:
                raise
            except UserError as error:
                waits = isinstance(error, NoRoom) and time.monotonic() < until_s
                if not waits or run.interrupts.requested != before:
                    raise UserError(f"{error}\n  {self._lost(error)}") from error
                if not told:
                    self.say(
                        f"warning: the last checkpoint is NOT saved: {error}. The steps are done and the weights are "
                        f"in memory: the save goes on by itself when there is room (for {WAIT_S / 60:.0f} minutes; a "
                        "signal, such as Ctrl-C, gives up)"
                    )
                told = True
            time.sleep(PAUSE_S)
        return path

    def _lost(self, error: UserError) -> str:
        """What is left of the run if its last checkpoint cannot be written."""
        step, good, whole = self.run.done, self.last_saved, False
        with suppress(OSError):
            whole = self.journal is not None and self.journal.flush_up_to(step)
        if whole:
            kept = f"all {step} steps are in {self.run.directory.journal}: --resume replays them, and nothing is lost"
        elif good is None:
            kept = "there is no checkpoint, so all steps are lost"
        else:
            kept = f"the steps after {good.name} are lost, and --resume goes on from there"
        return f"once {'there is room' if isinstance(error, NoRoom) else 'it can be written to'}: {kept}"

    def publish(self, step: int | None = None) -> None:
        """Makes the checkpoint of a step, or the last one, the model of the output directory."""
        source = self.last_saved if step is None else self.run.checkpoint(step)
        assert source is not None
        try:
            if self.writer.model.methods.low_rank is not None:  # its checkpoints hold factors beside the weights
                self.run.go_back(self.run.done if step is None else step)
                hf.save_model(self.writer.model, self.root)
            else:
                hf.publish(source, self.root, read_state(source).files.keys() - OWN_FILES)
        except (Damaged, FileNotFoundError) as error:
            raise UserError(f"output_dir: {source} was deleted or damaged just now: {error}") from error
        except OSError as error:
            at = f"it is complete in {source}; --resume puts it there when that can be written to"
            raise UserError(f"output_dir: the model could not be put into {self.root}: {error}; {at}") from error
