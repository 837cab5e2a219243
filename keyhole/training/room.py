"""Room on the disk for the checkpoint that ends a run.

A save during training may be skipped: the weights stay in memory, and there will be another save. After the last step
there is none, so the weights of a run that ended on a full disk were lost with the process. Two things prevent that:

    a wait      if the last save finds no room, the run waits up to WAIT_S seconds for somebody to free some, with the
                weights in memory. It tries again when the free space has grown, and every RETRY_S seconds (quotas
                cannot be seen from outside). A signal ends the wait
    a journal   the disk space of a zo run's journal is reserved ahead (disk/append.py), so its records are on the disk
                also when there is no room for weights, and --resume replays them

Only a lack of room is waited for; a disk that is read-only or broken will not recover by itself.
"""

import errno
import shutil
import time
from collections.abc import Callable
from pathlib import Path

from keyhole.errors import UserError

RETRY_S, WAIT_S = 60.0, 3600.0
PAUSE_S = 2.0
FULL = (errno.ENOSPC, errno.EDQUOT)


class NoRoom(UserError):
    """The disk, or the user's share of it, is full."""


def free_bytes(path: Path) -> int:
    """Free space on the file system that holds (or will hold) the path."""
    try:
        while not path.exists():
            path = path.parent
        return shutil.disk_usage(path).free
    except OSError as error:
        raise UserError(f"output_dir: {path} cannot be reached any more: {error.strerror}") from error


def is_full(error: BaseException | None) -> bool:
    """Whether a write failed for lack of room. safetensors reports the system's error as text."""
    return getattr(error, "errno", None) in FULL or "No space left" in str(error)


def wait_for_room(
    save: Callable[[], list[str]], free: Callable[[], int], say: Callable[[str], None], given_up: Callable[[], bool]
) -> list[str]:
    """Calls `save` until it finds room; NoRoom if nobody makes any, or if the run is asked to give up. free: the free
    bytes of the disk."""
    began_s, told = time.monotonic(), False
    while True:
        before, tried_s = free(), time.monotonic()
        try:
            return save()
        except NoRoom as error:
            if tried_s - began_s >= WAIT_S or given_up():
                raise
            if not told:
                say(
                    f"warning: the last checkpoint is NOT saved: {error}. The steps are done and the weights are in "
                    f"memory: the save goes on by itself when there is room (for {WAIT_S / 60:.0f} minutes; a signal, "
                    "such as Ctrl-C, gives up)"
                )
                told = True
        while free() <= before and not given_up() and time.monotonic() - tried_s < min(RETRY_S, WAIT_S):
            time.sleep(PAUSE_S)
