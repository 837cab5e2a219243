"""The little programs of a task file: texts and values made from the columns of a row.

    Text          "{{ premise }}\\nDoes this mean ..."      Jinja text, as it stands: no line break is taken away
    Expression    "[choice1, choice2]"                      one Jinja expression; its value may be of any kind

Both run in the sandbox that chat templates run in (data/sandbox.py): no file, no attribute with underscores, no loop
without end. A column that the row has not is an error, never an empty text; so is whatever else goes wrong in them
(UserError). Besides Jinja's filters there is one:

    spans | slices(text)     the pieces of `text` from `start` to `end` (inclusive) of each span, as ReCoRD marks its
                             entities
"""

from typing import Any

import jinja2
from jinja2 import nodes

from keyhole.data.bill import BUDGET, PER_CHARACTER, PER_ITEM, Watch, size
from keyhole.data.sandbox import Sandbox
from keyhole.data.template_segments import Watched
from keyhole.errors import UserError, printable

RESULT = "result"


class _Program:
    """Jinja source, compiled once."""

    def __init__(self, source: str, key: str) -> None:
        """key: where the source stands in the task file, for messages."""
        self.source, self.key = source, key
        self.sandbox = Sandbox()
        self.sandbox.undefined = jinja2.StrictUndefined
        self.sandbox.trim_blocks = self.sandbox.lstrip_blocks = False
        self.sandbox.keep_trailing_newline = True
        self.sandbox.filters["slices"] = self._slices
        try:
            self.program = self.sandbox.from_string(Watched().visit(self._parse()))
        except Exception as error:  # SyntaxError too: Jinja writes Python, which allows 20 nested loops
            raise UserError(f"{key}: not valid Jinja: {printable(str(error), 200)}: {source!r:.120}") from None

    def _parse(self) -> nodes.Template:
        return self.sandbox.parse(self.source)

    def run(self, variables: dict[str, Any]) -> Any:
        self.sandbox.watch = Watch([], BUDGET + PER_CHARACTER * size(variables, BUDGET))
        try:
            return self._made(variables)
        except Exception as error:  # a filter raises whatever it likes
            said = printable(str(error) or type(error).__name__, 200)
            raise UserError(f"{self.key}: {said}: {self.source!r:.120}") from None

    def _made(self, variables: dict[str, Any]) -> Any:
        raise NotImplementedError

    def _slices(self, spans: list[dict[str, int]], text: str) -> list[str]:
        pieces = []
        for span in spans:
            pieces.append(text[span["start"] : span["end"] + 1])
            self.sandbox.watch.spend(PER_ITEM + len(pieces[-1]))
        return pieces


class Text(_Program):
    """Text with columns in it."""

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
        if isinstance(value, jinja2.Undefined):
            str(value)  # raises, with the name that is missing
        return value if isinstance(value, str | int | float | list | dict | None) else list(value)
