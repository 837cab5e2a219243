"""The Jinja programs of a task file: texts and values from the columns of a row.

    Text          "{{ premise }}\\nDoes this mean ..."      Jinja text, unchanged: no line break is removed
    Expression    "[choice1, choice2]"                      one Jinja expression; its value may be of any kind

Both run in the same sandbox as chat templates (data/sandbox.py): no files, no attributes with underscores, no endless
loops. A missing column is an error, never an empty text; all other failures are errors too (UserError). A null, a NaN,
bytes, a list or an object is never written into a text as Python prints it ("None", "['a']"): a task file must handle
them explicitly (`x is none`, `x | join`). There are two filters besides Jinja's:

    spans | slices(text)     the pieces of `text` from `start` to `end` (inclusive) of each span, as ReCoRD marks its
                             entities
    answers | listed         the list itself; a text is refused, of which `answers[0]` would be one letter (the cells
                             of a CSV are texts)
"""

import functools
from collections.abc import Callable
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.visitor import NodeTransformer

from keyhole.data.bill import BUDGET, PER_CHARACTER, PER_ITEM, Watch, size
from keyhole.data.row_template import no_text
from keyhole.data.sandbox import CONTEXTS, Sandbox
from keyhole.data.template_segments import Watched
from keyhole.errors import UserError, printable

RESULT = "result"
SHOWN = "shown"
OF_TEXT = (  # filters that would convert a value to text first
    "trim", "lower", "upper", "capitalize", "title", "replace", "string", "escape", "e", "forceescape", "center",
    "indent", "wordwrap", "truncate", "striptags", "wordcount", "format", "urlize", "safe",
)  # fmt: skip


class _Program:
    """Jinja source, compiled once."""

    def __init__(self, source: str, key: str) -> None:
        """key: the key of the source in the task file, for messages."""
        self.source, self.key = source, key
        self.sandbox = Sandbox()
        self.sandbox.undefined = jinja2.StrictUndefined
        self.sandbox.trim_blocks = self.sandbox.lstrip_blocks = False
        self.sandbox.keep_trailing_newline = True
        self.sandbox.filters |= {name: _of_text(self.sandbox.filters[name]) for name in OF_TEXT}
        self.sandbox.filters |= {"slices": self._slices, "listed": _listed, SHOWN: _shown}
        try:
            tree = self._parse()
            self.names = {name.name for name in tree.find_all(nodes.Name) if name.ctx == "load"}  # columns, and others
            self.program = self.sandbox.from_string(Watched().visit(_Shown().visit(tree)))
        except Exception as error:  # also SyntaxError: Jinja generates Python, which allows 20 nested loops
            raise UserError(f"{key}: not valid Jinja: {printable(str(error), 200)}: {source!r:.120}") from None

    def _parse(self) -> nodes.Template:
        return self.sandbox.parse(self.source)

    def run(self, variables: dict[str, Any]) -> Any:
        self.sandbox.watch = Watch([], BUDGET + PER_CHARACTER * size(variables, BUDGET))
        try:
            return self._made(variables)
        except Exception as error:  # filters raise any error
            said = printable(str(error) or type(error).__name__, 200)
            raise UserError(f"{self.key}: {said}: {self.source!r:.120}") from None

    def _made(self, variables: dict[str, Any]) -> Any:
        raise NotImplementedError  # abstract

    def _slices(self, spans: list[dict[str, int]], text: str) -> list[str]:
        pieces = []
        for span in spans:
            pieces.append(text[span["start"] : span["end"] + 1])
            self.sandbox.watch.spend(PER_ITEM + len(pieces[-1]))
        return pieces


class Text(_Program):
    """Text with columns in it."""

    def _parse(self) -> nodes.Template:
        paid = self.sandbox.finalize
        assert paid is not None
        self.sandbox.finalize = lambda value: paid(_shown(value))
        return super()._parse()

    def _made(self, variables: dict[str, Any]) -> str:
        watch = self.sandbox.watch
        return "".join([watch.write(piece) for piece in self.program.generate(**variables)])


class Expression(_Program):
    """One value; lists come as lists of texts, numbers or objects."""

    def _parse(self) -> nodes.Template:
        value = self.sandbox.parse(f"{{{{ {self.source} }}}}").find(nodes.Output)
        if value is None or len(value.nodes) != 1 or isinstance(value.nodes[0], nodes.TemplateData):
            raise jinja2.TemplateSyntaxError("expected one expression", 1)
        return nodes.Template([nodes.Assign(nodes.Name(RESULT, "store"), value.nodes[0])], lineno=1)

    def _made(self, variables: dict[str, Any]) -> Any:
        value = getattr(self.program.make_module(variables), RESULT)
        for part in value if isinstance(value, tuple | list) else [value]:
            if isinstance(part, jinja2.Undefined):
                str(part)  # raises, with the missing name
        return value if isinstance(value, str | int | float | list | dict | None) else list(value)


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


def _listed(value: Any) -> list[Any]:
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
