"""The positions of the answers in the text of a chat.

An answer is *the text that the template writes for an assistant turn, after the text that the model is given*: words,
reasoning, tool calls, end of the turn. If a template marks its answers with `{% generation %}`, exactly the marked text
is trained on: nothing of a chat in which it marks nothing. Otherwise

    turn i    what is written while the template's loop is at message i (chat_template.py); for the last turn also the
              text after the loop. A template may rewrite earlier turns (drop reasoning, or close a turn differently if
              it is the last): only the final text counts.
    given     before = render(turns[:i], generation prompt on). If `before` is a prefix of the text, the answer begins
              after it; if the template writes earlier turns otherwise when they come last, what the turn has in common
              with the generation prompt is given. The first turn has nothing before it but that prompt.

If a template has no loop over the messages, a turn is the difference of two prefixes of the chat; if these are not
prefixes, the row is refused, and the message says what to do. keyhole never trains on a guess.

Text that the template does not write cannot be trained on, and is counted (`Lost`). A turn whose calls are missing is
not trained on at all: it would teach the model to stop where the assistant went on. The same holds for an empty turn
with its text under another key. A tool's result that the template writes inside the assistant's turn (Gemma 4) is cut
out of the answer.
"""

import os
import re
from collections import Counter
from typing import NamedTuple

from keyhole.data.chat_template import ChatTemplate, Given, Rendering, Span, Turns
from keyhole.data.turns import (
    TRAIN,
    Turn,
    called_names,
    described_names,
    further_texts,
    is_trained,
    is_written,
    reasoning,
    texts_in,
    words,
)
from keyhole.data.worker import why
from keyhole.errors import UserError, printable

SPACE = re.compile(r"\s*")
ABOUT_TURNS = ("name", "tool_call_id")  # keys of turns that are no answers, which few templates write


class Chat(NamedTuple):
    """What a row gives the template, and its place in the file."""

    turns: Turns
    given: Given
    where: str


class Lost(NamedTuple):
    """What the template leaves out of a chat.

    counts: turns by what is missing of them (calls, reasoning, text), or odd about them (empty, unheard: no answer and
    marked for training), turns of other roles with text that is not written (context), and 1 if tools or documents are
    not. keys: of turns, with texts that are not written. variables: set by the user and never read."""

    counts: Counter[str] = Counter()
    keys: tuple[str, ...] = ()
    variables: tuple[str, ...] = ()


class Rendered(NamedTuple):
    """A text and the half-open character spans of its answers, end of turn included."""

    text: str
    spans: list[Span]
    lost: Lost = Lost()
    marked: bool = False  # the template marks its answers


def find(template: ChatTemplate, chat: Chat) -> Rendered:
    """The whole chat, and its trained answers."""
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
    spans: list[Span] = []
    counts, keys = Counter[str](), list[str]()
    for i, (turn, given) in enumerate(zip(chat.turns, turns, strict=True)):
        unsaid: list[str] = []
        if is_trained(turn):
            found = _Answer(template, chat, turns, i, done).spans()
            missing, unsaid = _missing(given, "".join(done.text[a:b] for a, b in found))
            counts.update(missing)
            spans += [] if missing["calls"] or (missing["empty"] and unsaid) else found
        elif turn["role"] != "assistant":
            texts = {key: texts for key, texts in further_texts(given).items() if key not in ABOUT_TURNS}
            unsaid = [key for key, said in texts.items() if not all(is_written(each, done.text) for each in said)]
            counts["context"] += not is_written(given["content"].strip(), done.text)
            counts["unheard"] += any(turn.get(key) == 1 for key in TRAIN)  # only answers are trained on
        keys += unsaid
    counts["tools"] = any(name not in done.text for name in described_names(chat.given.get("tools")))
    documents = filter(None, map(texts_in, chat.given.get("documents") or ()))  # the longest text is its content
    counts["documents"] = any(not is_written(max(texts, key=len), done.text) for texts in documents)
    lost = Lost(+counts, tuple(keys), tuple(template.unread(chat.given)))
    return Rendered(done.text, spans, lost, done.marked is not None)


class _Answer(NamedTuple):
    """Answer i of a chat, and the text of the whole chat."""

    template: ChatTemplate
    chat: Chat
    turns: Turns
    i: int
    done: Rendering

    def spans(self) -> list[Span]:
        text, turn = self.done.text, self.turns[self.i]
        if self.done.marked is not None:
            return self._marked(self.done.marked)
        found, said = self._written(), words(turn)
        if not found or (said and not any(said in text[a:b] for a, b in found)):
            found = self._by_prefix() or found
        question = next((t["content"].strip() for t in reversed(self.turns[: self.i]) if t["role"] == "user"), "")
        both = question and any(question in text[a:b] for a, b in found) and question not in text[: found[0][0]]
        if (not found and (said or reasoning(turn))) or self.template.drops_content or both:
            raise UserError(
                f"{self.chat.where}: cannot find turn {self.i + 1} (assistant) in what the chat template writes; give "
                "the turn weight 0, mark the answers in the template with {% generation %}, or write the chat out as "
                "prompt and completion"
            )
        return found

    def _marked(self, marked: list[Span]) -> list[Span]:
        """The marked spans inside the turn; if turns are unknown, the marked spans of all answers in order."""
        own = [(a, b) for a, b, owner in self.done.segments if owner == self.i]
        if own:
            return [mark for mark in marked if any(a <= mark[0] < b for a, b in own)]
        assistants = [k for k, turn in enumerate(self.turns) if turn["role"] == "assistant"]
        in_order = len(assistants) == len(marked) and not self.done.segments
        return [marked[assistants.index(self.i)]] if in_order else []

    def _written(self) -> list[Span]:
        """The spans that the template wrote for the turn, after the given text. Of a template that loops over the
        messages several times (first for a list of the roles, say), those behind all segments of earlier turns."""
        behind = max((b for _, b, owner in self.done.segments if owner < self.i), default=0)
        parts = [(a, b) for a, b, owner in self.done.segments if owner == self.i and a >= behind]
        if not parts:
            return []
        parts[-1] = (parts[-1][0], self._end(parts[-1][1]))
        start = self._start(parts[0][0])
        parts = [(max(a, start), b) for a, b in parts if b > start]
        for k in range(self.i + 1, len(self.turns)):
            if self.turns[k]["role"] != "tool":
                break
            parts = self._without_result(k, parts)
        return parts

    def _end(self, end: int) -> int:
        """The last answer ends with the text: the template closes it after its loop. If it is closed already, further
        stop tokens belong to it, and a remark of the template does not. Another answer without an end token of its own
        ends with the stop token that follows (GLM: <|user|>)."""
        text, last = self.done.text, self.i + 1 == len(self.turns)
        closed = text[:end].rstrip().endswith(self.template.special_words)
        if last and not closed:
            return len(text)
        while last or not closed:
            following = self.template.special.match(text, _behind_space(text, end))
            if following is None or following[0] not in self.template.stops:
                break
            end, closed = following.end(), True
        return len(text) if last and not text[end:].strip() else end

    def _start(self, begin: int) -> int:
        """Where the answer begins: after the given text. begin: where the turn begins."""
        text, before = self.done.text, None
        prompt = self.template.generation_prompt
        if self.i and (before := self.template.attempt(self.turns[: self.i], self.chat.given, prompt=True)):
            if text.startswith(before.text):
                return len(before.text)
            prompt = self.template.prompt_after(self.turns[: self.i], self.chat.given, before)
        if self.i == 0 and prompt.strip() and (at := text.find(prompt, begin)) >= 0:
            return at + len(prompt)  # behind a system prompt of the template's own
        return begin + self._shared(text[begin:], prompt)

    def _shared(self, text: str, prompt: str) -> int:
        """The length of the common prefix of a turn and the generation prompt; white space before both may differ. A
        partial match counts up to its last whole token (or line, without tokens), or to where the prompt goes on with a
        tag: of `<|im_start|>assistant\\n<think>` the header is given, though the answer has no <think>."""
        space = _behind_space(text, 0)
        if prompt.strip() and text.startswith(prompt.lstrip(), space):
            return len(prompt) if text.startswith(prompt) else space + len(prompt.lstrip())
        shared = os.path.commonprefix([text, prompt])
        tokens = [match.end() for match in self.template.special.finditer(shared)]
        tags = [p for p in range(len(shared) + 1) if prompt.startswith("<", p)]
        lines = [] if tokens else [match.end() for match in re.finditer("\n", shared)]
        return _behind_space(shared, max(tokens + tags + lines, default=0))

    def _without_result(self, k: int, parts: list[Span]) -> list[Span]:
        """The parts without the tool result of turn k, if it is written here and not at turn k."""
        text, special, result = self.done.text, self.template.special, self.turns[k]["content"].strip()
        at_home = any(result in text[a:b] for a, b, owner in self.done.segments if owner == k)
        here = next(((a, b) for a, b in parts if text.find(result, a, b) >= 0), None)
        if not result or at_home or here is None:
            return parts
        at = text.find(result, *here)
        opening = list(special.finditer(text, here[0], at))
        closing = special.search(text, at + len(result), here[1])
        left = (
            at if not opening else opening[-1].end() if opening[-1][0] in self.template.stops else opening[-1].start()
        )
        kept = [(here[0], left), (closing.end() if closing else at + len(result), here[1])]
        return [p for part in parts for p in (kept if part == here else [part]) if p[1] > p[0]]

    def _by_prefix(self) -> list[Span]:
        """The difference of two prefixes of the chat."""
        text, given, last = self.done.text, self.chat.given, self.i + 1 == len(self.turns)
        before = self.template.attempt(self.turns[: self.i], given, prompt=True)
        upto = self.done if last else self.template.attempt(self.turns[: self.i + 1], given)
        if before is None or upto is None or not text.startswith(before.text) or not text.startswith(upto.text):
            return []
        return [(len(before.text), len(upto.text))] if len(before.text) < len(upto.text) else []


def _missing(turn: Turn, said: str) -> tuple[Counter[str], list[str]]:
    """The parts of a turn that are missing in its rendered text, and its keys with texts that are."""
    called = Counter(called_names(turn)).items()  # two calls of one function write its name twice
    calls = any(len(re.findall(rf"(?<!\w){re.escape(name)}(?!\w)", said)) < count for name, count in called)
    thought, spoken = reasoning(turn), words(turn)
    keys = [key for key, texts in further_texts(turn).items() if any(text not in said for text in texts)]
    empty = not thought and not spoken and not turn.get("tool_calls")
    return Counter(calls=calls, reasoning=thought not in said, text=spoken not in said, empty=empty), keys


def _behind_space(text: str, at: int) -> int:
    found = SPACE.match(text, at)
    return at if found is None else found.end()
