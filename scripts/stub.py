"""keyhole/__init__.pyi, from the table of what `import keyhole` offers (`make docs` writes it).

python -m scripts.stub > keyhole/__init__.pyi
"""

import keyhole

HEAD = '"""What `import keyhole` offers, for editors and type checkers: the module imports each name on first use."""'


def stub() -> str:
    """The text of the file."""
    places = [where.split(":") for where in keyhole._WHERE.values()]
    places.sort(key=lambda place: (place[0], not place[1].isupper(), place[1]))  # as ruff sorts imports
    imports = [f"from {module} import {name} as {name}" for module, name in places]
    return "\n".join([HEAD, "", *imports, "", "__version__: str", "__all__: list[str]", ""])


if __name__ == "__main__":
    print(stub(), end="")
