"""Five layouts of training data, told apart by their columns, brought into two shapes.

    layout              columns                               becomes
    messages            messages: [{role, content}]           a chat
    conversations       conversations: [{from, value}]        a chat (ShareGPT); a `system` column begins it
    prompt_completion   prompt, completion                    prompt + completion, as they stand
                        ... both lists of {role, content}     a chat; only turns of the completion are answers
    alpaca              instruction, output; input optional   a chat: instruction and input, output
    text                text                                  plain text: one long answer to an empty prompt

The first layout of this list whose columns are all there is taken, so a file that also carries a leftover
`prompt` or `text` column reads as its richest layout; `data_format` overrides. Further columns are ignored,
except `tools` of a chat, which the template gets to see.

Strings in prompt and completion are joined byte for byte, also when the tokenizer has a chat template:
whoever writes prompts out means them, and scoring answers by log-likelihood needs exactly that text. Who
wants the chat template writes `messages`.

A turn is an answer when its role is "assistant"; `weight: 0` in a turn (the convention of hosted
fine-tuning services) takes it out of training. Anything of the wrong type is refused with file, row, column
and what was found.
"""

import json
from dataclasses import dataclass
from typing import Any

from keyhole.data.files import Record
from keyhole.errors import UserError

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
}  # fmt: skip


@dataclass(slots=True)
class Example:
    """A chat (`turns`), or plain text split where the answer begins (`turns` is None)."""

    record: Record
    turns: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    prompt: str = ""
    answer: str = ""


def detect(record: Record) -> str:
    """The layout of the file this row begins."""
    for name, columns in COLUMNS.items():
        if all(column in record.row for column in columns):
            return name
    expected = "; ".join(f"{name}: {', '.join(columns)}" for name, columns in COLUMNS.items())
    raise UserError(
        f"{record.where}: cannot tell the data format from the columns\n"
        f"  found:    {', '.join(map(str, record.row)) or 'none'}\n"
        f"  expected: {expected}\n"
        "  rename the columns, or set data_format"
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
            f"found: {', '.join(map(str, record.row)) or 'none'}"
        )
    if layout == "messages":
        return Example(record, _chat(record, "messages", _turns(record, "messages")), _tools(record))
    if layout == "conversations":
        return Example(record, _system(record) + _sharegpt(record), _tools(record))
    if layout == "prompt_completion":
        return _prompt_completion(record)
    if layout == "alpaca":
        return Example(record, _alpaca(record))
    return Example(record, answer=_string(record, "text"))


def _wrong(record: Record, column: str, expected: str, value: Any) -> UserError:
    found = f"{type(value).__name__} {value!r:.60}" if value is not None else "null"
    return UserError(f"{record.where}: column {column}: expected {expected}, found {found}")


def _string(record: Record, column: str, optional: bool = False) -> str:
    value = record.row.get(column)
    if optional and value is None:
        return ""
    if not isinstance(value, str):
        raise _wrong(record, column, "text", value)
    return value


def _turns(record: Record, column: str) -> list[Any]:
    """The list in a column; in CSV it is written as JSON."""
    value = record.row[column]
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except json.JSONDecodeError:
            pass
    if not isinstance(value, list):
        raise _wrong(record, column, "a list of turns", value)
    return value


def _chat(record: Record, column: str, turns: list[Any]) -> list[dict[str, Any]]:
    return [_turn(record, f"{column}[{i}]", turn) for i, turn in enumerate(turns)]


def _turn(record: Record, place: str, turn: Any) -> dict[str, Any]:
    if not isinstance(turn, dict):
        raise _wrong(record, place, "an object with role and content", turn)
    if not isinstance(turn.get("role"), str) or "content" not in turn:
        raise _wrong(record, place, "an object with role and content", turn)
    if turn.get("weight", 1) not in (0, 1, None):
        raise _wrong(record, f"{place}.weight", "0 or 1", turn["weight"])
    out = {key: value for key, value in turn.items() if value is not None}  # Parquet fills absent keys with null
    out["content"] = _content(record, f"{place}.content", turn)
    return out


def _content(record: Record, place: str, turn: dict[str, Any]) -> str:
    """Text of a turn: a string, or a list of text parts. Only a turn that calls tools may have none."""
    content = turn["content"]
    if content is None and turn.get("tool_calls"):
        return ""
    if isinstance(content, list) and all(isinstance(p, dict) and isinstance(p.get("text"), str) for p in content):
        return "".join(part["text"] for part in content)
    if not isinstance(content, str):
        raise _wrong(record, place, "text", content)
    return content


def _system(record: Record) -> list[dict[str, Any]]:
    text = _string(record, "system", optional=True)
    return [{"role": "system", "content": text}] if text else []


def _sharegpt(record: Record) -> list[dict[str, Any]]:
    turns = []
    for i, turn in enumerate(_turns(record, "conversations")):
        place = f"conversations[{i}]"
        if isinstance(turn, dict) and "role" in turn:
            turns.append(_turn(record, place, turn))
            continue
        if not isinstance(turn, dict) or "from" not in turn or not isinstance(turn.get("value"), str):
            raise _wrong(record, place, "an object with from and value", turn)
        role = SHAREGPT_ROLES.get(str(turn["from"]).lower())
        if role is None:
            raise _wrong(record, f"{place}.from", f"one of {', '.join(SHAREGPT_ROLES)}", turn["from"])
        turns.append({"role": role, "content": turn["value"]})
    return turns


def _prompt_completion(record: Record) -> Example:
    prompt, completion = record.row["prompt"], record.row["completion"]
    if isinstance(prompt, list) and isinstance(completion, list):
        before = [turn | {"weight": 0} for turn in _chat(record, "prompt", prompt)]
        return Example(record, before + _chat(record, "completion", completion), _tools(record))
    return Example(record, prompt=_string(record, "prompt"), answer=_string(record, "completion"))


def _alpaca(record: Record) -> list[dict[str, Any]]:
    instruction, given = _string(record, "instruction"), _string(record, "input", optional=True)
    question = f"{instruction}\n\n{given}" if given.strip() else instruction
    answer = {"role": "assistant", "content": _string(record, "output")}
    return [*_system(record), {"role": "user", "content": question}, answer]


def _tools(record: Record) -> list[dict[str, Any]] | None:
    tools = record.row.get("tools")
    if not tools:
        return None
    if isinstance(tools, str):
        tools = _turns(record, "tools")
    if not isinstance(tools, list):
        raise _wrong(record, "tools", "a list of tool descriptions", tools)
    return tools
