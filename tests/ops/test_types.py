"""Functions of ops have types. mypy cannot demand them there: a kernel has none, since Triton reads annotations."""

import ast
from pathlib import Path

import keyhole.ops


def is_kernel(function: ast.FunctionDef) -> bool:
    return any(ast.unparse(decorator).startswith("jit(") for decorator in function.decorator_list)


def has_types(function: ast.FunctionDef) -> bool:
    every = function.args
    named = [*every.posonlyargs, *every.args, *every.kwonlyargs, every.vararg, every.kwarg]
    typed = (one is None or one.annotation is not None or one.arg in ("self", "cls") for one in named)
    return function.returns is not None and all(typed)


def test_every_function_that_is_no_kernel_has_types() -> None:
    bare = []
    for path in Path(keyhole.ops.__file__).parent.rglob("*.py"):
        functions = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)]
        bare += [f"{path.name}: {one.name}" for one in functions if not is_kernel(one) and not has_types(one)]
    assert bare == []
