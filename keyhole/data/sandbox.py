"""A Jinja sandbox with a bill, for programs that come with a model.

Jinja's sandbox keeps a template away from the computer, but not from its memory and time: two nested loops, or
`'x' * 10**10`, are enough. Here every loop turn, call, filter, product, sum, list and output is charged before it
happens, by the size of what goes in and of what can come out of it:

    budget = 2^26 + 64 * characters of the messages         a loop's turn costs 64, a call 2048

About a million turns, or 64 million characters: a few seconds. Long templates in use spend some 10^5 of it on a chat of
ten turns. No value can be larger than what was paid for it: lists are charged with all that is nested in them when
they are made, so one that holds itself twice, sixty times over, is stopped at a million items.

The functions are those that Transformers gives its templates: `tojson`, `raise_exception`, `strftime_now`, and the tag
`generation`. `strftime_now` answers with the date it is given, not with the clock: a run that goes on tomorrow must
find the tokens of today. Who wrote which part of the text (`Watch`): template_segments.py.
"""

import datetime
import functools
import json
import re
from collections.abc import Callable
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment

BUDGET, PER_CHARACTER, PER_ITEM, PER_CALL = 2**26, 64, 64, 2048
FLAT = {
    "length", "count", "first", "last", "list", "reverse", "selectattr", "rejectattr", "select", "reject", "map",
    "default", "d", "items", "dictsort", "sort", "groupby", "unique", "min", "max", "random", "attr", "int", "float",
}  # fmt: skip
TOO_MUCH = "the template loops or multiplies text beyond all bounds, so it was stopped"


class Runaway(Exception):
    """A template that would take more memory or time than any honest one."""


class Watch:
    """The state of one rendering: what is spent, and which message the output belongs to."""

    def __init__(self, messages: list[dict[str, Any]], budget: int) -> None:
        self.left, self.position, self.dated = budget, 0, False
        self.index = {id(message): i for i, message in enumerate(messages)}
        self.loops: list[int | None] = []  # of the loops that are running: the message each one stands at
        self.segments: list[tuple[int, int, int]] = []
        self.marked: list[tuple[int, int]] = []
        self.since = 0

    def spend(self, amount: int) -> None:
        self.left -= amount
        if self.left < 0:
            raise Runaway(TOO_MUCH)

    def write(self, text: str) -> str:
        self.spend(len(text))
        self.position += len(text)
        return text

    def note(self) -> None:
        """Closes the stretch of output that ends here."""
        owner = next((i for i in reversed(self.loops) if i is not None), None)
        if owner is not None and self.position > self.since:
            self.segments.append((self.since, self.position, owner))
        self.since = self.position

    def enter(self) -> None:
        self.note()
        self.loops.append(None)

    def turn(self, item: Any, literal: int) -> None:
        self.spend(PER_ITEM + literal)
        self.note()
        self.loops[-1] = self.index.get(id(item))

    def leave(self) -> None:
        self.note()
        self.loops.pop()


def size(value: Any, most: int) -> int:
    """The weight of a value with all that is nested in it: 1 per character, 64 per item; stops above `most`."""
    total, todo = 0, [value]
    while todo and total <= most:
        item = todo.pop()
        total += PER_ITEM if todo or total else 1
        if isinstance(item, str | bytes):
            total += len(item)
        elif isinstance(item, int) and not isinstance(item, bool):
            total += item.bit_length() // 3
        elif isinstance(item, dict):
            todo += [*item.keys(), *item.values()]
        elif isinstance(item, list | tuple | set):
            todo += item
    return total


def flat_size(value: Any) -> int:
    """The weight of a value by itself."""
    return 1 + len(value) if isinstance(value, str | bytes | list | tuple | dict) else 1


class _Generation(Extension):
    """The tag around what the model generates."""

    tags = {"generation"}

    def parse(self, parser: Any) -> nodes.Node:
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("mark"), [], [], body).set_lineno(lineno)

    def mark(self, caller: Callable[[], str]) -> str:
        watch, text = self.environment.watch, caller()
        watch.marked.append((watch.position, watch.position + len(text)))
        return text


class Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's sandbox, with a bill. `watch` is that of the rendering under way."""

    intercepted_binops = frozenset({"*", "**", "%", "+"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols], finalize=self._finalize
        )
        self.watch = Watch([], BUDGET)
        self.date = datetime.datetime.now()
        self.filters = {name: self._charged(name, filter) for name, filter in self.filters.items()}
        self.filters["tojson"] = self._charged("tojson", _tojson)
        self.filters |= {
            # pass_context keeps Jinja from calling them once for all when it compiles
            "watch enter": jinja2.pass_context(lambda *_: self.watch.enter()),
            "watch turn": jinja2.pass_context(lambda _, item, literal: self.watch.turn(item, literal)),
            "watch leave": jinja2.pass_context(lambda *_: self.watch.leave()),
            "watch macro": jinja2.pass_context(lambda _, __, literal: self.watch.spend(literal)),
            "watch value": jinja2.pass_context(lambda _, value, __: self._paid(value)),
        }
        self.globals.pop("lipsum")
        self.globals |= {"raise_exception": _raise, "strftime_now": self._strftime}

    def _finalize(self, value: Any) -> Any:
        return value if isinstance(value, str) else self._paid(value)

    def _paid(self, value: Any) -> Any:
        self.watch.spend(size(value, self.watch.left))
        return value

    def _strftime(self, form: str) -> str:
        self.watch.dated = True
        return self.date.strftime(form)

    def _charged(self, name: str, filter: Callable[..., Any]) -> Callable[..., Any]:
        """The filter, paid for before it runs."""

        @functools.wraps(filter)
        def paid(*args: Any, **kwargs: Any) -> Any:
            values = [value for value in args if not isinstance(value, CONTEXTS)]
            self._charge(name, values, kwargs)
            return filter(*args, **kwargs)

        return paid

    def call(self, context: Any, obj: Any, *args: Any, **kwargs: Any) -> Any:
        receiver = getattr(getattr(obj, "__wrapped__", obj), "__self__", None)  # Jinja wraps str.format
        values = [receiver, *args] if isinstance(receiver, str | bytes | list | dict | tuple) else list(args)
        if not isinstance(obj, Macro):
            self._charge(getattr(obj, "__name__", ""), values, kwargs)
        self.watch.spend(PER_CALL)
        return super().call(context, obj, *args, **kwargs)

    def _charge(self, name: str, values: list[Any], kwargs: dict[str, Any]) -> None:
        """What goes in, and what can come out of the functions that make more of it."""
        watch, values = self.watch, [*values, *kwargs.values()]
        given = sum(flat_size(value) if name in FLAT else size(value, watch.left) for value in values)
        number = max([abs(v) for v in values if isinstance(v, int)], default=0)
        if name == "tojson":
            number = max([number, *(len(text) for text in kwargs.values() if isinstance(text, str))])  # an indent
        texts = [value for value in values if isinstance(value, str)]
        cost = given * max(1, number // 16)
        if name in ("replace", "do_replace") and len(texts) >= 3:
            cost += texts[0].count(texts[1]) * len(texts[2])
        elif name == "join":
            longest = max(map(len, texts), default=0)
            cost += longest * max((len(v) for v in values if isinstance(v, list | tuple | dict)), default=given)
        elif name in ("format", "format_map", "do_format"):
            cost += sum(int(digits[:18]) for text in texts for digits in re.findall(r"\d+", text)) + number
        elif name in ("translate", "sum", "wordwrap", "urlize", "map"):
            cost += given * given
        watch.spend(cost)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "**":
            if not all(isinstance(x, int | float) and abs(x) <= 1000 for x in (left, right)):
                raise Runaway(TOO_MUCH)
        elif operator == "*":
            numbers = [x for x in (left, right) if isinstance(x, int)]
            factor = max((abs(x) for x in numbers), default=1)
            weight = size(left, self.watch.left) + size(right, self.watch.left)
            self.watch.spend(weight * (factor if len(numbers) < 2 else weight))
        elif operator == "%" and isinstance(left, str):
            self._charge("format", [left, *(right if isinstance(right, tuple) else (right,))], {})
        else:
            self.watch.spend(sum(len(x) for x in (left, right) if isinstance(x, str | list | tuple)))
        return super().call_binop(context, operator, left, right)


CONTEXTS = (jinja2.Environment, jinja2.runtime.Context, nodes.EvalContext)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
