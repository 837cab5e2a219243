"""The embedded files: small, complete, and loadable without a network."""

import random

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import keyhole
from keyhole import assets
from keyhole.data.tasks.parse import read_spec
from keyhole.data.tasks.question import Question, Task
from keyhole.eval.evaluate import read_task
from keyhole.eval.score import score_choices
from scripts.demo_model.corpus import FAR, remark


@pytest.fixture(scope="module")
def model() -> keyhole.Model:
    return keyhole.load(assets.MODEL, device="cpu", dtype="float32")


def test_files_are_few_and_small() -> None:
    """A Hugging Face directory and a task, below 4 MiB together."""
    names = {path.name for path in assets.MODEL.iterdir()}
    assert {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"} <= names
    assert sum(path.stat().st_size for path in assets.ASSETS.rglob("*") if path.is_file()) < 4 * 2**20
    assert "Apache-2.0" in (assets.ASSETS / "README.md").read_text()


def test_transformers_loads_it_offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stock loaders need nothing but the directory, and it holds every weight they ask for."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    loaded, info = AutoModelForCausalLM.from_pretrained(assets.MODEL, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert loaded.config.vocab_size == len(AutoTokenizer.from_pretrained(assets.MODEL))


def test_stamps_are_single_tokens() -> None:
    """Joined or apart, prompt and candidate give the same tokens, and a candidate is one token."""
    tokenizer = AutoTokenizer.from_pretrained(assets.MODEL)
    for question in read_task("demo", 50).questions:
        for candidate in question.candidates:
            prompt = tokenizer(question.prompt).input_ids
            assert tokenizer(question.prompt + candidate).input_ids == prompt + tokenizer(candidate).input_ids
            assert len(tokenizer(candidate).input_ids) == 1


def test_zero_shot_is_chance(model: keyhole.Model) -> None:
    """The stamp cannot be known before training."""
    score = score_choices(model, read_task("demo"))
    assert score.chance == 0.5 and 0.45 <= score.accuracy <= 0.55
    assert score.loss < 1.5


def test_the_model_can_read_notes(model: keyhole.Model) -> None:
    """What it does know: whether the writer of an unseen note would return."""
    rng = random.Random(5)
    rows = [(remark(rng, pleased, FAR), pleased) for pleased in (True, False) for _ in range(150)]
    questions = [Question(f"{text}\nReturn:", (" yes", " no"), 0 if pleased else 1) for text, pleased in rows]
    assert score_choices(model, Task("return", questions, read_spec("demo"))).accuracy > 0.9


def test_it_answers_in_chat(model: keyhole.Model) -> None:
    """A question gets a short answer that ends by itself and names a place of this world."""
    chat = [{"role": "user", "content": "Where does Mara live?"}]
    ids = model.tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt")
    ids = ids if isinstance(ids, torch.Tensor) else ids["input_ids"]
    out = model.generate(ids, max_new_tokens=24, do_sample=False)[0, ids.shape[1] :]
    assert out[-1] == model.tokenizer.eos_token_id
    assert model.tokenizer.decode(out, skip_special_tokens=True).startswith("Mara lives in ")
