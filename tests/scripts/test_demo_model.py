"""The programs that made the embedded model, its corpus and its task make them again, to the byte."""

import hashlib
import json

import pytest
import torch
from transformers import AutoTokenizer

from keyhole import assets
from scripts.demo_model import __main__ as demo_model
from scripts.demo_model.corpus import documents
from scripts.demo_model.task import TEST_ROWS, TRAIN_ROWS, make_rows, read_rows, rows_as_jsonl

FIRST_2000 = "320786f1b71fd647"


def test_same_seed_same_texts_on_every_python() -> None:
    """The first texts of the seed that made the model hash to a stored value; another seed gives others."""

    def digest(seed: int) -> str:
        return hashlib.sha256("\n".join(documents(seed, 2000)).encode("ascii")).hexdigest()[:16]

    assert digest(7) == FIRST_2000 != digest(8)


def test_the_task_is_remade_and_fair() -> None:
    """Byte by byte; no prompt occurs twice, and half of each split is blue."""
    train, test = make_rows()
    assert assets.TRAIN.read_bytes() == rows_as_jsonl(train).encode("ascii")
    assert assets.TEST.read_bytes() == rows_as_jsonl(test).encode("ascii")
    assert (train, test) == (read_rows(assets.TRAIN), read_rows(assets.TEST))
    assert len({row["prompt"] for row in train + test}) == TRAIN_ROWS + TEST_ROWS
    for rows in (train, test):
        assert 2 * sum(row["label"] for row in rows) == len(rows)
        assert all(row["completion"] == row["candidates"][row["label"]] for row in rows)


def test_the_tokenizer_is_remade() -> None:
    """Vocabulary and merges of the shipped tokenizer are those that the script trains today."""
    made = json.loads(demo_model.make_tokenizer(demo_model.SEED).backend_tokenizer.to_str())
    shipped = json.loads((assets.MODEL / "tokenizer.json").read_text())
    assert made["model"]["vocab"] == shipped["model"]["vocab"]
    assert made["model"]["merges"] == shipped["model"]["merges"]


@pytest.mark.matrix
def test_training_is_deterministic() -> None:
    """Two short trainings give the same weights, bit for bit, and a falling loss."""
    tokenizer = AutoTokenizer.from_pretrained(assets.MODEL)
    runs = []
    for _ in range(2):
        model = demo_model.make_model(tokenizer, 1)
        loss = demo_model.train(model, tokenizer, 4, 1)
        runs.append((loss, {name: w.clone() for name, w in model.state_dict().items()}))
    assert runs[0][0] == runs[1][0] < 7.4
    assert all(torch.equal(runs[0][1][name], runs[1][1][name]) for name in runs[0][1])
