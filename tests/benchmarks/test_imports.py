"""What scripts import from the library is there, and each is listed: most run on a GPU only, and rarely."""

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_imported_name_is_there() -> None:
    """By the source alone: nothing is imported."""
    wrong, count = [], 0
    for path in sorted([*(ROOT / "benchmarks").glob("*.py"), *(ROOT / "scripts").glob("*.py")]):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("keyhole"):
                missing = {name.name for name in node.names} - names_in(node.module)
                wrong += [f"{path.name}: {name} of {node.module}" for name in missing]
                count += 1
    assert not wrong and count > 40


def test_every_script_is_listed() -> None:
    """benchmarks/README.md has a command for each script, and every record lies in benchmarks/records/."""
    page = (ROOT / "benchmarks" / "README.md").read_text(encoding="utf-8")
    files = [path for path in (ROOT / "benchmarks").glob("*.*") if path.stem not in ("__init__", "README")]
    assert [path.name for path in files if path.suffix != ".py"] == []
    words = ("    python benchmarks/{}.py ", "    python -m benchmarks.{} ")
    assert [path.name for path in files if not any(each.format(path.stem) in page for each in words)] == []


@cache
def names_in(module: str) -> set[str]:
    """Everything that a module defines or imports, and the modules of a package."""
    place = ROOT.joinpath(*module.split("."))
    file = place / "__init__.py" if (place / "__init__.py").exists() else place.with_suffix(".py")
    found = {path.stem for path in place.glob("*")}
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found |= {alias.asname or alias.name for alias in node.names}
    return found
