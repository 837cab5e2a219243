"""The drawn questions of a task on disk, for the next run on the same files (setting `data_cache`).

Drawing 1,500 questions must first read all rows of the files, because only rows with a label can be drawn. An entry has
the drawn questions, and is identified by a hash of everything that they depend on: the bytes of the files and of the
task file, the number of questions of each split, the seed, and the code of keyhole/data.

    directory/<32 hex digits>.keyhole-task      JSON: split -> [about, [warnings], [questions]]; BLAKE2b-128 of it

Tasks that are read from the hub are not cached here: `datasets` has its own cache.
"""

import dataclasses
import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from keyhole.data.settings import AUTO
from keyhole.data.tasks.places import Split
from keyhole.data.tasks.question import Question, Task
from keyhole.data.tasks.spec import TaskSpec
from keyhole.disk import user_cache
from keyhole.disk.user_cache import cache_directory, digest_of_code, digest_of_files, versions
from keyhole.errors import UserError

SUFFIX = ".keyhole-task"
LEAST_BYTES = 2**16  # smaller files are read fast enough
PACKAGE = Path(__file__).parent.parent
LISTS = ("candidates", "also", "references", "texts")

Drawn = dict[str, Task]


def kept(
    asked: str | None, spec: TaskSpec, text: str, places: dict[str, Split], how: Any, draw: Callable[[], Drawn]
) -> Drawn:
    """The result of `draw`, read from this directory (auto: the user's cache), or drawn and written there.
    text: the text of the task file; how: everything else that the draw depends on, as JSON."""
    names = sorted({name for place in places.values() for name in place.names})
    directory = cache_directory("tasks") if asked == AUTO else None if asked is None else Path(asked)
    if directory is None or not all(Path(name).is_file() for name in names):
        return draw()
    if asked == AUTO and sum(map(os.path.getsize, names)) < LEAST_BYTES:
        return draw()
    before = versions(names)
    parts = [spec.name, text, how, {split: dataclasses.astuple(place) for split, place in places.items()}, names]
    digest = hashlib.blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=16)
    digest.update(digest_of_code(PACKAGE))
    digest.update(digest_of_files(names))
    path = directory / f"{digest.hexdigest()}{SUFFIX}"
    found = _read(path, spec)
    if found is None:
        found = draw()
        if versions(names) != before:
            return found  # a file was written to meanwhile: these may not be the rows of the bytes in the key
        try:
            user_cache.write_entry(path, [_packed(found)])
            if asked == AUTO:
                user_cache.trim(directory, SUFFIX)
        except OSError as error:
            if asked != AUTO:
                raise UserError(f"data_cache: cannot write to {directory}: {error.strerror or error}") from None
    return found


def _packed(drawn: Drawn) -> bytes:
    told = {
        s: [task.about, task.warnings, [vars(question) for question in task.questions]] for s, task in drawn.items()
    }
    return json.dumps(told).encode()


def _read(path: Path, spec: TaskSpec) -> Drawn | None:
    """The tasks of an entry; None if it is missing or damaged."""
    content = user_cache.read_entry(path)
    try:
        return None if content is None else {
            split: Task(spec.name, [_question(fields) for fields in questions], spec, about, tuple(warnings))
            for split, (about, warnings, questions) in json.loads(content).items()
        }  # fmt: skip
    except (ValueError, TypeError, KeyError, RecursionError):
        return None


def _question(fields: dict[str, Any]) -> Question:
    return Question(**fields | {name: tuple(fields[name]) for name in LISTS})
