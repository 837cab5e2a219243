"""lm-evaluation-harness with a keyhole model: `keyhole eval DIR --harness TASKS`, or `keyhole` as one of its models.

lm.py         the model class for the harness: streamed, and batched over all requests of the tasks
run.py        `keyhole eval --harness`: finds tasks before the model is loaded; prints a table, writes a file of results
__main__.py   `python -m keyhole.harness ...` is the harness's own command, with all its options and this model

The package lm_eval is an extra (`pip install lm_eval`). The model is declared as an entry point of the group
`lm_eval.models`. Version 0.4.13 of the harness does not load entry points, so importing this module registers the model
under its name for `--model keyhole`.
"""

import importlib.util

if importlib.util.find_spec("lm_eval") is not None:
    import lm_eval.models  # noqa: F401  registers its own models first
    from lm_eval.api.registry import MODEL_REGISTRY

    if "keyhole" not in MODEL_REGISTRY:
        MODEL_REGISTRY.register("keyhole", target="keyhole.harness.lm:KeyholeLM")  # imported on first use
