"""A process with a limit of time and memory, for programs that are not ours: chat templates, task files, patterns.

A template comes with a model, and two nested loops, `'x' * 10**12` or `(a+)+$` are enough to stop a computer. So such
programs run in one process beside this one, and the kernel ends what takes too much: SECONDS of computing for an item
of work (RLIMIT_CPU), MEMORY_BYTES of addresses (RLIMIT_AS). Nothing needs to be watched inside. The process is started
with the first item (0.2 s, without torch), is kept, and ends with its pipe; items travel in batches.
"""

import atexit
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import TypeVar

from keyhole.errors import UserError

SECONDS, MEMORY_BYTES, AT_ONCE = 10, 2**31, 512
Item = TypeVar("Item")
Result = TypeVar("Result")


class Worker:
    """The process, and our end of its pipe."""

    def __init__(self) -> None:
        self.pipe, theirs = Pipe()
        code = f"from keyhole.data.worker import serve; serve({theirs.fileno()})"
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-c", code],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            process_group=0,  # Ctrl-C is for us alone
        )
        theirs.close()

    def close(self) -> None:
        self.pipe.close()
        self.process.kill()
        self.process.wait()


_lock = threading.Lock()
_workers: list[Worker] = []  # none, or the one that is running


def bounded(function: Callable[[Item], Result], items: Sequence[Item], place: Callable[[Item], str]) -> list[Result]:
    """[function(item) for item in items], computed by the process. function: can be pickled, and raises UserError.
    place: the words of an error for an item that took too much."""
    done: list[Result] = []
    with _lock:
        for start in range(0, len(items), AT_ONCE):
            if not _workers:
                _workers.append(Worker())
            worker, batch = _workers[0], items[start : start + AT_ONCE]
            try:
                worker.pipe.send((function, batch, SECONDS))
                for _ in batch:
                    result, error = worker.pipe.recv()
                    if error is not None:
                        raise error
                    done.append(result)
            except (EOFError, ConnectionError):
                code = worker.process.wait()
                _workers.pop().close()
                why = f"takes more than {SECONDS} s" if code == -signal.SIGXCPU else "ended its process"
                raise UserError(f"{place(items[len(done)])} {why}, so it was stopped") from None
            except BaseException as error:
                if not isinstance(error, UserError):
                    _workers.pop().close()  # answers may be left in the pipe
                raise
    return done


@atexit.register
def _close() -> None:
    for worker in _workers:
        worker.close()


def serve(descriptor: int) -> None:
    """The process itself: answers until the pipe closes. After an error the rest of a batch is left."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    held_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    _limit(resource.RLIMIT_AS, held_bytes + MEMORY_BYTES)
    pipe: Connection = Connection(descriptor)
    try:
        while True:
            function, items, seconds = pipe.recv()
            for item in items:
                _limit(resource.RLIMIT_CPU, int(time.process_time()) + 1 + seconds)
                try:
                    pipe.send((function(item), None))
                except UserError as error:
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
