"""When a checkpoint is written, whether the disk has room for it, and what happens when it fails.

During training, checkpoints are written in the background (checkpoint/snapshot/), one at a time. If that is impossible
or switched off, and at the end of a run, training waits for the write.

A checkpoint needs   weights + the method's tensors + MARGIN_BYTES   on the disk before the oldest one is deleted. If
there is less room, the oldest is deleted first, as long as one good checkpoint remains. If there is still not enough
room, or the write fails, a save during training is skipped with a warning and tried again after RETRY_STEPS steps
(training is worth more than a checkpoint); the save that ends a run waits for room (room.py) and then raises. Weights
are checked to be finite before they are written.

A checkpoint gets its name when the journal is on the disk up to its step. If the journal cannot be written, a save
during training is tried again later; the save that ends a run is made nevertheless, with a warning.
"""

import threading
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from keyhole.checkpoint import select
from keyhole.checkpoint.files import OWN_FILES, About, method_state, save_checkpoint, split_state
from keyhole.checkpoint.snapshot.background import Background, Writing
from keyhole.checkpoint.snapshot.snapshot import Cancelled
from keyhole.checkpoint.state import STATE, Damaged, read_state, verify
from keyhole.data.loader import Loader
from keyhole.errors import NonFinite, UserError
from keyhole.machine.out_of_memory import out_of_memory
from keyhole.machine.sizes import GIB
from keyhole.methods.base import Method
from keyhole.model.model import Model
from keyhole.model.weights import save as hf
from keyhole.model.weights.save_parts import bad_tensor
from keyhole.training.journaling import Journaling
from keyhole.training.observer import Observer, Progress
from keyhole.training.room import NoRoom, free_bytes, is_full, wait_for_room
from keyhole.training.selection import Selection

MARGIN_BYTES = 64 * 2**20
RETRY_STEPS = 10
# Training continues after these errors, and if there is no memory for copies.
CANNOT_SAVE = (OSError, Cancelled, torch.AcceleratorError)


def saved_bytes(model: Model, method_state: dict[str, Any]) -> int:
    """Bytes on disk of the weights and of the method's tensors, and a margin for the small files."""
    tensors, _ = split_state(method_state)
    weights = sum(t.shape.numel() for t in model.layout.tensors) * torch.finfo(model.dtype).bits // 8
    weights = 0 if method_state.get("light") else weights
    return weights + sum(int(tensor.nbytes) for tensor in tensors.values()) + MARGIN_BYTES


@dataclass(frozen=True)
class SaveSettings:
    """Steps between checkpoints (None: only at the end), how many are kept (None: all), whether they are written in the
    background, and whether a model is saved at the end (otherwise only metrics are)."""

    every: int | None
    keep: int | None
    background: bool
    model: bool = True


def background_of(settings: SaveSettings, model: Model, method: Method) -> Background | None:
    """Writes checkpoints behind training, where that is asked for and possible."""
    if not settings.background or settings.every is None:
        return None
    background = Background(model, method)
    return background if background.possible else None


def describe(settings: SaveSettings, model: Model, background: Background | None) -> list[str]:
    """For the start block: how checkpoints are written, and the host memory that this needs."""
    if settings.every is None:
        return []
    if background is None:
        why = "its tensors are stored in another form" if settings.background else "background_save=false"
        return [f"checkpoints: training waits for each ({why})"]
    pool = background.pool_bytes
    weights = sum(home.numel() * home.element_size() for home in model.engine.homes)
    short = "" if pool >= weights // 2 else f" (half of them, {weights / 2 / GIB:.2f} GiB, is not free)"
    return [
        f"checkpoints: written while training goes on; host memory meanwhile: at most {pool / GIB:.2f} GiB more, "
        f"{pool / max(1, weights):.0%} of the weights{short}"
    ]


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

    about describes the run in every checkpoint; the journal, if there is one, is flushed before a checkpoint gets its
    name; selection: for checkpoints; best_step: its checkpoint is kept; say is called with lines for the user.
    """

    def __init__(
        self,
        root: Path,
        model: Model,
        method: Method,
        settings: SaveSettings,
        about: About,
        say: Callable[[str], None],
        *,
        background: Background | None,
        loader: Loader,
        journal: Journaling | None,
        selection: Selection,
        best_step: int | None,
    ) -> None:
        self.root, self.model, self.method, self.settings = root, model, method, settings
        self.about, self.say, self.background = about, say, background
        self.loader, self.journal, self.selection, self.best_step = loader, journal, selection, best_step
        self.last_good: Path | None = None
        self.last_step: int | None = None
        self.retry_at: int | None = None
        self.deleting: threading.Thread | None = None  # deletes old checkpoints in the background

    def went_on_from(self, path: Path | None, step: int) -> None:
        """Notes the checkpoint that the run resumes from; if it is in this directory, its step is not saved again."""
        self.last_good = path
        if path is not None and path.resolve() == (self.root / f"checkpoint-{step}").resolve():
            self.last_step = step

    def is_due(self, step: int) -> bool:
        """Whether a checkpoint is to be written after this step."""
        every = self.settings.every
        return step != self.last_step and ((every is not None and step % every == 0) or step == self.retry_at)

    def after_step(self, run: Progress) -> None:
        """Saves if that is due; the saves that end a run are save_last and save_best."""
        lines = self.poll(run.done)
        if self.is_due(run.done) and not run.is_last and not run.is_interrupted:
            waits = self.background is None or self.journal is None
            with run.paused() if waits else nullcontext():
                lines += self.try_save(run.done)
        for line in lines:
            self.say(line)

    def try_save(self, step: int) -> list[str]:
        """Saves during training, or starts a background save; returns lines for the user, also if it failed."""
        lines, self.retry_at = self.wait(step), None
        try:
            if self.background is None:
                return [*lines, f"saved {self.save(step)}"]
            deferred = self.method.deferred_state()
            self._make_room(step, self.method.state_dict() if deferred is None else deferred)
            self.background.begin(self.root / f"checkpoint-{step}", self._about(step), self._is_journaled)
            return lines
        except NonFinite:
            raise
        except UserError as error:
            return [*lines, self._failed(step, step, error)]

    def poll(self, step: int) -> list[str]:
        """Lines about a background checkpoint that has been finished since the last call."""
        done = None if self.background is None else self.background.poll()
        return [] if done is None else [self._finished(done, step)]

    def wait(self, step: int) -> list[str]:
        """Waits for a background checkpoint, and returns the lines about it."""
        done = None if self.background is None else self.background.wait()
        return [] if done is None else [self._finished(done, step)]

    def newest_good(self) -> Path | None:
        """No step follows: waits for a checkpoint that is being written, and returns the newest good one."""
        if self.journal is not None:
            self.journal.end()
        with suppress(NonFinite):
            self.wait(0)
        return self.last_good

    def close(self) -> None:
        """Ends a background save after an error in training."""
        if self.journal is not None:
            self.journal.end()
        if self.background is not None:
            self.background.abandon()

    def _finished(self, done: Writing, now: int) -> str:
        step, error = done.about.step, done.error
        if isinstance(error, NonFinite):
            raise self._broken(step, str(error)) from error
        if isinstance(error, CANNOT_SAVE) or out_of_memory(error) is not None:
            return self._failed(step, now, UserError(f"output_dir: {done.path} could not be written: {error}"))
        if error is not None:
            raise error
        self._note_saved(done.path, step, done.lines)
        snapshot = done.snapshot
        cost = f"copies took {snapshot.peak_bytes / GIB:.2f} GiB, training waited {snapshot.waited_s:.2f} s"
        return f"saved {done.path} in {done.seconds:.1f} s behind training ({cost})"

    def _failed(self, step: int, now: int, error: UserError) -> str:
        self.retry_at = now + RETRY_STEPS
        every = self.settings.every or RETRY_STEPS
        again = min(self.retry_at, now - now % every + every)  # whichever comes first
        kept = f"{self.last_good} stays" if self.last_good else "there is no checkpoint yet"
        return f"warning: checkpoint-{step} NOT saved ({error}); {kept}; trying again at step {again}"

    def _broken(self, step: int, what: str) -> NonFinite:
        good = f"the last good checkpoint is {self.last_good}" if self.last_good else "there is no checkpoint"
        return NonFinite(f"step {step}: {what}, so it is not saved; {good}")

    def _note_saved(self, path: Path, step: int, lines: list[str]) -> None:
        self.last_good, self.last_step = path, step
        for line in lines:
            self.say(line)
        self.deleting = select.prune(self.root, self.settings.keep, step, self.say, self.best_step)

    def save(self, step: int, last: bool = False) -> Path:
        """Flushes the method, checks weights and disk, writes checkpoint-step, deletes old checkpoints. last: this save
        ends the run."""
        self.method.flush()
        bad = bad_tensor(self.model)
        if bad is not None:
            raise self._broken(step, f"{bad} holds NaN or infinity")
        state = self.method.state_dict()
        self._make_room(step, state, MARGIN_BYTES if last else 0)
        path = self.root / f"checkpoint-{step}"
        try:
            lines = save_checkpoint(path, self.model, state, self._about(step), lambda: self._flush_journal(step, last))
        except (OSError, SafetensorError) as error:
            kind = NoRoom if is_full(error) else UserError
            raise kind(f"output_dir: {path} could not be written: {error}") from error
        self._note_saved(path, step, lines)
        self._wait_for_room()
        return path

    def _flush_journal(self, step: int, last: bool) -> None:
        try:
            if not self._is_journaled(step):
                raise OSError(f"the journal has no record of step {step}")
        except OSError as error:
            if not last:
                raise OSError(f"the journal is not on the disk up to step {step}: {error}") from error
            self.say(
                f"warning: the journal is not on the disk up to step {step}: {error}; the checkpoint is saved without"
            )

    def _about(self, step: int) -> About:
        return replace(self.about, step=step, loader=self.loader.state_dict(), selection=self.selection.state_dict())

    def _is_journaled(self, step: int) -> bool:
        """Whether the journal, if there is one, is on the disk up to this step; OSError: flushing failed."""
        return self.journal is None or self.journal.flush_up_to(step)

    def save_once(self, step: int) -> Path:
        """The save that ends a run, unless this step is on the disk already. Raises if it fails."""
        if self.last_good is not None and self.last_step == step and (self.last_good / STATE).is_file():
            return self.last_good
        return self.save(step, last=True)

    def save_last(self, step: int, given_up: Callable[[], bool]) -> Path:
        """save_once for the end of a run: if the disk is full, waits for room until given_up() (room.py)."""
        save = partial(self.save_once, step)
        return wait_for_room(save, lambda: free_bytes(self.root), self.say, given_up)

    def save_best(self, step: int) -> list[str]:
        """Saves the checkpoint of the best step so far, which is kept; training waits. Returns lines, also if it
        failed."""
        before, lines, self.best_step = self.best_step, self.wait(step), step
        try:
            return [*lines, f"saved {self.save_once(step)}"]
        except NonFinite:
            raise
        except UserError as error:
            self.best_step = before
            return [*lines, f"warning: checkpoint-{step}, the best so far, NOT saved ({error})"]

    def _make_room(self, step: int, state: dict[str, Any], dares_bytes: int = 0) -> None:
        """Deletes old checkpoints if the disk has less room than needed. dares_bytes: what may be missing all the
        same, because the need is an estimate, and nothing is lost by a save that fails."""
        need = saved_bytes(self.model, state)
        limit = self.settings.keep
        self._wait_for_room()
        if need > free_bytes(self.root) and limit is not None:
            select.prune(self.root, limit - 1, step, self.say, self.best_step).join()
        free = free_bytes(self.root)
        if need - dares_bytes > free:
            raise NoRoom(
                f"output_dir: a checkpoint takes {need / GIB:.2f} GiB, and {self.root} has "
                f"{free / GIB:.2f} GiB free; free some space"
            )

    def _wait_for_room(self) -> None:
        """Waits until the old checkpoints are deleted."""
        if self.deleting is not None:
            self.deleting.join()

    def damage_of(self, step: int) -> str | None:
        """What is wrong with the checkpoint of a step, by its checksums, and the name under which it is kept; None if
        it is intact."""
        path = self.root / f"checkpoint-{step}"
        try:
            verify(path)
            return None
        except Damaged as fault:
            with suppress(OSError):  # a directory that cannot be written to
                return f"{fault} (it is kept as {select.rename_damaged([path])[0].name})"
            return str(fault)

    def publish(self, step: int | None = None) -> None:
        """Makes the checkpoint of a step, or the last one, the model of the output directory."""
        self._wait_for_room()
        source = self.last_good if step is None else self.root / f"checkpoint-{step}"
        assert source is not None
        try:
            about = read_state(source)
            state = method_state(source, about)
            if self.method.light:
                self.method.load_state_dict(state)
                hf.save_model(self.model, self.root)
                return
            beside = self.method.learned_beside(state)
            finish = None if beside is None else partial(hf.merge_files, self.model, factors=beside)
            hf.publish(source, self.root, about.files.keys() - OWN_FILES, finish)
        except (Damaged, FileNotFoundError) as error:
            self._publish_from_memory(source, error)
        except OSError as error:
            raise UserError(
                f"output_dir: the model could not be put into {self.root}: {error}; it is complete in "
                f"{source}; --resume puts it there when that can be written to"
            ) from error

    def _publish_from_memory(self, source: Path, error: Exception) -> None:
        """Publishes the weights in memory, if they are those of a checkpoint that has been deleted or damaged since it
        was saved."""
        if source != self.root / f"checkpoint-{self.last_step}":
            raise UserError(f"output_dir: {source}, the best, was deleted or damaged just now: {error}") from error
        self.say(f"warning: {source} was deleted or damaged just now ({error}); the model is saved from memory")
        try:
            hf.save_model(self.model, self.root)
        except OSError as error:
            raise UserError(f"output_dir: the model could not be put into {self.root}: {error}") from error
