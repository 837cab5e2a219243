"""The page of a run: there from the start, the same as its files say, and never in the way."""

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from keyhole.config import TrainConfig, resolve
from keyhole.errors import NonFinite
from keyhole.report.curves import Curves
from keyhole.report.page import make_page
from keyhole.report.story import Story, View, read_story, read_view
from keyhole.training import loop, reports
from keyhole.training.reports import EVERY_S, RunPage
from keyhole.training.start import train
from tests.training.runs import Make, losses


def directory(config: TrainConfig) -> Path:
    return Path(config.output_dir) / "run"


def page(config: TrainConfig) -> str:
    return (directory(config) / "report.html").read_text()


def story(config: TrainConfig) -> Story:
    found = read_story(directory(config) / "report.json")
    assert found is not None
    return found


def test_there_before_the_first_step_and_up_to_date_after_the_last(
    make: Make, tiny_data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It begins with what was decided and ends with curves, the data and the result; what the run
    wrote is what `keyhole report` makes of its files."""
    config, real, seen = make(method="lomo", eval_data=str(tiny_data), placement="stream"), loop.Leader.step, []

    def step(self: loop.Leader, number: int) -> None:
        seen.append(page(config))
        real(self, number)

    monkeypatch.setattr(loop.Leader, "step", step)
    assert train(config) == 0
    assert "Running" in seen[0] and "http-equiv" in seen[0] and "What was decided" in seen[0] and "<dt>dtype" in seen[0]
    last = page(config)
    assert "<b>Done</b>: 6 steps" in last and "http-equiv" not in last
    for heading in ("Curves", "The data", "What happened"):
        assert f"<h2>{heading}</h2>" in last, heading
    assert last == make_page(read_view(directory(config)))
    told = story(config)
    trained = [word for sample in told.samples for on, words in sample.runs if on for word in words]
    assert "".join(trained).startswith("2<|end|>")


def test_a_run_that_goes_on_has_one_page(make: Make, stop_after: Callable[..., None], tiny_data: Path) -> None:
    config = make(eval_data=str(tiny_data), eval_steps=2)
    stop_after(3, signal.SIGTERM)
    assert train(config) == 130
    assert "<b>Stopped</b> at step 3 of 6" in page(config) and "--resume" in page(config)
    began = story(config).began
    assert train(config, resume="") == 0
    view = read_view(directory(config))
    assert view.curves.steps == 6 and view.story.state == "done" and view.story.began == began
    assert page(config) == make_page(view)


def test_a_page_that_cannot_be_made_changes_nothing(
    make: Make, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """The run ends well, with the same losses, and says once that its page failed."""
    sound = make("sound")
    train(sound)
    capsys.readouterr()

    def fail(view: View) -> str:
        raise OSError("no space left")

    monkeypatch.setattr(reports, "make_page", fail)
    monkeypatch.setattr(reports, "EVERY_S", 0.0)
    monkeypatch.setattr(reports, "COST", 0.0)  # a page after every step
    config = make("broken")
    assert train(config) == 0
    assert losses(config) == losses(sound)
    assert capsys.readouterr().out.count("warning: run/report.html failed") == 1


def test_a_failed_run_says_why(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:

    def fail(self: loop.Leader) -> None:
        raise NonFinite("the loss is <nan>")

    monkeypatch.setattr(loop.Leader, "after_step", fail)
    config = make()
    with pytest.raises(NonFinite):
        train(config)
    assert "<b>Failed</b> at step 1 of 6" in page(config) and "the loss is &lt;nan&gt;" in page(config)


def test_answers_of_a_task_come_with_its_score(tmp_path: Path) -> None:
    """The first dev questions with what the model chose, what is right, and whether that is the same."""
    made: dict[str, Any] = {"model": "demo", "task": "demo", "num_train": 16, "num_dev": 8, "num_eval": 4}
    made |= {"method": "adamw", "output_dir": str(tmp_path / "out"), "device": "cpu", "max_steps": 1, "batch_size": 4}
    config = resolve(TrainConfig(**made, sample_answers=2))[0]
    assert train(config) == 0
    (answers,) = story(config).answers
    assert len(answers.rows) == 2
    for row in answers.rows:
        assert {row.said, row.expected} <= {" blue", " red"} and row.right is (row.said == row.expected)


def test_pages_are_not_written_often(tmp_path: Path) -> None:
    """The clock decides: nothing before EVERY_S seconds, and the last one at the end."""
    now = [0.0]
    made = RunPage(View("n", tmp_path, Story(total=9, state="running"), Curves()), clock=lambda: now[0])
    made.add({"step": 1, "loss": 1.0, "tokens": 1, "seconds": 1.0})
    assert not made.path.exists()
    now[0] = EVERY_S
    made.add({"step": 2, "loss": 1.0, "tokens": 1, "seconds": 1.0})
    assert "step 2 of 9" in made.path.read_text() and made.due_s == 2 * EVERY_S
    made.ended("done")
    made.close()
    assert "<b>Done</b>" in made.path.read_text()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_plan_stands_beside_the_measured_peak(make: Make) -> None:
    config = make(method="lomo", placement="stream", device="cuda")
    assert train(config) == 0
    told = story(config)
    assert told.planned.device_bytes > 0 and told.measured["device_bytes"] > 0
    assert "GPU, planned" in page(config) and "GPU, measured" in page(config)
