"""Appends records to a journal (format.py), so that every step is durable and training never waits for the disk.

Durability: `append` passes a record to the operating system; from then on it survives the death of the process
(kill -9). A thread then flushes it to the disk, at once or after `sync_every` records; from then on it survives a power
cut. Training waits for neither; `sync` does.

A full disk: a record that was written only in part is cut off again, kept in memory, and written before the next one.
So the steps in the file stay consecutive, and none is lost once there is room again. AHEAD_BYTES of disk space are
reserved from the start (19,000 records of one direction), so a disk that others fill up takes all records of most runs.

A failed flush: the system may drop data that it could not write to the disk, and report success the next time. So
records are kept in memory until they have been flushed; after a failure they are written again before the next flush.
`synced` counts flushed records only, and `fault` is the error of the last flush, for a message to the user.
"""

import os
import threading
from collections import deque
from pathlib import Path

from keyhole.checkpoint.journal.format import CRC, Journal, Record, layout, pack_record
from keyhole.disk.append import Appender
from keyhole.disk.files import open_regular

AHEAD_BYTES = 2**20


class Writer:
    """Appends records to a journal that was read or created, after cutting off everything after record `last`."""

    def __init__(self, path: Path, journal: Journal, last: int, sync_every: int = 1) -> None:
        assert journal.header.first <= last <= journal.last, (journal.header.first, last, journal.last)
        self.last, self.sync_every, self.seed_crc = last, sync_every, journal.seed_crc
        self.memory = journal.header.memory
        size = layout(journal.header.directions, self.memory).size + CRC.size
        end = journal.begin + (last - journal.header.first) * size
        self.file = open_regular(path, os.O_WRONLY)
        try:
            os.ftruncate(self.file, end)
            os.fsync(self.file)
        except OSError:
            os.close(self.file)
            raise
        self.appender = Appender(self.file, end, self._taken, AHEAD_BYTES)
        self.unsynced: deque[bytes] = deque()  # records in the file that are not flushed yet, from offset synced_end on
        self.synced, self.synced_end, self.tried = last, end, last
        self.fault: OSError | None = None
        self.closing = False
        self.changed = threading.Condition()
        self.flushing = threading.Lock()
        self.syncer = threading.Thread(target=self._sync_behind, name="keyhole-journal", daemon=True)
        self.syncer.start()

    def append(self, record: Record) -> None:
        """Writes a record; it then survives this process. OSError if the disk is full: the partial record is cut off,
        kept in memory, and written before the next one."""
        with self.changed:
            assert record.step == self.last + len(self.appender.pending) + 1, (record.step, self.last)
            self.appender.append(pack_record(record, self.seed_crc))

    def _taken(self, piece: bytes) -> None:
        self.unsynced.append(piece)
        self.last += 1
        self.changed.notify_all()

    def _sync_behind(self) -> None:
        while True:
            with self.changed:
                self.changed.wait_for(lambda: self.closing or self.last >= self.tried + self.sync_every)
                if self.closing:
                    return
            self._sync()

    def _sync(self) -> OSError | None:
        """Flushes the records appended before this call; returns the error if that failed."""
        with self.flushing:
            with self.changed:
                step, pieces = self.last, list(self.unsynced)
            error = None
            try:
                if self.fault is not None:
                    os.pwrite(self.file, b"".join(pieces), self.synced_end)
                os.fsync(self.file)
            except OSError as fault:
                error = fault
            with self.changed:
                self.fault, self.tried = error, step
                if error is None:
                    self.synced, self.synced_end = step, self.synced_end + sum(map(len, pieces))
                    for _ in pieces:
                        self.unsynced.popleft()
                self.changed.notify_all()
            return error

    def sync(self) -> None:
        """Returns when all records appended so far are on the disk. OSError if that failed."""
        error = self._sync()
        if error is not None:
            raise error

    def wait_for(self, step: int, timeout_s: float) -> bool:
        """Returns when the record of a step has been appended; False if it was never appended. OSError if it could not
        be written."""
        with self.changed:

            def known() -> bool:
                return self.last + len(self.appender.pending) >= step

            self.changed.wait_for(lambda: known() or self.closing, timeout_s)
            if known():
                self.appender.write_pending()
            return self.last >= step

    def end(self) -> None:
        """No more records follow: wakes threads that wait for one."""
        with self.changed:
            self.closing = True
            self.changed.notify_all()

    def close(self) -> None:
        """Writes and flushes the remaining records, ends the thread, and closes the file. OSError if something was not
        written."""
        self.end()
        self.syncer.join()
        try:
            with self.changed:
                self.appender.write_pending()
            self.sync()
        finally:
            self.appender.release()
            os.close(self.file)
