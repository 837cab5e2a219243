"""The only writer of checkpoints. A blocking save is a background save and a wait.

    begin      which memory is saved; from here on training may change it
    run        in a thread: files of their final size, pages and tensors (snapshot.py), the state, flushes, the journal
               up to this step, the final name
    wait       until that is done

A snapshot must be notified before memory changes. The method's trait `announces` says how:

    pages    pages change between engine.acquire and engine.commit: the engine announces each
    step     all weights change in one update, and the method calls a hook before it
    never    changes are not announced: the next step waits until everything is copied or written

Training waits for the whole save where memory is not what is saved (adapters beside the model, tensors that
Transformers stores in another form), where other ranks write parts of it, and where ranks share the host's copy.
"""

import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from keyhole.checkpoint.select import put_in_place
from keyhole.checkpoint.snapshot import READY, WAITING, Cancelled, Segment, Snapshot, Source, event_on, segments_of
from keyhole.checkpoint.state import STATE, TENSORS, State, Written, dump
from keyhole.disk.files import checksums, flush_all, staged
from keyhole.disk.json_text import Json
from keyhole.disk.tensors import Files, MethodState, Ranges, create, one_file
from keyhole.machine.gpu import accelerator
from keyhole.machine.host import host_memory
from keyhole.methods import METHODS
from keyhole.methods.base import Method
from keyhole.model.model import Model
from keyhole.model.structure.layout import Unit
from keyhole.model.structure.skeleton import saved_buffers
from keyhole.model.weights.format import PACKED
from keyhole.model.weights.save import (
    names_on_disk,
    plan_files,
    small_files,
    write_contents,
    write_files,
    write_parts,
    write_state_parts,
)

SLACK_BYTES = 2**30  # host memory that is left free
MARGIN_BYTES = 64 * 2**20  # of the disk, for small files
Tensors = dict[str, torch.Tensor | Ranges]


@dataclass
class Writing:
    """One checkpoint. thread: writes it (None: training waits); error: what went wrong; lines: about a user's files."""

    snapshot: Snapshot
    path: Path
    about: State
    files: list[Files]
    tensors: Tensors
    before_rename: Callable[[], None]
    delete_old: Callable[[Callable[[str], None]], None]
    error: BaseException | None = None
    lines: list[str] = field(default_factory=list)
    seconds: float = 0.0
    thread: threading.Thread | None = None


class Writer:
    """Writes checkpoints of one model and method, one at a time. waits: training has to wait for every save."""

    def __init__(self, model: Model, method: Method, pool_bytes: int | None = None) -> None:
        self.model, self.method, self.announces = model, method, METHODS[method.name].announces
        by_itself = model.methods.addon is not None or model.sharded  # else its files are its memory
        self.names = {} if method.light else None if by_itself else names_on_disk(model)
        self.waits = self.names is None or bool(model.engine.shared)
        self.files = plan_files(model, self.names) if self.names else Files()
        self.small, self.lines = small_files(model)
        half = sum(home.nbytes for home in model.engine.homes) // 2
        free = max(0, host_memory().available_bytes - SLACK_BYTES)
        self.pool_bytes = min(half, free) if pool_bytes is None else pool_bytes
        self.writing: Writing | None = None
        if self.announces == "step" and not self.waits:
            method.call_before_update(self.release_all)

    def begin(
        self,
        path: Path,
        about: State,
        make_room: Callable[[int], None] = lambda size_bytes: None,
        before_rename: Callable[[], None] = lambda: None,
        delete_old: Callable[[Callable[[str], None]], None] = lambda say: None,
        waits: bool = False,
    ) -> None:
        """Starts a checkpoint of the weights after the last step; training may continue when this returns. waits: it
        returns when the checkpoint is written. make_room is called with its size before anything is written, and
        before_rename when everything is; both may prevent it by an exception. delete_old is called when it is in place,
        with a function for messages."""
        waits = waits or self.waits
        state = None if waits else self.method.deferred_state()
        if state is None:
            self.method.flush()
        if self.model.engine.gate is not None:
            self.model.engine.wait_for_homes()
        tensors, scalars = split_state(self.method.state_dict() if state is None else state)
        make_room(saved_bytes(self.model, tensors, bool(scalars.get("light"))))
        in_memory = {} if any(isinstance(t, Ranges) for t in tensors.values()) else tensors
        snapshot, files = self._snapshot(in_memory, deferred=state is not None)
        writing = Writing(snapshot, path, replace(about, method=scalars), files, tensors, before_rename, delete_old)
        self.writing = writing
        if waits:
            self._run(writing)
            return
        self.model.engine.watch = snapshot
        writing.thread = threading.Thread(target=self._run, args=(writing,), name="keyhole-snapshot", daemon=True)
        writing.thread.start()
        if self.announces == "never":
            snapshot.release_all()
        elif self.announces == "pages":  # only pages are announced, not the method's own tensors
            for source in snapshot.queue[: len(tensors)]:
                snapshot.release(source)

    def _snapshot(self, tensors: Tensors, deferred: bool) -> tuple[Snapshot, list[Files]]:
        """What is read from memory: the method's tensors, buffers and pages; and the files that they are written to.
        deferred: units may wait for an update that the next step applies; otherwise all are as they are saved."""
        engine, formats = self.model.engine, self.model.formats
        own = one_file(tensors, TENSORS) if tensors else Files()
        alone = [(own.places[name], name, t) for name, t in tensors.items() if isinstance(t, torch.Tensor)]
        pages: dict[int, Source] = {}
        if self.names:
            places = {name: self.files.places[on_disk] for name, on_disk in self.names.items()}
            alone += [(places[name], name, buffer) for name, buffer in saved_buffers(self.model.module).items()]
            for unit in self.model.layout.units:
                home = engine.homes[unit.index]
                packed = home.dtype == PACKED
                itemsize = (formats.saved if packed else home.dtype).itemsize
                tensors_in = [(t.name, t.start, t.stop) for t in unit.tensors]
                segments = segments_of(tensors_in, unit.start, unit.stop, places, itemsize)
                state = WAITING if deferred and self.method.owes(unit) else READY
                pages[unit.index] = Source(home, segments, partial(self._unpacked, unit) if packed else None, state)
        others = [
            Source(t.detach().reshape(-1), [Segment(name, 0, t.numel(), place.file, place.offset)])
            for place, name, t in alone
        ]
        snapshot = Snapshot(pages, others, self.pool_bytes, self.model.device)
        if engine.cuda:
            for source in snapshot.order:  # an event after all work queued so far that changes it
                stream = accelerator.current_stream(engine.device) if source.flat.is_cuda else engine.down
                source.event = event_on(stream)
        return snapshot, [self.files, own]

    def _unpacked(self, unit: Unit, flat: torch.Tensor) -> torch.Tensor:
        numbers = torch.empty(unit.numel, dtype=self.model.formats.saved)
        self.model.formats.decode(unit, flat, numbers)
        return numbers

    def _run(self, writing: Writing) -> None:
        """Writes the checkpoint, with what went wrong in `error`."""
        begin_s = time.perf_counter()
        try:
            with staged(writing.path.parent, writing.path.name) as temporary:
                self._write(writing, temporary)
                write_state(temporary, writing.about)
                writing.before_rename()
                writing.lines = put_in_place(temporary, writing.path)
            writing.delete_old(writing.lines.append)
        except BaseException as error:
            writing.snapshot.fail(error)
            writing.error = error
        writing.seconds = time.perf_counter() - begin_s

    def _write(self, writing: Writing, directory: Path) -> None:
        """Everything but the state: a further file of a checkpoint is a line here."""
        if self.names is None and self.model.sharded:
            write_parts(self.model, directory)
        elif self.names is None:
            write_files(self.model, directory, merged=False)
        else:
            write_contents(directory, self.small)
        for files in writing.files:
            create(files, directory)
        writing.snapshot.write(directory)
        if any(isinstance(tensor, Ranges) for tensor in writing.tensors.values()):
            write_state_parts(self.model, directory, writing.tensors, TENSORS)

    def release_all(self) -> None:
        """Waits until training may change all memory."""
        if self.writing is not None:
            self.writing.snapshot.release_all()

    def wait(self) -> Writing | None:
        """Waits for the checkpoint that is being written, and returns it; None if there is none."""
        if self.writing is not None and not self.writing.snapshot.is_whole:
            self.method.flush()
        return self._finish()

    def poll(self) -> Writing | None:
        """The checkpoint that has been finished since the last call, if any."""
        running = self.writing is not None and self.writing.thread is not None and self.writing.thread.is_alive()
        return None if running else self._finish()

    def abandon(self) -> None:
        """At the end of training: finishes a checkpoint that has all its weights, drops any other."""
        if self.writing is not None and not self.writing.snapshot.is_whole:
            self.writing.snapshot.fail(Cancelled("training ended before the weights of this step were whole"))
        self._finish()

    def _finish(self) -> Writing | None:
        done, self.writing = self.writing, None
        if done is not None:
            if done.thread is not None:
                done.thread.join()
            self.model.engine.watch = None
        return done


def saved_bytes(model: Model, tensors: Tensors, light: bool = False) -> int:
    """Bytes on disk of the weights and of the method's tensors, and a margin for the small files."""
    weights = sum(t.shape.numel() for t in model.layout.tensors) * model.dtype.itemsize
    return (0 if light else weights) + sum(int(tensor.nbytes) for tensor in tensors.values()) + MARGIN_BYTES


def split_state(method_state: Mapping[str, Any]) -> tuple[Tensors, Json]:
    """(tensors, the rest) of a method's state."""
    tensors = {name: value for name, value in method_state.items() if isinstance(value, torch.Tensor | Ranges)}
    return tensors, {name: value for name, value in method_state.items() if name not in tensors}


def write_state(directory: Path, about: State, leave_out: Collection[str] = ()) -> None:
    """Completes a checkpoint: writes keyhole_state.json with the checksums of all other files, and flushes everything
    to the disk. leave_out: files that are none of the checkpoint's."""
    names = (file.relative_to(directory).as_posix() for file in directory.rglob("*") if file.is_file())
    files = {name: directory / name for name in sorted(names) if name not in leave_out}
    found = checksums(list(files.values()))
    inventory = {
        name: Written(file.stat().st_size, crc) for (name, file), crc in zip(files.items(), found, strict=True)
    }
    (directory / STATE).write_text(dump(asdict(replace(about, files=inventory))), encoding="utf-8")
    flush_all(directory)


def method_state(path: Path, state: State) -> MethodState:
    """The argument of the method's load_state_dict; tensors are read one by one."""
    return MethodState(state.method, path / TENSORS if TENSORS in state.files else None)
