"""The write rate of the disk without training: the floor of a checkpoint is its bytes at this rate.

Threads write one file, each a part of it, and flush it from the first piece on, as a snapshot's workers do
(checkpoint/snapshot.py), but without checksums and without checking the numbers. The bytes are random, since
some file systems are faster with repeated bytes.
"""

import os
import threading
import time
from pathlib import Path

from keyhole.checkpoint.pages import PIECE_BYTES, write_at
from keyhole.checkpoint.snapshot import FLUSH_EVERY_S, WORKERS

PROBE_BYTES = 4 * 2**30  # upper limit


def disk_rate(directory: Path, size_bytes: int) -> float:
    """Bytes per second of writing and flushing a file of about this size, which is deleted afterwards."""
    pieces = max(WORKERS, min(size_bytes, PROBE_BYTES) // PIECE_BYTES)
    data, path = memoryview(os.urandom(PIECE_BYTES)), directory / "probe"
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.truncate(file, pieces * PIECE_BYTES)
        begin_s = time.perf_counter()

        def work(first: int) -> None:
            for piece in range(first, pieces, WORKERS):
                write_at(file, data, piece * PIECE_BYTES)

        threads = [threading.Thread(target=work, args=(i,)) for i in range(WORKERS)]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            os.fdatasync(file)
            threads[0].join(FLUSH_EVERY_S)
        os.fdatasync(file)
        return pieces * PIECE_BYTES / (time.perf_counter() - begin_s)
    finally:
        os.close(file)
        path.unlink()
