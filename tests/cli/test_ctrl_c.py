"""Ctrl-C, and a reader that has gone, end a command with one line and exit code 130: neither is a bug."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import keyhole.cli
from keyhole.cli import main
from keyhole.machine.collector import imports


@pytest.fixture(autouse=True)
def heard() -> Any:
    """Python's own handler, also where the tests run as a background job, which ignores Ctrl-C."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def press(**_: Any) -> int:
    os.kill(os.getpid(), signal.SIGINT)
    return 0


def test_ctrl_c_in_a_verb_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    """It was an exit code without a word."""
    monkeypatch.setattr("keyhole.machine.probe.environment", press)
    assert main(["env", "--json"]) == 130
    assert capsys.readouterr().err == "keyhole: interrupted\n"
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_ctrl_c_in_an_import_leaves_no_half_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> None:
    """A library that swallows it would go on, with a module that lacks its second half."""
    (tmp_path / "half_a_module.py").write_text(
        "import os, signal\ntry:\n    os.kill(os.getpid(), signal.SIGINT)\nexcept KeyboardInterrupt:\n    pass\n"
    )
    monkeypatch.syspath_prepend(tmp_path)

    def leave(code: int) -> None:
        raise SystemExit(code)

    def importing(words: object) -> int:
        with imports():
            import half_a_module  # noqa: F401
        return 0

    monkeypatch.setattr(os, "_exit", leave)
    monkeypatch.setattr(keyhole.cli, "_run", importing)
    assert main(["env"]) == 130
    assert "keyhole: interrupted" in capfd.readouterr().err and "half_a_module" not in sys.modules


def test_a_reader_that_has_gone_is_no_bug() -> None:
    """`keyhole --help | true`: no message, and not the exit code of a bug."""
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run([sys.executable, "-m", "keyhole", "--help"], stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert (done.returncode, done.stderr) == (130, "")
