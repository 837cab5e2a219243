"""Names of tasks and of their splits in a config, as far as they can be judged without reading a row."""

from collections.abc import Sequence

from keyhole.data.tasks.spec import SPLITS, task_name
from keyhole.errors import UserError, listed


def check_names(names: Sequence[str], splits: dict[str, str] | None) -> None:
    """Refuses two tasks of one name, whose results could not be told apart, and splits of a task that is not there."""
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
        if dot and task not in called:
            raise UserError(f"task_splits: found {key}, but no task {task} is set; there are {listed(called)}")


def own_splits(given: dict[str, str] | None, name: str) -> dict[str, str]:
    """The splits that the setting names for this task: `train`, or `boolq.train` where there are several tasks."""
    found = {}
    for key, value in (given or {}).items():
        task, _, split = key.rpartition(".")
        if split not in SPLITS:
            raise UserError(f"task_splits: found {key}, expected {', '.join(SPLITS)}, or of one task: {name}.train")
        if task in ("", name):
            found[split] = value
    return found


def listed_names(names: str | list[str] | None) -> list[str]:
    """One name, several or none, as a list."""
    return [names] if isinstance(names, str) else list(names or ())
