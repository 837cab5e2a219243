"""The metric of a task while a run goes on, and the test of the model that it publishes."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import keyhole
from keyhole import assets
from keyhole.config import TrainConfig, resolve
from keyhole.data.run import load_data
from keyhole.data.settings import data_settings
from keyhole.data.tasks.parse import read_spec
from keyhole.data.tasks.question import Question, Task
from keyhole.errors import UserError
from keyhole.eval.score import score
from keyhole.training import validation
from keyhole.training.start import Parts, train
from keyhole.training.validation import Selection, common_metric
from tests.matrix import in_every_run
from tests.training.runs import metrics, same, weights

DEV, TEST = 10, 12  # questions
DEMO = {"model": "demo", "task": "demo", "num_train": 32, "num_dev": DEV, "num_eval": TEST, "device": "cpu"}
SHORT = {"max_steps": 4, "eval_steps": 2, "batch_size": 4, "learning_rate": 2e-3, "max_length": 128}
BEST = {"load_best_model_at_end": True}


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., TrainConfig]:
    def build(name: str = "out", **changes: Any) -> TrainConfig:
        base = {"method": "adamw", "output_dir": str(tmp_path / name), "dtype": "float32"}
        return resolve(TrainConfig(**base | DEMO | SHORT | changes))[0]

    return build


def test_dev_is_scored_besides_the_loss_and_test_at_the_end(make: Callable, capsys: pytest.CaptureFixture) -> None:
    """Every eval_steps a line has loss and accuracy of dev; the end has the accuracy of test, as `score` finds it."""
    config = make()
    assert train(config) == 0
    entries = metrics(config)
    dev = [entry for entry in entries if "eval_loss" in entry]
    assert [entry["step"] for entry in dev] == [2, 4]
    assert all(0 <= entry["eval_accuracy"] <= 1 and entry["eval_questions"] == DEV for entry in dev)
    (test,) = [entry for entry in entries if "test_questions" in entry]
    published = keyhole.load(config.output_dir, device="cpu", dtype="float32")
    task = load_data(data_settings(config)).test[0]
    assert test == {"step": 4, "test_accuracy": score(published, task).metrics["accuracy"], "test_questions": TEST}
    said = capsys.readouterr().out
    assert f"accuracy {100 * dev[0]['eval_accuracy']:.1f} % of {DEV} questions" in said
    assert f"; test accuracy {100 * test['test_accuracy']:.1f} % of {TEST} questions; the model is in" in said


def first_is_best(monkeypatch: pytest.MonkeyPatch) -> None:
    """The best step is the first that was evaluated, whatever was found there."""
    monkeypatch.setattr(Selection, "best_steps", lambda self: sorted(self.values))


@in_every_run(lambda method: method in ("lomo-lora", "zo"))
@pytest.mark.parametrize("method", ["adamw", "lora", "lomo-lora", "zo", "adam-offload"])
def test_the_published_model_is_the_one_that_is_tested(
    make: Callable, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, method: str
) -> None:
    """Where an earlier step is the best, the test is of its weights; without a saved model the number is the same. The
    last line of the run names adapters that lie beside the model, which Transformers would not load."""
    first_is_best(monkeypatch)
    saved, unsaved = make("saved", method=method, **BEST), make("unsaved", method=method, save_model=False, **BEST)
    assert train(saved) == train(unsaved) == 0
    tests = [[entry for entry in metrics(config) if "test_questions" in entry] for config in (saved, unsaved)]
    assert tests[0] == tests[1] and tests[0][0]["step"] == 2
    root = Path(saved.output_dir)
    assert (f"its adapters in {root / 'adapter'}" in capsys.readouterr().out) == (method == "lomo-lora")
    assert same(weights(root), weights(root / "checkpoint-2"))
    assert not list(Path(unsaved.output_dir).glob("*.safetensors")) and not list(
        Path(unsaved.output_dir).glob("check*")
    )
    if method != "lomo-lora":  # its adapters lie beside the model
        task = load_data(data_settings(saved)).test[0]
        found = score(keyhole.load(root, device="cpu", dtype="float32"), task).metrics["accuracy"]
        assert found == pytest.approx(tests[0][0]["test_accuracy"], abs=1 / TEST)


@pytest.mark.parametrize(("place", "saves"), [("dev", False), ("test", True)])
def test_an_interrupted_score_is_repeated(
    make: Callable, monkeypatch: pytest.MonkeyPatch, place: str, saves: bool
) -> None:
    """A signal in the middle of scoring ends the run; resumed, it has the numbers of one that was not disturbed."""
    through, stopped = (make(name, save_model=saves, **BEST) for name in ("through", "stopped"))
    assert train(through) == 0
    real = getattr(validation.Judge, f"{place}_metrics")

    def disturbed(self: Any, model: Any, stop: Callable[[], bool], *more: Any) -> Any:
        monkeypatch.setattr(validation.Judge, f"{place}_metrics", real)
        stop.__self__.interrupts.ask("SIGTERM")
        return real(self, model, stop)

    monkeypatch.setattr(validation.Judge, f"{place}_metrics", disturbed)
    assert train(stopped) == 130
    assert train(stopped, resume="") == 0
    assert metrics(through) == metrics(stopped)
    assert train(stopped, resume="") == 0 and metrics(through) == metrics(stopped), "a test is not taken twice"


def test_the_metric_of_several_tasks(make: Callable, tmp_path: Path) -> None:
    """One number per task, and their mean, which chooses."""
    other = tmp_path / "other.yaml"
    text = (Path(assets.__file__).parents[1] / "data" / "tasks" / "library" / "demo.yaml").read_text()
    other.write_text(text.replace("the embedded task", "the same under another name"))
    for name in ("demo", "other"):
        (tmp_path / "data" / name).mkdir(parents=True)
        for source in (assets.TRAIN, assets.TEST):
            (tmp_path / "data" / name / source.name).write_bytes(source.read_bytes())
    config = make(task=["demo", str(other)], task_data=str(tmp_path / "data"), max_steps=2)
    assert train(config) == 0
    (dev,) = [entry for entry in metrics(config) if "eval_loss" in entry]
    assert dev["eval_accuracy"] == (dev["eval_demo_accuracy"] + dev["eval_other_accuracy"]) / 2
    assert dev["eval_questions"] == 2 * DEV


def test_different_metrics_have_a_mean_unless_less_is_better() -> None:
    def task(name: str) -> Task:
        return Task(name, [Question("a", ("b", "c"), 0)], read_spec(name))

    assert common_metric([]) is None and common_metric([task("sst2"), task("rte")]) == "accuracy"
    assert common_metric([task("sst2"), task("cola")]) == "score" and common_metric([task("alpaca")]) == "perplexity"
    assert common_metric([task("sst2"), task("alpaca")]) is None


def test_a_run_on_files_is_judged_by_test_task(make: Callable) -> None:
    """Nothing of that task is trained on; its metric comes from the weights at the end."""
    config = make(task=None, train_data="demo", test_task="demo", eval_steps=None)
    assert train(config) == 0
    (test,) = [entry for entry in metrics(config) if "test_questions" in entry]
    assert test["step"] == 4 and test["test_questions"] == TEST and 0 <= test["test_accuracy"] <= 1


def test_programs_are_run_only_where_that_was_allowed(make: Callable, tmp_path: Path) -> None:
    """A test task whose answers are programs is refused at the start, before anything is written."""
    row = {"prompt": "def one():\n", "canonical_solution": "    return 1\n", "entry_point": "one"}
    row |= {"test": "def check(f):\n    assert f() == 1\n", "task_id": "a/1"}
    (tmp_path / "data" / "humaneval").mkdir(parents=True)
    (tmp_path / "data" / "humaneval" / "test.jsonl").write_text(json.dumps(row) + "\n")
    config = make(
        task=None, train_data="demo", test_task="humaneval", task_data=str(tmp_path / "data"), eval_steps=None
    )
    with pytest.raises(UserError, match="--allow-code-execution"):
        train(config)
    assert not Path(config.output_dir).exists()
    assert train(config, parts=Parts(allow_code_execution=True)) == 0
    (test,) = [entry for entry in metrics(config) if "test_questions" in entry]
    assert test["test_pass@1"] == 0.0


@pytest.mark.parametrize("metric", ["foo", "tokens", "eval_tokens", "questions", "test_accuracy", "f1"])
def test_an_unknown_metric_is_refused_before_the_first_step(make: Callable, metric: str) -> None:
    """Not at the first evaluation, which may be at the end of training."""
    config = make(**BEST, metric_for_best_model=metric)
    with pytest.raises(
        UserError, match=f"metric_for_best_model={metric}: an evaluation here gives loss, perplexity, acc"
    ):
        train(config)
    assert not Path(config.output_dir).exists()


def test_two_rows_leave_no_dev_to_choose_by(make: Callable, tmp_path: Path) -> None:
    """num_dev is a wish: where the rows give none, choosing is refused before the first step."""
    for split, count in (("train", 2), ("test", 4)):
        row = json.dumps({"prompt": "a", "candidates": [" b", " c"], "label": 1}) + "\n"
        (tmp_path / f"{split}.jsonl").write_text(row * count)
    with pytest.raises(UserError, match="no dev question is left to choose by"):
        train(make(**BEST, task_data=str(tmp_path), eval_steps=None))


def test_without_dev_questions_a_run_is_only_tested(make: Callable) -> None:
    config = make(num_dev=0, eval_steps=None)
    assert train(config) == 0
    found = [key for entry in metrics(config) for key in entry]
    assert "test_questions" in found and "eval_loss" not in found
