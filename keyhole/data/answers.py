"""The positions of the answers in the text of a chat.

An answer is *the text that the template writes for an assistant turn, after the text that the model is given*: words,
reasoning, tool calls, end of the turn. There are two ways to find it:

    marks     if a template marks its answers with `{% generation %}`, exactly the marked text is trained on: nothing of
              a turn in which it marks nothing
    turns     otherwise an answer is what is written while the template's loop is at message i (chat_template.py), for
              the last turn also the text after the loop, without the generation prompt that it begins with: the part of
              it that a finished answer has. A template may rewrite earlier turns (drop reasoning, or close a turn
              differently if it is the last): only the final text counts

Where neither finds the answer (the template does not loop over the messages), or where what it finds holds the text of
another turn (a question, or the result of a tool), the row is refused, and the message says what to do. keyhole never
trains on a guess.

Text that the template does not write cannot be trained on, and is counted (`lost`). A turn whose calls are missing is
not trained on at all: it would teach the model to stop where the assistant went on. The same holds for an empty turn
with its text under another key.
"""

import json
import re
from collections import Counter
from itertools import takewhile
from typing import NamedTuple

from keyhole.data.chat_template import ChatTemplate, Given, Rendering, Span, Turns
from keyhole.data.turns import READ, REASONING, Turn, is_trained, reasoning, words
from keyhole.errors import UserError, printable
from keyhole.machine.worker import why

NO_WORDS = (*READ, *REASONING, "id", "name", "tool_call_id")  # keys of turns whose texts nobody says


class Chat(NamedTuple):
    """What a row gives the template, and its place in the file."""

    turns: Turns
    given: Given
    where: str


class Rendered(NamedTuple):
    """A text and the half-open character spans of its answers, end of turn included. lost: what the template leaves out
    of the chat, by its kind (report.py)."""

    text: str
    spans: list[Span]
    lost: Counter[str] = Counter()
    marked: bool = False  # the template marks its answers


def find(template: ChatTemplate, chat: Chat) -> Rendered:
    if not chat.turns:
        return Rendered("", [])
    turns = template.ready(chat.turns)
    try:
        done = template.run(turns, chat.given)
    except Exception as error:  # templates raise any error
        roles = printable(", ".join(turn["role"] for turn in turns), 200)
        raise UserError(
            f"{chat.where}: the chat template cannot write this chat (roles: {roles}): {printable(why(error), 400)}"
        ) from None
    prompt = template.generation_prompt(chat.given) if done.marked is None else ""
    spans: list[Span] = []
    lost = _lost_around(template, chat, done.text)
    for i, (turn, given) in enumerate(zip(chat.turns, turns, strict=True)):
        further = [text for key, text in given.items() if isinstance(text, str) and key not in NO_WORDS]
        if is_trained(turn):
            found = _marked(done, i) if done.marked is not None else _written(template, turns, i, done, prompt)
            said = "".join(done.text[a:b] for a, b in found)
            told = f"{reasoning(given)} {words(given)}".split()
            hidden = bool(told) and not any(word in said for word in told)
            if done.marked is None and (hidden or _holds_another(turns, i, found, done)):
                raise UserError(
                    f"{chat.where}: cannot find turn {i + 1} (assistant) in what the chat template writes; give the "
                    "turn weight 0, mark the answers in the template with {% generation %}, or write the chat out as "
                    "prompt and completion"
                )
            missing = _missing(given, further, said)
            lost.update(missing)
            spans += [] if missing["calls"] or (missing["empty"] and missing["text"]) else found
        elif turn["role"] != "assistant":
            lost["context"] += not all(_is_written(text, done.text) for text in (given["content"], *further))
    return Rendered(done.text, spans, +lost, done.marked is not None)


def _marked(done: Rendering, i: int) -> list[Span]:
    own = [(a, b) for a, b, owner in done.segments if owner == i]
    return [mark for mark in done.marked or () if any(a <= mark[0] < b for a, b in own)]


def _written(template: ChatTemplate, turns: Turns, i: int, done: Rendering, prompt: str) -> list[Span]:
    """The spans that the template wrote for turn i, after the given text. Of a template that loops over the messages
    several times (first for a list of the roles, say), those behind all segments of earlier turns."""
    text, last = done.text, i + 1 == len(turns)
    behind = max((b for _, b, owner in done.segments if owner < i), default=0)
    parts = [(a, b) for a, b, owner in done.segments if owner == i and a >= behind]
    if not parts:
        return []
    start, end = parts[0][0], parts[-1][1]
    if i == 0 and prompt.strip() and (at := text.find(prompt, start)) >= 0:
        start = at + len(prompt)  # behind a system prompt of the template's own
    else:
        start += _shared(template, text[start:end], prompt)
    closed = text[:end].rstrip().endswith(template.special_words)
    following = template.stops.match(text, end)
    if following and (last or not closed):  # without an end of its own it ends with the stop token that follows (GLM)
        end = following.end()
    if last and (not closed or not text[end:].strip()):
        end = len(text)  # the template closes it after its loop; what it says behind a closed answer is a remark
    parts[-1] = (parts[-1][0], end)
    return [(max(a, start), b) for a, b in parts if b > start]


def _shared(template: ChatTemplate, turn: str, prompt: str) -> int:
    """How much of a turn is the generation prompt, or the part of it before a tag, or up to a whole token or line: of
    `<|im_start|>assistant\\n<think>` the header is given, though the answer has no <think>."""
    space, prompt = len(turn) - len(turn.lstrip()), prompt.lstrip()
    ends = [match.end() for match in (*template.special.finditer(prompt), *re.finditer("\n", prompt))]
    ends += [match.start() for match in re.finditer("<", prompt)] + [len(prompt)]
    shared = max(end for end in (0, *ends) if turn.startswith(prompt[:end], space))
    return space + shared if shared else 0


def _holds_another(turns: Turns, i: int, found: list[Span], done: Rendering) -> bool:
    """Whether the question before an answer, or the result of a tool after it, stands inside of the answer, and not
    where its own turn is written."""
    question = next((k for k in reversed(range(i)) if turns[k]["role"] == "user"), None)
    results = takewhile(lambda k: turns[k]["role"] == "tool", range(i + 1, len(turns)))
    for k in (*results, *([] if question is None else [question])):
        content = turns[k]["content"].strip()
        own = [(a, b) for a, b, owner in done.segments if owner == k]
        inside, at_home = (any(content in done.text[a:b] for a, b in spans) for spans in (found, own))
        if content and inside and not at_home:
            return True
    return False


def _missing(turn: Turn, further: list[str], said: str) -> Counter[str]:
    """The parts of a turn that are missing in its rendered text. further: texts under keys of its own."""
    names = Counter(call["function"]["name"] for call in turn.get("tool_calls") or ())  # two calls write a name twice
    calls = any(len(re.findall(rf"(?<!\w){re.escape(name)}(?!\w)", said)) < count for name, count in names.items())
    thought, spoken = reasoning(turn), words(turn)
    text = any(text.strip() not in said for text in (spoken, *further))
    return Counter(calls=calls, reasoning=thought not in said, text=text, empty=not (thought or spoken or names))


def _lost_around(template: ChatTemplate, chat: Chat, text: str) -> Counter[str]:
    """What is missing of that which a row gives the template besides its turns."""
    tools = [tool.get("function", tool) for tool in chat.given.get("tools") or () if isinstance(tool, dict)]
    names = [tool["name"] for tool in tools if isinstance(tool, dict) and isinstance(tool.get("name"), str)]
    documents = [each if isinstance(each, dict) else {"": each} for each in chat.given.get("documents") or ()]
    texts = [[value for value in each.values() if isinstance(value, str)] for each in documents]
    return Counter(
        tools=any(name not in text for name in names),
        documents=not all(_is_written(max(each, key=len, default=""), text) for each in texts),  # the longest: its text
        variables=template.ignores(chat.given),
    )


def _is_written(text: str, where: str) -> bool:
    """Whether a text occurs somewhere as it stands, or as JSON encodes it."""
    text = text.strip()
    return any(form in where for form in (text, json.dumps(text)[1:-1], json.dumps(text, ensure_ascii=False)[1:-1]))
