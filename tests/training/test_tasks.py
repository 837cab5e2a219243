"""A run on tasks by name: it trains, evaluates on dev, and goes on exactly after a stop."""

import json
from pathlib import Path
from typing import Any

import pytest

from keyhole.errors import UserError
from keyhole.training.start import train
from tests.matrix import in_every_run
from tests.training.runs import Make, metrics


@pytest.fixture
def tasks(tmp_path: Path) -> dict[str, Any]:
    """Settings of a run on sst2 and a task file of one's own, with 20 rows each."""
    for folder in ("sst2", "own"):
        (tmp_path / "data" / folder).mkdir(parents=True)
        for split in ("train", "dev"):
            rows = [{"sentence": f"{folder} {i}", "label": i % 2} for i in range(20)]
            (tmp_path / "data" / folder / f"{split}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    (tmp_path / "own.yaml").write_text(
        "columns: {s: sentence, label: label}\nprompt: '{{ s }}?'\ncandidates: [' a', ' bc']\nmetric: accuracy\n"
    )
    given = {"train_data": None, "task": ["sst2", str(tmp_path / "own.yaml")], "task_data": str(tmp_path / "data")}
    return given | {"num_train": 10, "num_dev": 4, "eval_steps": 3}


@in_every_run(lambda method, loss: loss == {"adamw": "tokens", "zo": "candidates"}.get(method))
@pytest.mark.parametrize("loss", ["tokens", "candidates"])
@pytest.mark.parametrize("method", ["zo", "adamw", "lomo"])
def test_a_stopped_run_is_the_run_that_never_stopped(
    make: Make, tasks: dict, stopped_is_whole: Any, method: str, loss: str
) -> None:
    """Steps and evaluations of a mixture of tasks, to the bit, by either loss."""
    stopped_is_whole(*(make(name, method=method, loss=loss, **tasks) for name in ("through", "stopped")), 4)


def test_a_streamed_run_is_the_resident_one(make: Make, tasks: dict) -> None:
    """All candidates of a batch pass each unit in one visit, wherever its weights lie."""
    given = {"method": "lomo", "loss": "candidates", "gradient_accumulation_steps": 2, **tasks}
    runs = [make(placement, placement=placement, **given) for placement in ("resident", "stream")]
    assert [train(run) for run in runs] == [0, 0]
    assert metrics(runs[0]) == metrics(runs[1])


def test_the_start_tells_of_the_draw(make: Make, tasks: dict, capsys: pytest.CaptureFixture) -> None:
    """A dry run prints which rows of which files it would use."""
    assert train(make(**tasks), dry_run=True) == 0
    said = capsys.readouterr().out
    assert "task sst2: train 10 of 20 rows of train.jsonl" in said and "task own: dev 4 of 20 rows" in said
    assert "batches: stratified (stratify=auto), 4 classes of" in said


def test_another_draw_is_refused_on_resume(make: Make, tasks: dict, tmp_path: Path) -> None:
    """The number of questions belongs to the run; where the files lie does not."""
    train(make(**tasks, max_steps=2))
    with pytest.raises(UserError, match="num_train: the run has 10"):
        train(make(**tasks | {"num_train": 9}), resume="")
    (tmp_path / "data").rename(tmp_path / "moved")
    assert train(make(**tasks | {"task_data": str(tmp_path / "moved")}), resume="") == 0


def test_a_finished_run_is_tested_again_on_other_questions(make: Make, tasks: dict) -> None:
    """num_eval may change on resume: the old score is of other questions, and is not printed as that of the new."""
    tasks |= {"task": "sst2", "max_steps": 2, "load_best_model_at_end": True, "eval_steps": 1}
    counts = []
    for num_eval in (6, 6, 9):
        run = make(**tasks, num_eval=num_eval)
        assert train(run, resume="" if counts else None) == 0
        counts.append([entry["test_questions"] for entry in metrics(run) if "test_questions" in entry])
    assert counts == [[6], [6], [6, 9]]


def test_the_last_weights_are_not_tested_as_the_best(make: Make, tasks: dict) -> None:
    """Without a saved model the best step is tested when it is reached; a resumed run cannot go back to it."""
    tasks |= {"task": "sst2", "max_steps": 3, "load_best_model_at_end": True, "eval_steps": 1, "save_model": False}
    tasks |= {"save_steps": 2, "metric_for_best_model": "loss", "greater_is_better": True}  # the first is the best
    assert train(make(**tasks, num_eval=6)) == 0
    run = make(**tasks, num_eval=9)
    assert train(run, resume="") == 0
    tested = [(entry["step"], entry["test_questions"]) for entry in metrics(run) if "test_questions" in entry]
    assert tested == [(1, 6)]


def test_other_dev_questions_are_refused_on_resume(make: Make, tasks: dict, tmp_path: Path) -> None:
    """Where dev is a file of its own, the rows to train on do not tell that it has changed."""
    tasks |= {"task": "sst2", "task_splits": {"train": "train[:15]", "dev": "more", "test": "dev"}, "max_steps": 2}
    dev = tmp_path / "data" / "sst2" / "more.jsonl"
    dev.write_text((tmp_path / "data" / "sst2" / "train.jsonl").read_text().replace("sst2", "other"))
    assert train(make(**tasks, load_best_model_at_end=True, save_steps=1)) == 0
    dev.write_text(dev.read_text().replace("other", "another"))
    with pytest.raises(UserError, match="the dev questions are not those of the run so far"):
        train(make(**tasks | {"max_steps": 4}, load_best_model_at_end=True), resume="")
    assert train(make(**tasks | {"max_steps": 3}, load_best_model_at_end=False), resume="") == 0
