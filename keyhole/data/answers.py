"""The positions of the answers in the text of a chat.

An answer is *the text that the template writes for an assistant turn, after the text that the model is given*: words,
reasoning, tool calls, end of the turn.

    turn i      the text that is written while the template's loop is at message i (template_segments.py); for the last
                turn also the text after the loop. A template may rewrite earlier turns (drop reasoning, or close a turn
                differently if it is the last): only the final text counts.
    given       before = render(turns[:i], generation prompt on). If `before` is a prefix of the text, the answer
                begins after it. A template may write earlier turns differently if they come last; then `before` is no
                prefix, and only its part from turn i - 1 on is compared. If that fails too, the common prefix of the
                turn and the generation prompt is taken as given. A chat that begins with an answer has nothing
                before it (but a template's own system prompt): its answer is what the same chat has after a question.

Each answer takes a rendering of everything before it, so a chat of n turns takes about n^2 / 4 turns. A chat
of more than LONG turns repeats itself: once SURE answers behind the same kind of turn all began after the same text,
another turn that begins with that text is not rendered again (the last one always is). A chat that takes more than
MOST_RENDERED turns even so is refused.

If a template marks its answers with `{% generation %}`, exactly the marked text is trained on: nothing of a chat in
which it marks nothing. If a template has no loop over the messages, a turn is the difference of two prefixes of the
chat; if these are not prefixes, the row is refused. keyhole never trains on a guess.

Text that the template does not write cannot be trained on, and is counted (`Lost`): tool calls, reasoning, text of a
turn, and keys that only some templates know. A turn whose calls are missing is not trained on at all: it would teach
the model to stop where the assistant went on. The same holds for an empty turn with its text under another key. What
the template leaves out before an answer (a system prompt, a question, documents, tools and their results) is counted
too, and so are variables that were set and that it never reads. A tool's result that the template writes inside the
assistant's turn (Gemma 4) is cut out of the answer.
"""

import operator
import os
import re
from collections import Counter
from typing import NamedTuple

from keyhole.data.chat_template import MARKER, ChatTemplate, Given, Turns
from keyhole.data.formats import Example
from keyhole.data.template_segments import Rendering
from keyhole.data.turns import (
    Turn,
    called_names,
    described_names,
    document_texts,
    further_texts,
    is_ignored_wish,
    is_trained,
    is_written,
    reasoning,
    words,
    written_forms,
)
from keyhole.errors import UserError, printable

SPACE = re.compile(r"\s*")
MOST_TURNS, MOST_RENDERED = 2**12, 2**17  # of a chat; and turns that are written to find its answers
LONG, SURE = 128, 16  # turns of a long chat; answers that began after the same text, before that is taken as given
ABOUT_TURNS = ("name", "tool_call_id")  # keys of turns that are no answers, which few templates write

Span = tuple[int, int]


class Lost(NamedTuple):
    """Counts of turns, most of them the assistant's, of which the template omits something."""

    calls: int = 0
    reasoning: int = 0
    text: int = 0
    empty: int = 0  # turns without any text, of which only the end is trained
    keys: tuple[str, ...] = ()  # for each turn, of any role: keys with texts that are not written
    unheard: int = 0  # turns of other roles that are marked for training
    context: int = 0  # turns of other roles with text that is not written
    tools: int = 0  # 1 if a tool is not described
    documents: int = 0  # 1 if a document is not written
    variables: tuple[str, ...] = ()  # set by the user, and not read by the template


class Rendered(NamedTuple):
    """A text and the half-open character spans of its answers, end of turn included."""

    text: str
    spans: list[Span]
    lost: Lost = Lost()
    marked: bool = False  # the template marks its answers


class AnswerFinder:
    """Finds the answers in what a chat template writes."""

    def __init__(self, template: ChatTemplate) -> None:
        self.template, self.special, self.stops = template, template.special, template.stops
        self.owned: dict[int, list[int]] = {}  # segments of each turn of the current chat
        self.rendered = 0  # turns of the current chat that were written to find its answers
        self.headers: dict[tuple[str, ...], list[str | None]] = {}  # given text of its answers, by the turn before

    def find(self, example: Example) -> Rendered:
        """The whole chat, and its trained answers."""
        if not example.turns:
            return Rendered("", [])
        turns = self.template.ready(example.turns)
        self.rendered, self.headers = 0, {}
        if len(turns) > MOST_TURNS:
            raise UserError(
                f"{example.record.where}: a chat of {len(turns):,} turns; {MOST_TURNS:,} are the most: split it"
            )
        try:
            done = self.template.run(turns, example.given)
        except Exception as error:
            roles = printable(", ".join(turn["role"] for turn in turns), 200)
            raise UserError(
                f"{example.record.where}: the chat template cannot write this chat (roles: {roles}): "
                f"{printable(str(error) or type(error).__name__, 400)}"
            ) from None
        self.owned = {}
        for k, (_, _, owner) in enumerate(done.segments):
            self.owned.setdefault(owner, []).append(k)
        spans, lost = [], Lost()
        for i in (i for i, turn in enumerate(example.turns) if is_trained(turn)):
            found = self._answer(example, turns, i, done)
            if self.rendered > MOST_RENDERED:
                raise UserError(
                    f"{example.record.where}: a chat of {len(turns):,} turns, whose answers take too long to find in "
                    "what the chat template writes; split it"
                )
            missing = _missing(turns[i], "".join(done.text[a:b] for a, b in found))
            lost = Lost(*map(operator.add, lost, missing))
            spans += [] if missing.calls or (missing.empty and missing.keys) else found
        others = [turn for turn in turns if turn["role"] != "assistant"]
        lost = lost._replace(
            keys=(*lost.keys, *(key for turn in others for key in _unwritten_keys(turn, done.text))),
            unheard=sum(map(is_ignored_wish, example.turns)),
            context=_unwritten([turn["content"].strip() for turn in others], done.text),
            tools=int(any(name not in done.text for name in described_names(example.given.get("tools")))),
            documents=int(any(not is_written(text, done.text) for text in document_texts(example.given))),
            variables=self.template.unread(example.given),
        )
        return Rendered(done.text, spans, lost, done.marks)

    def _answer(self, example: Example, turns: Turns, i: int, done: Rendering) -> list[Span]:
        if done.marks:
            return self._marked(turns, i, done)
        found = self._written(turns, example.given, i, done)
        said = words(turns[i])
        if not found or (said and not any(said in done.text[a:b] for a, b in found)):
            found = self._by_prefix(turns, example.given, i, done.text) or found
        lost = not found and (said or reasoning(turns[i]))
        if lost or self.template.drops_content or _has_question(turns[:i], found, done.text):
            raise UserError(
                f"{example.record.where}: cannot find turn {i + 1} (assistant) in what the chat template "
                "writes; give the turn weight 0, or write the chat out as prompt and completion"
            )
        return found

    def _marked(self, turns: Turns, i: int, done: Rendering) -> list[Span]:
        """The marked spans inside turn i; if turns are unknown, the marked spans of all answers in order."""
        own = [(a, b) for a, b, owner in done.segments if owner == i]
        if own:
            return [mark for mark in done.marked if any(a <= mark[0] < b for a, b in own)]
        assistants = [k for k, turn in enumerate(turns) if turn["role"] == "assistant"]
        in_order = len(assistants) == len(done.marked) and not done.segments
        return [done.marked[assistants.index(i)]] if in_order else []

    def _written(self, turns: Turns, given: Given, i: int, done: Rendering) -> list[Span]:
        """The spans that the template wrote for turn i, after the given text."""
        parts = self._own_parts(i, done)
        if not parts:
            return []
        last = i + 1 == len(turns)
        end = self._end_of_last(done.text, parts[-1][1]) if last else self._with_stop(done.text, parts[-1][1])
        parts[-1] = (parts[-1][0], end)
        start = self._start(turns, given, i, done, parts[0][0])
        parts = [(max(a, start), b) for a, b in parts if b > start]
        for k in range(i + 1, len(turns)):
            if turns[k]["role"] != "tool":
                break
            parts = self._without_result(turns[k]["content"].strip(), k, parts, done)
        return parts

    def _own_parts(self, i: int, done: Rendering) -> list[Span]:
        """The segments of turn i; of a template that loops over the messages several times (first for a list of the
        roles, say) those of the last loop: behind all segments of earlier turns."""
        own = self.owned.get(i, [])
        before = range(own[-1] - 1, -1, -1) if own else ()  # segments are in the order of the text
        last_earlier = next((k for k in before if done.segments[k][2] < i), -1)
        return [done.segments[k][:2] for k in own if k > last_earlier]

    def _end_of_last(self, text: str, end: int) -> int:
        """The last answer ends with the text: the template closes it after its loop. If it is closed already, only
        further stop tokens belong to it, not a remark of the template."""
        if not self._is_closed(text, end):
            return len(text)
        while (more := self.special.match(text, _behind_space(text, end))) and more[0] in self.stops:
            end = more.end()
        return end if text[end:].strip() else len(text)

    def _is_closed(self, text: str, end: int) -> bool:
        """Whether the text up to `end` ends with a special token, and white space."""
        while end and text[end - 1].isspace():
            end -= 1
        return text.endswith(self.template.special_words, 0, end)

    def _with_stop(self, text: str, end: int) -> int:
        """If an answer has no end token of its own, it ends with the stop token that follows (GLM: <|user|>)."""
        following = self.special.match(text, _behind_space(text, end))
        if following is None or following[0] not in self.stops:
            return end
        return end if self._is_closed(text, end) else following.end()

    def _start(self, turns: Turns, given: Given, i: int, done: Rendering, begin: int) -> int:
        """Where answer i begins: after the given text. begin: where turn i begins."""
        text, kind = done.text, tuple(sorted(turns[i - 1], key=str)) + (turns[i - 1]["role"],) if i else ()
        known = self.headers.setdefault(kind, [])
        header = known[0] if len(known) >= SURE and len(set(known)) == 1 else None
        if LONG < len(turns) != i + 1 and header is not None and text.startswith(header, begin):
            return begin + len(header)
        before = self._attempt(turns[:i], given, prompt=True) if i else None
        if before is None and i == 0 and (found := self._start_after_question(turns, given, done)) is not None:
            return found
        if before is None:
            return begin + self._shared(text[begin:], self.template.generation_prompt)
        if text.startswith(before.text):
            known.append(text[begin : len(before.text)])
            return len(before.text)
        known.append(None)
        first, asks = (next((a for a, _, owner in which.segments if owner == i - 1), None) for which in (done, before))
        if first is not None and asks is not None:
            asked, here = before.text[asks:], text[first:]
            behind = first + self._shared(here, asked)
            if here.startswith(asked) or behind > begin:
                return behind
        return begin + self._shared(text[begin:], self.template.prompt_after(turns[:i], given, before))

    def _start_after_question(self, turns: Turns, given: Given, done: Rendering) -> int | None:
        """Where the answer begins that is the first turn: it ends as the same answer after a question does."""
        asked = [{"role": "user", "content": MARKER}, *turns]
        with_question = self._attempt(asked, given)
        if with_question is None:
            return None
        ours, theirs = (
            [(a, b) for a, b, owner in which.segments if owner == i] for i, which in enumerate((done, with_question))
        )
        if not ours or not theirs:
            return None
        start = self._start(asked, given, 1, with_question, theirs[0][0])
        answer = with_question.text[start : theirs[-1][1]]
        return ours[-1][1] - len(answer) if done.text[ours[0][0] : ours[-1][1]].endswith(answer) else None

    def _shared(self, text: str, given: str) -> int:
        """The length of the common prefix of the text and the given text; white space before both may differ. A partial
        match counts up to its last whole token, or to the end of the line where the given text goes on with a tag: of
        `<|im_start|>assistant\\n<think>` the header is given, though the answer has no <think>. Without tokens it
        counts up to its last whole word: `A: <think>` and `A: <b>` share no `<`."""
        if text.startswith(given):
            return len(given)
        space = _behind_space(text, 0)
        if given.strip() and text.startswith(given.lstrip(), space):
            return space + len(given.lstrip())
        shared = os.path.commonprefix([text, given])
        tokens = [match.end() for match in self.special.finditer(shared)]
        if not tokens:
            return max(p for p in range(len(shared) + 1) if _is_between_words(given, p))
        lines = [match.end() for match in re.finditer("\n", shared) if given.startswith("<", match.end())]
        return _behind_space(shared, max(tokens + lines))

    def _without_result(self, result: str, k: int, parts: list[Span], done: Rendering) -> list[Span]:
        """The parts without the tool result of turn k, if it is written here and not at turn k."""
        at_home = any(result in done.text[a:b] for a, b, owner in done.segments if owner == k)
        at = next((p for a, b in parts if (p := done.text.find(result, a, b)) >= 0), -1)
        if not result or at_home or at < 0:
            return parts
        a, b = next(part for part in parts if part[0] <= at < part[1])
        opening = [m for m in self.special.finditer(done.text, a, at)]
        closing = self.special.search(done.text, at + len(result), b)
        left = at if not opening else opening[-1].end() if opening[-1][0] in self.stops else opening[-1].start()
        right = closing.end() if closing else at + len(result)
        kept = [(a, left), (right, b)]
        return [p for part in parts for p in (kept if part == (a, b) else [part]) if p[1] > p[0]]

    def _attempt(self, turns: Turns, given: Given, prompt: bool = False) -> Rendering | None:
        """A rendering of a part of the chat, counted."""
        self.rendered += len(turns)
        return self.template.attempt(turns, given, prompt)

    def _by_prefix(self, turns: Turns, given: Given, i: int, text: str) -> list[Span]:
        before = self._attempt(turns[:i], given, prompt=True)
        upto = self._attempt(turns[: i + 1], given) if i + 1 < len(turns) else None
        end = len(text) if i + 1 == len(turns) else len(upto.text) if upto and text.startswith(upto.text) else 0
        start = len(before.text) if before and text.startswith(before.text) else end
        return [(start, end)] if start < end else []


def _unwritten(asked: list[str], text: str) -> int:
    """How many of these do not occur in the text, as they stand or encoded as JSON. They stand there in order, so each
    is first sought behind the one before: a search of the whole text for every turn would take minutes in a long
    chat."""
    missing, at = 0, 0
    for each in asked:
        found = next((p for form in written_forms(each) if (p := text.find(form, at)) >= 0), -1)
        at = found if found >= 0 else at
        missing += found < 0 and not is_written(each, text)
    return missing


def _unwritten_keys(turn: Turn, text: str) -> list[str]:
    """Further keys of a turn that is no answer, with texts that do not occur in the text."""
    texts = {key: texts for key, texts in further_texts(turn).items() if key not in ABOUT_TURNS}
    return [key for key, said in texts.items() if not all(is_written(each, text) for each in said)]


def _has_question(before: Turns, found: list[Span], text: str) -> bool:
    """Whether an answer contains the question, which should stand before it: the template writes both at once."""
    question = next((turn["content"].strip() for turn in reversed(before) if turn["role"] == "user"), "")
    inside = question and any(question in text[a:b] for a, b in found)
    return bool(inside) and question not in text[: found[0][0]]


def _is_between_words(text: str, at: int) -> bool:
    """Whether a heading may end here: behind a space, behind a mark and before a space (`A: `), or before a tag."""
    if at == 0 or text[at - 1].isspace() or text.startswith("<", at):
        return True
    return text[at : at + 1].isspace() and not text[at - 1].isalnum()


def _missing(turn: Turn, said: str) -> Lost:
    """The parts of a turn that are missing in its rendered text."""
    called = Counter(called_names(turn)).items()  # two calls of one function write its name twice
    calls = any(len(re.findall(rf"(?<!\w){re.escape(name)}(?!\w)", said)) < count for name, count in called)
    thought, spoken = reasoning(turn), words(turn)
    keys = [key for key, texts in further_texts(turn).items() if any(text not in said for text in texts)]
    empty = not thought and not spoken and not turn.get("tool_calls")
    return Lost(int(calls), int(thought not in said), int(spoken not in said), int(empty), tuple(keys))


def _behind_space(text: str, at: int) -> int:
    found = SPACE.match(text, at)
    return at if found is None else found.end()
