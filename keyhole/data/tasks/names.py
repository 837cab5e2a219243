"""Names of tasks and of their splits in a config, checked as far as possible without reading a row."""

import os
from collections.abc import Sequence

from keyhole.data.tasks.spec import SPLITS, is_task_file, is_task_name, own_name, task_name
from keyhole.errors import UserError, listed


def check_names(names: Sequence[str], splits: dict[str, str] | None) -> None:
    """Refuses two tasks of the same name, whose results could not be distinguished, and splits of a missing task."""
    called: dict[str, str] = {}
    for name in names:
        own = task_name(name)
        if own in called:
            if called[own] == name:
                raise UserError(f"task: {name} is named twice (task, test_task); train_weights repeats a task's rows")
            raise UserError(
                f"task: {called[own]} and {name} are both called {own}, and so would be their results; rename one file"
            )
        called[own] = name
    for key in splits or {}:
        task, dot, _ = key.rpartition(".")
        if dot and task_name(task) not in called:
            raise UserError(f"task_splits: found {key}, but no task {task} is set; there are {listed(called)}")


def own_splits(given: dict[str, str] | None, name: str) -> dict[str, str]:
    """The splits that the setting names for this task: `train`, or `boolq.train` if there are several tasks."""
    found = {}
    for key, value in (given or {}).items():
        task, _, split = key.rpartition(".")
        if split not in SPLITS:
            raise UserError(f"task_splits: found {key}, expected {', '.join(SPLITS)}, or of one task: {name}.train")
        if not task or task_name(task) == name:
            found[split] = value
    return found


def listed_names(names: str | list[str] | None) -> list[str]:
    """One name, several or none, as a list; names of shipped tasks are normalised."""
    words = [names] if isinstance(names, str) else list(names or ())
    return [own_name(name) for word in words for name in divided(word)]


def divided(word: str) -> list[str]:
    """`sst2,rte` is two names, and so is `sst2,held-out.jsonl` where there is such a file; a path with a comma in it is
    one. Unknown names among others are kept, to be refused by name."""
    if os.path.exists(word):
        return [word]
    parts = [part.strip() for part in word.split(",")]
    known = [is_task_name(part) or os.path.isfile(os.path.expanduser(part)) for part in parts]
    shipped = any(is_task_name(part) and not is_task_file(part) for part in parts)
    return parts if all(known) or (shipped and all(parts) and "/" not in word) else [word]
