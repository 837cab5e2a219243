"""The five layouts are told apart by their columns and become chats or plain text."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keyhole.data.examples import COLUMNS, RowTemplate, example_of, layout_of, unread
from keyhole.data.opened import Record
from keyhole.data.prepare import prepare
from keyhole.data.settings import DataSettings
from keyhole.errors import UserError
from tests.conftest import build_tokenizer


def record(**row: Any) -> Record:
    return Record("data.jsonl", "line", 3, row)


def turns(layout: str, **row: Any) -> list[tuple[str, str]]:
    return [(turn["role"], turn["content"]) for turn in example_of(record(**row), layout).turns]


USER, ASSISTANT = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}
CHAT = [("user", "Hi"), ("assistant", "Hello")]


@pytest.mark.parametrize(
    ("row", "layout"),
    [
        ({"messages": [], "prompt": "", "text": ""}, "messages"),
        ({"conversations": [], "id": 1}, "conversations"),
        ({"prompt": "", "completion": "", "text": ""}, "prompt_completion"),
        ({"instruction": "", "output": "", "text": ""}, "alpaca"),
        ({"instruction": "", "input": "", "output": ""}, "alpaca"),
        ({"text": "", "url": ""}, "text"),
    ],
)
def test_the_columns_say_the_layout(row: dict, layout: str) -> None:
    assert layout_of(record(**row), None, {})[0] == layout


def test_unknown_columns_are_listed_with_what_is_expected() -> None:
    with pytest.raises(UserError) as error:
        layout_of(record(question="?", answer="!"), None, {})
    message = str(error.value)
    assert "data.jsonl, line 3" in message and "found:    question, answer" in message
    assert all(name in message for name in COLUMNS) and "data_format" in message
    with pytest.raises(UserError, match="data_format='chatml': expected messages"):
        DataSettings(data_format="chatml")


def test_every_layout_of_a_chat_is_the_same_chat() -> None:
    sharegpt = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]
    assert turns("messages", messages=[USER, ASSISTANT]) == CHAT
    assert turns("messages", messages=json.dumps([USER, ASSISTANT])) == CHAT
    assert turns("conversations", conversations=sharegpt) == CHAT
    assert turns("conversations", conversations=[USER, ASSISTANT]) == CHAT
    assert turns("alpaca", instruction="Hi", output="Hello") == CHAT
    assert turns("alpaca", instruction="Hi", input=None, output="Hello") == CHAT
    assert turns("prompt_completion", prompt=[USER], completion=[ASSISTANT]) == CHAT
    with_system = [("system", "Be kind."), *CHAT]
    assert turns("conversations", conversations=sharegpt, system="Be kind.") == with_system


def test_alpacas_history_comes_before_the_question() -> None:
    before = [("user", "a"), ("assistant", "b")]
    for history in ([["a", "b"]], '[["a", "b"]]'):
        assert turns("alpaca", instruction="Hi", output="Hello", history=history) == before + CHAT
    assert turns("alpaca", instruction="Hi", output="Hello", history=None) == CHAT
    with pytest.raises(UserError, match="column history: expected a list of .question, answer. pairs"):
        turns("alpaca", instruction="Hi", output="Hello", history=[["a"]])


def test_sharegpts_function_calls_are_calls() -> None:
    call = {"from": "function_call", "value": '{"name": "f", "arguments": {"a": 1}}'}
    example = example_of(record(conversations=[{"from": "human", "value": "Hi"}, call]), "conversations")
    assert example.turns[1]["tool_calls"] == [{"name": "f", "arguments": {"a": 1}}]
    with pytest.raises(UserError, match=r"conversations\[0\].value: expected a call in JSON"):
        example_of(record(conversations=[call | {"value": "f()"}]), "conversations")


@pytest.mark.parametrize("role", ["human", "User", "system ", "Tool"])
def test_a_role_that_templates_do_not_know_is_refused(role: str) -> None:
    with pytest.raises(UserError, match=r"messages\[0\].role: expected (user|system|tool) .*found str"):
        turns("messages", messages=[{"role": role, "content": "Hi"}, ASSISTANT])


def test_columns_that_a_layout_does_not_use_are_known() -> None:
    further = {"system": "Be kind.", "tools": [], "history": None, "id": 3, "label": False, "__index_level_0__": 7}
    found = {
        "messages": {"messages": [USER, ASSISTANT]},
        "prompt_completion": {"prompt": "a", "completion": "b"},
        "alpaca": {"instruction": "a", "output": "b", "input": "c"},
    }
    unused = {name: unread(example_of(record(**row, **further), name), name) for name, row in found.items()}
    assert unused["messages"] == unused["alpaca"] == ["id", "label"]
    assert unused["prompt_completion"] == ["system", "id", "label"]


def test_parts_tools_and_nulls() -> None:
    parts = [{"type": "text", "text": "He"}, {"type": "text", "text": "llo"}]
    assert turns("messages", messages=[USER, ASSISTANT | {"content": parts}]) == CHAT
    calls = {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}], "name": None}
    example = example_of(record(messages=[USER, calls], tools=[{"name": "f"}]), "messages")
    assert example.given == {"tools": [{"name": "f"}]} and "name" not in example.turns[1]


@pytest.mark.parametrize(
    ("layout", "row", "message"),
    [
        ("text", {"text": None}, "column text: expected text, found null"),
        ("text", {"body": "a"}, "column text is missing for data format text; found: body"),
        ("prompt_completion", {"prompt": "a", "completion": 3}, "completion: expected text, found int 3"),
        ("prompt_completion", {"prompt": [USER], "completion": "a"}, "prompt: expected text, found list"),
        ("alpaca", {"instruction": "a", "output": ["b"]}, "column output: expected text, found list"),
        ("messages", {"messages": "hello"}, "column messages: expected a list of turns, found str 'hello'"),
        ("messages", {"messages": {"role": "user"}}, "column messages: expected a list of turns, found dict"),
        ("messages", {"messages": [USER, "Hello"]}, r"messages\[1\]: expected an object"),
        ("messages", {"messages": [{"from": "human", "value": "a"}]}, r"messages\[0\]: expected an object"),
        ("messages", {"messages": [USER | {"content": None}]}, r"messages\[0\].content: .* null"),
        ("messages", {"messages": [USER | {"weight": 0.5}]}, r"messages\[0\].weight: expected 0 or 1"),
        ("messages", {"messages": [USER | {"train": "no"}]}, r"messages\[0\].train: expected true or false"),
        ("messages", {"messages": [ASSISTANT | {"tool_calls": "f()"}]}, r"messages\[0\].tool_calls: expected a list"),
        ("messages", {"messages": [USER | {"content": [{"image": "x"}]}]}, r"messages\[0\].content: "),
        ("conversations", {"conversations": [{"from": "bob", "value": "a"}]}, r"conversations\[0\].from: "),
        ("conversations", {"conversations": [{"from": "gpt"}]}, r"conversations\[0\]: .* from"),
        ("messages", {"messages": [USER], "tools": {"a": 1}}, "column tools: expected a list"),
    ],
)  # fmt: skip
def test_a_wrong_type_names_row_and_column(layout: str, row: dict, message: str) -> None:
    with pytest.raises(UserError, match=f"data.jsonl, line 3: .*{message}"):
        example_of(record(**row), layout)


KEYS = st.sampled_from(["role", "content", "from", "value"])
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner),
    max_leaves=6,
)


@given(layout=st.sampled_from(list(COLUMNS)), values=st.lists(JSON, min_size=3, max_size=3))
def test_any_row_is_an_example_or_a_user_error(layout: str, values: list[Any]) -> None:
    row = dict(zip([*COLUMNS[layout], "input", "system"], values, strict=False))
    try:
        example = example_of(record(**row), layout)
    except UserError as error:
        assert "data.jsonl, line 3" in str(error)
    else:
        assert isinstance(example.answer, str) and isinstance(example.prompt, str)
        assert all(isinstance(t["content"], str) and isinstance(t["role"], str) for t in example.turns or [])


def row(**cells: Any) -> Record:
    return Record("t.csv", "line", 2, cells)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{sentence} It was", "A fine film. It was"),
        ("{ sentence }|{n}|{ok}", "A fine film.|3|true"),
        ("{{{Customer name}}}", "{Ann}"),
        ("{a.b}\n{sentence}", "x\nA fine film."),
    ],
)
def test_cells_are_written_where_their_columns_stand(text: str, expected: str) -> None:
    cells = {"sentence": "A fine film.", "n": 3, "ok": True, "Customer name": "Ann", "a.b": "x"}
    assert RowTemplate(text, "prompt").fill(row(**cells)) == expected


@pytest.mark.parametrize(
    ("text", "cells", "says"),
    [
        ("{sentense}", {"sentence": "a"}, "t.csv, line 2: prompt: there is no column 'sentense'.*did you mean"),
        ("{x}", {"x": None}, "column 'x' is null"),
        ("{x}", {"x": [1]}, "column 'x' is a list"),
    ],
)
def test_what_is_no_text_is_refused(text: str, cells: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=says):
        RowTemplate(text, "prompt").fill(row(**cells))


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"prompt": "{sentence"}, "a single {"),
        ({"prompt": "a } b {x}"}, "a single }"),
        ({"completion": "label"}, "completion: .* names no column"),
        ({"prompt": "{x}", "data_format": "messages"}, "leave data_format out"),
    ],
)
def test_templates_are_checked_before_data_are_read(settings: dict[str, str], says: str) -> None:
    with pytest.raises(UserError, match=says):
        DataSettings(**settings)


def test_a_table_becomes_prompt_and_completion(tmp_path: Path) -> None:
    table, plain = tmp_path / "reviews.csv", tmp_path / "plain.jsonl"
    table.write_text('Review,stars,note\n"Warm, fresh bread.",5,\n"Cold soup.",1,late\n')
    pairs = [("Warm, fresh bread. Stars:", " 5"), ("Cold soup. Stars:", " 1")]
    plain.write_text("".join(json.dumps({"prompt": p, "completion": c}) + "\n" for p, c in pairs))
    tokenizer = build_tokenizer()
    how = {"prompt": "{text} Stars:", "completion": " {stars}", "columns": {"text": "Review"}}
    made, expected = prepare(str(table), tokenizer, **how), prepare(str(plain), tokenizer)
    assert made.ids.tolist() == expected.ids.tolist() and made.trained.tolist() == expected.trained.tolist()
    assert "prompt and completion from columns" in made.report.formats[str(table)]


def test_a_prompt_without_an_answer_is_refused_with_the_setting_that_makes_one(tmp_path: Path) -> None:
    table = tmp_path / "t.csv"
    table.write_text("sentence,label\na,1\n")
    with pytest.raises(UserError, match="column completion is missing.*completion: ' {label}'"):
        prepare(str(table), build_tokenizer(), prompt="{sentence} It was")
