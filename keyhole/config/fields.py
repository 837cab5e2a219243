"""The table of settings: each dotted key ("zo.eps") with its type, default and doc line.

It is made once from schema.py and the methods' rows: types from typing, defaults from dataclasses, and doc lines from
the source text, because Python discards the string under a field. A field whose type is a dataclass is a section; its
fields appear under their dotted names and the section itself does not.
"""

import ast
import dataclasses
import functools
import inspect
import typing
from dataclasses import MISSING, dataclass
from typing import Any

from keyhole.config.schema import TrainConfig


@dataclass(frozen=True)
class Setting:
    """One key a user can set."""

    key: str
    type: Any
    default: Any
    doc: str

    @property
    def required(self) -> bool:
        """Whether there is no default."""
        return self.default is MISSING

    @property
    def section(self) -> str | None:
        """`zo` for `zo.eps`; None at the top level."""
        return self.key.split(".")[0] if "." in self.key else None


def doc_lines(cls: type) -> dict[str, str]:
    """The string under each field of a dataclass, by field name; including base classes."""
    bases = [base for base in cls.__bases__ if dataclasses.is_dataclass(base)]
    docs = {name: doc for base in bases for name, doc in doc_lines(base).items()}
    if cls is TrainConfig:  # generated from its base and the methods' rows, without source text
        return docs
    (source,) = ast.parse(inspect.getsource(cls)).body
    body = source.body if isinstance(source, ast.ClassDef) else []
    for statement, after in zip(body, body[1:], strict=False):
        match statement, after:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(doc))):
                docs[name] = inspect.cleandoc(doc)
    return docs


@functools.cache
def sections() -> dict[str, type]:
    """Section name -> dataclass, in the order of the schema."""
    hints = typing.get_type_hints(TrainConfig, include_extras=True)
    return {name: hint for name, hint in hints.items() if isinstance(hint, type) and dataclasses.is_dataclass(hint)}


def _own_settings(cls: type, prefix: str) -> dict[str, Setting]:
    hints = typing.get_type_hints(cls, include_extras=True)
    docs = doc_lines(cls)
    own = [f for f in dataclasses.fields(cls) if not dataclasses.is_dataclass(hints[f.name])]
    return {prefix + f.name: Setting(prefix + f.name, hints[f.name], f.default, docs.get(f.name, "")) for f in own}


@functools.cache
def settings() -> dict[str, Setting]:
    """All settings by dotted key: the top level first, then section by section."""
    table = _own_settings(TrainConfig, "")
    for name, cls in sections().items():
        table |= _own_settings(cls, f"{name}.")
    return table
