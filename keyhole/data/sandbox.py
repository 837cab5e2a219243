"""A Jinja sandbox with limits on memory and time, for templates that come with a model.

Jinja's sandbox protects the computer from a template, but not its memory and time: two nested loops, or `'x' * 10**10`,
are enough. Here every loop iteration, call, filter, product, sum, comparison, list and output is charged before it
happens, by the size of its inputs and of its possible output (bill.py).

The functions are those that Transformers gives its templates: `tojson`, `raise_exception`, `strftime_now`, and the tag
`generation`. `strftime_now` returns a given date, not the clock's: a run that is resumed tomorrow must get the same
tokens. template_segments.py records which message each part of the text belongs to.
"""

import datetime
import functools
import json
import operator
import re
from collections.abc import Callable, Sized
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment

from keyhole.data.bill import BUDGET, PER_CALL, TOO_MUCH, Runaway, Watch, depth, flat_size, size

FLAT = {
    "length", "count", "first", "last", "list", "reverse", "selectattr", "rejectattr", "select", "reject", "map",
    "default", "d", "items", "dictsort", "sort", "groupby", "unique", "min", "max", "attr", "int", "float",
}  # fmt: skip
COMPARISONS: dict[str, Callable[[Any, Any], Any]] = {
    "eq": operator.eq, "ne": operator.ne, "gt": operator.gt, "gteq": operator.ge, "lt": operator.lt,
    "lteq": operator.le, "in": lambda item, container: item in container,
    "notin": lambda item, container: item not in container,
}  # fmt: skip
READING_TESTS = (
    "in", "==", "eq", "equalto", "!=", "ne", ">", "gt", "greaterthan", "ge", ">=", "<", "lt", "lessthan", "<=", "le",
    "lower", "upper",
)  # fmt: skip
LINE_BREAKS = "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"


class _Generation(Extension):
    """The tag around text that the model generates."""

    tags = {"generation"}
    environment: "Sandbox"

    def parse(self, parser: Any) -> nodes.Node:
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("mark"), [], [], body).set_lineno(lineno)

    def mark(self, caller: Callable[[], str]) -> str:
        watch, text = self.environment.watch, caller()
        if watch.brackets is not None:
            return watch.brackets[0] + text + watch.brackets[1]
        watch.marked.append((watch.position, watch.position + len(text)))
        return text


class Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's sandbox with limits. `watch` belongs to the current rendering."""

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
            # pass_context prevents Jinja from evaluating them at compile time
            "watch enter": jinja2.pass_context(lambda *_: self.watch.enter()),
            "watch turn": jinja2.pass_context(lambda _, item, literal: self.watch.turn(item, literal)),
            "watch leave": jinja2.pass_context(lambda *_: self.watch.leave()),
            "watch macro": jinja2.pass_context(lambda _, __, literal: self.watch.spend(literal)),
            "watch compare": jinja2.pass_context(lambda _, *parts: self._compared(*parts)),
            "watch value": jinja2.pass_context(lambda _, value, __: self._paid(value)),
        }
        known: dict[str, Any] = self.tests
        self.tests |= {name: self._read(name, known[name]) for name in READING_TESTS}
        self.globals.pop("lipsum")
        self.filters.pop("random")  # the same chat must give the same text: a resumed run prepares its data again
        self.globals |= {"raise_exception": _raise, "strftime_now": self._strftime}

    def _finalize(self, value: Any) -> Any:
        return value if isinstance(value, str) else self._paid(value)

    def _paid(self, value: Any) -> Any:
        self.watch.spend(size(value, self.watch.left))
        return value

    def _compared(self, left: Any, *parts: Any) -> Any:
        """A comparison, or a chain of them (operator, value, operator, value, ...), charged."""
        held: Any = True
        for name, right in zip(parts[::2], parts[1::2], strict=True):
            self._charge_comparison(left, right, name in ("in", "notin"))
            held = COMPARISONS[name](left, right)
            if not held:
                break
            left = right
        return held

    def _charge_comparison(self, left: Any, right: Any, is_search: bool) -> None:
        """A search costs the value and the text or list with everything in it; comparing containers costs both; other
        comparisons cost the smaller value."""
        most = self.watch.left
        if is_search and not isinstance(right, dict):
            length = len(right) if isinstance(right, Sized) else 0
            self.watch.spend(flat_size(left) + max(length, size(right, most)))
        elif all(isinstance(value, list | tuple | dict | set) for value in (left, right)) and not is_search:
            self.watch.spend(size(left, most) + size(right, most))
        else:
            self.watch.spend(min(flat_size(left), flat_size(right)))

    def _read(self, name: str, test: Callable[..., bool]) -> Callable[..., bool]:
        """A test that reads its values, charged."""

        @functools.wraps(test)
        def paid(value: Any, *args: Any, **kwargs: Any) -> bool:
            others = [*args, *kwargs.values()]
            self._charge_comparison(value, others[0] if others else value, name == "in")
            return test(value, *args, **kwargs)

        return paid

    def _strftime(self, form: str) -> str:
        self.watch.dated = True
        return self.date.strftime(form)

    def _charged(self, name: str, filter: Callable[..., Any]) -> Callable[..., Any]:
        """The filter, charged before it runs."""

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
        """Charges the inputs, and the possible output of functions that enlarge their input."""
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
        elif name == "indent" and texts:
            breaks = sum(texts[0].count(character) for character in LINE_BREAKS)
            cost += (breaks + 1) * max(number, 4, *map(len, texts[1:]))
        elif name == "tojson" and number:
            watch.spend(given)  # before the traversal
            cost *= max(map(depth, values))
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
