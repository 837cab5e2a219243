"""A chat as one text, and the positions of the answers in that text.

The template is the tokenizer's own, or the one of the setting `chat_template`. An answer is *the text that the template
writes for an assistant turn, after the text that the model is given*: words, reasoning, tool calls, end of the turn.

    turn i      the text that is written while the template's loop is at message i (template_segments.py); for the last
                turn also the text after the loop. A template may rewrite earlier turns (drop reasoning, or close a turn
                differently if it is the last): only the final text counts.
    given       before = render(turns[:i], generation prompt on). If `before` is a prefix of the text, the answer
                begins after it. A template may write earlier turns differently if they come last; then `before` is no
                prefix, and only its part from turn i - 1 on is compared. If that fails too, the common prefix of the
                turn and the generation prompt is taken as given. A chat that begins with an answer has nothing
                before it (but a template's own system prompt): its answer is what the same chat has after a question.

If a template marks its answers with `{% generation %}`, exactly the marked text is trained on: nothing of a chat in
which it marks nothing. If a template has no loop over the messages, a turn is the difference of two prefixes of the
chat; if these are not prefixes, the row is refused. keyhole never trains on a guess.

Text that the template does not write cannot be trained on, and is counted (`Lost`): tool calls, reasoning, text of a
turn, and keys that only some templates know. A turn whose calls are missing is not trained on at all: it would teach
the model to stop where the assistant went on. The same holds for an empty turn with its text under another key. A
tool's result that the template writes inside the assistant's turn (Gemma 4) is cut out of the answer.

Without a chat template, chats are written with PLAIN_TEMPLATE, with Alpaca's headings:

    [bos] system text, ### Instruction: user text, ### Response: answer [eos]      a blank line after each

Llama 3's templates have a variable `date_string`; they get their own default. `strftime_now` returns the date on which
the run began.
"""

import datetime
import os
import re
from functools import cached_property
from typing import Any, NamedTuple

from keyhole.data.formats import Example
from keyhole.data.template_segments import Rendering, Template
from keyhole.data.turns import (
    FLAGS,
    Turn,
    call_as,
    called_names,
    further_texts,
    is_ignored_wish,
    is_trained,
    reasoning,
    words,
)
from keyhole.errors import UserError, printable

PLAIN_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.role == 'assistant' %}{{ '### Response:\n' + message.content + eos_token + '\n\n' }}"
    "{% elif message.role == 'user' %}{{ '### Instruction:\n' + message.content + '\n\n' }}"
    "{% else %}{{ message.content + '\n\n' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '### Response:\n' }}{% endif %}"
)
MARKER, VALUE = "Q0Z", "Z1Q"
DATE = "26 Jul 2024"
SPACE = re.compile(r"\s*")

Span = tuple[int, int]
Turns = list[Turn]


class Lost(NamedTuple):
    """Counts of assistant turns of which the template omits something."""

    calls: int = 0
    reasoning: int = 0
    text: int = 0
    empty: int = 0  # turns without any text, of which only the end is trained
    keys: tuple[str, ...] = ()  # for each turn: keys with texts that are not written
    unheard: int = 0  # turns of other roles that are marked for training


class Rendered(NamedTuple):
    """A text and the half-open character spans of its answers, end of turn included."""

    text: str
    spans: list[Span]
    lost: Lost = Lost()
    marked: bool = False  # the template marks its answers


def bos_ids(tokenizer: Any) -> list[int]:
    """The tokens that the tokenizer adds before every text: [bos] or nothing."""
    with_special, without = tokenizer("a").input_ids, tokenizer("a", add_special_tokens=False).input_ids
    return with_special[: with_special.index(without[0])] if without and without[0] in with_special else []


def special_tokens(tokenizer: Any) -> dict[int, str]:
    """Control tokens by id: those with a role (bos, eos, pad) and all added as special."""
    named = dict(zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True))
    return named | {i: t.content for i, t in tokenizer.added_tokens_decoder.items() if t.special}


def plain_template(tokenizer: Any) -> str:
    """The template for tokenizers that have none; it writes bos where the tokenizer would."""
    return ("{{ bos_token }}" if bos_ids(tokenizer) else "") + PLAIN_TEMPLATE


class ChatTemplate:
    """The chat template of a tokenizer, a given one, or the plain one."""

    def __init__(
        self,
        tokenizer: Any,
        source: str | None = None,
        variables: dict[str, Any] | None = None,
        date: datetime.date | None = None,
        stop_token_ids: tuple[int, ...] = (),
    ) -> None:
        self.tokenizer, self.given = tokenizer, source
        self.is_plain = not source and not getattr(tokenizer, "chat_template", None)
        self.date = date or datetime.date.today()
        self.compiled: dict[str, Template] = {}
        special = special_tokens(tokenizer)
        longest_first = sorted(special.values(), key=len, reverse=True)
        self.special = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self.stops = {special[i] for i in (tokenizer.eos_token_id, *stop_token_ids) if i in special}
        eos = {} if tokenizer.eos_token else {"eos_token": ""}  # the plain template uses it
        self.variables = {**tokenizer.special_tokens_map, **eos, "date_string": DATE, **(variables or {})}
        self.dated = False  # whether a template has used the date

    def source(self, tools: list[Any] | None = None) -> str:
        """The text of the template; some tokenizers have one for chats with tools and one for those without."""
        if self.given:
            return self.given
        return plain_template(self.tokenizer) if self.is_plain else self.tokenizer.get_chat_template(None, tools)

    def run(self, turns: Turns, tools: list[Any] | None, prompt: bool = False) -> Rendering:
        """The chat as text, and which message each part belongs to; raises the template's errors."""
        source = self.source(tools)
        if source not in self.compiled:
            self.compiled[source] = Template(source, self.date)
        done = self.compiled[source].render(turns, {"tools": tools, "add_generation_prompt": prompt, **self.variables})
        self.dated |= done.dated
        return done

    def render(self, turns: Turns, tools: list[Any] | None, prompt: bool = False) -> str:
        """The chat as text; `prompt` appends the generation prompt."""
        return self.run(self._ready(turns), tools, prompt).text

    def _try(self, turns: Turns, tools: list[Any] | None, prompt: bool = False) -> Rendering | None:
        """A rendering, or None if the template refuses such a chat (templates raise any error)."""
        try:
            return self.run(turns, tools, prompt)
        except Exception:
            return None

    def _ready(self, turns: Turns) -> Turns:
        """The turns as passed to the template: without keyhole's own keys, and with calls in the form that it
        expects."""
        plain = [{key: value for key, value in turn.items() if key not in FLAGS} for turn in turns]
        calling = (turn for turn in plain if isinstance(turn.get("tool_calls"), list))
        for turn in calling:
            turn["tool_calls"] = [call_as(call, self.takes_text_arguments) for call in turn["tool_calls"]]
        return plain

    @cached_property
    def takes_text_arguments(self) -> bool:
        """Whether arguments of calls must be JSON text: the template concatenates them, or would print Python's
        dict."""
        call = {"type": "function", "id": "000000000", "function": {"name": MARKER, "arguments": {MARKER: VALUE}}}
        chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
        done = self._try(chat, None)
        if done is not None and f"{{'{MARKER}'" not in done.text:
            return False
        chat[1]["tool_calls"] = [call_as(call, True)]
        as_text = self._try(chat, None)
        return as_text is not None and f'\\"{MARKER}' not in as_text.text

    @cached_property
    def drops_content(self) -> bool:
        """Whether the template drops text content (templates of vision models expect a list of parts)."""
        done = self._try([{"role": role, "content": MARKER} for role in ("user", "assistant")], None)
        return done is not None and done.text.count(MARKER) < 2

    @cached_property
    def generation_prompt(self) -> str:
        """The text that the template writes after a question, before the answer."""
        done = self._try([{"role": "user", "content": MARKER}], None, prompt=True)
        return _after_last_turn(done) if done else ""

    def answers(self, example: Example) -> Rendered:
        """The whole chat, and its trained answers."""
        if not example.turns:
            return Rendered("", [])
        turns = self._ready(example.turns)
        try:
            done = self.run(turns, example.tools)
        except Exception as error:
            roles = printable(", ".join(turn["role"] for turn in turns), 200)
            raise UserError(
                f"{example.record.where}: the chat template cannot write this chat (roles: {roles}): "
                f"{printable(str(error) or type(error).__name__, 400)}"
            ) from None
        spans, lost = [], Lost()
        for i in (i for i, turn in enumerate(example.turns) if is_trained(turn)):
            found = self._answer(example, turns, i, done)
            missing = _missing(turns[i], "".join(done.text[a:b] for a, b in found))
            lost = Lost(*(x + y for x, y in zip(lost, missing, strict=True)))
            spans += [] if missing.calls or (missing.empty and missing.keys) else found
        lost = lost._replace(unheard=sum(map(is_ignored_wish, example.turns)))
        return Rendered(done.text, spans, lost, done.marks)

    def _answer(self, example: Example, turns: Turns, i: int, done: Rendering) -> list[Span]:
        if done.marks:
            return self._marked(turns, i, done)
        found = self._written(turns, example.tools, i, done)
        said = words(turns[i])
        if not found or (said and not any(said in done.text[a:b] for a, b in found)):
            found = self._by_prefix(turns, example.tools, i, done.text) or found
        if (not found and (said or reasoning(turns[i]))) or self.drops_content:
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

    def _written(self, turns: Turns, tools: list[Any] | None, i: int, done: Rendering) -> list[Span]:
        """The spans that the template wrote for turn i, after the given text."""
        parts = self._own_parts(i, done)
        if not parts:
            return []
        last = i + 1 == len(turns)
        end = self._end_of_last(done.text, parts[-1][1]) if last else self._with_stop(done.text, parts[-1][1])
        parts[-1] = (parts[-1][0], end)
        start = self._start(turns, tools, i, done, parts[0][0])
        parts = [(max(a, start), b) for a, b in parts if b > start]
        for k in range(i + 1, len(turns)):
            if turns[k]["role"] != "tool":
                break
            parts = self._without_result(turns[k]["content"].strip(), k, parts, done)
        return parts

    @staticmethod
    def _own_parts(i: int, done: Rendering) -> list[Span]:
        """The segments of turn i; of a template that loops over the messages several times (first for a list of the
        roles, say) those of the last loop: behind all segments of earlier turns."""
        own = [(a, b) for a, b, owner in done.segments if owner == i]
        earlier = [a for a, _, owner in done.segments if owner < i and own and a < own[-1][0]]
        return [(a, b) for a, b in own if a > max(earlier, default=-1)]

    def _end_of_last(self, text: str, end: int) -> int:
        """The last answer ends with the text: the template closes it after its loop. If it is closed already, only
        further stop tokens belong to it, not a remark of the template."""
        if not self._is_closed(text[:end]):
            return len(text)
        while (more := self.special.match(text, SPACE.match(text, end).end())) and more[0] in self.stops:
            end = more.end()
        return end if text[end:].strip() else len(text)

    def _is_closed(self, text: str) -> bool:
        return any(match.end() == len(text.rstrip()) for match in self.special.finditer(text))

    def _with_stop(self, text: str, end: int) -> int:
        """If an answer has no end token of its own, it ends with the stop token that follows (GLM: <|user|>)."""
        following = self.special.match(text, SPACE.match(text, end).end())
        stops = following is not None and following[0] in self.stops
        return following.end() if stops and not self._is_closed(text[:end]) else end

    def _start(self, turns: Turns, tools: list[Any] | None, i: int, done: Rendering, begin: int) -> int:
        """Where answer i begins: after the given text. begin: where turn i begins."""
        text, before = done.text, self._try(turns[:i], tools, prompt=True) if i else None
        if before is None and i == 0 and (found := self._start_after_question(turns, tools, done)) is not None:
            return found
        if before is None:
            return begin + self._shared(text[begin:], self.generation_prompt)
        if text.startswith(before.text):
            return len(before.text)
        firsts = [next((a for a, _, owner in which.segments if owner == i - 1), None) for which in (done, before)]
        if None not in firsts:
            given, here = before.text[firsts[1] :], text[firsts[0] :]
            behind = firsts[0] + self._shared(here, given)
            if here.startswith(given) or behind > begin:
                return behind
        return begin + self._shared(text[begin:], _after_last_turn(before))

    def _start_after_question(self, turns: Turns, tools: list[Any] | None, done: Rendering) -> int | None:
        """Where the answer begins that is the first turn: it ends as the same answer after a question does."""
        asked = [{"role": "user", "content": MARKER}, *turns]
        with_question = self._try(asked, tools)
        if with_question is None:
            return None
        ours, theirs = (
            [(a, b) for a, b, owner in which.segments if owner == i] for i, which in enumerate((done, with_question))
        )
        if not ours or not theirs:
            return None
        start = self._start(asked, tools, 1, with_question, theirs[0][0])
        answer = with_question.text[start : theirs[-1][1]]
        return ours[-1][1] - len(answer) if done.text[ours[0][0] : ours[-1][1]].endswith(answer) else None

    def _shared(self, text: str, given: str) -> int:
        """The length of the common prefix of the text and the given text; white space before both may differ. A partial
        match counts up to its last whole token, or to the end of the line where the given text goes on with a tag: of
        `<|im_start|>assistant\\n<think>` the header is given, though the answer has no <think>."""
        if text.startswith(given):
            return len(given)
        space = SPACE.match(text).end()
        if given.strip() and text.startswith(given.lstrip(), space):
            return space + len(given.lstrip())
        shared = os.path.commonprefix([text, given])
        tokens = [match.end() for match in self.special.finditer(shared)]
        if not tokens:
            return len(shared)
        lines = [match.end() for match in re.finditer("\n", shared) if given.startswith("<", match.end())]
        return SPACE.match(shared, max(tokens + lines)).end()

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

    def _by_prefix(self, turns: Turns, tools: list[Any] | None, i: int, text: str) -> list[Span]:
        before = self._try(turns[:i], tools, prompt=True)
        upto = self._try(turns[: i + 1], tools) if i + 1 < len(turns) else None
        end = len(text) if i + 1 == len(turns) else len(upto.text) if upto and text.startswith(upto.text) else 0
        start = len(before.text) if before and text.startswith(before.text) else end
        return [(start, end)] if start < end else []


def _after_last_turn(done: Rendering) -> str:
    return done.text[max((end for _, end, _ in done.segments), default=len(done.text)) :]


def _missing(turn: Turn, said: str) -> Lost:
    """The parts of a turn that are missing in its rendered text."""
    calls = any(not re.search(rf"(?<!\w){re.escape(name)}(?!\w)", said) for name in called_names(turn))
    thought, spoken = reasoning(turn), words(turn)
    keys = [key for key, texts in further_texts(turn).items() if any(text not in said for text in texts)]
    empty = not thought and not spoken and not turn.get("tool_calls")
    return Lost(int(calls), int(thought not in said), int(spoken not in said), int(empty), tuple(keys))
