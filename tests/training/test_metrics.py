"""Records of steps, and the file they go to."""

import json
from pathlib import Path

import pytest
import torch

from keyhole.errors import NonFinite
from keyhole.report.entries import read_metrics
from keyhole.training.metrics import MOST_SKIPS, QueuedStep, Reading, Recorder, resident_bytes
from keyhole.training.records import MetricsFile

CPU = torch.device("cpu")


def record(step: int, loss: float, **extra: float) -> QueuedStep:
    return QueuedStep({"step": step, "loss": torch.tensor(loss), "tokens": 100, **extra}, f"samples {step}")


def recorder(entries: list, lag: int = 0, warnings: list | None = None) -> Recorder:
    warn = ([] if warnings is None else warnings).append
    made = Recorder(CPU, lambda reading: entries.append(reading.entry), warn, lambda: "it is out/checkpoint-5")
    made.lag = lag
    return made


def test_reads_one_step_late_where_reading_waits() -> None:
    """With a lag of one, a loss is read after the next step was queued; drain reads the rest."""
    entries: list = []
    late = recorder(entries, lag=1)
    late.add(record(1, 2.0))
    assert entries == []
    late.add(record(2, 1.5))
    assert [entry["step"] for entry in entries] == [1]
    late.drain()
    assert [entry["loss"] for entry in entries] == [2.0, 1.5]
    assert entries[1]["tokens_per_second"] > 0
    assert entries[1]["host_gib"] == pytest.approx(resident_bytes() / 2**30, rel=0.1)


@pytest.mark.parametrize("loss", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_stops_the_run(loss: float) -> None:
    """The message names the step, the batch and the last good checkpoint; the entry is written first."""
    entries: list = []
    with pytest.raises(NonFinite, match=r"step 7: the loss is (nan|inf)(.|\n)*samples 7(.|\n)*out/checkpoint-5"):
        recorder(entries).add(record(7, loss))
    assert entries[0]["step"] == 7


def test_overflowing_gradients_are_borne_for_a_while() -> None:
    """A gradient that overflows now and then does not stop a run, but is said; many in a row do."""
    warnings: list = []
    patient = recorder([], warnings=warnings)
    for step in range(1, MOST_SKIPS):
        patient.add(record(step, 1.0, grad_norm=float("inf")))
    patient.add(record(MOST_SKIPS, 1.0, grad_norm=1.0))
    for step in range(1, MOST_SKIPS):
        patient.add(record(step, 1.0, grad_norm=float("inf")))
    with pytest.raises(NonFinite, match="grad_norm is inf, for 10 steps in a row"):
        patient.add(record(MOST_SKIPS, 1.0, grad_norm=float("inf")))
    assert len(warnings) == 2 * MOST_SKIPS - 1
    assert warnings[0] == "warning: step 1: grad_norm is inf; such an update is left out"


def test_file_drops_what_a_resumed_run_does_again(tmp_path: Path) -> None:
    """Opening at step 2 keeps entries up to 2, drops later ones and a torn line, and appends."""
    path = tmp_path / "metrics.jsonl"
    path.write_text(
        '{"step": 1, "loss": 3.0}\n{"step": 2, "eval_loss": 2.0}\n{"step": 3, "loss": 1.0}\n{"step": 4, "lo'
    )
    file = MetricsFile(path, 2, print)
    file.note(Reading({"step": 3, "loss": 1.25, "tokens": 7}))
    assert read_metrics(path) == [
        {"step": 1, "loss": 3.0}, {"step": 2, "eval_loss": 2.0}, {"step": 3, "loss": 1.25, "tokens": 7},
    ]  # fmt: skip
    file.close()


def test_lines_are_strict_json(tmp_path: Path) -> None:
    """NaN is no JSON: it is written as null."""
    file = MetricsFile(tmp_path / "metrics.jsonl", 0, print)
    file.note(Reading({"step": 1, "loss": float("nan"), "grad_norm": float("inf")}))
    file.close()
    text = (tmp_path / "metrics.jsonl").read_text()
    assert json.loads(text, parse_constant=lambda word: pytest.fail(word)) == {
        "step": 1, "loss": None, "grad_norm": None,
    }  # fmt: skip
