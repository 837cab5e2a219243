"""keyhole/__init__.pyi, from the table of what `import keyhole` offers (`make docs` writes it). The constructor of a
method takes its settings by name there, so that editors offer them and a type checker finds a misspelt one.

python -m scripts.stub > keyhole/__init__.pyi
"""

import typing
from dataclasses import fields

import keyhole
from keyhole.limits import UNIONS
from keyhole.methods import CLASSES

HEAD = '"""What `import keyhole` offers, for editors and type checkers: the module imports each name on first use."""'


def stub() -> str:
    """The text of the file."""
    places = [where.split(":") for where in keyhole._WHERE.values()]
    places.sort(key=lambda place: (place[0], not place[1].isupper(), place[1]))  # as ruff sorts imports
    private = {name: f"_{name}" for name in CLASSES}
    imports = [f"from {module} import {name} as {private.get(name, name)}" for module, name in places]
    classes = [line for _, name in places if name in CLASSES for line in _class(name)]
    head = [HEAD, "", "from typing import Any, Literal", "", *imports, "", "__version__: str", "__all__: list[str]", ""]
    return "\n".join([*head, *classes])


def _class(name: str) -> list[str]:
    """A method with the types of its settings, without their bounds."""
    cls = CLASSES[name].settings
    kinds = {key: _text(kind) for key, kind in typing.get_type_hints(cls).items()}
    settings = [f"        {each.name}: {kinds[each.name]} = ...," for each in fields(cls)]
    lines = [
        "        self,",
        "        model: Model,",
        "        lr: float | str | None = None,",
        "        *,",
        *settings,
    ]
    return [f"class {name}(_{name}):", "    def __init__(", *lines, "    ) -> None: ...", ""]


def _text(kind: object) -> str:
    """As it is written in a source."""
    if typing.get_origin(kind) in UNIONS:
        return " | ".join(_text(part) for part in typing.get_args(kind))
    if kind is type(None):
        return "None"
    return kind.__name__ if isinstance(kind, type) else str(kind).replace("typing.", "").replace("'", '"')


if __name__ == "__main__":
    print(stub(), end="")
