"""A chat as one text, and where in that text the answers stand.

The template is the tokenizer's own. Stock templates carry no marks around what the model has to say (asking
them for an answer mask returns zeros), so answers are found by rendering prefixes of the chat:

    before = render(turns[:i], generation prompt on)       what the model is given at turn i
    upto   = render(turns[:i+1])                           the same, with the answer and its end of turn
    text   = render(turns)                                 answer i is text[len(before):len(upto)]

which holds when `before` and `upto` are prefixes of `text`. Some templates rewrite earlier turns (they drop
the reasoning, or close the last turn differently, or refuse a chat that ends there). Then turn i is
rendered twice inside the whole chat, with two marker words in place of its content: what the two texts
share on the left and on the right is exactly what is not the content. The end-of-turn token that follows is
added. If even that does not explain `text`, the row is refused by name; a guess is never trained on.

Without a chat template chats are written with PLAIN_TEMPLATE, headings as Alpaca had them:

    [bos] system text, ### Instruction: user text, ### Response: answer [eos]      a blank line after each

Dates: the templates of Llama 3 print today's date unless they are given one. A run must not depend on the
day it is resumed, so they are given the one they fall back to.
"""

import os
import re
from functools import cached_property
from typing import Any, NamedTuple

from keyhole.data.formats import Example
from keyhole.errors import UserError

PLAIN_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.role == 'assistant' %}{{ '### Response:\n' + message.content + eos_token + '\n\n' }}"
    "{% elif message.role == 'user' %}{{ '### Instruction:\n' + message.content + '\n\n' }}"
    "{% else %}{{ message.content + '\n\n' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '### Response:\n' }}{% endif %}"
)
MARKERS = ("Q0Z", "Z1Q")  # no common first or last character
DATE = "26 Jul 2024"

Span = tuple[int, int]


class Rendered(NamedTuple):
    """A text and the half-open character spans of its answers, end of turn included."""

    text: str
    spans: list[Span]


def bos_ids(tokenizer: Any) -> list[int]:
    """What the tokenizer puts before every text by itself: [bos] or nothing."""
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
    """The chat template of a tokenizer, or the plain one."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.is_plain = not tokenizer.chat_template
        self.template = plain_template(tokenizer) if self.is_plain else None
        words = sorted(special_tokens(tokenizer).values(), key=len, reverse=True)
        self.end_of_turn = re.compile(rf"\s*(?:{'|'.join(map(re.escape, words))})") if words else None
        self.eos = {} if tokenizer.eos_token else {"eos_token": ""}  # the plain template names it

    def render(self, turns: list[dict[str, Any]], tools: list[Any] | None, prompt: bool = False) -> str:
        """The chat as text; `prompt` appends what an answer begins after."""
        return self.tokenizer.apply_chat_template(
            turns, tools=tools, chat_template=self.template, add_generation_prompt=prompt, tokenize=False,
            date_string=DATE, **self.eos,
        )  # fmt: skip

    def try_render(self, turns: list[dict[str, Any]], tools: list[Any] | None, prompt: bool = False) -> str | None:
        """The same, or None where the template refuses such a chat (each raises what it likes)."""
        try:
            return self.render(turns, tools, prompt)
        except Exception:
            return None

    @cached_property
    def drops_content(self) -> bool:
        """Whether the template writes turns without their text (vision models' want it in parts)."""
        chat = [{"role": role, "content": MARKERS[0]} for role in ("user", "assistant")]
        text = self.try_render(chat, None)
        return text is not None and text.count(MARKERS[0]) < 2

    def answers(self, example: Example) -> Rendered:
        """The whole chat, and its answers that are trained on."""
        if not example.turns:
            return Rendered("", [])
        trained = [i for i, turn in enumerate(example.turns) if turn["role"] == "assistant" and turn.get("weight") != 0]
        turns = [{key: value for key, value in turn.items() if key != "weight"} for turn in example.turns]
        try:
            text = self.render(turns, example.tools)
        except Exception as error:
            roles = ", ".join(turn["role"] for turn in turns)
            raise UserError(
                f"{example.record.where}: the chat template cannot write this chat (roles: {roles}): {error}"
            ) from None
        return Rendered(text, [self._answer(example, turns, i, text) for i in trained])

    def _answer(self, example: Example, turns: list[dict[str, Any]], i: int, text: str) -> Span:
        start, end = self._by_prefix(turns, example.tools, i, text)
        if start is None or end is None:
            left, right = self._by_markers(turns, example.tools, i, text)
            start, end = left if start is None else start, right if end is None else end
        if start is None or end is None or end <= start or self.drops_content:
            raise UserError(
                f"{example.record.where}: cannot find turn {i + 1} (assistant) in what the chat template "
                "writes; give the turn weight 0, or write the chat out as prompt and completion"
            )
        return start, end

    def _by_prefix(
        self, turns: list[dict[str, Any]], tools: list[Any] | None, i: int, text: str
    ) -> tuple[int | None, int | None]:
        before = self.try_render(turns[:i], tools, prompt=True)
        upto = text if i + 1 == len(turns) else self.try_render(turns[: i + 1], tools)
        return tuple(len(x) if x is not None and text.startswith(x) else None for x in (before, upto))

    def _by_markers(
        self, turns: list[dict[str, Any]], tools: list[Any] | None, i: int, text: str
    ) -> tuple[int | None, int | None]:
        marked = [[*turns[:i], turns[i] | {"content": word}, *turns[i + 1 :]] for word in MARKERS]
        first, second = (self.try_render(chat, tools) for chat in marked)
        if first is None or second is None or first == second:
            return None, None
        left = len(os.path.commonprefix([first, second]))
        right = len(os.path.commonprefix([first[::-1], second[::-1]]))
        end = len(text) - right
        if end < left or text[:left] != first[:left] or text[end:] != first[len(first) - right :]:
            return None, None
        closing = self.end_of_turn.match(text, end) if self.end_of_turn else None
        return left, closing.end() if closing else end
