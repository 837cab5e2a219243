"""lm-evaluation-harness with a keyhole model: `keyhole eval DIR --harness TASKS`, or `keyhole` as one of its models.

lm.py         the model that the harness is given: streamed, and batched over all requests of a task list
run.py        `keyhole eval --harness`: tasks are found before the model is loaded; a table, and a file of results
__main__.py   `python -m keyhole.harness ...` is the harness's own command, with all its options, which knows the model

The package lm_eval is an extra (`pip install "keyhole[harness]"`). The model is declared as an entry point of the group
`lm_eval.models`. Version 0.4.13 of the harness has room for entry points in its list of models, but does not look for
any, so whoever imports this module before asking for `--model keyhole` registers it by name.
"""

import importlib.util
from typing import Any

from keyhole.errors import UserError

NAME = "keyhole"
TARGET = "keyhole.harness.lm:KeyholeLM"


def require() -> None:
    """UserError without the harness."""
    if importlib.util.find_spec("lm_eval") is None:
        raise UserError(
            '--harness: the package lm_eval is not installed; pip install "keyhole[harness]" (or pip install lm_eval)'
        )


def register() -> None:
    """Makes `keyhole` one of the harness's models; its class is imported when it is first asked for."""
    require()
    import lm_eval.models  # noqa: F401  its own models come first
    from lm_eval.api.registry import MODEL_REGISTRY

    if NAME in MODEL_REGISTRY:
        return
    if hasattr(MODEL_REGISTRY, "register"):
        MODEL_REGISTRY.register(NAME, target=TARGET)
    else:  # a plain dict before 0.4.10
        from lm_eval.api.registry import register_model

        from keyhole.harness.lm import KeyholeLM

        register_model(NAME)(KeyholeLM)


def __getattr__(name: str) -> Any:
    if name == "KeyholeLM":
        from keyhole.harness.lm import KeyholeLM

        return KeyholeLM
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


if importlib.util.find_spec("lm_eval") is not None:
    register()
