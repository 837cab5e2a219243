"""Questions as rows to train on: both losses, mixtures, batches, and what a resumed run compares."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from keyhole.data.run import load_data, load_tokenizer, preview_data
from keyhole.data.settings import DataSettings
from keyhole.errors import UserError


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """30 rows of sst2, 12 of cb, 5 of squad and alpaca, and as many to judge."""
    path = tmp_path_factory.mktemp("tasks")
    nli = ["entailment", "contradiction", "neutral"]
    rows = {
        "sst2": [{"sentence": f"{'good' if i % 2 else 'bad'} {i}", "label": i % 2} for i in range(30)],
        "cb": [{"premise": f"{i}.", "hypothesis": "x", "label": nli[i % 3]} for i in range(12)],
        "squad": [{"title": "t", "context": "c", "question": "q", "answers": {"text": ["a b"]}}] * 5,
        "alpaca": [{"instruction": "Say", "input": str(i), "output": f"so {i}"} for i in range(5)],
    }
    for task, given in rows.items():
        (path / task).mkdir()
        for split in ("train", "validation"):
            (path / task / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in given))
    return path


def settings(model: Path, folder: Path, **changes: object) -> DataSettings:
    given = {"model": str(model), "task": "sst2", "task_data": str(folder), "batch_size": 4, "num_train": 10}
    return DataSettings(**given | {"num_dev": 6} | changes)


def test_tokens_trains_the_right_answer_alone(tiny_model: Path, folder: Path) -> None:
    data = load_data(settings(tiny_model, folder))
    batch = next(data.train)[0]
    assert set(batch) == {"input_ids", "labels", "attention_mask"} and len(batch["input_ids"]) == 4
    tokenizer = load_tokenizer(str(tiny_model))
    for ids, labels, mask in zip(batch["input_ids"], batch["labels"], batch["attention_mask"], strict=True):
        prompt, answer = tokenizer.decode(ids[(labels < 0) & (mask > 0)]), tokenizer.decode(labels[labels >= 0])
        assert answer == (" great" if "good" in prompt else " terrible")
    assert len(data.eval.dataset) == 6 and data.end_token_ids == []


def test_candidates_come_question_by_question(tiny_model: Path, folder: Path) -> None:
    data = load_data(settings(tiny_model, folder, task=["sst2", "cb"], loss="candidates", num_train=7))
    data.train.next_step()
    sizes = set()
    for _ in range(6):
        for batch in next(data.train):
            question, answer = batch["question"], batch["answer"]
            assert question.dtype == answer.dtype == torch.int64 and question.shape == batch["input_ids"].shape[:1]
            assert question[0] == 0 and set(question.diff().tolist()) <= {0, 1} and question[-1] < 4
            assert torch.equal(torch.bincount(question, answer.double()), torch.ones(int(question[-1]) + 1).double())
            assert ((batch["labels"] >= 0).sum(1) > 0).all()
            sizes |= set(torch.bincount(question).tolist())
    assert sizes == {2, 3}


def test_other_questions_cannot_be_resumed_on(tiny_model: Path, folder: Path) -> None:
    given = settings(tiny_model, folder, loss="candidates")
    state = load_data(given).train.state_dict()
    for change in ({"seed": 1}, {"loss": "tokens"}, {"num_train": 9}, {"task": "cb"}):
        with pytest.raises(UserError, match="not those of the checkpoint"):
            load_data(replace(given, **change)).train.load_state_dict(state)
    data = load_data(given).train.dataset
    before = data.fingerprint
    data.right[0] = 1 - data.right[0]
    assert data.fingerprint != before


def test_the_largest_batch_counts_every_candidate(tiny_model: Path, folder: Path) -> None:
    """For the memory plan: four questions of cb are twelve rows."""
    data = load_data(settings(tiny_model, folder, task=["sst2", "cb"], loss="candidates", num_train=3))
    assert data.train.dataset.most_samples(4) == 3 * 3 + 2 and data.eval.dataset.most_samples(4) == 4


def test_a_mixture_by_weights(tiny_model: Path, folder: Path) -> None:
    given = {"task": ["sst2", "cb"], "train_weights": [2, 0.5], "num_train": 6, "num_dev": 0, "loss": "candidates"}
    data = load_data(settings(tiny_model, folder, **given)).train.dataset
    assert np.bincount([len(row) for row in data.rows]).tolist() == [0, 0, 12, 3]
    with pytest.raises(UserError, match="train_weights: 1 numbers for 2 tasks"):
        load_data(settings(tiny_model, folder, **given | {"train_weights": [1]}))
    with pytest.raises(UserError, match="cb and cb are both called cb.*name a task once"):
        load_data(settings(tiny_model, folder, task=["cb", "cb"]))


def test_free_text_ends_where_the_task_says(tiny_model: Path, folder: Path) -> None:
    eos = 257
    alpaca, squad = (load_data(settings(tiny_model, folder, task=task)) for task in ("alpaca", "squad"))
    assert alpaca.end_token_ids == [eos] and all(row.labels[-1] == eos for row in alpaca.train.dataset)
    assert not any(eos in row.labels for row in squad.train.dataset)
    without = load_data(settings(tiny_model, folder, task="alpaca", train_end_token=False))
    assert not any(eos in row.labels for row in without.train.dataset)
    with pytest.raises(UserError, match="loss: candidates needs a choice; the answers of task squad"):
        load_data(settings(tiny_model, folder, task="squad", loss="candidates"))


def test_the_report_tells_of_the_draw(tiny_model: Path, folder: Path) -> None:
    data = load_data(settings(tiny_model, folder, loss="candidates"))
    report = "\n".join(data.report)
    assert (
        "task sst2: train 10 of 30 rows of train.jsonl (" in report and "test all 30 rows of validation.jsonl" in report
    )
    assert data.dev[0].fingerprint in report and data.test[0].fingerprint in report
    assert "20 candidates of 10 questions" in report
    assert [len(tasks[0].questions) for tasks in (data.dev, data.test)] == [6, 30]


@pytest.mark.parametrize("loss", ["tokens", "candidates"])
def test_the_preview_marks_the_right_candidate(tiny_model: Path, folder: Path, loss: str) -> None:
    text = preview_data(settings(tiny_model, folder, loss=loss), 2)
    assert text.count("question ") == 2 and text.count("RIGHT") == text.count("wrong") == 2
    first = text[text.index("question 1") : text.index("question 2")]
    words = "".join(first.split("|"))
    assert words.index("RIGHT") < words.index("wrong")
    assert ("good" in words.split("ids")[0]) == ("great" in words[words.index("RIGHT") : words.index("wrong")])


def test_questions_without_a_wrong_candidate_are_not_called_too_long(tiny_model: Path, tmp_path: Path) -> None:
    """loss=candidates has nothing to compare there, and says so."""
    (tmp_path / "own.yaml").write_text(
        "columns: {x: x}\nprompt: '{{ x }}'\ncandidates: \"['a', 'b']\"\nright: \"['a', 'b']\"\nmetric: accuracy\n"
    )
    for split in ("train", "dev"):
        (tmp_path / f"{split}.jsonl").write_text(json.dumps({"x": "so"}) + "\n")
    given = settings(tiny_model, tmp_path, task=str(tmp_path / "own.yaml"), loss="candidates")
    with pytest.raises(UserError, match="1 are questions of which no candidate is wrong"):
        load_data(given)
