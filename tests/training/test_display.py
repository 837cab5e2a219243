"""What the user sees: progress of a start by a clock that the test holds, then lines."""

import io
import os
import sys
from pathlib import Path

import pytest

from keyhole.machine.progress import tell
from keyhole.training.display import Display, Waiting


def entry(step: int, loss: float) -> dict:
    timing = {"tokens": 100, "seconds": 0.5, "tokens_per_second": 200.0, "host_gib": 1.5}
    return {"step": step, "loss": loss, "learning_rate": 1e-3, "epoch": 0.1, **timing, "grad_norm": 2.0}


def test_a_line_a_step(capsys: pytest.CaptureFixture) -> None:
    display = Display(10, 1)
    display.open(0)
    display.step(entry(1, 2.5))
    display.close()
    said = capsys.readouterr().out
    assert said.startswith("step  1/10  loss 2.5000  lr 1.0e-03  200 tok/s  RAM 1.50 GiB  grad_norm 2  ")
    assert said.count("\n") == 1 and said.isprintable() is False and said[:-1].isprintable()


def test_a_log_on_a_full_disk_loses_lines_and_nothing_else(capfd: pytest.CaptureFixture) -> None:
    """Standard output that cannot be written is said once; the run is not asked to stop, as it is by a closed one."""
    kept, full, asked = os.dup(1), os.open("/dev/full", os.O_WRONLY), []
    display = Display(3, 1)
    display.gone = lambda: asked.append(1)
    out = open(full, "w", closefd=False)
    real, sys.stdout = sys.stdout, out
    try:
        for step in (1, 2, 3):
            display.step(entry(step, 1.0))
        display.close()
    finally:
        sys.stdout = real
        os.close(kept)
    out.close()
    assert not asked and capfd.readouterr().err.count("lines are lost, training goes on") == 1


def test_fewer_lines_show_means(capsys: pytest.CaptureFixture) -> None:
    """With logging_steps=3 the first step, every third and the last have a line, with means in between."""
    display = Display(7, 3)
    for step in range(1, 8):
        display.step(entry(step, float(step)))
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[:2] for line in lines] == [
        ["step 1/7", "loss 1.0000"], ["step 3/7", "loss 2.5000"],
        ["step 6/7", "loss 5.0000"], ["step 7/7", "loss 7.0000"],
    ]  # fmt: skip


def test_a_line_tells_the_time(capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Elapsed, and what is left at the pace since the start of this process; the end has a summary."""
    now = [1000.0]
    monkeypatch.setattr("keyhole.training.display.time.monotonic", lambda: now[0])
    display = Display(100, 10)
    display.open(40)
    for step in range(41, 101):
        now[0] += 3.0
        display.step(entry(step, 5.0 - step / 100))
    times = [line.rpartition("  ")[2] for line in capsys.readouterr().out.splitlines()]
    assert times[0] == "30 s, 2 min 30 s left" and times[-1] == "3 min 0 s"
    losses = "loss 4.5900 at step 41, 4.0000 at step 100"
    assert display.summary() == f", the last 60 in 3 min 0 s; {losses}; peak host memory 1.50 GiB"


def test_every_line_is_in_the_log_file(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Those of before the file too; a second run adds to it, a link is not followed, and a full disk stops nothing."""
    for said in ("first", "second"):
        display = Display(3, 1)
        display.line(f"{said} \x1b[2J")
        display.log_to(tmp_path / "log.txt")
        display.step(entry(1, 2.5))
    text = (tmp_path / "log.txt").read_text()
    assert [line[:6] for line in text.splitlines()] == ["--- 20", "first ", "step 1", "--- 20", "second", "step 1"]
    assert "\x1b" not in text
    (tmp_path / "precious").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "precious")
    for path in (tmp_path / "link", Path("/dev/full")):
        display.log_to(path)
        display.line("goes on")
    assert (tmp_path / "precious").read_text() == "mine" and capsys.readouterr().out.count("goes on") == 2


def test_plain_lines_are_rare() -> None:
    """Nothing within two seconds, then a line every ten, and no control codes."""
    now, stream = [100.0], io.StringIO()
    waiting = Waiting(stream=stream, clock=lambda: now[0])
    with waiting.phase("reading data"):
        for second in range(15):
            now[0] = 100.0 + second
            tell("tokenising", second * 1000, lambda: 15_000, "rows")
    assert stream.getvalue().splitlines() == [
        "keyhole: tokenising: 2,000 of 15,000 rows",
        "keyhole: tokenising: 12,000 of 15,000 rows",
    ]
    assert str(waiting) == "start: 14.0 s (reading data 14.0)"


def test_nothing_is_said_in_silence_or_into_a_closed_stream(capsys: pytest.CaptureFixture[str]) -> None:
    """A comparison has the screen; a stream that nobody reads is no reason to stop."""
    closed = io.StringIO()
    closed.close()
    for waiting in (Waiting(silent=True), Waiting(stream=closed)):
        with waiting.phase("importing", now=True):
            tell("reading", 1)
    assert capsys.readouterr() == ("", "")
