"""The interpreter of Triton, without what it does again and again: for tests that run kernels on the CPU.

It replaces the functions of triton.language for a launch, and once more for every call of a device
function in it: hundreds of times, a third of all its time, though all are replaced already. Here it does so once per
launch. And it computes for every sum and product of integers whether it has overflowed, a fourth of the rest, to
assert it where assertions are compiled, which by default they are not: here it does not. Types are made once, not for
every operation.

A file outside of tests/ops that runs kernels imports `replaced_once`; from then on it holds to the session's end.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from keyhole.ops import backend


@pytest.fixture(autouse=True, scope="session")
def replaced_once() -> Iterator[None]:
    """What is in the globals of a function decides what is replaced. Where Triton's insides are others, all is as it
    was."""
    if not backend.INTERPRETED:
        yield
        return
    import triton.language as tl
    from triton.runtime import interpreter

    with pytest.MonkeyPatch.context() as patch:
        if all(hasattr(interpreter, name) for name in ("_patch_lang", "_LangPatchScope", "GridExecutor")):
            replace, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
            launches, replaced = [0], set()

            def replace_once(fn: Any) -> Any:
                languages = frozenset(id(value) for value in fn.__globals__.values() if value is tl or value is tl.core)
                if launches[0] and languages in replaced:
                    return interpreter._LangPatchScope()
                replaced.add(languages)
                return replace(fn)

            def count(self: Any, *args: Any, **kwargs: Any) -> Any:
                replaced.clear()
                launches[0] += 1
                try:
                    return launch(self, *args, **kwargs)
                finally:
                    launches[0] -= 1

            patch.setattr(interpreter, "_patch_lang", replace_once)
            patch.setattr(interpreter.GridExecutor, "__call__", count)
        options = getattr(getattr(interpreter, "interpreter_builder", None), "options", None)
        if hasattr(options, "sanitize_overflow") and not options.debug:
            unchecked = dataclasses.replace(options, sanitize_overflow=False)
            patch.setattr(interpreter.interpreter_builder, "options", unchecked)
        if hasattr(interpreter, "_get_np_dtype") and hasattr(tl.block_type, "with_element_ty"):
            patch.setattr(interpreter, "_get_np_dtype", kept_by_names(interpreter._get_np_dtype))
            patch.setattr(tl.block_type, "with_element_ty", kept_by_names(tl.block_type.with_element_ty))
        yield


def kept_by_names(make: Callable[..., Any]) -> Callable[..., Any]:
    """A function of types, which do not change and have names: each result is made once."""
    kept: dict[tuple[str, ...], Any] = {}

    def found(*types: Any) -> Any:
        names = tuple(one.name for one in types)
        if names not in kept:
            kept[names] = make(*types)
        return kept[names]

    return found
