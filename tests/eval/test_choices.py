"""Scores against a one-candidate-at-a-time reference, and what has no score."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel

import keyhole
from keyhole.data.tasks.parse import read_spec
from keyhole.data.tasks.question import Question, Task
from keyhole.errors import UserError
from keyhole.eval.score import score
from tests.conftest import build_tokenizer

WORDS = "soup bread was good bad cold warm very not the a red blue stamp".split()


def make_questions(count: int, seed: int = 0) -> list[Question]:
    rng = random.Random(seed)

    def words(n: int) -> str:
        return " ".join(rng.choice(WORDS) for _ in range(n))

    return [
        Question(words(rng.randint(1, 9)), tuple(f" {words(1 + k)} {k}" for k in range(rng.randint(2, 4))), 1)
        for _ in range(count)
    ]


def words(questions: list[Question]) -> Task:
    return Task("words", questions, read_spec("demo"))


@torch.no_grad()
def reference(directory: Path, question: Question) -> tuple[list[float], list[float]]:
    """Sums and means of log-probabilities by the book: one candidate, one forward pass, all logits."""
    module, tokenizer = AutoModelForCausalLM.from_pretrained(directory), AutoTokenizer.from_pretrained(directory)
    sums, means = [], []
    for candidate in question.candidates:
        prompt, full = (tokenizer(text).input_ids for text in (question.prompt, question.prompt + candidate))
        logp = F.log_softmax(module(torch.tensor([full])).logits[0, :-1].float(), dim=-1)
        scores = logp[range(len(prompt) - 1, len(full) - 1), full[len(prompt) :]]
        sums.append(float(scores.sum()))
        means.append(float(scores.mean()))
    return sums, means


@pytest.mark.parametrize("placement", ["resident", "stream"])
def test_scores_are_those_of_the_book(tiny_model: Path, placement: str) -> None:
    """Accuracy by mean and by sum, margin and loss equal a loop over candidates with Hugging Face alone."""
    model = keyhole.load(tiny_model, device="cpu", placement=placement)
    questions = make_questions(12)
    found = score(model, words(questions), batch_tokens=100)
    sums, means = zip(*[reference(tiny_model, question) for question in questions], strict=True)
    best = [max(range(len(mean)), key=mean.__getitem__) for mean in means]
    assert found.predictions == best and found.questions == 12 and found.name == "words"
    assert found.accuracy == sum(choice == 1 for choice in best) / 12
    assert found.accuracy_sum == sum(max(range(len(s)), key=s.__getitem__) == 1 for s in sums) / 12
    margins = [mean[1] - max(x for i, x in enumerate(mean) if i != 1) for mean in means]
    assert found.margin == pytest.approx(sum(margins) / 12, abs=1e-5)
    tokens = sum(round(s[1] / m[1]) for s, m in zip(sums, means, strict=True))
    assert found.loss == pytest.approx(-sum(s[1] for s in sums) / tokens, rel=1e-5)
    assert found.chance == pytest.approx(sum(1 / len(q.candidates) for q in questions) / 12)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_scores_that_are_not_finite_are_refused(tiny_model: Path, dtype: str) -> None:
    """NaN is not an accuracy; the tensor is named, and float32 is not advised to who has it."""
    model = keyhole.load(tiny_model, device="cpu", dtype=dtype)
    damage(model)
    name = model.layout.common.tensors[0].name
    with pytest.raises(UserError, match=rf"not finite \(5 of 5 questions\).* {name} has NaN") as error:
        score(model, words(make_questions(5)))
    assert ("try dtype=float32" in str(error.value)) == (dtype == "float16")


def test_what_the_model_cannot_take_is_refused(tmp_path: Path) -> None:
    """Tokens without a row in the embedding, and a max_length beyond the table of positions."""
    tokenizer = build_tokenizer()
    config = GPT2Config(n_embd=16, n_layer=1, n_head=2, n_positions=30, vocab_size=len(tokenizer))
    GPT2LMHeadModel(config).save_pretrained(tmp_path)
    tokenizer.add_tokens(["soup"])
    tokenizer.save_pretrained(tmp_path)
    model = keyhole.load(tmp_path, device="cpu")
    good, bad = (Question(f"{word}:", (" a", " b"), 0, f"t.jsonl, line {i}") for i, word in enumerate(("tea", "soup")))
    assert score(model, words([good]), max_length=30).questions == 1
    with pytest.raises(UserError, match="t.jsonl, line 1 has token id 261, .* 261 rows"):
        score(model, words([good, bad]))
    with pytest.raises(UserError, match="max_length: 31 is more than the 30 positions"):
        score(model, words([good]), max_length=31)


def damage(model: Any) -> None:
    model.home(model.layout.common.tensors[0]).fill_(float("nan"))
