"""The programs of a task file: Jinja texts and values from the columns of a row, and regular expressions.

    Text          "{{ premise }}\\nDoes this mean ..."      Jinja text, unchanged: no line break is removed
    Expression    "[choice1, choice2]"                      one Jinja expression; its value may be of any kind

They are read here, and run in the process of worker.py, in the sandbox of chat templates. A missing column is an error,
never an empty text; all other failures are errors too (UserError). A null, a NaN, bytes, a list or an object is never
written into a text as Python prints it ("None", "['a']"): a task file must handle them explicitly (`x is none`,
`x | join`). There are two filters besides Jinja's:

    spans | slices(text)     the pieces of `text` from `start` to `end` (inclusive) of each span, as ReCoRD marks its
                             entities
    answers | listed         the list itself; a text is refused, of which `answers[0]` would be one letter (the cells
                             of a CSV are texts)
"""

import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.visitor import NodeTransformer

from keyhole.data.formats import no_text
from keyhole.data.opened import Row
from keyhole.data.sandbox import MOST_SOURCE, Sandbox, written
from keyhole.data.worker import bounded, why
from keyhole.errors import UserError, printable

RESULT, SHOWN = "result", "shown"
OF_TEXT = (  # filters that would convert a value to text first
    "trim", "lower", "upper", "capitalize", "title", "replace", "string", "escape", "e", "forceescape", "center",
    "indent", "wordwrap", "truncate", "striptags", "wordcount", "format", "urlize", "safe",
)  # fmt: skip
CONTEXTS = (jinja2.Environment, jinja2.runtime.Context, nodes.EvalContext)


class _Program:
    """Jinja source. names: those that it reads, columns and others."""

    def __init__(self, source: str, key: str) -> None:
        """key: the key of the source in the task file, for messages."""
        self.source, self.key = source, key
        try:
            if len(source) > MOST_SOURCE:
                raise ValueError(f"{len(source):,} characters")
            self.names = {name.name for name in self.parsed(_sandbox()).find_all(nodes.Name) if name.ctx == "load"}
        except Exception as error:
            raise self._fault("not valid Jinja: ", error) from None

    def parsed(self, sandbox: Sandbox) -> nodes.Template:
        return sandbox.parse(self.source)

    def run(self, variables: Row) -> Any:
        """The value for a row. Only in the process of worker.py."""
        try:
            return self.made(_compiled(isinstance(self, Text), self.source), variables)
        except Exception as error:  # filters raise any error, and Python refuses what Jinja makes of 20 nested loops
            raise self._fault("", error) from None

    def made(self, program: jinja2.Template, variables: Row) -> Any:
        raise NotImplementedError  # abstract

    def _fault(self, what: str, error: Exception) -> UserError:
        return UserError(f"{self.key}: {what}{printable(why(error), 200)}: {self.source!r:.120}")


class Text(_Program):
    """Text with columns in it."""

    def made(self, program: jinja2.Template, variables: Row) -> str:
        return written(program, variables)


class Expression(_Program):
    """One value; lists come as lists of texts, numbers or objects."""

    def parsed(self, sandbox: Sandbox) -> nodes.Template:
        value = sandbox.parse(f"{{{{ {self.source} }}}}").find(nodes.Output)
        if value is None or len(value.nodes) != 1 or isinstance(value.nodes[0], nodes.TemplateData):
            raise jinja2.TemplateSyntaxError("expected one expression", 1)
        return nodes.Template([nodes.Assign(nodes.Name(RESULT, "store"), value.nodes[0])], lineno=1)

    def made(self, program: jinja2.Template, variables: Row) -> Any:
        value = vars(program.make_module(variables))[RESULT]
        for part in value if isinstance(value, tuple | list) else [value]:
            if isinstance(part, jinja2.Undefined):
                str(part)  # raises, with the missing name
        return value if isinstance(value, str | int | float | list | dict | None) else list(value)


@functools.lru_cache(64)
def _compiled(is_text: bool, source: str) -> jinja2.Template:
    sandbox = _sandbox()
    return sandbox.from_string(_Shown().visit((Text if is_text else Expression)(source, "").parsed(sandbox)))


def _sandbox() -> Sandbox:
    sandbox = Sandbox(undefined=jinja2.StrictUndefined, keep_trailing_newline=True, finalize=_shown)
    sandbox.filters |= {name: _of_text(sandbox.filters[name]) for name in OF_TEXT}
    sandbox.filters |= {"slices": _slices, "listed": _listed, SHOWN: _shown}
    return sandbox


class _Shown(NodeTransformer):
    """Makes `a ~ b` check its parts as text filters do."""

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        parts = [nodes.Filter(part, SHOWN, [], [], None, None, lineno=node.lineno) for part in node.nodes]
        return self.generic_visit(nodes.Concat(parts, lineno=node.lineno))


def _shown(value: Any) -> Any:
    """The value; refuses values that are not text, a finite number, a boolean or a date."""
    found = "" if isinstance(value, jinja2.Undefined) else no_text(value)  # a missing name raises when it is written
    if found:
        found += f", {value!r:.60}" if isinstance(value, list | tuple | dict | bytes) else ""
        raise UserError(f"found {found} where a text is written; correct or remove the row, or test for it")
    return value


def _slices(spans: list[dict[str, int]], text: str) -> list[str]:
    return [text[span["start"] : span["end"] + 1] for span in spans]


def _listed(value: object) -> list[object]:
    """The list, empty for null; refuses anything else."""
    if value is not None and not isinstance(value, list):
        raise UserError(f"found {value!r:.60}, expected a list; a CSV or TSV holds none: use JSONL or Parquet")
    return value or []


def _of_text(filter: Callable[..., Any]) -> Callable[..., Any]:
    """The filter, which refuses values that are not text; Jinja may pass a context before the value."""

    @functools.wraps(filter)
    def checked(*args: Any, **kwargs: Any) -> Any:
        _shown(next((value for value in args if not isinstance(value, CONTEXTS)), ""))
        return filter(*args, **kwargs)

    return checked


def extracted(pattern: str, texts: Sequence[str]) -> list[str | None]:
    """The last match of a regular expression in each text, or its group; None where it matches nothing."""
    return bounded(functools.partial(_last, pattern), texts, lambda text: f"extract: `{pattern}`")


def _last(pattern: str, text: str) -> str | None:
    found = [match[1] if match.re.groups else match[0] for match in re.finditer(pattern, text)]
    return next((part for part in reversed(found) if part is not None), "" if found else None)
