"""The drawn questions of a task on disk: the same questions, found again only where everything is the same."""

import json
from pathlib import Path
from typing import Any

import pytest

from keyhole.data.tasks import draw
from keyhole.data.tasks.cache import LEAST_BYTES, SUFFIX
from keyhole.data.tasks.draw import Numbers, load_task
from keyhole.data.tasks.question import Question, Task
from keyhole.errors import UserError

NUMBERS = Numbers(train=8, dev=4, test=6, seed=1)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Forty rows of SST-2."""
    (tmp_path / "data" / "sst2").mkdir(parents=True)
    for split in ("train", "validation"):
        rows = [{"sentence": f"{split} sentence {i}", "label": i % 2} for i in range(40)]
        (tmp_path / "data" / "sst2" / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path / "data"


def drawn(tasks: dict[str, Task]) -> dict[str, tuple[list[Question], str]]:
    """Everything but the task file."""
    return {split: (task.questions, task.about) for split, task in tasks.items()}


def test_a_second_draw_is_read(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All questions of all splits come back as they were, without a row being read."""
    cache = str(tmp_path / "cache")
    first = load_task("sst2", str(folder), NUMBERS, cache=cache)
    monkeypatch.setattr(draw, "read_split", lambda *_: pytest.fail("rows were read"))
    second = load_task("sst2", str(folder), NUMBERS, cache=cache)
    assert drawn(first) == drawn(second)


def test_anything_else_is_drawn_anew(folder: Path, tmp_path: Path) -> None:
    """Another seed or number, other splits, other bytes in a file; and a damaged entry."""
    cache = tmp_path / "cache"
    plain = drawn(load_task("sst2", str(folder), NUMBERS, cache=str(cache)))
    load_task("sst2", str(folder), Numbers(train=8, dev=4, test=6, seed=2), cache=str(cache))
    load_task("sst2", str(folder), NUMBERS, {"train": "train[:30]"}, cache=str(cache))
    load_task("sst2", str(folder), NUMBERS, training=False, cache=str(cache))
    assert len(list(cache.glob(f"*{SUFFIX}"))) == 4
    for path in cache.glob(f"*{SUFFIX}"):
        path.write_bytes(path.read_bytes()[:-1])
    assert drawn(load_task("sst2", str(folder), NUMBERS, cache=str(cache))) == plain
    file = folder / "sst2" / "train.jsonl"
    file.write_text(file.read_text().replace("sentence 1", "sentence one"))
    assert drawn(load_task("sst2", str(folder), NUMBERS, cache=str(cache))) != plain


def test_small_files_leave_nothing_in_the_users_cache(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """auto keeps what takes time; a place that cannot be written is no error there, and one where it was asked for."""
    monkeypatch.setenv("KEYHOLE_CACHE", str(tmp_path / "own"))
    load_task("sst2", str(folder), NUMBERS, cache="auto")
    assert not (tmp_path / "own").exists()
    with open(folder / "sst2" / "train.jsonl", "a") as file:
        file.write("\n" * LEAST_BYTES)
    (tmp_path / "own").write_text("in the way")
    assert len(load_task("sst2", str(folder), NUMBERS, cache="auto")["train"].questions) == 8
    with pytest.raises(UserError, match="data_cache: cannot write to"):
        load_task("sst2", str(folder), NUMBERS, cache=str(tmp_path / "own"))
    (tmp_path / "own").unlink()
    load_task("sst2", str(folder), NUMBERS, cache="auto")
    assert len(list((tmp_path / "own" / "tasks").glob(f"*{SUFFIX}"))) == 1


def test_a_file_that_is_written_to_meanwhile_is_not_kept(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its questions may not be those of the bytes that the entry would be found by."""
    cache, file, read = tmp_path / "cache", folder / "sst2" / "train.jsonl", draw.read_split

    def slow(*args: Any) -> Any:
        rows = list(read(*args))
        file.write_text(file.read_text().replace("sentence 1", "sentence one"))
        return rows

    with monkeypatch.context() as patched:
        patched.setattr(draw, "read_split", slow)
        load_task("sst2", str(folder), NUMBERS, cache=str(cache))
    assert not list(cache.glob(f"*{SUFFIX}"))
    load_task("sst2", str(folder), NUMBERS, cache=str(cache))
    assert len(list(cache.glob(f"*{SUFFIX}"))) == 1
