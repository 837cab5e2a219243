"""One turn of a chat: its allowed content, whether it is trained on, and its parts.

    role, content        required; only a turn that calls tools may have no content. The assistant's role is
                         `assistant`: a turn of `model` or `Assistant` would not be trained on, so it is refused;
                         so is `human` or `User`, which templates would write as an unknown role, or drop
    reasoning            under one of the names of REASONING, or inside the content, before </think>
    tool_calls           [{function: {name, arguments}}], or {name, arguments} alone; arguments: an object or JSON text.
                         `function_call`, one call under its older name, becomes a list of one
    weight, train        `weight: 0` (hosted fine-tuning services) and `train: false` (axolotl; `training` and
                         ms-swift's `loss` mean the same) exclude a turn
    other keys           passed to the template; texts under them that it does not write are reported

Templates differ in how they expect the arguments of a call: most encode an object themselves, some concatenate JSON
text. With the wrong form they encode the text twice, print Python's dict, or fail; `call_as` converts the arguments.
"""

import json
from typing import Any

from keyhole.data.opened import Record, Row
from keyhole.data.readers import parse_json
from keyhole.errors import UserError, printable

OWN_VARIABLES = ("messages", "tools", "documents", "add_generation_prompt")  # of a chat template, set for every row
REASONING = ("reasoning_content", "thinking", "reasoning")
TRAIN = ("train", "training", "loss")  # true or false: three names of one flag
FLAGS = ("weight", *TRAIN)  # not passed to the template
READ = ("role", "content", "tool_calls", *FLAGS)  # keys with a meaning of their own
ASSISTANTS = ("ai", "assistant", "bot", "chatbot", "chatgpt", "gpt", "model")  # what others call an assistant
USERS = {"human": "user", "prompter": "user"}  # what others call a user
ABOUT_CALLS = ("name", "type", "id", "index", "description", "strict")  # keys of a call that are no arguments
CONTENT_PARTS = (None, "text", "input_text", "output_text")

Turn = Row
Call = Row


def wrong(record: Record, column: str, expected: str, value: object) -> UserError:
    """The error for a value of the wrong type, with its row, its column and the beginning of the value."""
    try:
        text = repr(value) if not isinstance(value, str) else repr(value[:60])
    except (RecursionError, ValueError):  # nested too deeply, or an integer with too many digits
        text = "..."
    found = f"{type(value).__name__} {text:.60}" if value is not None else "null"
    return UserError(f"{record.where}: column {printable(column, 80)}: expected {expected}, found {found}")


def parsed(value: object) -> Any:
    """A list or an object; in CSV it is written as JSON."""
    try:
        return parse_json(value) if isinstance(value, str) and value.strip() else value
    except (ValueError, RecursionError):
        return value


def read_turn(record: Record, place: str, turn: object) -> Turn:
    """A valid turn, without nulls, which Parquet inserts for missing keys."""
    if not isinstance(turn, dict) or not isinstance(turn.get("role"), str):
        raise wrong(record, place, "an object with role and content", turn)
    if turn.get("function_call") is not None and not turn.get("tool_calls"):
        others = {key: value for key, value in turn.items() if key != "function_call"}
        turn = others | {"tool_calls": [turn["function_call"]]}
    calls, role, plain = turn.get("tool_calls") or [], turn["role"], turn["role"].strip().lower()
    meant, content = USERS.get(plain, plain), turn.get("content")
    if isinstance(content, list) and all(_is_text(part) for part in content):
        content = "".join(part["text"] for part in content)
    another_name = role != "assistant" and plain in ASSISTANTS and not _is_excluded(turn)
    unknown_name = meant in ("system", "user", "tool") and role != meant
    refused = (
        ("content" not in turn and not calls, "", "an object with role and content", turn),
        (turn.get("weight", 1) not in (0, 1, None), ".weight", "0 or 1", turn.get("weight")),
        *((turn.get(key) not in (True, False, None), f".{key}", "true or false", turn.get(key)) for key in TRAIN),
        (not isinstance(calls, list), ".tool_calls", "a list of calls", calls),
        (another_name, ".role", "assistant (only its turns are trained on)", role),
        (unknown_name, ".role", f"{meant} (the name that templates know)", role),
        (not isinstance(content, str) and not (content is None and calls), ".content", "text", content),
    )
    for holds, key, expected, value in refused:
        if holds:
            raise wrong(record, f"{place}{key}", expected, value)
    for i, call in enumerate(calls):
        _check_call(record, f"{place}.tool_calls[{i}]", call)
    return {key: value for key, value in turn.items() if value is not None} | {"content": content or ""}


def _is_text(part: object) -> bool:
    return isinstance(part, dict) and isinstance(part.get("text"), str) and part.get("type") in CONTENT_PARTS


def _check_call(record: Record, place: str, call: object) -> None:
    """Refuses a call without a name, with its arguments under a name that no template reads (they would be {}), or
    with arguments that are no object: a template would write a text that no program can call with."""
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise wrong(record, place, "a call, {function: {name, arguments}}", call)
    others = [key for key, value in function.items() if key not in ABOUT_CALLS and value is not None]
    if function.get("arguments") is None and others:
        raise wrong(record, f"{place}.{others[0]}", "the arguments of a call under the key arguments", call)
    if not isinstance(_arguments(function), dict):
        raise wrong(record, f"{place}.arguments", "an object, or one as JSON text", function["arguments"])


def _is_excluded(turn: Turn) -> bool:
    return turn.get("weight") == 0 or any(turn.get(key) == 0 for key in TRAIN)  # 0 is false, as tables write it


def is_trained(turn: Turn) -> bool:
    """Whether a turn is trained on: an assistant's turn that is not excluded."""
    return turn["role"] == "assistant" and not _is_excluded(turn)


def call_as(call: Call, text: bool) -> Call:
    """A tool call under `function`, with its arguments as JSON text or as an object."""
    call = call if "function" in call else {"type": "function", "function": call}
    arguments = call["function"].get("arguments")
    if not text or not isinstance(arguments, str) or not arguments.strip():
        arguments = _arguments(call["function"])
        arguments = json.dumps(arguments, ensure_ascii=False) if text else arguments
    return {**call, "function": {**call["function"], "arguments": arguments}}


def _arguments(function: Call) -> Any:
    """The arguments of a call; {} for null and for an empty text, None for a text that is no JSON."""
    given = function.get("arguments") or {}
    try:
        return given if not isinstance(given, str) else json.loads(given) if given.strip() else {}
    except (ValueError, RecursionError):
        return None


def reasoning(turn: Turn) -> str:
    """The reasoning of a turn: a separate field, or the text before </think>."""
    field = next((turn[key] for key in REASONING if isinstance(turn.get(key), str)), "")
    return (field or turn["content"].rpartition("</think>")[0].rpartition("<think>")[2]).strip()


def words(turn: Turn) -> str:
    """The text of a turn without its reasoning."""
    return str(turn["content"].rpartition("</think>")[2].strip())
