"""The names behind `keyhole eval --tasks`, checked as far as possible before torch is imported.

A name is a task of keyhole.data.tasks (by name or task file), or a data file. Tasks must be known and have their files;
where the numbers are to be written there must be room for a file. No row is read and no request is made.
"""

import os
import re
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from keyhole.data.tasks.parse import read_spec
from keyhole.data.tasks.places import find_splits
from keyhole.data.tasks.spec import check_names, divided, is_task_name, nearest_task, own_name, task_names, unknown_task
from keyhole.disk.json_text import check_result_file
from keyhole.errors import UserError


def asked_names(
    tasks: Sequence[str],
    task_data: str | None = None,
    task_splits: dict[str, str] | None = None,
    json_path: str | Path | None = None,
) -> list[str]:
    """The names that the arguments stand for; UserError at the first that cannot be scored."""
    named = [name for word in tasks for name in divided(word)]
    names = [name if os.path.exists(name) else own_name(name) for name in named]  # SST-2 is sst2, unless it is a file
    if not names:
        raise UserError("--tasks: name at least one task or data file, or demo")
    if json_path is not None:
        check_result_file("--json", Path(json_path))
    for name in names:  # one that is no file and looks like a mistyped task
        is_word = name != "demo" and not is_task_name(name) and re.fullmatch(r"[\w -]+", name) is not None
        may_be_on_hub = find_spec("datasets") is not None and task_data is None and not nearest_task(name)
        if is_word and not may_be_on_hub and not os.path.exists(name):
            raise UserError(f"--tasks: {unknown_task(name)}; nor is there a file of that name")
    library = list(filter(is_library_task, names))
    if task_data is not None and not library:
        raise UserError(
            f"--task-data: none of {', '.join(names)} is a task by name; there are {', '.join(task_names())}"
        )
    check_names(library, task_splits)
    for name in library:
        find_splits(read_spec(name), task_data, task_splits)
    return names


def is_library_task(name: str) -> bool:
    """Whether an argument of --tasks is a task by name or a task file; `demo` is the embedded file."""
    return name != "demo" and is_task_name(name) and (name == own_name(name) or not os.path.exists(name))
