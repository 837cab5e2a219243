"""A chat as text: the tokenizer's chat template, the one of the setting `chat_template`, or a plain one.

A template is a program that comes with the model, so it runs in the process of worker.py. The text equals that of
`apply_chat_template`. Templates differ in what they take: some concatenate the arguments of tool calls, which must then
be JSON text, some print a dict; those of vision models expect a list of parts and drop plain text. `ChatTemplate` finds
this out by writing small chats. Beside the text it says what was written for which message (`segments`: what the
template writes while its loop is at the message), and what stands inside `{% generation %}` (`marked`). A mark does not
know its place, as the text of a macro is made before it is written: so a template with marks runs a second time with
unique brackets around each, which must give the same text but for the brackets; otherwise the chat is refused.

Without a chat template, chats are written with PLAIN_TEMPLATE, with Alpaca's headings:

    [bos] system text, ### Instruction: user text, ### Response: answer [eos]      a blank line after each

Llama 3's templates have a variable `date_string`; they get their own default. `strftime_now` returns the date on which
the run began.

The sandbox, of task files too, is Jinja's: no files, no private attributes, no changes of what is passed in. Beside
Jinja's own, programs have `tojson`, `raise_exception`, `strftime_now`, `break` and `continue`, and the tag
`generation`. What would differ from run to run is missing (`random`), and `strftime_now` gets a date, not the clock's:
a run that is resumed tomorrow must get the same tokens. `Loops` inserts statements that record which message a text is
written for."""

import datetime
import json
import re
import secrets
from collections.abc import Callable
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from keyhole.data.opened import Row
from keyhole.data.tokenizer import Tokenizer, bos_ids, special_tokens
from keyhole.data.turns import FLAGS, OWN_VARIABLES, REASONING, Turn, call_as
from keyhole.errors import UserError, printable
from keyhole.machine.worker import bounded, why

MOST_TEXT = 2**25
FOLLOW = "follow the loops"  # a filter that no template can name


class Generation(Extension):
    """The tag around text that the model generates."""

    tags = {"generation"}
    environment: "Sandbox"

    def parse(self, parser: Parser) -> nodes.Node:
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("mark"), [], [], body).set_lineno(lineno)

    def mark(self, caller: Callable[[], str]) -> str:
        return caller().join(self.environment.brackets)


class Sandbox(ImmutableSandboxedEnvironment):
    """The environment of one program. brackets: written around what the model generates, where its place is wanted."""

    brackets = ("", "")

    def __init__(self, date: datetime.date | None = None, **options: Any) -> None:
        super().__init__(extensions=[Generation, loopcontrols], **options)
        midnight = datetime.datetime.combine(date or datetime.date.today(), datetime.time())
        self.trace = Trace([])
        self.filters["tojson"] = _tojson
        self.filters[FOLLOW] = jinja2.pass_context(lambda _, item, change: self.trace.follow(item, change))
        self.filters.pop("random")
        self.globals.pop("lipsum")
        self.globals |= {"raise_exception": _raise, "strftime_now": midnight.strftime}


def written(program: jinja2.Template, variables: Row, trace: "Trace | None" = None) -> str:
    """The text of a program. trace: is told its length so far, piece by piece."""
    pieces, length = [], 0
    for piece in program.generate(**variables):
        pieces.append(piece)
        length += len(piece)
        if length > MOST_TEXT:
            raise MemoryError
        if trace is not None:
            trace.position = length
    return "".join(pieces)


class Loops(NodeTransformer):
    """Inserts a call of the filter FOLLOW before and after every loop (+1, -1), and at the top of its body (0) with the
    item."""

    def visit_For(self, node: nodes.For) -> list[nodes.Node]:
        self.generic_visit(node)
        item = nodes.Name(node.target.name, "load") if isinstance(node.target, nodes.Name) else nodes.Const(None)
        node.body.insert(0, _call(item, 0, node.lineno))
        return [_call(nodes.Const(None), 1, node.lineno), node, _call(nodes.Const(None), -1, node.lineno)]


def _call(item: nodes.Expr, change: int, lineno: int) -> nodes.Node:
    filtered = nodes.Filter(item, FOLLOW, [nodes.Const(change)], [], None, None, lineno=lineno)
    return nodes.ExprStmt(filtered, lineno=lineno)


class Trace:
    """Which message each part of a text was written for: (start, end, index of the message)."""

    def __init__(self, messages: list[Row]) -> None:
        self.index = {id(message): i for i, message in enumerate(messages)}
        self.loops: list[int | None] = []  # for each running loop: the index of its current message
        self.segments: list[tuple[int, int, int]] = []
        self.position = self.since = 0

    def follow(self, item: object, change: int) -> None:
        owner = next((i for i in reversed(self.loops) if i is not None), None)
        if owner is not None and self.position > self.since:
            self.segments.append((self.since, self.position, owner))
        self.since = self.position
        if change > 0:
            self.loops.append(None)
        elif change < 0:
            self.loops.pop()
        else:
            self.loops[-1] = self.index.get(id(item))


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


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
Given = Row  # variables of one chat: tools, documents, others by name
Span = tuple[int, int]


class Rendering(NamedTuple):
    """A text, and the message of each part: (start, end, index of the message). marked: None without marks."""

    text: str
    segments: list[tuple[int, int, int]]
    marked: list[Span] | None

    @property
    def after(self) -> str:
        """What is written after the loop over the messages."""
        return self.text[max((end for _, end, _ in self.segments), default=len(self.text)) :]


class Program:
    def __init__(self, source: str, date: datetime.date) -> None:
        self.sandbox = Sandbox(date, trim_blocks=True, lstrip_blocks=True)
        parsed = self.sandbox.parse(source)
        self.has_marks = parsed.find(nodes.ExtensionAttribute) is not None
        self.reads = meta.find_undeclared_variables(parsed)  # the variables that it takes from outside
        self.program = self.sandbox.from_string(Loops().visit(parsed))

    def render(self, turns: Turns, variables: Given) -> Rendering:
        messages = []
        for turn in turns:  # with the reasoning under every name that templates use for it
            thought = next((turn[key] for key in REASONING if turn.get(key) is not None), None)
            names = {} if thought is None else dict.fromkeys(REASONING, thought)
            messages.append(names | turn | ({"reasoning_content": thought} if names else {}))
        given = {"documents": None, **variables, "messages": messages}
        self.sandbox.trace = trace = Trace(messages)
        text = written(self.program, given, trace)
        return Rendering(text, trace.segments, self._marked(given, text) if self.has_marks else None)

    def _marked(self, given: Given, text: str) -> list[Span]:
        """The places of marked text, from a second run with brackets around it."""
        name = secrets.token_hex(8)
        self.sandbox.brackets = opening, closing = f"[{name}[", f"]{name}]"
        try:
            parts = re.split(f"({re.escape(opening)}|{re.escape(closing)})", written(self.program, given))
        finally:
            self.sandbox.brackets = ("", "")
        if "".join(part for part in parts if part not in (opening, closing)) != text:
            raise jinja2.TemplateError("it changes the text that it marks with {% generation %} after marking it")
        position, begun, marked = 0, [], []
        for part in parts:
            if part == opening:
                begun.append(position)
            elif part == closing:
                marked.append((begun.pop(), position))
            else:
                position += len(part)
        return marked


compiled = lru_cache(16)(Program)


class ChatTemplate:
    """The chat template of a tokenizer, a given one, or the plain one. `write` is for callers; the other methods run in
    the process of worker.py, where answers.py calls them. name: what it is, for the report."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        source: str | None = None,
        variables: Given | None = None,
        date: datetime.date | None = None,
        stop_token_ids: tuple[int, ...] = (),
    ) -> None:
        self.is_tokenizers, self.name = False, "the one of the setting chat_template"
        if not source and tokenizer.chat_template:
            self.is_tokenizers, self.name = True, "chat template of the tokenizer"
        elif not source:  # the plain one writes bos where the tokenizer would
            source = ("{{ bos_token }}" if bos_ids(tokenizer) else "") + PLAIN_TEMPLATE
            self.name = "none in the tokenizer; '### Instruction:' and '### Response:' are used"
        self.source = source or tokenizer.get_chat_template(None, None)
        self.source_with_tools = source or tokenizer.get_chat_template(None, [{}])  # some tokenizers have two
        self.date = date or datetime.date.today()
        self.dated = f"; it may print the date, {self.date}" if "strftime_now" in self.source else ""
        special = special_tokens(tokenizer)
        self.special_words = tuple(sorted(special.values(), key=len, reverse=True))
        self.special = re.compile("|".join(map(re.escape, self.special_words)) or r"(?!)")
        stops = [re.escape(special[i]) for i in (tokenizer.eos_token_id, *stop_token_ids) if i in special]
        self.stops = re.compile(rf"(\s*({'|'.join(stops)}))*" if stops else "")  # matches everywhere, if nothing
        eos = {} if tokenizer.eos_token else {"eos_token": ""}  # the plain template uses it
        self.set_by_user = tuple(variables or ())
        self.variables: Given = {**tokenizer.special_tokens_map, **eos, "date_string": DATE, **(variables or {})}

    def write(self, turns: Turns, prompt: bool = False) -> str:
        """The chat as text; `prompt` appends the generation prompt."""
        return bounded(self._text, [(turns, prompt)], lambda _: "the chat template")[0]

    def _text(self, asked: tuple[Turns, bool]) -> str:
        try:
            return self.run(self.ready(asked[0]), {}, asked[1]).text
        except Exception as error:  # templates raise any error
            raise UserError(f"the chat template cannot write this chat: {printable(why(error), 400)}") from None

    def _compiled(self, given: Given) -> Program:
        return compiled(self.source_with_tools if given.get("tools") else self.source, self.date)

    def run(self, turns: Turns, given: Given, prompt: bool = False) -> Rendering:
        """The chat as text, and which message each part belongs to; raises the template's errors."""
        variables = {"tools": None, **self.variables, **given, "add_generation_prompt": prompt}
        return self._compiled(given).render(turns, variables)

    def attempt(self, turns: Turns, given: Given, prompt: bool = False) -> Rendering | None:
        """A rendering, or None if the template refuses such a chat (templates raise any error)."""
        try:
            return self.run(turns, given, prompt)
        except Exception:
            return None

    def ignores(self, given: Given) -> bool:
        """Whether the template never reads a variable that the user set, for all chats or for this one."""
        named = {*self.set_by_user, *(name for name in given if name not in OWN_VARIABLES)}
        return not named <= self._compiled(given).reads

    def ready(self, turns: Turns) -> Turns:
        """The turns as passed to the template: without keyhole's own keys, and with calls in the form that it
        expects."""
        plain = [{key: value for key, value in turn.items() if key not in FLAGS} for turn in turns]
        for turn in plain:
            if isinstance(turn.get("tool_calls"), list):
                turn["tool_calls"] = [call_as(call, self.takes_text_arguments) for call in turn["tool_calls"]]
        return plain

    @cached_property
    def takes_text_arguments(self) -> bool:
        """Whether arguments of calls must be JSON text: the template concatenates them, or would print Python's
        dict."""
        call = {"type": "function", "id": "000000000", "function": {"name": MARKER, "arguments": {MARKER: VALUE}}}
        chat: Turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
        done = self.attempt(chat, {})
        return done is None or f"{{'{MARKER}'" in done.text

    def generation_prompt(self, given: Given) -> str:
        """The text that the template writes after a question, before the answer: what is written after its loop, or,
        where it writes the prompt inside of the loop, what it writes more than without it."""
        asked = [{"role": "user", "content": MARKER}]
        done, plain = self.attempt(asked, given, prompt=True), self.attempt(asked, given)
        if done is None or done.after:
            return done.after if done else ""
        return done.text[len(plain.text) :] if plain and done.text.startswith(plain.text) else ""
