"""A checkpoint in the background: which memory is saved, how its changes are announced, and the thread that writes.

A snapshot must be notified before memory changes. The method's trait `announces` says how:

    pages    pages change between engine.acquire and engine.commit: the engine announces each
    step     all weights change in one update, and the method calls a hook before it
    never    changes are not announced: the next step waits until everything is copied or written

The files are the same, byte for byte, as those of a blocking save (checkpoint/files.py).
"""

import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from keyhole.checkpoint.files import TENSORS, About, split_state, write_state
from keyhole.checkpoint.removal import put_in_place
from keyhole.checkpoint.snapshot.copy_threads import CopyThreads
from keyhole.checkpoint.snapshot.page_writer import BUFFER_BYTES
from keyhole.checkpoint.snapshot.snapshot import PAGE_WRITERS, Cancelled, Snapshot
from keyhole.checkpoint.snapshot.source import READY, WAITING, Segment, Source, event_on, segments_of
from keyhole.disk.files import staged
from keyhole.disk.tensors import Files, Spec, lay_out
from keyhole.machine.host import host_memory
from keyhole.methods import METHODS
from keyhole.methods.base import Method
from keyhole.model.model import Model
from keyhole.model.structure.skeleton import saved_buffers
from keyhole.model.weights.format import PACKED
from keyhole.model.weights.saved_files import create_files, names_on_disk, plan_files, small_files

SLACK_BYTES = 2**30  # host memory that is left free


class Background:
    """Takes snapshots of one model and method, one at a time."""

    def __init__(self, model: Model, method: Method, pool_bytes: int | None = None) -> None:
        self.model, self.method, self.announces = model, method, METHODS[method.name].announces
        names = {} if method.light else names_on_disk(model)
        names = names if model.addon is None else None  # an addon writes its own files
        self.possible = names is not None
        if names is None:
            return
        self.files = plan_files(model, names) if names else Files({}, {}, {})
        self.places = {name: self.files.places[on_disk] for name, on_disk in names.items()}
        self.small = small_files(model)
        self.pool_bytes = _pool_bytes(model) if pool_bytes is None else pool_bytes
        self.writing: Writing | None = None
        self.copy_threads = CopyThreads()
        if self.announces == "step":
            method.call_before_update(self.release_all)

    def begin(self, path: Path, about: About, flush_journal: Callable[[int], bool]) -> "Writing":
        """Starts a checkpoint of the weights after the last step; training may continue when this returns."""
        state = self.method.deferred_state()
        if state is None:
            self.method.flush()
        if self.model.engine.gate is not None:
            self.model.engine.wait_for_homes()
        state = self.method.state_dict() if state is None else state
        tensors, scalars = split_state(state)
        specs = [Spec(name, t.dtype, tuple(t.shape)) for name, t in sorted(tensors.items())]
        own = lay_out(specs, name=Path(TENSORS).stem) if specs else Files({}, {}, {})
        others = [_whole(name, t, own) for name, t in tensors.items()]
        kept = {} if self.method.light else saved_buffers(self.model.module)
        buffers = [_whole(n, b, self.files, self.places) for n, b in kept.items()]
        snapshot = Snapshot(self._pages(), others + buffers, self.pool_bytes, self.model.device, self.copy_threads)
        for source in snapshot.queue:
            source.event = None if source.state == WAITING else self._event(source)
        self.writing = Writing(snapshot, path, about, scalars, [self.files, own], self.small, flush_journal)
        self.model.engine.watch = snapshot
        if self.announces == "never":
            snapshot.release_all()
        elif self.announces == "pages":  # only pages are announced, not the method's own tensors
            for source in others:
                snapshot.release(source)
        return self.writing

    def _pages(self) -> dict[int, Source]:
        model, pages = self.model, {}
        for unit in [] if self.method.light else model.layout.units:
            home = model.engine.homes[unit.index]
            packed = home.dtype == PACKED
            element_bytes = (model.formats.saved if packed else home.dtype).itemsize
            tensors = [(t.name, t.start, t.stop) for t in unit.tensors]
            segments = segments_of(tensors, unit.start, unit.stop, self.places, element_bytes)
            unpacks = (unit.numel, model.formats.saved, partial(model.formats.decode, unit)) if packed else None
            pages[unit.index] = Source(home, segments, unpacks, WAITING if self.method.owes(unit) else READY)
        return pages

    def _event(self, source: Source) -> Any:
        """An event after all work queued so far that changes the source; None on a CPU."""
        engine = self.model.engine
        if not engine.cuda:
            return None
        return event_on(torch.cuda.current_stream(engine.device) if source.flat.is_cuda else engine.down)

    def release_all(self) -> None:
        """Waits until training may change all memory."""
        if self.writing is not None:
            self.writing.snapshot.release_all()

    def wait(self) -> "Writing | None":
        """Waits for the checkpoint that is being written, and returns it; None if there is none."""
        if self.writing is None:
            return None
        if not self.writing.snapshot.is_whole:
            self.method.flush()
        return self._finish()

    def poll(self) -> "Writing | None":
        """The checkpoint that has been finished since the last call, if any."""
        return None if self.writing is None or self.writing.thread.is_alive() else self._finish()

    def _finish(self) -> "Writing":
        done, self.writing = self.writing, None
        assert done is not None  # its callers check
        done.thread.join()
        self.model.engine.watch = None
        return done

    def abandon(self) -> None:
        """At the end of training: finishes a checkpoint that has all its weights, drops any other."""
        if self.writing is not None:
            if not self.writing.snapshot.is_whole:
                self.writing.snapshot.cancel()
            self._finish()


def _pool_bytes(model: Model) -> int:
    """Host memory for copies: half of the weights, less the workers' buffers (unless these are most of it), if free."""
    half = sum(home.numel() * home.element_size() for home in model.engine.homes) // 2
    buffers = PAGE_WRITERS * BUFFER_BYTES if model.engine.cuda else 0
    return min(max(half - buffers, half // 2), max(0, host_memory().available_bytes - SLACK_BYTES))


def _whole(name: str, tensor: torch.Tensor, files: Files, places: dict[str, Any] | None = None) -> Source:
    place = (files.places if places is None else places)[name]
    return Source(tensor.detach().reshape(-1), [Segment(name, 0, tensor.numel(), place.file, place.offset)])


class Writing:
    """One checkpoint, and the thread that writes it."""

    def __init__(
        self,
        snapshot: Snapshot,
        path: Path,
        about: About,
        scalars: dict[str, Any],
        files: list[Files],
        small: dict[str, bytes],
        flush_journal: Callable[[int], bool],
    ) -> None:
        self.snapshot, self.path, self.about, self.scalars = snapshot, path, about, scalars
        self.files, self.small, self.flush_journal = files, small, flush_journal
        self.error: BaseException | None = None
        self.lines: list[str] = []  # about a user's files of that name
        self.begin_s = time.perf_counter()
        self.seconds = 0.0
        self.thread = threading.Thread(target=self._run, name="keyhole-snapshot", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            self._write()
        except BaseException as error:
            self.snapshot.fail(error)
            self.error = error
        self.seconds = time.perf_counter() - self.begin_s

    def _write(self) -> None:
        with staged(self.path.parent, self.path.name) as temporary:
            for files in self.files:
                create_files(files, temporary)
            for name, content in self.small.items():
                (temporary / name).parent.mkdir(exist_ok=True)
                (temporary / name).write_bytes(content)
            self.snapshot.write(temporary)
            write_state(temporary, self.about, self.scalars, self.snapshot.sums)
            if not self.flush_journal(self.about.step):
                raise Cancelled(f"the journal has no record of step {self.about.step}")
            self.lines = put_in_place(temporary, self.path)
