"""Appends pieces (records, lines) to a file; a piece that a full disk refuses is kept and written before the next one.

The file always ends with a complete piece: one that was written only in part is cut off again. Waiting pieces are tried
again at every append, PIECES of them at a time, so that a disk that stays full costs only one failed write per append.
"""

import errno
import os
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from itertools import islice

PIECES = 256


class Appender:
    """Appends to an open file, from the offset `end` on. Not thread-safe.

    taken is called with every piece that the operating system has accepted."""

    def __init__(self, file: int, end: int, taken: Callable[[bytes], None] = lambda piece: None) -> None:
        self.file, self.end, self.taken = file, end, taken
        self.pending: deque[bytes] = deque()

    def append(self, piece: bytes) -> None:
        """Writes a piece. OSError: the write failed, and the piece waits for the next call."""
        self.pending.append(piece)
        self.write_pending()

    def write_pending(self) -> None:
        """Writes the waiting pieces. OSError: some of them still wait."""
        while self.pending:
            pieces = list(islice(self.pending, PIECES))
            data, end = b"".join(pieces), self.end
            try:
                size = os.pwrite(self.file, data, end)
            except OSError:
                self._cut()
                raise
            for piece in pieces:
                if self.end + len(piece) > end + size:
                    break
                self.end += len(piece)
                self.taken(self.pending.popleft())
            if size < len(data):
                self._cut()
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _cut(self) -> None:
        with suppress(OSError):  # the next write starts at `end` in any case
            os.ftruncate(self.file, self.end)
