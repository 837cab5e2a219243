"""The program that made the embedded model makes it again."""

import json

import pytest
import torch
from transformers import AutoTokenizer

from keyhole import assets
from scripts.demo_model import __main__ as demo_model


def test_script_remakes_the_tokenizer() -> None:
    """Vocabulary and merges of the shipped tokenizer are those that the script trains today."""
    made = json.loads(demo_model.make_tokenizer(demo_model.SEED).backend_tokenizer.to_str())
    shipped = json.loads((assets.MODEL / "tokenizer.json").read_text())
    assert made["model"]["vocab"] == shipped["model"]["vocab"]
    assert made["model"]["merges"] == shipped["model"]["merges"]


@pytest.mark.matrix
def test_script_is_deterministic() -> None:
    """Two short trainings give the same weights, bit for bit, and a falling loss."""
    tokenizer = AutoTokenizer.from_pretrained(assets.MODEL)
    runs = []
    for _ in range(2):
        model = demo_model.make_model(tokenizer, 1)
        loss = demo_model.train(model, tokenizer, 4, 1)
        runs.append((loss, {name: w.clone() for name, w in model.state_dict().items()}))
    assert runs[0][0] == runs[1][0] < 7.4
    assert all(torch.equal(runs[0][1][name], runs[1][1][name]) for name in runs[0][1])
