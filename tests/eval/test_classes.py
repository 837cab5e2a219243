"""A classifier's scores: the largest logit among labels in the model's order, and Pearson's of a regression."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import keyhole
from keyhole.data.tasks.parse import parse_spec, read_spec
from keyhole.data.tasks.question import Question, Task
from keyhole.errors import NonFinite, UserError
from keyhole.eval.conversation import Conversation
from keyhole.eval.score import score
from tests.training.classifiers import WORDS, save_encoder

SPEC = "columns: {a: a, label: label}\nprompt: '{{ a }}'\ncandidates: ['0', '1', '2']\nlabels: [[no], [maybe], [yes]]\n"
QUESTIONS = [
    Question(f"{WORDS[i]} {WORDS[i + 1]}", ("0", "1", "2"), i % 3, f"line {i}", texts=(WORDS[i],) * 2, value=i / 7)
    for i in range(12)
]


def task(**how: Any) -> Task:
    text = SPEC if not how else SPEC.replace("label: label}", "label: label, s: s}") + "value: s\n"
    return Task(
        "own", QUESTIONS, parse_spec(f"{text}metric: {how.get('metric', '[accuracy, macro_f1]')}\n", "own", "own")
    )


def load(tmp_path: Path, count: int, **how: Any) -> keyhole.Model:
    path = save_encoder("bert", tmp_path / "bert")
    return keyhole.load(path, device="cpu", head="classification", num_labels=count, seed=3, **how)


def expected(model: keyhole.Model) -> torch.Tensor:
    """Logits by Transformers' own code, question by question."""
    with torch.no_grad():
        return torch.cat([model.module(**model.tokenizer(*q.texts, return_tensors="pt")).logits for q in QUESTIONS])


@pytest.mark.parametrize("placement", ["resident", "stream"])
def test_the_largest_logit_answers(tmp_path: Path, placement: str) -> None:
    """By number, and by name where the model has its labels in another order."""
    resident, model = load(tmp_path, 3), load(tmp_path, 3, placement=placement)
    middle = -expected(resident).median(dim=0).values  # so that no label answers everything
    for each in (resident, model):
        each.module.classifier.bias.data.copy_(middle)
    plain = expected(resident)
    found = score(model, task(), batch_tokens=40)
    chosen = plain.argmax(dim=1).tolist()
    assert found.predictions == chosen and len(set(chosen)) > 1
    right = [q.answer for q in QUESTIONS]
    assert found.value == pytest.approx(np.mean([p == y for p, y in zip(chosen, right, strict=True)]))
    nll = torch.nn.functional.cross_entropy(plain, torch.tensor(right))
    assert found.loss == pytest.approx(float(nll), rel=1e-5) and found.chance == pytest.approx(1 / 3)
    model.config.id2label = {0: "Yes", 1: "no", 2: "Maybe"}
    assert score(model, task()).predictions == [{0: 2, 1: 0, 2: 1}[label] for label in chosen]


def test_a_regression_has_pearsons_correlation(tmp_path: Path) -> None:
    """With the values themselves; for accuracy the nearest candidate counts."""
    model = load(tmp_path, 1)
    found = score(model, task(metric="[pearson, accuracy]"))
    numbers = expected(model)[:, 0].double().numpy()
    right = [q.answer == np.clip(np.round(number), 0, 2) for q, number in zip(QUESTIONS, numbers, strict=True)]
    correlation = np.corrcoef(numbers, [q.value for q in QUESTIONS])[0, 1]
    assert found.metrics == {"pearson": pytest.approx(correlation, rel=1e-4), "accuracy": pytest.approx(np.mean(right))}
    assert found.value == found.metrics["pearson"]
    assert found.predictions == pytest.approx(numbers.tolist(), rel=1e-4) and found.chance is None


def test_what_cannot_be_scored_is_refused(tmp_path: Path) -> None:
    """Candidates that no label stands for, a chat, and logits that are not finite."""
    model = load(tmp_path, 3)
    with pytest.raises(UserError, match="task file: its candidates differ from row to row; a classifier has no labels"):
        score(model, Task("file", QUESTIONS, replace(read_spec("demo"), name="file")))
    with pytest.raises(UserError, match="classifies texts and cannot write any"):
        Conversation(model)
    model.module.classifier.weight.data[0, 0] = float("nan")
    with pytest.raises(NonFinite, match="line 0: logits that are not finite"):
        score(model, task())
