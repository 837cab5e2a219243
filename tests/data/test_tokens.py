"""Templates and masks: what is trained on is exactly the answers and their ends, written out by hand."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keyhole.data.examples import example_of
from keyhole.data.opened import Record
from keyhole.data.settings import DataSettings
from keyhole.data.tokens import Renderer
from keyhole.errors import UserError
from tests.data import chats
from tests.data.chats import answers, chat, tokenizer


def render(tok: Any, layout: str, train_on: str = "answers", how: dict | None = None, **row: Any) -> Any:
    """One row as (tokens, list of trained texts)."""
    example = example_of(Record("data.jsonl", "line", 7, row), layout)
    tokens = Renderer(tok, DataSettings(train_on=train_on, **how or {}))([example])[0]
    return tokens, trained_text(tok, tokens)


def trained_text(tok: Any, tokens: Any) -> list[str]:
    ids = tokens.ids_T.tolist()
    labels = [i if t else -100 for i, t in zip(ids, tokens.trained_T.tolist(), strict=True)]
    return answers(tok, chats.Sample(ids, labels))


TALK = chat("What is the capital?", "Paris.", "Of France?", "Yes.")


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (chats.CHATML, ["Paris.<|im_end|>", "Yes.<|im_end|>"]),
        (chats.LLAMA3, ["Paris.<|eot_id|>", "Yes.<|eot_id|>"]),
        (chats.THINKING, ["Paris.<|im_end|>", "<think>\n\n</think>\n\nYes.<|im_end|>"]),
        (chats.CLOSING, ["Paris.<|end|>", "Yes.<|end|>\n</s>"]),
        (chats.STRICT, [" Paris.</s>", " Yes.</s>"]),
        (chats.PREFILLED, ["Paris.</s>", "Yes.</s>"]),
        (chats.BARE, ["Paris.\n", "Yes.\n</s>"]),
        (chats.CHANNELS, ["<|system|>final\nParis.<|end|>", "<|system|>final\nYes.</s>"]),
        (None, ["Paris.</s>", "Yes.</s>"]),
    ],
    ids=["chatml", "llama3", "thinking", "closing", "strict", "prefilled", "bare", "channels", "no-template"],
)
def test_answers_of_a_chat(template: str | None, expected: list[str]) -> None:
    _, trained = render(tokenizer(template), "messages", messages=TALK)
    assert trained == expected


@pytest.mark.parametrize("template", [chats.CHATML, chats.LLAMA3, chats.STRICT, None])
@pytest.mark.parametrize("bos", [False, True])
def test_a_chat_is_tokenised_as_at_inference(template: str | None, bos: bool) -> None:
    """The ids are those of apply_chat_template, bos at most once; the prompt is what precedes the answer."""
    tok = tokenizer(template, bos)
    tokens, _ = render(tok, "messages", messages=TALK[:2])
    ids = tokens.ids_T.tolist()
    assert ids.count(tok.bos_token_id) == (
        1 if template in (chats.LLAMA3, chats.STRICT) or (bos and not template) else 0
    )
    if template:
        options = {"tokenize": True, "return_dict": False, "date_string": "26 Jul 2024"}
        assert ids == tok.apply_chat_template(TALK[:2], **options)
        prompt = tok.apply_chat_template(TALK[:1], add_generation_prompt=True, **options)
        assert ids[: int(tokens.trained_T.argmax())] == prompt


def test_train_on_all() -> None:
    tokens, _ = render(tokenizer(chats.CHATML), "messages", train_on="all", messages=TALK)
    assert not tokens.trained_T[0] and tokens.trained_T[1:].all()


@pytest.mark.parametrize("bos", [False, True])
@pytest.mark.parametrize("trim_offsets", [False, True])
@pytest.mark.parametrize(
    ("prompt", "completion", "expected"),
    [
        ("What is the answer:", " yes", " yes</s>"),
        ("What is the answer:", "\nyes", "\nyes</s>"),
        ("What is the answer: ", "yes", " yes</s>"),  # the token " yes" lies across the boundary
        ("What is the answer:\n", "yes", "yes</s>"),
        ("", "yes", "yes</s>"),
        ("caf\u00e9 \U0001f600", "\U0001f601 yes", "\U0001f601 yes</s>"),
        ("<s>What", " is", " is</s>"),
        ("What", " is</s>", " is</s>"),
    ],
)
def test_prompt_and_completion(bos: bool, trim_offsets: bool, prompt: str, completion: str, expected: str) -> None:
    tok = tokenizer(chats.CHATML, bos, trim_offsets)
    tokens, trained = render(tok, "prompt_completion", prompt=prompt, completion=completion)
    ids = tokens.ids_T.tolist()
    if not prompt and not bos:
        expected = tok.decode(ids[1:])  # nothing predicts the first token
    assert trained == [expected]
    assert ids.count(tok.bos_token_id) == (1 if bos or prompt.startswith("<s>") else 0)
    assert ids.count(tok.eos_token_id) == 1 and tokens.end_id == tok.eos_token_id


def test_alpaca_without_a_chat_template() -> None:
    tok = tokenizer(bos=True)
    tokens, trained = render(tok, "alpaca", instruction="Add.", input="1 2", output="3")
    text = tok.decode(tokens.ids_T.tolist(), clean_up_tokenization_spaces=False)
    assert text == "<s>### Instruction:\nAdd.\n\n1 2\n\n### Response:\n3</s>\n\n"
    assert trained == ["3</s>"]


def test_a_tokenizer_without_offsets_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"prompt": p, "completion": c} for p, c in [("What is:", " yes"), ("What: ", "yes"), ("", "no")]]
    tok = tokenizer(bos=True)
    fast = [render(tok, "prompt_completion", **row)[0] for row in rows]
    monkeypatch.setattr(type(tok), "is_fast", False)
    slow = [render(tok, "prompt_completion", **row)[0] for row in rows]
    for a, b in zip(fast, slow, strict=True):
        assert a.ids_T.tolist() == b.ids_T.tolist() and a.trained_T.tolist() == b.trained_T.tolist()


@pytest.mark.parametrize(
    "template",
    [
        "{% macro all() %}{{ messages | length }}{% for m in messages %}{{ m.content }}{% endfor %}{% endmacro %}"
        "{{ all() }}",
        "{% for message in messages %}{{ message.role + '\n' }}{% endfor %}",
    ],
    ids=["hides its loop and rewrites", "does not write it"],
)
def test_an_answer_that_cannot_be_found_is_refused(template: str) -> None:
    with pytest.raises(UserError, match=r"data.jsonl, line 7: cannot find turn 2"):
        render(tokenizer(template), "messages", messages=chat("Hello", "Paris", "more"))


WORDS = st.text(alphabet=st.characters(codec="utf-8", exclude_categories=["Cs"]), min_size=1, max_size=12)


ENDS = {chats.CHATML: "<|im_end|>", chats.LLAMA3: "<|eot_id|>", chats.CLOSING: "<|end|>"}


@given(contents=st.lists(WORDS, min_size=2, max_size=6), template=st.sampled_from(list(ENDS)))
def test_any_chat_trains_its_answers(contents: list[str], template: str) -> None:
    """For any text, each trained run is its answer and end; only white space can be drawn in before."""
    said = [content.strip() if template == chats.LLAMA3 else content for content in contents[1::2]]
    _, trained = render(tokenizer(template), "messages", messages=chat(*contents))
    assert len(trained) == len(said)
    for run, content in zip(trained, said, strict=True):
        expected = content + ENDS[template]
        assert expected in run and run.split(expected)[0].strip() == ""


@pytest.mark.parametrize("row", [{"text": "ab \ud83d cd"}, {"messages": chat("ab \ud83d cd", "fine")}])
def test_half_a_character_is_refused_by_line(row: dict[str, Any]) -> None:
    tok, layout = tokenizer(chats.CHATML), next(iter(row))
    with pytest.raises(UserError, match=r"data.jsonl, line 7: .*'\\ud83d', half of a character.*ab .* cd"):
        render(tok, layout, **row)
    render(tok, layout, **json.loads(json.dumps(row).replace("\\ud83d", "\\ud83d\\ude00")))
