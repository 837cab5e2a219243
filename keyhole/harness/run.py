"""`keyhole eval DIR --harness TASKS`: tasks of lm-evaluation-harness, scored with a model that may be larger than the
GPU.

A task is a name of the harness (hellaswag), one of its groups or tags (mmlu), a pattern (arc_*), or a YAML file of a
task. Names are looked up before the model is loaded, and an unknown one is refused with the nearest name. The harness
itself downloads a task's data set (HF_HUB_OFFLINE and HF_DATASETS_OFFLINE work as usual).
"""

import difflib
import importlib.util
import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from keyhole.disk.json_text import check_result_file, json_text, write_result
from keyhole.errors import UserError


def require() -> None:
    if importlib.util.find_spec("lm_eval") is None:
        raise UserError("--harness: the package lm_eval is not installed: pip install lm_eval")


def run_harness(
    directory: str,
    tasks: Sequence[str],
    *,
    limit: int | None = None,
    num_fewshot: int | None = None,
    include_path: str | None = None,
    apply_chat_template: bool = False,
    json_path: str | Path | None = None,
    say: Callable[[str], None] = lambda line: None,
    **settings: Any,
) -> str:
    """The harness's table of results; json_path: file for the full results. settings: of the model (placement,
    gpu_memory, dtype, device, max_length)."""
    require()
    if json_path is not None:
        check_result_file("--json", Path(json_path))
    logging.getLogger("lm_eval").setLevel(logging.ERROR)  # hides its notes on seeds and contexts
    from lm_eval import evaluator
    from lm_eval.tasks import TaskManager
    from lm_eval.utils import handle_non_serializable, make_table

    if include_path is not None and not os.path.isdir(include_path):
        raise UserError(f"--include-path: {include_path} is not a directory")
    manager = TaskManager(include_path=include_path)
    found = find_tasks(manager, tasks)
    from keyhole.harness.lm import KeyholeLM

    lm = KeyholeLM(directory, **settings)
    for line in lm.model.describe():
        say(line)
    results = evaluator.simple_evaluate(
        lm,
        tasks=found,
        limit=limit,
        num_fewshot=num_fewshot,
        task_manager=manager,
        apply_chat_template=apply_chat_template,
        log_samples=json_path is not None,
    )
    table = make_table(results)
    shown = "\n".join([table, make_table(results, "groups")] if results.get("groups") else [table])
    if json_path is not None:
        kept = {**results, "config": {**results.get("config", {}), "model": "keyhole", "model_source": directory}}
        text = json_text(kept, indent=1, default=handle_non_serializable)
        write_result("--json", Path(json_path), text + "\n", shown)
    return shown


def find_tasks(manager: Any, words: Sequence[str]) -> list[str]:
    """The task names and files of the arguments; UserError for an unknown one."""
    found: list[str] = []
    for word in [name for each in words for name in each.split(",") if name]:
        if word.endswith((".yaml", ".yml")):
            if not os.path.isfile(word):
                raise UserError(f"--harness: there is no file {word}")
            found.append(word)
        elif matches := manager.match_tasks([word]):
            found += matches
        else:
            close = difflib.get_close_matches(word, manager.all_tasks, n=1)
            meant = f"; did you mean {close[0]}?" if close else ""
            raise UserError(
                f"--harness: {word} is no task of the harness{meant} (all names: lm-eval ls tasks; your own: a .yaml "
                "file, or --include-path DIR)"
            )
    if not found:
        raise UserError("--harness: name at least one task of lm-evaluation-harness")
    return list(dict.fromkeys(found))
