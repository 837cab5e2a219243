"""The library imports with torch, transformers and safetensors alone (numpy and PyYAML come with them)."""

import subprocess
import sys
from pathlib import Path

import pytest

import keyhole

PACKAGE = Path(keyhole.__file__).parent
NOT_NEEDED = (
    "typer", "click", "rich", "matplotlib", "pyarrow", "pandas", "tensorboard", "datasets",
    "psutil", "triton",
)  # fmt: skip
LIBRARY = (
    "",
    "config",
    "model",
    "methods",
    "ops",
    "offload",
    "checkpoint",
    "plan",
    "data",
    "eval",
    "trainer",
)


def modules() -> list[str]:
    """Every module of the library that exists, the command line and the demo aside."""
    found = []
    for part in LIBRARY:
        top = PACKAGE / part
        files = sorted(top.rglob("*.py")) if part else [PACKAGE / "__init__.py"]
        files += [top.with_suffix(".py")] if part and top.with_suffix(".py").exists() else []
        for file in files:
            dotted = ".".join(("keyhole", *file.relative_to(PACKAGE).with_suffix("").parts))
            found.append(dotted.removesuffix(".__init__"))
    return found


def test_the_library_imports_with_the_core_dependencies_alone() -> None:
    """Every module of the library imports in a process where everything optional is missing."""
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({NOT_NEEDED!r}))\n"
        f"import importlib\nfor name in {modules()!r}: importlib.import_module(name)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", ["keyhole", "keyhole.config", "keyhole.cli"])
def test_starting_imports_neither_torch_nor_transformers(name: str) -> None:
    """`import keyhole` is instant; torch comes with the first thing that needs it."""
    code = f"import sys, {name}; sys.exit(bool({{'torch', 'transformers', 'numpy'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_no_module_is_forgotten() -> None:
    """Every folder of the package is either in the library list or is the command line or the demo."""
    folders = {path.name for path in PACKAGE.iterdir() if path.is_dir() and any(path.glob("*.py"))}
    assert folders <= {*LIBRARY, "cli", "demo", "bench"}
