"""Programs that a model wrote: right ones pass, and whatever a wrong one tries stays inside."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from keyhole.eval.programs import CONFINED, run_program

MEMORY = 2**29
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="the kernel's part is Linux's")


def run(source: str, seconds: float = 20.0) -> tuple[bool, str]:
    outcome = run_program(source, seconds=seconds, memory_bytes=MEMORY)
    return outcome.passed, outcome.reason


@pytest.mark.parametrize(
    "source",
    [
        "def f(x):\n    return x + 1\n\nassert f(1) == 2\n",
        "from typing import List\nimport math, re, collections, hashlib\nassert hashlib.md5(b'').hexdigest()\n",
        "open('a.txt', 'w').write('b')\nassert open('a.txt').read() == 'b'\n",
        "import os, tempfile\nos.mkdir('d')\nwith tempfile.TemporaryFile() as f:\n    f.write(b'x')\nos.rmdir('d')\n",
        "print('x' * 10**6)\n",
    ],
)
def test_right_programs_pass(source: str) -> None:
    """Plain functions, the standard library, and files in their own directory."""
    assert run(source) == (True, "")


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("assert 1 == 2", "AssertionError"),
        ("def f(:", "SyntaxError"),
        ("exit()", "NameError"),
        ("import sys; sys.exit(0)", "SystemExit"),
        ("import os; os._exit(0)", "before its end"),
        ("import builtins\nbuiltins.BaseException = ValueError\nassert False", "AssertionError"),
        ("def f(): f()\nf()", "RecursionError"),
        ("x = 'a' * 2**34", "MemoryError"),
        ("import os; os.fork()", "os.fork is refused"),
        ("import subprocess; subprocess.run(['true'])", "subprocess.Popen is refused"),
        ("import os; os.execv('/bin/true', ['true'])", "os.exec is refused"),
        ("import os; os.kill(os.getppid(), 9)", "os.kill is refused"),
        ("import socket; socket.socket()", "socket.__new__ is refused"),
        ("import ctypes; ctypes.CDLL(None).fork()", "ctypes.dlopen is refused"),
        ("import threading; threading.Thread(target=print).start()", "thread"),
        ("f = open('big', 'wb')\nwhile True: f.write(b'x' * 2**16)", "File too large"),
        ("for i in range(10**6): open(f'{i}', 'w').close()", "is refused"),
        ("import os; os.symlink('/', 'root')", "os.symlink is refused"),
        ("import os\nfor i in range(10**6): os.mkdir(f'{i}')", "is refused"),
        ("open('/proc/self/mem', 'rb')", "is refused"),
        ("import os; os._exit = os.write = print\nassert False", "AssertionError"),
        ("class E(BaseException):\n    def __str__(self): raise SystemExit(0)\nraise E", "before its end"),
        ("import os, resource as r; r.prlimit(os.getppid(), r.RLIMIT_CPU, (1, 1))", "resource.prlimit is refused"),
        ("import fcntl; fcntl.fcntl(0, fcntl.F_SETOWN, 1)", "fcntl.fcntl is refused"),
    ],
)
def test_wrong_programs_fail_with_their_reason(source: str, says: str) -> None:
    passed, reason = run(source)
    assert not passed and says in reason and not reason.startswith("failed: ")


@pytest.mark.parametrize(
    "source", ["while True: pass", "import time; time.sleep(1000)", "while True: print('x' * 1000)"]
)
def test_endless_programs_are_stopped(source: str) -> None:
    """A loop, a sleep and a flood of output end with the time they were given."""
    assert run(source, seconds=1.0) == (False, "not done after 1 s")


@pytest.mark.parametrize(
    "source",
    [
        "open({path!r}, 'w')",
        "import os; os.remove({path!r})",
        "import os; os.rename({path!r}, 'x')",
        "import os; os.truncate({path!r}, 0)",
        "import os; d = os.open({parent!r}, os.O_RDONLY); os.open('mine.txt', os.O_WRONLY | os.O_TRUNC, dir_fd=d)",
        "import os; os.open('../' * 20 + {path!r}, os.O_WRONLY | os.O_TRUNC)",
        "import os; os.fchmod(os.open({path!r}, os.O_RDONLY), 0)",
        "import os; os.chmod(os.open({path!r}, os.O_RDONLY), 0)",
        "import os; os.chmod('mine.txt', 0, dir_fd=os.open({parent!r}, os.O_RDONLY))",
        "import os; os.utime(os.open({path!r}, os.O_RDONLY), (1, 1))",
        "import os; os.utime('mine.txt', (1, 1), dir_fd=os.open({parent!r}, os.O_RDONLY))",
    ],
)
def test_files_elsewhere_are_left_alone(source: str, tmp_path: Path) -> None:
    """No way to write, remove, rename or empty a file outside of the working directory."""
    path = tmp_path / "mine.txt"
    path.write_text("precious")
    before = path.stat()
    passed, _ = run(source.format(path=str(path), parent=str(tmp_path)))
    after = path.stat()
    assert not passed and path.read_text() == "precious"
    assert (after.st_mode, after.st_mtime_ns) == (before.st_mode, before.st_mtime_ns)


def test_nothing_is_handed_down(monkeypatch: pytest.MonkeyPatch) -> None:
    """No variable of the environment, no file of the parent, and an empty directory."""
    monkeypatch.setenv("SECRET", "x")
    assert run("import os\nassert 'SECRET' not in os.environ and os.listdir('.') == []\n") == (True, "")


def test_the_directory_is_gone_afterwards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert run("import os\nos.makedirs('a/b')\nopen('a/b/c', 'w').close()\n")[0]
    assert list(tmp_path.iterdir()) == []


def test_nested_directories_end_with_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that nests directories by descriptor is refused the next one, and leaves nothing behind."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    passed, reason = run(
        "import os\nd = os.open('.', os.O_RDONLY)\nfor _ in range(1500):\n    os.mkdir('d', dir_fd=d)\n"
        "    e = os.open('d', os.O_RDONLY, dir_fd=d); os.close(d); d = e\n"
    )
    assert not passed and "is refused" in reason and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "search",
    [
        "frame = sys._getframe()\nwhile frame:\n    look(frame.f_locals, 3)\n"
        "    look(frame.f_globals, 3)\n    frame = frame.f_back",
        "for thing in gc.get_objects(): look(thing, 2)",
    ],
)
def test_no_object_holds_the_end_mark(search: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the frames nor the garbage collector lead a program to the word that says it has passed."""
    word = "0123456789abcdef" * 2
    monkeypatch.setattr("secrets.token_hex", lambda count: word[: 2 * count])
    look = (
        "import gc, sys\nword = ''.join(map(chr, [*range(48, 58), *range(97, 103)])) * 2\n"
        "def look(thing, depth):\n"
        "    if isinstance(thing, str | bytes):\n"
        "        text = thing if isinstance(thing, str) else thing.decode('latin-1')\n"
        "        assert thing is word or word not in text, 'found'\n"
        "    elif depth:\n        for part in gc.get_referents(thing): look(part, depth - 1)\n"
    )
    assert run(look + search) == (True, "")


@LINUX
@pytest.mark.parametrize(
    ("attempt", "error"),
    [
        ("os.fork()", "PermissionError"),
        ("os.execv(sys.executable, [sys.executable, '-c', ''])", "PermissionError"),
        ("socket.socket()", "PermissionError"),
        ("os.kill(os.getppid(), 0)", "PermissionError"),
        ("open({path!r}, 'w')", "PermissionError"),
        ("os.remove({path!r})", "PermissionError"),
        ("threading.Thread(target=print).start()", "RuntimeError"),
        ("resource.prlimit(os.getppid(), resource.RLIMIT_CPU, (1000, 1000))", "PermissionError"),
        ("os.setpriority(os.PRIO_PROCESS, os.getppid(), 19)", "PermissionError"),
        ("os.sched_setaffinity(os.getppid(), {{0}})", "PermissionError"),
        ("signal.pidfd_send_signal(0, 0)", "PermissionError"),
        ("fcntl.fcntl(os.pipe()[0], fcntl.F_SETOWN, os.getppid())", "PermissionError"),
        ("fcntl.flock(os.open({path!r}, os.O_RDONLY), fcntl.LOCK_EX)", "PermissionError"),
        ("fcntl.ioctl(os.open({path!r}, os.O_RDONLY), 0x40086602, bytes(8))", "PermissionError"),
        ("os.fchmod(os.open({path!r}, os.O_RDONLY), 0)", "PermissionError"),
        ("os.utime(os.open({path!r}, os.O_RDONLY))", "PermissionError"),
        ("os.chown({path!r}, os.getuid(), os.getgid())", "PermissionError"),
        ("os.fchown(os.open({path!r}, os.O_RDONLY), -1, -1)", "PermissionError"),
        ("os.setxattr(os.open({path!r}, os.O_RDONLY), 'user.a', b'x')", "PermissionError"),
        ("print(resource.getrlimit(resource.RLIMIT_CORE)[0], os.isatty(1), os.dup(1) > 2)", "0 False True"),
    ],
)
def test_the_kernel_refuses_by_itself(attempt: str, error: str, tmp_path: Path) -> None:
    """Without the audit hook: what the process took from itself, nothing in it brings back."""
    path = tmp_path / "mine.txt"
    path.write_text("precious")
    (tmp_path / "cell").mkdir()
    source = (
        "import fcntl, os, resource, signal, socket, sys, threading\n"
        f"sys.path.insert(0, {str(CONFINED.parent)!r})\nimport confined\n"
        f"confined.confine(os.getcwd(), 20, {MEMORY})\ntry:\n    {attempt.format(path=str(path))}\n"
        "except Exception as error:\n    print(type(error).__name__)\n"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", source], cwd=tmp_path / "cell", capture_output=True, text=True, check=False
    )
    if not kernel_helps():
        pytest.skip("neither Landlock nor seccomp in this kernel")
    assert done.stdout.strip() == error and path.read_text() == "precious"


def kernel_helps() -> bool:
    """Whether this kernel has Landlock, and filters of system calls on this machine."""
    lsm = Path("/sys/kernel/security/lsm")
    return os.uname().machine in ("x86_64", "aarch64") and (not lsm.exists() or "landlock" in lsm.read_text())
