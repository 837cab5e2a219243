"""Five layouts of training data, recognised by their columns, and converted into chats or plain text.

    layout              columns                               becomes
    messages            messages: [{role, content}]           a chat; a `system` column begins it, here and below
    conversations       conversations: [{from, value}]        a chat (ShareGPT)
    prompt_completion   prompt, completion                    prompt + completion, unchanged
                        ... both lists of {role, content}     a chat; only turns of the completion are answers
    alpaca              instruction, output; input optional   a chat: instruction and input, output; a `history`
                                                              of [question, answer] pairs comes before it
    text                text                                  plain text: one long answer to an empty prompt

The first layout of this list whose columns are all present is used, so a file that also has a leftover `prompt` or
`text` column is read as its richest layout; `data_format` overrides this, and the setting `columns` renames columns.
Other columns are not used, and the report names them (`unread`), except those of a chat that are passed to the template
(`given`):

    tools                  descriptions of functions                documents      texts to answer from
    chat_template_kwargs   variables by name, such as {enable_thinking: false}; they replace those of the setting

Each may be written as JSON text.

Strings in prompt and completion are joined byte for byte, even if the tokenizer has a chat template: a written-out
prompt is used as written, and scoring answers by log-likelihood needs exactly that text. To use the chat template,
write `messages`.

turns.py defines what a turn may contain, and which turns are trained on. Values of the wrong type are refused with
file, row, column and the value found.
"""

import json
from dataclasses import dataclass, field, replace
from typing import Any

from keyhole.data.files import Record
from keyhole.data.readers import keys_once
from keyhole.data.turns import FLAGS, Turn, read_turn, wrong
from keyhole.errors import UserError, listed

COLUMNS: dict[str, tuple[str, ...]] = {
    "messages": ("messages",),
    "conversations": ("conversations",),
    "prompt_completion": ("prompt", "completion"),
    "alpaca": ("instruction", "output"),
    "text": ("text",),
}

SHAREGPT_ROLES = {
    "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "chatgpt": "assistant",
    "model": "assistant", "system": "system", "tool": "tool", "function": "tool", "observation": "tool",
    "function_call": "assistant",
}  # fmt: skip

ROUND = ("user", "assistant")
CHAT_COLUMNS = ("system", "tools", "documents", "chat_template_kwargs")  # of every chat, beside its turns
ALPACA_COLUMNS = ("input", "history")
WITH_A_MEANING = (*CHAT_COLUMNS, *ALPACA_COLUMNS, *FLAGS)  # columns, or keys of turns, that other rows use
OWN_VARIABLES = ("messages", "tools", "documents", "add_generation_prompt")  # of a chat template, set for every row


@dataclass(slots=True)
class Example:
    """A chat (`turns`), or plain text split where the answer begins (`turns` is None). given: what the row gives the
    chat template besides the turns, by variable."""

    record: Record
    turns: list[Turn] | None = None
    given: dict[str, Any] = field(default_factory=dict)
    prompt: str = ""
    answer: str = ""


def detect(record: Record) -> str:
    """The layout of a file, from its first row."""
    for name, columns in COLUMNS.items():
        if all(column in record.row for column in columns):
            return name
    expected = "; ".join(f"{name}: {', '.join(columns)}" for name, columns in COLUMNS.items())
    raise UserError(
        f"{record.where}: cannot tell the data format from the columns\n"
        f"  found:    {listed(record.row) or 'none'}\n"
        f"  expected: {expected}\n"
        "  rename the columns (columns: {prompt: question, completion: answer}), make a prompt of them\n"
        '  (prompt: "{question} It was", completion: " {answer}"), or set data_format'
    )


def check_format(name: str | None) -> None:
    """Refuse a data_format that does not exist."""
    if name not in (None, "auto", *COLUMNS):
        raise UserError(f"data_format={name!r}: expected auto, {', '.join(COLUMNS)}")


def normalise(record: Record, layout: str) -> Example:
    """One row as an example."""
    missing = [column for column in COLUMNS[layout] if column not in record.row]
    if missing:
        raise UserError(
            f"{record.where}: column {', '.join(missing)} is missing for data format {layout}; "
            f"found: {listed(record.row) or 'none'}"
            + ("; make it of others: completion: ' {label}'" if missing == ["completion"] else "")
        )
    if layout == "messages":
        return Example(record, _begun(record, _chat(record, "messages", _turns(record, "messages"))), _given(record))
    if layout == "conversations":
        return Example(record, _begun(record, _sharegpt(record)), _given(record))
    if layout == "prompt_completion":
        return _prompt_completion(record)
    if layout == "alpaca":
        return Example(record, _alpaca(record), _given(record))
    return Example(record, answer=_string(record, "text"))


def unread(example: Example, layout: str) -> list[str]:
    """The columns of a row that its layout does not use, and that are not empty. The index that pandas writes is no
    column of the data."""
    read = {*COLUMNS[layout], *(ALPACA_COLUMNS if layout == "alpaca" else ())}
    read |= set(CHAT_COLUMNS if example.turns is not None else ())
    others = {name: value for name, value in example.record.row.items() if name not in read}
    return [name for name, value in others.items() if value not in (None, "", [], {}) and not _is_index(name)]


def _is_index(name: str) -> bool:
    return name in ("", "Unnamed: 0") or name.startswith("__index_level_")


def rename(record: Record, columns: dict[str, str]) -> Record:
    """The row with the columns renamed by the setting `columns`."""
    missing = [theirs for theirs in columns.values() if theirs not in record.row]
    if missing:
        raise UserError(
            f"{record.where}: columns: the data have no column {listed(missing)}; found: {listed(record.row) or 'none'}"
        )
    left = {name: value for name, value in record.row.items() if name not in columns.values()}
    return replace(record, row=left | {ours: record.row[theirs] for ours, theirs in columns.items()})


def _string(record: Record, column: str, optional: bool = False) -> str:
    value = record.row.get(column)
    if optional and value is None:
        return ""
    if not isinstance(value, str):
        raise wrong(record, column, "text", value)
    return value


def _turns(record: Record, column: str) -> list[Any]:
    """The list in a column; in CSV it is written as JSON."""
    value = record.row[column]
    if isinstance(value, str):
        try:
            value = json.loads(value, object_pairs_hook=keys_once)
        except (ValueError, RecursionError):
            pass
    if not isinstance(value, list):
        raise wrong(record, column, "a list of turns", value)
    return value


def _chat(record: Record, column: str, turns: list[Any]) -> list[Turn]:
    return [read_turn(record, f"{column}[{i}]", turn) for i, turn in enumerate(turns)]


def _system(record: Record) -> list[Turn]:
    text = _string(record, "system", optional=True)
    return [{"role": "system", "content": text}] if text else []


def _begun(record: Record, turns: list[Turn]) -> list[Turn]:
    """The chat with the text of its `system` column, which it may repeat and not contradict."""
    system = _system(record)
    own = next((turn["content"] for turn in turns if turn["role"] == "system"), None)
    if system and own is not None and own.strip() != system[0]["content"].strip():
        raise UserError(
            f"{record.where}: column system differs from the system turn of the chat; keep one of them, or name the "
            "column otherwise"
        )
    return turns if own is not None else system + turns


def _sharegpt(record: Record) -> list[Turn]:
    turns = []
    for i, turn in enumerate(_turns(record, "conversations")):
        place = f"conversations[{i}]"
        if isinstance(turn, dict) and "role" in turn:
            turns.append(read_turn(record, place, turn))
            continue
        if not isinstance(turn, dict) or "from" not in turn or not isinstance(turn.get("value"), str):
            raise wrong(record, place, "an object with from and value", turn)
        role = SHAREGPT_ROLES.get(str(turn["from"]).lower())
        if role is None:
            raise wrong(record, f"{place}.from", f"one of {', '.join(SHAREGPT_ROLES)}", turn["from"])
        said = {"role": role, "content": turn["value"]}
        if str(turn["from"]).lower() == "function_call":
            said = {"role": role, "content": "", "tool_calls": [_json(record, f"{place}.value", turn["value"])]}
        further = {key: value for key, value in turn.items() if key not in ("from", "value")}
        turns.append(read_turn(record, place, further | said))
    return turns


def _prompt_completion(record: Record) -> Example:
    prompt, completion = record.row["prompt"], record.row["completion"]
    if isinstance(prompt, list) and isinstance(completion, list):
        before = [turn | {"weight": 0} for turn in _chat(record, "prompt", prompt)]
        return Example(record, _begun(record, before + _chat(record, "completion", completion)), _given(record))
    return Example(record, prompt=_string(record, "prompt"), answer=_string(record, "completion"))


def _alpaca(record: Record) -> list[Turn]:
    instruction, given = _string(record, "instruction"), _string(record, "input", optional=True)
    question = f"{instruction}\n\n{given}" if given.strip() else instruction
    answer = {"role": "assistant", "content": _string(record, "output")}
    return [*_system(record), *_history(record), {"role": "user", "content": question}, answer]


def _history(record: Record) -> list[Turn]:
    """The rounds before the question: [[question, answer], ...]."""
    rounds = record.row.get("history") or []
    if isinstance(rounds, str):
        rounds = _turns(record, "history")
    fits = isinstance(rounds, list) and all(
        isinstance(pair, list | tuple) and len(pair) == 2 and all(isinstance(text, str) for text in pair)
        for pair in rounds
    )
    if not fits:
        raise wrong(record, "history", "a list of [question, answer] pairs", rounds)
    return [{"role": role, "content": text} for pair in rounds for role, text in zip(ROUND, pair, strict=True)]


def _json(record: Record, place: str, text: str) -> dict[str, Any]:
    try:
        value = json.loads(text, object_pairs_hook=keys_once)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        raise wrong(record, place, 'a call in JSON, {"name": ..., "arguments": {...}}', text)
    return value


def _given(record: Record) -> dict[str, Any]:
    """What a row gives the chat template besides its turns."""
    variables = _column(record, "chat_template_kwargs", dict, "an object of variables")
    if own := [name for name in OWN_VARIABLES if name in variables]:
        raise UserError(
            f"{record.where}: column chat_template_kwargs: {own[0]} is no variable to set; tools and documents are "
            "columns of their own"
        )
    lists = {"tools": "a list of tool descriptions", "documents": "a list of documents"}
    lists = {name: _column(record, name, list, expected) for name, expected in lists.items()}
    return {name: value for name, value in (variables | lists).items() if value is not None and value != []}


def _column(record: Record, name: str, kind: type, expected: str) -> Any:
    """A list or object for the chat template, also where it is written as JSON; empty if the row has none."""
    value = record.row.get(name)
    if isinstance(value, str) and value.strip():
        try:
            value = json.loads(value, object_pairs_hook=keys_once)
        except (ValueError, RecursionError):
            pass
    if not value:
        return kind()
    if not isinstance(value, kind):
        raise wrong(record, name, expected, value)
    return value
