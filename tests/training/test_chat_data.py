"""Runs on chats: the model is saved with the template it was trained with, and goes on with the date it began."""

import datetime
import json
import shutil
from pathlib import Path

import pytest

import keyhole
from keyhole.config.data import data_settings
from keyhole.data import settings as data_settings_module
from keyhole.data.run import load_data, load_tokenizer
from keyhole.errors import UserError
from keyhole.eval.conversation import Conversation
from keyhole.training.start import train
from tests.conftest import build_tokenizer
from tests.training.runs import Make, losses

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
    make: Make, talks: str, stop_after: object, monkeypatch: pytest.MonkeyPatch
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
    assert losses(halves) == losses(whole)
    with pytest.raises(UserError, match="template_date: the run has null, the config now says 2024-02-29"):
        train(make("halves", **given, template_date="2024-02-29"), resume="last")
