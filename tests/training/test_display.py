"""Lines for the user."""

import pytest

from keyhole.training.display import Display


def entry(step: int, loss: float) -> dict:
    timing = {"tokens": 100, "seconds": 0.5, "tokens_per_second": 200.0, "host_gib": 1.5}
    return {"step": step, "loss": loss, "learning_rate": 1e-3, "epoch": 0.1, **timing, "grad_norm": 2.0}


def test_a_line_a_step(capsys: pytest.CaptureFixture) -> None:
    """Without a terminal: one plain line a step, no control codes."""
    display = Display(10, 1)
    display.open(0)
    display.step(entry(1, 2.5))
    display.close()
    assert capsys.readouterr().out == ("step  1/10  loss 2.5000  lr 1.0e-03  200 tok/s  RAM 1.50 GiB  grad_norm 2\n")


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
