"""Appends pieces (records, lines) to a file; a piece that a full disk refuses is kept and written before the next one.

The file always ends with a complete piece: one that was written only in part is cut off again. Waiting pieces are tried
again at every append, PIECES of them at a time, so that a disk that stays full costs only one failed write per append.

`ahead` bytes of disk space are reserved behind the end of the file, where the system can do that (Linux; not every file
system): a disk that others fill up still takes that much. The file's size does not show the space, and `release` gives
it back.
"""

import ctypes
import errno
import os
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from itertools import islice

PIECES = 256
KEEP_SIZE = 1  # FALLOC_FL_KEEP_SIZE of Linux


class Appender:
    """Appends to an open file, from the offset `end` on. Not thread-safe.

    taken is called with every piece that the operating system has accepted. ahead: bytes that are reserved."""

    def __init__(
        self, file: int, end: int, taken: Callable[[bytes], None] = lambda piece: None, ahead: int = 0
    ) -> None:
        self.file, self.end, self.taken, self.ahead = file, end, taken, ahead
        self.pending: deque[bytes] = deque()
        self.reserved = end
        self._reserve()

    def _reserve(self) -> None:
        """Keeps at least half of `ahead` reserved; what the disk does not give is not asked for again until then."""
        if self.ahead and self.end + self.ahead // 2 >= self.reserved:
            reserve(self.file, self.end, self.ahead)
            self.reserved = self.end + self.ahead

    def release(self) -> None:
        """Gives the reserved space back, before the file is closed."""
        if self.ahead:
            self._cut()

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
        self._reserve()

    def _cut(self) -> None:
        with suppress(OSError):  # the next write starts at `end` in any case
            os.ftruncate(self.file, self.end)  # also gives reserved space back
            self.reserved = self.end


def reserve(file: int, start: int, size: int) -> bool:
    """Reserves disk space from an offset on, without changing the size of the file; False if that is not possible."""
    try:
        call = ctypes.CDLL(None, use_errno=True).fallocate64
    except (AttributeError, OSError):
        return False
    return bool(call(file, KEEP_SIZE, ctypes.c_int64(start), ctypes.c_int64(size)) == 0)
