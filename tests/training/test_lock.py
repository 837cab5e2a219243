"""One process a directory."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from keyhole.errors import UserError
from keyhole.training.lock import Lock, locked

HOLDER = """
import sys, time
from pathlib import Path
from keyhole.training.lock import Lock
Lock(Path(sys.argv[1])).take()
print("held", flush=True)
time.sleep(60)
"""


def test_another_process_is_named_and_a_dead_one_is_not_in_the_way(tmp_path: Path) -> None:
    """While a process holds the lock the message has its number; after kill -9 the lock is free at once."""
    path = tmp_path / "run" / "lock"
    path.parent.mkdir()
    child = subprocess.Popen([sys.executable, "-c", HOLDER, str(path)], stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout.readline() == "held\n"
        with pytest.raises(UserError, match=f"process {child.pid} is training into {tmp_path} already"):
            Lock(path).take()
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait()
    with locked(path) as lock:
        lock.take()
        lock.take()
        assert path.read_text() == f"{os.getpid()}\n"
        with pytest.raises(UserError, match=f"process {os.getpid()}"):
            Lock(path).take()
    Lock(path).take()


@pytest.mark.parametrize("linked", [os.symlink, os.link])
def test_a_file_of_the_user_is_no_lock(tmp_path: Path, linked: Callable) -> None:
    """Whichever way it got that name, it is refused and not written over."""
    (tmp_path / "victim").write_text("precious\n")
    (tmp_path / "run").mkdir()
    linked(tmp_path / "victim", tmp_path / "run" / "lock")
    with pytest.raises(UserError, match="output_dir: .*lock"):
        Lock(tmp_path / "run" / "lock").take()
    assert (tmp_path / "victim").read_text() == "precious\n"


def test_without_a_directory_there_is_nothing_to_lock(tmp_path: Path) -> None:
    """Looking at a directory that does not exist creates nothing."""
    with locked(tmp_path / "run" / "lock") as lock:
        lock.take()
        assert lock.file is None and not (tmp_path / "run").exists()
        (tmp_path / "run").mkdir()
        lock.take()
        assert lock.file is not None
