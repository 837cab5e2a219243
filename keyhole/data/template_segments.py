"""Runs a chat template: the text it writes, and which message each part of the text belongs to.

A chat template is a program in Jinja that comes with the model. The text equals that of `apply_chat_template` (a test
compares them). Before the program is compiled, statements are inserted that call the watch of the rendering
(sandbox.py, bill.py):

    who      A template loops over the messages. A statement at the top of every loop body, and one after every loop,
             record the position in the output, so each character is known to be written while the loop was at message
             i (`segments`), or outside of any loop.
    marks    The text inside `{% generation %}` (`marked`): the template's own mark for text that the model generates.
             A macro or a `{% set %}` block makes its text before it is written, so a mark inside does not know its
             position: such a template runs a second time with a unique bracket around each marked text, which must
             give the same text but for the brackets. If it does not, the chat is refused.
    cost     Everything that the program computes is charged, so that no template uses too much memory or time.
"""

import datetime
import re
import secrets
from typing import Any, NamedTuple

import jinja2
from jinja2 import meta, nodes
from jinja2.visitor import NodeTransformer

from keyhole.data.bill import BUDGET, PER_CHARACTER, Runaway, Watch, size
from keyhole.data.sandbox import Sandbox
from keyhole.data.turns import REASONING

MOST_SOURCE = 2**20
BUFFERS = (nodes.Macro, nodes.AssignBlock, nodes.FilterBlock)  # their text is made first, and written later


class Rendering(NamedTuple):
    """A text, and the message of each part: (start, end, index of the message)."""

    text: str
    segments: list[tuple[int, int, int]]
    marked: list[tuple[int, int]]
    dated: bool = False  # the template used the date
    marks: bool = False  # the template has marks, whether or not it reached one


class Watched(NodeTransformer):
    """Inserts the watching statements into a parsed template."""

    def visit_For(self, node: nodes.For) -> list[nodes.Node]:
        self.generic_visit(node)
        name = node.target.name if isinstance(node.target, nodes.Name) else None
        item = nodes.Name(name, "load") if name else nodes.Const(None)
        node.body.insert(0, _statement("turn", node.lineno, item, _literal(node.body)))
        return [_statement("enter", node.lineno), node, _statement("leave", node.lineno)]

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:
        self.generic_visit(node)
        node.body.insert(0, _statement("macro", node.lineno, literal=_literal(node.body)))
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        node.nodes = [_watched("value", part, node.lineno) for part in node.nodes]
        return node

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        if len(node.ops) == 1 and _is_short(node.expr, node.ops[0]):
            return node
        parts = [part for operand in node.ops for part in (nodes.Const(operand.op), operand.expr)]
        return nodes.Filter(node.expr, "watch compare", parts, [], None, None, lineno=node.lineno)

    def visit_List(self, node: nodes.Expr) -> nodes.Node:
        self.generic_visit(node)
        made = any(True for _ in node.find_all(nodes.Name)) and getattr(node, "ctx", "load") == "load"
        return _watched("value", node, node.lineno) if made else node

    visit_Tuple = visit_Dict = visit_List


def _is_short(left: nodes.Expr, operand: nodes.Operand) -> bool:
    """Whether a comparison has a literal operand, which bounds its cost."""
    right = operand.expr
    if operand.op in ("in", "notin"):
        right_items = right.items if isinstance(right, nodes.List | nodes.Tuple) else [right]
        return all(isinstance(item, nodes.Const) for item in right_items)
    return isinstance(left, nodes.Const) or isinstance(right, nodes.Const)


def _literal(body: list[nodes.Node]) -> int:
    """Literal characters that a body writes."""
    return sum(len(data.data) for part in body for data in [*part.find_all(nodes.TemplateData)])


def _statement(name: str, lineno: int, item: nodes.Expr | None = None, literal: int = 0) -> nodes.Node:
    return nodes.ExprStmt(_watched(name, item or nodes.Const(None), lineno, literal), lineno=lineno)


def _watched(name: str, item: nodes.Expr, lineno: int, literal: int = 0) -> nodes.Filter:
    """A filter that no template can name, because its name contains a space; a filter costs less than a call."""
    return nodes.Filter(item, f"watch {name}", [nodes.Const(literal)], [], None, None, lineno=lineno)


class Template:
    """A compiled chat template."""

    def __init__(self, source: str, date: datetime.date) -> None:
        if len(source) > MOST_SOURCE:
            raise Runaway(f"a template of {len(source):,} characters; {MOST_SOURCE:,} are the most")
        self.source = source
        self.sandbox = Sandbox()
        self.sandbox.date = datetime.datetime(date.year, date.month, date.day)
        parsed = self.sandbox.parse(source)
        calls = [block.call for block in parsed.find_all(nodes.CallBlock)]
        marks = [call for call in calls if _is_mark(call)]
        self.has_marks = bool(marks)
        self.is_buffered = len(marks) < len(calls) or any(True for _ in parsed.find_all(BUFFERS))
        self.reads = meta.find_undeclared_variables(parsed)  # the variables that it takes from outside
        self.program = self.sandbox.from_string(Watched().visit(parsed))

    def render(self, messages: list[dict[str, Any]], variables: dict[str, Any]) -> Rendering:
        """Runs the template. Its errors are passed on; Runaway if it exceeds its budget."""
        messages = [_with_reasoning(message) for message in messages]
        text, watch = self._run(messages, variables)
        marked = watch.marked
        if marked and self.is_buffered:
            marked = self._bracketed(messages, variables, text)
        return Rendering(text, watch.segments, marked, watch.dated, self.has_marks)

    def _run(
        self, messages: list[dict[str, Any]], variables: dict[str, Any], brackets: tuple[str, str] | None = None
    ) -> tuple[str, Watch]:
        budget = BUDGET + PER_CHARACTER * size([messages, variables], BUDGET)
        watch = self.sandbox.watch = Watch(messages, budget, brackets)
        pieces = self.program.generate(**{"documents": None, **variables, "messages": messages})
        return "".join([watch.write(piece) for piece in pieces]), watch

    def _bracketed(self, messages: list[dict[str, Any]], variables: dict[str, Any], text: str) -> list[tuple[int, int]]:
        """The positions of marked text, from a second run with brackets around it."""
        name = secrets.token_hex(8)
        opening, closing = brackets = f"[{name}[", f"]{name}]"
        parts = re.split(f"({re.escape(opening)}|{re.escape(closing)})", self._run(messages, variables, brackets)[0])
        if "".join(part for part in parts if part not in brackets) != text:
            raise jinja2.TemplateError("it changes the text that it marks with {% generation %} after marking it")
        position, begun, marked = 0, [], []
        for part in parts:
            if part == opening:
                begun.append(position)
            elif part == closing and begun:
                marked.append((begun.pop(), position))
            elif part != closing:
                position += len(part)
        return marked


def _is_mark(call: nodes.Expr) -> bool:
    method = call.node if isinstance(call, nodes.Call) else None
    return isinstance(method, nodes.ExtensionAttribute) and method.name == "mark"


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """A copy with the reasoning under every name that templates use for it."""
    reasoning = next((message[key] for key in REASONING if message.get(key) is not None), None)
    names = dict.fromkeys(REASONING, reasoning)
    return {**message} if reasoning is None else {**names, **message, "reasoning_content": reasoning}
