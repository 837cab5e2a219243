"""Jinja as Transformers runs it, for chat templates and task files; it runs only in the process of worker.py.

The sandbox is Jinja's: no files, no private attributes, no changes of what is passed in. Beside Jinja's own, programs
have `tojson`, `raise_exception`, `strftime_now`, `break` and `continue`, and the tag `generation`. What would differ
from run to run is missing (`random`), and `strftime_now` gets a date, not the clock's: a run that is resumed tomorrow
must get the same tokens. `Loops` inserts statements that record which message a text is written for.
"""

import datetime
import json
from collections.abc import Callable
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

MOST_SOURCE, MOST_TEXT = 2**20, 2**25
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
    """The environment of one program. dated: whether it has asked for the date. brackets: written around what the model
    generates, where its place is wanted."""

    brackets = ("", "")

    def __init__(self, date: datetime.date | None = None, **options: Any) -> None:
        super().__init__(extensions=[Generation, loopcontrols], **options)
        self.date, self.dated = date or datetime.date.today(), False
        self.trace = Trace([])
        self.filters["tojson"] = _tojson
        self.filters[FOLLOW] = jinja2.pass_context(lambda _, item, change: self.trace.follow(item, change))
        self.filters.pop("random")
        self.globals.pop("lipsum")
        self.globals |= {"raise_exception": _raise, "strftime_now": self._strftime}

    def _strftime(self, form: str) -> str:
        self.dated = True
        return datetime.datetime.combine(self.date, datetime.time()).strftime(form)


def written(program: jinja2.Template, variables: dict[str, Any], step: Callable[[int], None] = lambda _: None) -> str:
    """The text of a program. step: is told its length so far, piece by piece."""
    pieces, length = [], 0
    for piece in program.generate(**variables):
        pieces.append(piece)
        length += len(piece)
        if length > MOST_TEXT:
            raise MemoryError
        step(length)
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

    def __init__(self, messages: list[dict[str, Any]]) -> None:
        self.index = {id(message): i for i, message in enumerate(messages)}
        self.loops: list[int | None] = []  # for each running loop: the index of its current message
        self.segments: list[tuple[int, int, int]] = []
        self.position = self.since = 0

    def step(self, position: int) -> None:
        self.position = position

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
