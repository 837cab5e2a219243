"""Appends records to a journal (format.py has the format), so that every step is durable and training waits for none.

What "durable" means. `append` hands a record to the operating system: from then on it survives the death of
the process (kill -9). A thread of its own then flushes it to the disk, at once or after `sync_every` records:
from then on it survives a power cut. Training waits for neither; `sync` does.

A full disk. A record that was not taken whole is cut off again, kept, and written before the next one: the steps in
the file stay consecutive, and none is lost when there is room again.
"""

import errno
import os
import threading
from pathlib import Path

from keyhole.checkpoint.journal.format import CRC, Journal, Record, layout, pack_header, pack_record


class Writer:
    """Appends records to a journal that was read or created, after cutting what is behind record `last`."""

    def __init__(self, path: Path, journal: Journal, last: int, sync_every: int = 1) -> None:
        assert journal.header.first <= last <= journal.last, (journal.header.first, last, journal.last)
        self.header, self.last, self.sync_every = journal.header, last, sync_every
        front = pack_header(journal.header)
        self.seed_crc = CRC.unpack(front[-CRC.size :])[0]
        size = layout(journal.header.directions).size + CRC.size
        self.file = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        end = len(front) + (last - journal.header.first) * size
        os.ftruncate(self.file, end)
        os.lseek(self.file, end, os.SEEK_SET)
        self.backlog: list[bytes] = []  # records that a full disk did not take
        self.synced, self.error, self.closing = last, None, False
        self.changed = threading.Condition()
        self.syncer = threading.Thread(target=self._sync_behind, name="keyhole-journal", daemon=True)
        self.syncer.start()

    def append(self, record: Record) -> None:
        """Writes a record; it then survives this process. OSError when the disk is full: nothing is left half-written,
        and the record is kept and written before the next one."""
        assert record.step == self.last + len(self.backlog) + 1, (record.step, self.last, len(self.backlog))
        self.backlog.append(pack_record(record, self.seed_crc))
        end, waiting = os.lseek(self.file, 0, os.SEEK_CUR), b"".join(self.backlog)
        try:
            if os.write(self.file, waiting) < len(waiting):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            os.ftruncate(self.file, end)
            os.lseek(self.file, end, os.SEEK_SET)
            raise
        self.backlog = []
        with self.changed:
            self.last = record.step
            self.changed.notify_all()

    def _sync_behind(self) -> None:
        while True:
            with self.changed:
                self.changed.wait_for(lambda: self.closing or self.last >= self.synced + self.sync_every)
                step = self.last
                if self.closing:
                    return
            self._sync(step)

    def _sync(self, step: int) -> None:
        try:
            os.fsync(self.file)
        except OSError as error:
            self.error = error
        with self.changed:
            self.synced = max(self.synced, step)
            self.changed.notify_all()

    def sync(self) -> None:
        """Blocks until everything appended so far is on the disk. OSError when that failed."""
        with self.changed:
            step = self.last
        self._sync(step)
        if self.error is not None:
            error, self.error = self.error, None
            raise error

    def wait_for(self, step: int, timeout_s: float) -> bool:
        """Blocks until the record of a step has been appended; False when it never came."""
        with self.changed:
            return self.changed.wait_for(lambda: self.last >= step or self.closing, timeout_s) and self.last >= step

    def end(self) -> None:
        """No record will come any more: nobody needs to wait for one."""
        with self.changed:
            self.closing = True
            self.changed.notify_all()

    def close(self) -> None:
        """Syncs, and ends the thread."""
        self.end()
        self.syncer.join()
        try:
            os.fsync(self.file)
        finally:
            os.close(self.file)
