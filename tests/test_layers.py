"""One order of layers, no method known by its name outside its folder, and folders that list their files."""

import ast
import re
from functools import cache
from pathlib import Path

import keyhole
from keyhole.methods import METHODS

PACKAGE = Path(keyhole.__file__).parent
ORDER = (
    "errors", "weak", "assets", "machine", "limits", "pages", "disk", "ranks", "ops", "offload", "model", "methods",
    "config", "plan", "loading", "data", "checkpoint", "eval", "harness", "report", "hub", "training", "bench", "demo",
    "compare", "cli", "hf",
)  # fmt: skip
SOURCES = {path: path.relative_to(PACKAGE).parts for path in PACKAGE.rglob("*.py")}
ROOT = ("__init__.py", "__main__.py")


@cache
def nodes(path: Path) -> list[ast.Import | ast.ImportFrom | ast.Constant]:
    """What the tests look at in a file."""
    kinds = (ast.Import, ast.ImportFrom, ast.Constant)
    return [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, kinds)]


def imported(path: Path) -> set[str]:
    """The layers that a file imports, also inside functions."""
    found = set()
    for node in nodes(path):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        found |= {name.split(".")[1] for name in names if name.startswith("keyhole.")}
    return found & set(ORDER)


def test_layers_import_only_what_is_below_them() -> None:
    """No circle and no exception: each layer knows those before it in ORDER."""
    upward = []
    for path, parts in SOURCES.items():
        layer = parts[0].removesuffix(".py")
        assert layer in ORDER or parts[0] in ROOT, f"{layer} has no place in the order"
        own = len(ORDER) if parts[0] in ROOT else ORDER.index(layer)
        upward += [f"{'/'.join(parts)} imports {name}" for name in imported(path) if ORDER.index(name) > own]
    assert upward == []


def test_no_method_is_known_by_its_name_elsewhere() -> None:
    """Outside of methods/, a method's name appears in no string of the code: others read its row."""
    named = []
    for path, parts in SOURCES.items():
        if parts[0] != "methods":
            strings = [node for node in nodes(path) if isinstance(node, ast.Constant)]
            named += [f"{'/'.join(parts)}:{n.lineno} names {n.value}" for n in strings if n.value in METHODS]
    assert named == []


def test_every_folder_lists_its_files() -> None:
    """The `__init__.py` of a folder names each file and folder in it, so that a reader finds where a change goes."""
    unlisted = []
    for init in PACKAGE.rglob("__init__.py"):
        words = set(re.findall(r"\w+", init.read_text()))
        inside = [path for path in init.parent.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()]
        unlisted += [
            str(path.relative_to(PACKAGE)) for path in inside if path.stem not in words and path.stem[0] != "_"
        ]
    assert unlisted == []


def imports(path: Path) -> set[str]:
    """The modules of keyhole that a file imports above its functions, also for type checkers alone."""
    tree = ast.parse(path.read_text())
    within = {id(n) for f in ast.walk(tree) if isinstance(f, ast.FunctionDef) for n in ast.walk(f)}
    found = set()
    for node in (n for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and id(n) not in within):
        found |= {name for alias in node.names for name in (f"{node.module}.{alias.name}", str(node.module))}
    return found


def test_no_files_import_each_other() -> None:
    """Not in a circle of any length, within a package or between them."""
    names = {".".join(("keyhole", *path.relative_to(PACKAGE).with_suffix("").parts)): path for path in SOURCES}
    left = {name: imports(path) & names.keys() - {name} for name, path in names.items()}
    count = -1
    while count != (count := len(left)):  # without those that import none of the others, or that none of them imports
        wanted = set().union(*left.values())
        left = {name: own & left.keys() for name, own in left.items() if own & left.keys() and name in wanted}
    assert not left, sorted(left)


def test_one_module_names_the_accelerator() -> None:
    """Code reaches torch.cuda by keyhole.machine.gpu, so that another accelerator is a change there."""
    for path, parts in SOURCES.items():
        if parts != ("machine", "gpu.py"):
            names = (
                ast.unparse(node) for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)
            )
            assert "torch.cuda" not in names, path
