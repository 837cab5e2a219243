"""Training in a process of its own, to be signalled, limited and killed.

Every child is a fork of one server (multiprocessing's) that has imported everything a run needs and nothing else: a
child costs a fraction of a second instead of the seven that the imports take. Its output comes through a pipe, which
no limit on file sizes touches.
"""

import multiprocessing
import os
import sys
import tempfile
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

from keyhole.config import TrainConfig

IMPORTS = ["tests.training.imported"]
LIMIT_S = 120.0
server = multiprocessing.get_context("forkserver")
server.set_forkserver_preload(IMPORTS)


def command(words: list[str], given: bytes) -> tuple[int, bytes, bytes]:
    """`keyhole WORDS` with this on its standard input: exit code, standard output, standard error."""
    with tempfile.TemporaryDirectory() as directory:
        paths = [Path(directory) / name for name in ("in", "out", "err")]
        paths[0].write_bytes(given)
        process = server.Process(target=_command, args=(words, paths))
        process.start()
        process.join(LIMIT_S)
        process.kill()
        process.join()
        return process.exitcode, paths[1].read_bytes(), paths[2].read_bytes()


class Child:
    """A started run. `arrange`, a function of a module, prepares the process before it."""

    def __init__(self, config: TrainConfig, arrange: Callable[[], None] | None = None) -> None:
        reader, writer = server.Pipe(duplex=False)
        self.process = server.Process(target=_live, args=(config, arrange, writer))
        self.process.start()
        writer.close()
        self.out = os.fdopen(os.dup(reader.fileno()), encoding="utf-8")
        self.limit = threading.Timer(LIMIT_S, self.process.kill)  # one that hangs ends its test
        self.limit.start()

    def wait_for(self, text: str) -> None:
        """Returns when a line has `text` in it."""
        assert any(text in line for line in self.out), f"the run ended without {text!r}"

    def end(self) -> tuple[int, str]:
        """The exit code (negative: the signal it died of), and what was printed since the last wait."""
        printed = self.out.read()
        self.process.join()
        self.limit.cancel()
        return self.process.exitcode, printed

    def kill(self) -> None:
        self.process.kill()
        self.end()


def _command(words: list[str], paths: list[Path]) -> None:
    for stream, path in enumerate(paths):
        os.dup2(os.open(path, os.O_RDONLY if stream == 0 else os.O_WRONLY | os.O_CREAT), stream)
    sys.stdin, sys.stdout, sys.stderr = (
        open(stream, "w" if stream else "r", encoding="utf-8", closefd=False) for stream in range(3)
    )
    from keyhole.cli import main

    code = main(words)
    sys.stdout.flush()
    sys.exit(code)


def _live(config: TrainConfig, arrange: Callable[[], None] | None, writer: Connection) -> None:
    for stream in (1, 2):
        os.dup2(writer.fileno(), stream)
    writer.close()
    if arrange:
        arrange()
    from keyhole.training.start import train

    sys.exit(train(config))
