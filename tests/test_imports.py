"""The library imports with torch, transformers and safetensors alone (numpy and PyYAML come with them)."""

import importlib
import subprocess
import sys
from pathlib import Path

import keyhole
from scripts.stub import stub
from tests.training.children import server

PACKAGE = Path(keyhole.__file__).parent
NOT_NEEDED = (
    "typer", "click", "rich", "matplotlib", "pyarrow", "pandas", "tensorboard", "datasets",
    "psutil", "triton",
)  # fmt: skip
OUTSIDE = ("cli", "demo", "bench", "harness", "__main__.py")  # programs; everything else is the library


def modules() -> list[str]:
    """Every module of the library."""
    files = [path.relative_to(PACKAGE) for path in sorted(PACKAGE.rglob("*.py"))]
    names = [".".join(("keyhole", *f.with_suffix("").parts)) for f in files if f.parts[0] not in OUTSIDE]
    return [name.removesuffix(".__init__") for name in names]


def _import_anew(names: list[str]) -> None:
    """In a fork of a process that has torch and transformers, and forgets keyhole."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "keyhole"]:
        del sys.modules[name]
    sys.modules.update(dict.fromkeys(NOT_NEEDED))
    for name in names:
        importlib.import_module(name)


def test_the_library_imports_with_the_core_dependencies_alone() -> None:
    """Every module of the library imports in a process where everything optional is missing."""
    assert "keyhole.training.start" in modules()
    child = server.Process(target=_import_anew, args=(modules(),))
    child.start()
    child.join()
    assert child.exitcode == 0, "the traceback is above"


def test_the_stub_names_what_the_module_offers() -> None:
    """`make docs` writes it again."""
    assert (PACKAGE / "__init__.pyi").read_text() == stub()


def test_starting_imports_neither_torch_nor_transformers() -> None:
    """`import keyhole` is instant, and so is the command line; torch comes with the first thing that needs it."""
    code = (
        "import importlib, sys\n"
        "for name in ('keyhole', 'keyhole.config', 'keyhole.cli'):\n"
        "    importlib.import_module(name)\n"
        "    found = {'torch', 'transformers', 'numpy'} & set(sys.modules)\n"
        "    assert not found, (name, found)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
