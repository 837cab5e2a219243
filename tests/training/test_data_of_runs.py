"""What a run keeps of its data: draws of tasks, padding, the chat template and its date."""

import datetime
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import keyhole
from keyhole.data import settings as data_settings_module
from keyhole.data.batches import Padding
from keyhole.data.run import load_data, load_tokenizer
from keyhole.data.settings import data_settings
from keyhole.errors import UserError
from keyhole.eval.conversation import Conversation
from keyhole.training.loop import Leader
from keyhole.training.start import train
from tests.conftest import build_tokenizer
from tests.matrix import in_every_run
from tests.training.runs import Make, losses, metrics


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


@pytest.fixture
def ragged(tmp_path: Path) -> str:
    """Rows of 13 to 120 tokens: auto pads them to multiples of 16."""
    path = tmp_path / "ragged.jsonl"
    texts = [{"prompt": "ab" * (4 + 9 * i % 53), "completion": f" {i}"} for i in range(24)]
    path.write_text("".join(json.dumps(row) + "\n" for row in texts))
    return str(path)


@pytest.fixture
def paddings(monkeypatch: pytest.MonkeyPatch) -> list[Padding]:
    """The padding of every run, of training and of held-out data, in order."""
    seen, real = [], Leader.go

    def go(self: Leader) -> int:
        seen.append((self.run.data.train.padding, self.run.data.eval.padding))
        return real(self)

    monkeypatch.setattr(Leader, "go", go)
    return seen


def test_auto_is_kept_and_resume_is_exact(make: Make, ragged: str, stopped_is_whole: Callable, paddings: list) -> None:
    """N steps, a stop and M more are N + M steps, with batches that are padded to few widths."""
    how = {"train_data": ragged, "eval_data": ragged, "eval_steps": 2}
    stopped_is_whole(make("through", **how), make("stopped", **how), 3)
    assert len(set(paddings)) == 1 and paddings[0][0].multiple == 16 and paddings[0][0].most is not None


TALK = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
DATED = "{{ strftime_now('%d %b %Y') }}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"


@pytest.fixture
def talks(tmp_path: Path) -> str:
    path = tmp_path / "talks.jsonl"
    path.write_text((json.dumps({"messages": TALK}) + "\n") * 8)
    return str(path)


@pytest.fixture
def without_template(tiny_model: Path, tmp_path: Path) -> str:
    path = tmp_path / "model"
    shutil.copytree(tiny_model, path)
    (path / "chat_template.jinja").unlink(missing_ok=True)
    tokenizer = build_tokenizer()
    tokenizer.chat_template = None
    tokenizer.save_pretrained(path)
    return str(path)


def test_chat_sends_the_layout_that_training_wrote(make: Make, without_template: str, talks: str) -> None:
    """Without a chat template training writes headings; the saved model has them as its template, so has a replay."""
    config = make(model=without_template, train_data=talks, method="zo", learning_rate=1e-6, max_steps=2)
    assert load_tokenizer(without_template).chat_template is None
    data = load_data(data_settings(config))
    assert train(config) == 0
    trained = load_tokenizer(without_template).decode(data.train.dataset[0].input_ids)
    model = keyhole.load(config.output_dir, device="cpu")
    conversation = Conversation(model)
    conversation.turns = TALK[:1]
    sent = model.tokenizer.decode(conversation._ids("Hi")[0])
    assert sent == "### Instruction:\nHi\n\n### Response:\n" and trained.startswith(sent + "Hello")
    replayed = Path(config.output_dir).parent / "replayed"
    from keyhole.checkpoint.replay import replay

    replay(without_template, Path(config.output_dir), replayed, device="cpu", say=lambda line: None)
    assert load_tokenizer(str(replayed)).chat_template == model.tokenizer.chat_template


def test_a_run_that_prints_the_date_goes_on_tomorrow(
    make: Make, talks: str, stop_after: Callable, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """Stopped on one day and resumed on the next, it has the tokens of the day it began, and the same losses."""
    monkeypatch.setattr(data_settings_module, "today", lambda: datetime.date(2024, 2, 28))
    given = {"train_data": talks, "chat_template": DATED, "method": "adamw", "learning_rate": 1e-3, "max_steps": 4}
    whole, halves = make("whole", **given), make("halves", **given)
    assert train(whole) == 0
    stop_after(2)
    assert train(halves) == 130
    monkeypatch.setattr(data_settings_module, "today", lambda: datetime.date(2024, 2, 29))
    assert train(halves, resume="last") == 0
    assert losses(halves) == losses(whole) and "print the date, 2024-02-28" in capsys.readouterr().out
    with pytest.raises(UserError, match="template_date: the run has null, the config now says 2024-02-29"):
        train(make("halves", **given, template_date="2024-02-29"), resume="last")
