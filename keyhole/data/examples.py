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
(`_given`); each may be written as JSON text.

Strings in prompt and completion are joined byte for byte, even if the tokenizer has a chat template: a written-out
prompt is used as written, and scoring answers by log-likelihood needs exactly that text. To use the chat template,
write `messages`. turns.py defines what a turn may contain, and which turns are trained on. Values of the wrong type are
refused with file, row, column and the value found.
"""

import datetime
import difflib
import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from decimal import Decimal

from keyhole.data.opened import Record, Row
from keyhole.data.turns import FLAGS, OWN_VARIABLES, Turn, parsed, read_turn, wrong
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

AUTO, TABLE = "auto", "prompt_completion"
PIECE = re.compile(r"\{\{|\}\}|\{([^{}]*)\}|[{}]")  # of a RowTemplate: a brace, a column, or a mistake
CHAT_COLUMNS = ("system", "tools", "documents", "chat_template_kwargs")  # of every chat, beside its turns
ALPACA_COLUMNS = ("input", "history")
WITH_A_MEANING = (*CHAT_COLUMNS, *ALPACA_COLUMNS, *FLAGS)  # columns, or keys of turns, that other rows use


@dataclass(slots=True)
class Example:
    """A chat (`turns`), or plain text split where the answer begins (`turns` is None). given: what the row gives the
    chat template besides the turns, by variable."""

    record: Record
    turns: list[Turn] | None = None
    given: Row = field(default_factory=dict)
    prompt: str = ""
    answer: str = ""


class RowTemplate:
    """A text from the columns of a row: `prompt: "{sentence} It was"` turns any table into training data.

        {sentence}     the cell of that column; a name may have spaces and dots ({Customer name})
        {{ and }}      a brace

    Texts are inserted unchanged, numbers and booleans as in JSON, dates as 2025-01-31. A null, a NaN (a missing number
    of pandas), a list, an object or a missing column is refused; an empty cell of a CSV is an empty text."""

    def __init__(self, text: str, key: str) -> None:
        """key: the name of its setting."""
        self.text, self.key = text, key
        pieces = list(PIECE.finditer(text))
        if alone := next((piece[0] for piece in pieces if piece[0] in ("{", "}")), None):
            raise UserError(f"{key}: {text!r:.120}: a single {alone}; a column is {{name}}, a brace {{{{ or }}}}")
        if all(piece[1] is None for piece in pieces):
            raise UserError(f"{key}: {text!r:.120} names no column; write one in braces, such as {{text}}")

    def fill(self, record: Record) -> str:
        return PIECE.sub(lambda p: p[0][0] if p[1] is None else self._cell(record, p[1].strip()), self.text)

    def _cell(self, record: Record, column: str) -> str:
        if column not in record.row:
            close = difflib.get_close_matches(column, [str(name) for name in record.row], n=1)
            meant = f"; did you mean {{{close[0]}}}?" if close else ""
            found = listed(record.row) or "none"
            raise UserError(f"{record.where}: {self.key}: there is no column {column!r}; found: {found}{meant}")
        value = record.row[column]
        if found := no_text(value):
            what = f"is {found}, which is no text; correct or remove the row"
            raise UserError(f"{record.where}: {self.key}: column {column!r} {what}")
        return json.dumps(value) if isinstance(value, bool | int | float) else str(value)


def no_text(value: object) -> str:
    """What a value is that has no text; empty if it has one. A missing number is NaN in the files of pandas; texts of
    Hive and Impala may be bytes in Parquet."""
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return "null" if value is None else "not a number" if math.isnan(value) else "infinite"
    if isinstance(value, str | bool | int | float | Decimal | datetime.date | datetime.time):
        return ""
    kinds: dict[type, str] = {dict: "an object", list: "a list", tuple: "a list", bytes: "bytes"}
    return kinds.get(type(value), f"a {type(value).__name__}")


def with_columns(record: Record, columns: dict[str, str] | None, templates: Mapping[str, RowTemplate]) -> Record:
    """The row with the columns that the settings rename, and then those that they make."""
    renamed = columns or {}
    if missing := [theirs for theirs in renamed.values() if theirs not in record.row]:
        found = listed(record.row) or "none"
        raise UserError(f"{record.where}: columns: the data have no column {listed(missing)}; found: {found}")
    row = {name: value for name, value in record.row.items() if name not in renamed.values()}
    record = replace(record, row=row | {ours: record.row[theirs] for ours, theirs in renamed.items()})
    return replace(record, row=record.row | {key: template.fill(record) for key, template in templates.items()})


def layout_of(record: Record, data_format: str | None, templates: Mapping[str, RowTemplate]) -> tuple[str, str]:
    """(layout, reason) of a file, from its first row and the settings."""
    if templates:
        return TABLE, f"{' and '.join(templates)} from columns"
    if data_format is not None:
        layout, why = str(data_format), "data_format is set"
    elif layout := next((name for name, columns in COLUMNS.items() if record.row.keys() >= set(columns)), ""):
        why = f"found column {', '.join(COLUMNS[layout])}"
    else:
        expected = "; ".join(f"{name}: {', '.join(columns)}" for name, columns in COLUMNS.items())
        raise UserError(
            f"{record.where}: cannot tell the data format from the columns\n"
            f"  found:    {listed(record.row) or 'none'}\n"
            f"  expected: {expected}\n"
            "  rename the columns (columns: {prompt: question, completion: answer}), make a prompt of them\n"
            '  (prompt: "{question} It was", completion: " {answer}"), or set data_format'
        )
    if record.is_document:
        why = "plain text: one document, or several between lines of <|endoftext|>"
    return layout, why


def example_of(record: Record, layout: str) -> Example:
    if missing := [column for column in COLUMNS[layout] if column not in record.row]:
        hint = "; make it of others: completion: ' {label}'" if missing == ["completion"] else ""
        raise UserError(
            f"{record.where}: column {', '.join(missing)} is missing for data format {layout}; "
            f"found: {listed(record.row) or 'none'}{hint}"
        )
    if layout == "text":
        return Example(record, answer=_string(record, "text"))
    if layout == TABLE and not all(isinstance(record.row[column], list) for column in COLUMNS[TABLE]):
        return Example(record, prompt=_string(record, "prompt"), answer=_string(record, "completion"))
    if layout == TABLE:
        turns = [turn | {"weight": 0} for turn in _turns(record, "prompt", read_turn)]
        turns += _turns(record, "completion", read_turn)
    elif layout == "alpaca":
        turns = _alpaca(record)
    else:
        turns = _turns(record, layout, read_turn if layout == "messages" else _sharegpt)
    system = _string(record, "system", optional=True)  # a column, which the chat may repeat and not contradict
    own = next((turn["content"] for turn in turns if turn["role"] == "system"), None)
    if system and own is not None and own.strip() != system.strip():
        raise UserError(
            f"{record.where}: column system differs from the system turn of the chat; keep one of them, or name the "
            "column otherwise"
        )
    begin: list[Turn] = [{"role": "system", "content": system}] if system and own is None else []
    return Example(record, begin + turns, _given(record))


def unread(example: Example, layout: str) -> list[str]:
    """The columns of a row that its layout does not use, and that are not empty. The index that pandas writes is no
    column of the data."""
    read = {*COLUMNS[layout], *(ALPACA_COLUMNS if layout == "alpaca" else ()), "", "Unnamed: 0"}
    read |= set(CHAT_COLUMNS if example.turns is not None else ())
    return [
        name
        for name, value in example.record.row.items()
        if name not in read and value not in (None, "", [], {}) and not name.startswith("__index_level_")
    ]


def _string(record: Record, column: str, optional: bool = False) -> str:
    value = record.row.get(column)
    if optional and value is None:
        return ""
    if not isinstance(value, str):
        raise wrong(record, column, "text", value)
    return value


def _turns(record: Record, column: str, read: Callable[[Record, str, object], Turn]) -> list[Turn]:
    turns = parsed(record.row[column])
    if not isinstance(turns, list):
        raise wrong(record, column, "a list of turns", turns)
    return [read(record, f"{column}[{i}]", turn) for i, turn in enumerate(turns)]


def _sharegpt(record: Record, place: str, turn: object) -> Turn:
    if isinstance(turn, dict) and "role" in turn:
        return read_turn(record, place, turn)
    if not isinstance(turn, dict) or "from" not in turn or not isinstance(turn.get("value"), str):
        raise wrong(record, place, "an object with from and value", turn)
    speaker = str(turn["from"]).lower()
    if speaker not in SHAREGPT_ROLES:
        raise wrong(record, f"{place}.from", f"one of {', '.join(SHAREGPT_ROLES)}", turn["from"])
    said: Turn = {"role": SHAREGPT_ROLES[speaker], "content": turn["value"]}
    if speaker == "function_call":
        call = parsed(turn["value"])
        if not isinstance(call, dict) or not isinstance(call.get("name"), str):
            raise wrong(record, f"{place}.value", 'a call in JSON, {"name": ..., "arguments": {...}}', turn["value"])
        said |= {"content": "", "tool_calls": [call]}
    return read_turn(record, place, {k: v for k, v in turn.items() if k not in ("from", "value")} | said)


def _alpaca(record: Record) -> list[Turn]:
    instruction, given = _string(record, "instruction"), _string(record, "input", optional=True)
    rounds = parsed(record.row.get("history") or [])  # before the question: [[question, answer], ...]
    pairs = [pair for pair in rounds if isinstance(pair, list | tuple)] if isinstance(rounds, list) else [()]
    if len(pairs) < len(rounds) or not all(len(p) == 2 and all(isinstance(text, str) for text in p) for p in pairs):
        raise wrong(record, "history", "a list of [question, answer] pairs", rounds)
    question = f"{instruction}\n\n{given}" if given.strip() else instruction
    said = [*(text for pair in pairs for text in pair), question, _string(record, "output")]
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(said)]


def _given(record: Record) -> Row:
    """What a row gives the chat template besides its turns: descriptions of functions, texts to answer from, and
    variables by name, which replace those of the setting."""
    found: Row = {}
    for name, kind, expected in (
        ("chat_template_kwargs", dict, "an object of variables"),
        ("tools", list, "a list of tool descriptions"),
        ("documents", list, "a list of documents"),
    ):
        value = parsed(record.row.get(name))
        if value and not isinstance(value, kind):
            raise wrong(record, name, expected, value)
        if value and kind is dict and (own := [variable for variable in OWN_VARIABLES if variable in value]):
            raise UserError(
                f"{record.where}: column chat_template_kwargs: {own[0]} is no variable to set; tools and documents are "
                "columns of their own"
            )
        found |= value or {} if kind is dict else {name: value} if value else {}
    return {name: value for name, value in found.items() if value is not None and value != []}
