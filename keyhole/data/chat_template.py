"""A chat as text: the tokenizer's chat template, the one of the setting `chat_template`, or a plain one.

A template is a program (template_segments.py runs it), and templates differ in what they take: some concatenate the
arguments of tool calls, which must then be JSON text, some print a dict; those of vision models expect content as a
list of parts and drop plain text. `ChatTemplate` finds this out by rendering small chats, and passes turns in the form
that the template expects. Where the answers are in the text is found in answers.py.

Without a chat template, chats are written with PLAIN_TEMPLATE, with Alpaca's headings:

    [bos] system text, ### Instruction: user text, ### Response: answer [eos]      a blank line after each

Llama 3's templates have a variable `date_string`; they get their own default. `strftime_now` returns the date on which
the run began.
"""

import datetime
import re
from functools import cached_property
from typing import Any

from keyhole.data.formats import OWN_VARIABLES
from keyhole.data.template_segments import Rendering, Template
from keyhole.data.turns import FLAGS, Turn, call_as

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

Turns = list[Turn]
Given = dict[str, Any] | None  # variables of one chat: tools, documents, others by name


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
        self.special_words = tuple(longest_first)
        self.special = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self.stops = {special[i] for i in (tokenizer.eos_token_id, *stop_token_ids) if i in special}
        eos = {} if tokenizer.eos_token else {"eos_token": ""}  # the plain template uses it
        self.set_by_user = tuple(variables or ())
        self.variables = {**tokenizer.special_tokens_map, **eos, "date_string": DATE, **(variables or {})}
        self.dated = False  # whether a template has used the date

    def source(self, tools: list[Any] | None = None) -> str:
        """The text of the template; some tokenizers have one for chats with tools and one for those without."""
        if self.given:
            return self.given
        return plain_template(self.tokenizer) if self.is_plain else self.tokenizer.get_chat_template(None, tools)

    def _compiled(self, given: Given) -> Template:
        source = self.source((given or {}).get("tools"))
        if source not in self.compiled:
            self.compiled[source] = Template(source, self.date)
        return self.compiled[source]

    def run(self, turns: Turns, given: Given, prompt: bool = False) -> Rendering:
        """The chat as text, and which message each part belongs to; raises the template's errors."""
        variables = {"tools": None, **self.variables, **(given or {}), "add_generation_prompt": prompt}
        done = self._compiled(given).render(turns, variables)
        self.dated |= done.dated
        return done

    def unread(self, given: Given) -> tuple[str, ...]:
        """Variables that the user set, for all chats or for this one, and that the template never reads."""
        named = [*self.set_by_user, *(name for name in given or () if name not in OWN_VARIABLES)]
        return tuple(name for name in dict.fromkeys(named) if name not in self._compiled(given).reads)

    def render(self, turns: Turns, given: Given, prompt: bool = False) -> str:
        """The chat as text; `prompt` appends the generation prompt."""
        return self.run(self.ready(turns), given, prompt).text

    def attempt(self, turns: Turns, given: Given, prompt: bool = False) -> Rendering | None:
        """A rendering, or None if the template refuses such a chat (templates raise any error)."""
        try:
            return self.run(turns, given, prompt)
        except Exception:
            return None

    def ready(self, turns: Turns) -> Turns:
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
        chat: list[dict[str, Any]]
        chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
        done = self.attempt(chat, None)
        if done is not None and f"{{'{MARKER}'" not in done.text:
            return False
        chat[1]["tool_calls"] = [call_as(call, True)]
        as_text = self.attempt(chat, None)
        return as_text is not None and f'\\"{MARKER}' not in as_text.text

    @cached_property
    def drops_content(self) -> bool:
        """Whether the template drops text content (templates of vision models expect a list of parts)."""
        done = self.attempt([{"role": role, "content": MARKER} for role in ("user", "assistant")], None)
        return done is not None and done.text.count(MARKER) < 2

    @cached_property
    def generation_prompt(self) -> str:
        """The text that the template writes after a question, before the answer."""
        asked = [{"role": "user", "content": MARKER}]
        done = self.attempt(asked, None, prompt=True)
        return self.prompt_after(asked, None, done) if done else ""

    @cached_property
    def trained_heading(self) -> str:
        """The text that the template writes between a question and its answer, where it has no generation prompt: then
        the model has to write it, so it is trained on."""
        asked = [{"role": "user", "content": MARKER}]
        before = self.attempt(asked, None, prompt=True)
        done = self.attempt([*asked, {"role": "assistant", "content": VALUE}], None)
        if before is None or done is None or done.marks or self.generation_prompt:
            return ""
        heading, answer, _ = done.text.removeprefix(before.text).partition(VALUE)
        return heading.strip() if answer and done.text.startswith(before.text) else ""

    def prompt_after(self, turns: Turns, given: Given, done: Rendering) -> str:
        """The generation prompt behind these turns, whose rendering with it is `done`: what is written after the loop
        over them, or, where the template writes it inside of the loop, what it writes more than without it."""
        if (after := after_last_turn(done)) or (plain := self.attempt(turns, given)) is None:
            return after
        return done.text.removeprefix(plain.text) if done.text.startswith(plain.text) else ""


def after_last_turn(done: Rendering) -> str:
    """What the template writes after its loop over the messages."""
    return done.text[max((end for _, end, _ in done.segments), default=len(done.text)) :]
