"""One turn of a chat: its allowed content, whether it is trained on, and its parts.

    role, content        required; only a turn that calls tools may have no content
    reasoning            under one of the names of REASONING, or inside the content, before </think>
    tool_calls           [{function: {name, arguments}}], or {name, arguments} alone; arguments: an object or JSON text
    weight, train        `weight: 0` (hosted fine-tuning services) and `train: false` (axolotl) exclude a turn

Templates differ in how they expect the arguments of a call: most encode an object themselves, some concatenate JSON
text. With the wrong form they encode the text twice, print Python's dict, or fail; `call_as` converts the arguments.
"""

import json
from typing import Any

from keyhole.data.files import Record
from keyhole.errors import UserError, printable

REASONING = ("reasoning_content", "thinking", "reasoning")
FLAGS = ("weight", "train")  # not passed to the template

Turn = dict[str, Any]


def wrong(record: Record, column: str, expected: str, value: Any) -> UserError:
    """The error for a value of the wrong type, with its row, its column and the beginning of the value."""
    try:
        text = repr(value) if not isinstance(value, str) else repr(value[:60])
    except (RecursionError, ValueError):  # nested too deeply, or an integer with too many digits
        text = "..."
    found = f"{type(value).__name__} {text:.60}" if value is not None else "null"
    return UserError(f"{record.where}: column {printable(column, 80)}: expected {expected}, found {found}")


def read_turn(record: Record, place: str, turn: Any) -> Turn:
    """A valid turn, without nulls, which Parquet inserts for missing keys."""
    if not isinstance(turn, dict) or not isinstance(turn.get("role"), str):
        raise wrong(record, place, "an object with role and content", turn)
    if "content" not in turn and not turn.get("tool_calls"):
        raise wrong(record, place, "an object with role and content", turn)
    if turn.get("weight", 1) not in (0, 1, None):
        raise wrong(record, f"{place}.weight", "0 or 1", turn["weight"])
    if turn.get("train") not in (True, False, None):
        raise wrong(record, f"{place}.train", "true or false", turn["train"])
    if not isinstance(turn.get("tool_calls") or [], list):
        raise wrong(record, f"{place}.tool_calls", "a list of calls", turn["tool_calls"])
    out = {key: value for key, value in turn.items() if value is not None}
    out["content"] = _content(record, f"{place}.content", turn)
    return out


def _content(record: Record, place: str, turn: Turn) -> str:
    """Text of a turn: a string, or a list of text parts."""
    content = turn.get("content")
    if content is None and turn.get("tool_calls"):
        return ""
    if isinstance(content, list) and all(isinstance(p, dict) and isinstance(p.get("text"), str) for p in content):
        return "".join(part["text"] for part in content)
    if not isinstance(content, str):
        raise wrong(record, place, "text", content)
    return content


def is_trained(turn: Turn) -> bool:
    """Whether a turn is trained on: an assistant's turn that is not excluded."""
    return turn["role"] == "assistant" and turn.get("weight") != 0 and turn.get("train") is not False


def call_as(call: Any, text: bool) -> Any:
    """A tool call under `function`, with its arguments as JSON text or as an object."""
    if not isinstance(call, dict):
        return call
    if "function" not in call and "name" in call:
        call = {"type": "function", "function": call}
    function = call.get("function")
    if not isinstance(function, dict):
        return call
    arguments = function.get("arguments", {})
    if text and not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    elif not text and isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            pass  # not JSON: the template gets the text
    return {**call, "function": {**function, "arguments": arguments}}


def called_names(turn: Turn) -> list[str]:
    """The names of the functions that a turn calls."""
    calls = [call.get("function", call) for call in turn.get("tool_calls") or () if isinstance(call, dict)]
    return [call["name"] for call in calls if isinstance(call, dict) and isinstance(call.get("name"), str)]


def reasoning(turn: Turn) -> str:
    """The reasoning of a turn: a separate field, or the text before </think>."""
    field = next((turn[key] for key in REASONING if isinstance(turn.get(key), str)), "")
    return (field or turn["content"].rpartition("</think>")[0].rpartition("<think>")[2]).strip()


def words(turn: Turn) -> str:
    """The text of a turn without its reasoning."""
    return turn["content"].rpartition("</think>")[2].strip()
