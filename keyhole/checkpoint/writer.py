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
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from keyhole.checkpoint.pages import BUFFER_BYTES, READY, WAITING, Source, segments_of, whole
from keyhole.checkpoint.select import put_in_place
from keyhole.checkpoint.snapshot import PAGE_WRITERS, Cancelled, CopyThreads, Snapshot, event_on
from keyhole.checkpoint.state import STATE, TENSORS, State, dump
from keyhole.disk.crc import Span, checksums
from keyhole.disk.files import flush_all, staged
from keyhole.disk.json_text import Json
from keyhole.disk.tensors import Files, MethodState, Ranges, Spec, create, lay_out
from keyhole.errors import NonFinite
from keyhole.machine.host import host_memory
from keyhole.methods import METHODS
from keyhole.methods.base import Method
from keyhole.model.model import Model
from keyhole.model.structure.layout import Unit
from keyhole.model.structure.skeleton import saved_buffers
from keyhole.model.weights.format import PACKED
from keyhole.model.weights.save import bad_tensor, write_files, write_state_parts
from keyhole.model.weights.saved_files import names_on_disk, plan_files, small_files

SLACK_BYTES = 2**30  # host memory that is left free
MARGIN_BYTES = 64 * 2**20  # of the disk, for small files
Tensors = dict[str, torch.Tensor | Ranges]


class Writer:
    """Writes checkpoints of one model and method, one at a time. waits: training has to wait for every save."""

    def __init__(self, model: Model, method: Method, pool_bytes: int | None = None) -> None:
        self.model, self.method, self.announces = model, method, METHODS[method.name].announces
        by_itself = model.addon is not None or model.sharded  # else its files are its memory
        self.names = {} if method.light else None if by_itself else names_on_disk(model)
        self.waits = self.names is None or bool(model.engine.shared)
        self.files = plan_files(model, self.names) if self.names else Files()
        self.small = {} if self.names is None else small_files(model)
        self.pool_bytes = _pool_bytes(model) if pool_bytes is None else pool_bytes
        self.writing: Writing | None = None
        self.copy_threads = CopyThreads()
        if self.announces == "step" and not self.waits:
            method.call_before_update(self.release_all)

    def begin(
        self,
        path: Path,
        about: State,
        make_room: Callable[[int], None] = lambda size_bytes: None,
        before_rename: Callable[[], None] = lambda: None,
        waits: bool = False,
    ) -> None:
        """Starts a checkpoint of the weights after the last step; training may continue when this returns. waits: it
        returns when the checkpoint is written. make_room is called with its size before anything is written, and
        before_rename when everything is; both may prevent it by an exception."""
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
        self.writing = Writing(self, snapshot, path, replace(about, method=scalars), files, tensors, before_rename)
        if waits:
            self.writing.run()
            return
        self.model.engine.watch = snapshot
        self.writing.thread = threading.Thread(target=self.writing.run, name="keyhole-snapshot", daemon=True)
        self.writing.thread.start()
        if self.announces == "never":
            snapshot.release_all()
        elif self.announces == "pages":  # only pages are announced, not the method's own tensors
            for source in snapshot.queue[: len(tensors)]:
                snapshot.release(source)

    def _snapshot(self, tensors: Tensors, deferred: bool) -> tuple[Snapshot, list[Files]]:
        """What is read from memory: the method's tensors, buffers and pages; and the files that they are written to.
        deferred: units may wait for an update that the next step applies; otherwise all are as they are saved."""
        specs = [Spec(name, t.dtype, tuple(t.shape)) for name, t in sorted(tensors.items())]
        own = lay_out(specs, name=Path(TENSORS).stem) if specs else Files()
        others = [whole(name, t, own.places[name]) for name, t in tensors.items() if isinstance(t, torch.Tensor)]
        pages: dict[int, Source] = {}
        if self.names:
            places = {name: self.files.places[on_disk] for name, on_disk in self.names.items()}
            others += [whole(name, b, places[name]) for name, b in saved_buffers(self.model.module).items()]
            for unit in self.model.layout.units:
                home = self.model.engine.homes[unit.index]
                packed, saved = home.dtype == PACKED, self.model.formats.saved
                tensors_in = [(t.name, t.start, t.stop) for t in unit.tensors]
                itemsize = (saved if packed else home.dtype).itemsize
                segments = segments_of(tensors_in, unit.start, unit.stop, places, itemsize)
                state = WAITING if deferred and self.method.owes(unit) else READY
                pages[unit.index] = Source(home, segments, partial(self._unpacked, unit) if packed else None, state)
        snapshot = Snapshot(pages, others, self.pool_bytes, self.model.device, self.copy_threads)
        for source in snapshot.order:
            source.event = self._event(source)
        return snapshot, [self.files, own]

    def _unpacked(self, unit: Unit, flat: torch.Tensor) -> torch.Tensor:
        numbers = torch.empty(unit.numel, dtype=self.model.formats.saved)
        self.model.formats.decode(unit, flat, numbers)
        return numbers

    def _event(self, source: Source) -> torch.cuda.Event | None:
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
        if self.writing is not None and not self.writing.snapshot.is_whole:
            self.method.flush()
        return self._finish()

    def poll(self) -> "Writing | None":
        """The checkpoint that has been finished since the last call, if any."""
        running = self.writing is not None and self.writing.thread is not None and self.writing.thread.is_alive()
        return None if running else self._finish()

    def abandon(self) -> None:
        """At the end of training: finishes a checkpoint that has all its weights, drops any other."""
        if self.writing is not None and not self.writing.snapshot.is_whole:
            self.writing.snapshot.fail(Cancelled("training ended before the weights of this step were whole"))
        self._finish()

    def _finish(self) -> "Writing | None":
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


def _pool_bytes(model: Model) -> int:
    """Host memory for copies: half of the weights, less the workers' buffers (unless these are most of it), if free."""
    half = sum(home.numel() * home.element_size() for home in model.engine.homes) // 2
    buffers = PAGE_WRITERS * BUFFER_BYTES if model.engine.cuda else 0
    return min(max(half - buffers, half // 2), max(0, host_memory().available_bytes - SLACK_BYTES))


class Writing:
    """One checkpoint, and the thread that writes it."""

    def __init__(
        self,
        writer: Writer,
        snapshot: Snapshot,
        path: Path,
        about: State,
        files: list[Files],
        tensors: Tensors,
        before_rename: Callable[[], None],
    ) -> None:
        self.writer, self.snapshot, self.path, self.about = writer, snapshot, path, about
        self.files, self.tensors, self.before_rename = files, tensors, before_rename
        self.error: BaseException | None = None
        self.lines: list[str] = []  # about a user's files of that name
        self.seconds = 0.0
        self.thread: threading.Thread | None = None  # None: training waits

    def run(self) -> None:
        """Writes the checkpoint, with what went wrong in `error`."""
        begin_s = time.perf_counter()
        try:
            with staged(self.path.parent, self.path.name) as temporary:
                self._write(temporary)
                write_state(temporary, self.about, self.snapshot.sums)
                self.before_rename()
                self.lines = put_in_place(temporary, self.path)
        except BaseException as error:
            self.snapshot.fail(error)
            self.error = error
        self.seconds = time.perf_counter() - begin_s

    def _write(self, directory: Path) -> None:
        """Everything but the state: a further file of a checkpoint is a line here."""
        model = self.writer.model
        if self.writer.names is None:
            if (bad := bad_tensor(model)) is not None:
                raise NonFinite(f"{bad} holds NaN or infinity")
            write_files(model, directory, merged=False)
        for name, content in self.writer.small.items():
            (directory / name).parent.mkdir(exist_ok=True)
            (directory / name).write_bytes(content)
        for files in self.files:
            create(files, directory)
        self.snapshot.write(directory)
        if any(isinstance(tensor, Ranges) for tensor in self.tensors.values()):
            write_state_parts(model, directory / TENSORS, self.tensors)


def split_state(method_state: Mapping[str, Any]) -> tuple[Tensors, Json]:
    """(tensors, the rest) of a method's state."""
    tensors = {name: value for name, value in method_state.items() if isinstance(value, torch.Tensor | Ranges)}
    return tensors, {name: value for name, value in method_state.items() if name not in tensors}


def write_state(
    directory: Path, about: State, sums: Mapping[str, list[Span]] | None = None, leave_out: Collection[str] = ()
) -> None:
    """Completes a checkpoint: writes keyhole_state.json with the checksums of all other files, and flushes everything
    to the disk. sums: known checksums of pieces of the files; leave_out: files that are none of the checkpoint's."""
    names = (file.relative_to(directory).as_posix() for file in directory.rglob("*") if file.is_file())
    files = {name: directory / name for name in sorted(names) if name not in leave_out}
    found = checksums(list(files.values()), [(sums or {}).get(name, []) for name in files])
    inventory = {
        name: {"bytes": file.stat().st_size, "crc32": crc}
        for (name, file), crc in zip(files.items(), found, strict=True)
    }
    (directory / STATE).write_text(dump(asdict(replace(about, files=inventory))), encoding="utf-8")
    flush_all(directory)


def method_state(path: Path, state: State) -> MethodState:
    """The argument of the method's load_state_dict; tensors are read one by one."""
    return MethodState(state.method, path / TENSORS if TENSORS in state.files else None)
