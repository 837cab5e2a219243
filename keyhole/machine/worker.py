"""A process with a limit of time and memory, for programs and files that are not ours: chat templates, task files,
patterns; packed and binary files of data.

A template comes with a model, and two nested loops, `'x' * 10**12` or `(a+)+$` are enough to stop a computer. One byte
of an Arrow file is enough to end a process, and 260 KB of gzip are 2^28 empty lines. So these run in a process beside
this one, and the kernel ends what takes too much: SECONDS of computing for an item of work (RLIMIT_CPU), MEMORY_BYTES
of addresses (RLIMIT_AS). Nothing needs to be watched inside; what crashes is a message here. A process is started with
the first item (0.2 s, without torch), is kept, and ends with its pipe. Several exist only while rows are read from one
and rendered in another.

    bounded     a result for each item; items travel in batches
    streamed    what a generator yields, ROWS at a time, while the process reads on; a file may take as much more as it
                is large, so that an ordinary one meets no limit: a second per MiB, and GROWTH bytes per byte
"""

import atexit
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any, TypeVar

from keyhole.errors import UserError

SECONDS, MEMORY_BYTES, AT_ONCE = 8, 2**31, 512
ROWS, GROWTH = 64, 16
Item = TypeVar("Item")
Result = TypeVar("Result")


class Worker:
    """The process, and our end of its pipe."""

    def __init__(self) -> None:
        self.pipe, theirs = Pipe()
        code = f"from keyhole.machine.worker import serve; serve({theirs.fileno()})"
        alone = {"MALLOC_ARENA_MAX": "1", "ARROW_DEFAULT_MEMORY_POOL": "system"}  # no addresses in reserve
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-c", code],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))} | alone,
            process_group=0,  # Ctrl-C is for us alone
        )
        theirs.close()

    def receive(self) -> Any:
        result, error = self.pipe.recv()
        if error is not None:
            raise error
        return result

    def close(self) -> None:
        self.pipe.close()
        self.process.kill()
        self.process.wait()


_idle: list[Worker] = []
os.register_at_fork(after_in_child=_idle.clear)  # the processes of a parent answer the parent


@contextmanager
def _borrowed(place: Callable[[], str], room: int = 0) -> Iterator[Worker]:
    """A process that nobody else uses. place: the words of an error for an item that took too much."""
    try:
        worker = _idle.pop()
    except IndexError:
        worker = Worker()
    try:
        yield worker
    except (EOFError, ConnectionError, MemoryError) as error:
        ended = None if isinstance(error, MemoryError) else worker.process.wait()
        worker.close()
        took = {-signal.SIGXCPU: f"{_limits(room)[0]} s", None: f"{_limits(room)[1] / 2**30:.3g} GiB of memory"}
        why = f"takes more than {took[ended]}" if ended in took else "ended its process"
        raise UserError(f"{place()} {why}, so it was stopped") from None
    except BaseException as error:
        if isinstance(error, UserError):
            _idle.append(worker)
        else:
            worker.close()  # answers may be left in the pipe
        raise
    _idle.append(worker)


def bounded(function: Callable[[Item], Result], items: Sequence[Item], place: Callable[[Item], str]) -> list[Result]:
    """[function(item) for item in items], computed by the process. function: can be pickled, and raises UserError.
    place: the words of an error for an item that took too much."""
    done: list[Result] = []
    for start in range(0, len(items), AT_ONCE):
        with _borrowed(lambda: place(items[len(done)])) as worker:
            worker.pipe.send((function, batch := items[start : start + AT_ONCE], *_limits(), None))
            for _ in batch:
                done.append(worker.receive())
    return done


def streamed(function: Callable[[Item], Iterator[Result]], item: Item, place: str, room: int = 0) -> Iterator[Result]:
    """What function(item) yields, in the process, which works in this one's directory. room: bytes of the file that it
    reads."""
    with _borrowed(lambda: place, room) as worker:
        worker.pipe.send((function, [item], *_limits(room), os.getcwd()))
        while rows := worker.receive():
            yield from rows


def _limits(room: int = 0) -> tuple[int, int]:
    """Seconds, bytes."""
    return SECONDS + room // 2**20, MEMORY_BYTES + GROWTH * room


@atexit.register
def _close() -> None:
    for worker in _idle:
        worker.close()


def serve(descriptor: int) -> None:
    """The process itself: answers until the pipe closes. After an error the rest of a batch is left."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    pipe: Connection = Connection(descriptor)
    try:
        while True:
            for what in (resource.RLIMIT_CPU, resource.RLIMIT_AS):  # what comes next may be in a module to import
                _limit(what, resource.getrlimit(what)[1])
            function, items, seconds, memory_bytes, directory = pipe.recv()
            held_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            _limit(resource.RLIMIT_AS, held_bytes + memory_bytes)
            for item in items:
                _limit(resource.RLIMIT_CPU, int(time.process_time()) + 1 + seconds)
                try:
                    if directory is not None:
                        os.chdir(directory)
                    found = function(item)
                    while isinstance(found, Iterator) and (rows := list(islice(found, ROWS))):
                        pipe.send((rows, None))
                    pipe.send((None if isinstance(found, Iterator) else found, None))
                except (UserError, MemoryError) as error:
                    pipe.send((None, error))
                    break
    except (EOFError, ConnectionError):
        return


def _limit(what: int, most: int) -> None:
    hard = resource.getrlimit(what)[1]
    resource.setrlimit(what, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


def why(error: Exception) -> str:
    """The words of whatever a program raised."""
    if isinstance(error, MemoryError):
        return f"takes more than {MEMORY_BYTES / 2**30:g} GiB of memory"
    return str(error) or type(error).__name__
