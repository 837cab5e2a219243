"""Several ranks in processes of their own, started as torchrun starts them, without its seconds of imports.

Children are forks of the server of tests/training/children.py; the variables are torchrun's, and the store is in this
process, as torchrun's is in its own. What a rank prints comes through a pipe of its own.
"""

import os
import signal
import sys
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from keyhole.machine.host import cpu_has_bf16
from tests.bf16 import Products
from tests.noise import draw_once
from tests.training.children import server

LIMIT_S = 300.0  # more than ranks need on a busy machine


class Launch:
    """Ranks that run target(*args), a function of a module; what it returns is the exit code."""

    def __init__(self, size: int, target: Callable[..., Any], *args: Any, env: dict[str, str] | None = None) -> None:
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        shared = {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1"}
        shared |= {"MASTER_PORT": self.store.port, "TORCHELASTIC_USE_AGENT_STORE": "True"}
        self.processes, self.printed, self.readers = [], [""] * size, []
        self.lines = [threading.Semaphore(0) for _ in range(size)]
        for rank in range(size):
            own = {name: str(value) for name, value in (shared | {"RANK": rank, "LOCAL_RANK": rank}).items()}
            reader, writer = server.Pipe(duplex=False)
            process = server.Process(target=_live, args=(target, args, own | (env or {}), writer))
            process.start()
            writer.close()
            self.processes.append(process)
            out = os.fdopen(os.dup(reader.fileno()), encoding="utf-8", errors="replace")
            self.readers.append(threading.Thread(target=self._read, args=(rank, out), daemon=True))
            self.readers[-1].start()
        self.limit = threading.Timer(LIMIT_S, self.kill_all)
        self.limit.start()

    def _read(self, rank: int, out: Any) -> None:
        for line in out:
            self.printed[rank] += line
            self.lines[rank].release()
        self.lines[rank].release()

    def wait_for(self, text: str, rank: int = 0) -> None:
        """Returns when a rank has printed this."""
        while text not in self.printed[rank]:
            self.lines[rank].acquire()
            assert self.readers[rank].is_alive() or text in self.printed[rank], self.printed[rank]

    def send(self, number: int, rank: int) -> None:
        os.kill(self.processes[rank].pid, number)

    def kill_all(self) -> None:
        for process in self.processes:
            if process.is_alive():
                os.kill(process.pid, signal.SIGCONT)
                process.kill()

    def after_a_kill(self) -> list[int]:
        """What torchrun does when one process has died: it asks the others to end; not when one is done. Exit codes."""
        while living := [process for process in self.processes if process.is_alive()]:
            if any(process.exitcode for process in self.processes):
                break
            wait([process.sentinel for process in living])
        for process in self.processes:
            if process.is_alive():
                process.terminate()
        return self.end()

    def end(self) -> list[int]:
        """The exit codes of all ranks (negative: the signal one died of)."""
        for process, reader in zip(self.processes, self.readers, strict=True):
            process.join()
            reader.join()
        self.limit.cancel()
        return [process.exitcode for process in self.processes]


def _live(target: Callable[..., Any], args: tuple, env: dict[str, str], writer: Connection) -> None:
    for stream in (1, 2):
        os.dup2(writer.fileno(), stream)
    writer.close()
    sys.stdout, sys.stderr = (open(stream, "w", encoding="utf-8", closefd=False) for stream in (1, 2))
    os.environ.update(env)
    torch.backends.mkldnn.enabled = False
    products = Products()  # while they have an owner
    if not cpu_has_bf16():
        products.start()
    draw_once(setattr)  # a step asks for the same noise several times
    code = target(*args)
    sys.stdout.flush()
    sys.exit(code)


def train(words: list[str]) -> int:
    """`keyhole train WORDS`."""
    from keyhole.cli import main

    return main(["train", *words])


def written(path: Path, config: Any) -> str:
    """A config as a file, for `train`."""
    from keyhole.config import to_yaml

    file = path / f"{Path(config.output_dir).name}.yaml"
    file.write_text(to_yaml(config))
    return str(file)
