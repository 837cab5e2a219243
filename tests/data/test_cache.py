"""Tokens of files and drawn questions of tasks on disk: the same, found again only where everything is the same."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from keyhole.data import prepare as prepare_module
from keyhole.data.dataset import Dataset
from keyhole.data.prepare import LEAST_BYTES, SUFFIX, tokenise
from keyhole.data.run import load_data
from keyhole.data.settings import DataSettings
from keyhole.data.tasks import draw
from keyhole.data.tasks.draw import Numbers, load_task
from keyhole.data.tasks.question import Task
from keyhole.errors import UserError
from tests.data import chats
from tests.data.chats import chat, tokenizer
from tests.data.test_run import settings

NUMBERS = Numbers(train=8, dev=4, test=6, seed=1)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "a.jsonl"
    rows = ({"messages": chat("Hello " * n, "yes"), "documents": [{"text": "Long."}]} for n in range(1, 9))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Forty rows of SST-2."""
    (tmp_path / "data" / "sst2").mkdir(parents=True)
    for split in ("train", "validation"):
        rows = [{"sentence": f"{split} sentence {i}", "label": i % 2} for i in range(40)]
        (tmp_path / "data" / "sst2" / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path / "data"


def entries(directory: Path) -> list[Path]:
    return sorted(directory.glob(f"*{SUFFIX}"))


def get(directory: Path, file: Path, template: str = chats.CHATML, **how: Any) -> Dataset:
    return tokenise([str(file)], tokenizer(template), DataSettings(data_cache=str(directory), **how))


def questions(folder: Path, cache: Path, numbers: Numbers = NUMBERS, *args: Any, **how: Any) -> dict[str, Any]:
    """Everything of a draw but the task file."""
    drawn: dict[str, Task] = load_task("sst2", str(folder), numbers, *args, cache=str(cache), **how)
    return {split: (task.questions, task.about) for split, task in drawn.items()}


def test_a_second_run_reads_the_same_data(
    tmp_path: Path, file: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = (get(tmp_path / "cache", file, max_length=32) for _ in range(2))
    assert first.fingerprint == second.fingerprint and not first.report.cached and second.report.cached
    assert list(first.where) == list(second.where) and first.cuts == second.cuts
    assert first.end_token_ids == second.end_token_ids and list(first) == list(second)
    assert first.report.truncated == second.report.truncated > 0
    assert first.report.lost == second.report.lost == {"documents": 8}
    assert any("data_cache" in line for line in second.report.lines())
    drawn = questions(folder, tmp_path / "cache")
    monkeypatch.setattr(draw, "read_split", lambda *_: pytest.fail("rows were read"))
    assert questions(folder, tmp_path / "cache") == drawn


def test_anything_else_makes_another_entry(tmp_path: Path, file: Path, folder: Path) -> None:
    cache = tmp_path / "cache"
    dated = chats.CHATML + "{{ strftime_now('%d') }}"
    get(cache, file)
    get(cache, file, max_length=32)
    get(cache, file, template=chats.BARE)
    get(cache, file, template_date="2025-01-01", batch_size=3)
    assert len(entries(cache)) == 3
    get(cache, file, template=dated, template_date="2025-01-01")
    get(cache, file, template=dated, template_date="2025-01-02")
    assert len(entries(cache)) == 5
    text, stamp = file.read_text(), file.stat().st_mtime_ns
    file.write_text(text.replace("Hello", "Hallo"))
    os.utime(file, ns=(stamp, stamp))
    changed = get(cache, file)
    assert len(entries(cache)) == 6 and "Hallo" in tokenizer().decode(changed[0].input_ids)
    plain = questions(folder, cache)
    questions(folder, cache, Numbers(train=8, dev=4, test=6, seed=2))
    questions(folder, cache, NUMBERS, {"train": "train[:30]"})
    questions(folder, cache, training=False)
    assert len(entries(cache)) == 10
    rows = folder / "sst2" / "train.jsonl"
    rows.write_text(rows.read_text().replace("sentence 1", "sentence one"))
    assert questions(folder, cache) != plain


@pytest.mark.parametrize("damage", ["cut", "changed", "empty", "huge", "link", "pipe"])
def test_a_damaged_entry_is_made_again(tmp_path: Path, file: Path, damage: str) -> None:
    """Nothing is read from it, written through it or waited for."""
    first, cache = get(tmp_path / "cache", file), tmp_path / "cache"
    path, victim = entries(cache)[0], tmp_path / "victim"
    content = path.read_bytes()
    victim.write_bytes(content)
    path.unlink()
    places = {"link": lambda: path.symlink_to(victim), "pipe": lambda: os.mkfifo(path)}
    damaged = {"cut": content[:-7], "empty": b"", "changed": content[:-99] + b"\x01" * 99}
    damaged["huge"] = b"\xff" * 8 + content[8:]
    places[damage]() if damage in places else path.write_bytes(damaged[damage])
    again = get(cache, file)
    assert again.fingerprint == first.fingerprint and not again.report.cached
    assert victim.read_bytes() == path.read_bytes() == content and not path.is_symlink()


def test_a_run_uses_its_cache(tmp_path: Path, tiny_model: Path, tiny_data: Path) -> None:
    given = {"eval_data": str(tiny_data), "data_cache": str(tmp_path / "cache")}
    first = load_data(settings(tiny_model, tiny_data, **given))
    second = load_data(settings(tiny_model, tiny_data, **given, packing=True))
    assert len(entries(tmp_path / "cache")) == 1 and len(second.train.dataset) < len(first.train.dataset)
    (tmp_path / "file").write_text("")
    (entry,) = entries(tmp_path / "cache")
    entry.unlink()
    entry.mkdir()
    for place in (tmp_path / "file", tmp_path / "cache"):
        with pytest.raises(UserError, match="data_cache: cannot write to"):
            load_data(settings(tiny_model, tiny_data, data_cache=str(place)))


def test_the_users_cache_is_the_default_of_a_run(
    tmp_path: Path, tiny_model: Path, tiny_data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """auto keeps files of 64 KiB and more; a cache that cannot be written is no error."""
    monkeypatch.setenv("KEYHOLE_CACHE", str(tmp_path / "own"))
    large = tmp_path / "large.jsonl"
    large.write_text(tiny_data.read_text() * (LEAST_BYTES // tiny_data.stat().st_size + 1))
    (tmp_path / "own").write_text("in the way")
    first = load_data(settings(tiny_model, large, data_cache="auto"))
    (tmp_path / "own").unlink()
    for _ in range(2):
        again = load_data(settings(tiny_model, large, data_cache="auto"))
    load_data(settings(tiny_model, tiny_data, data_cache="auto"))
    assert len(entries(tmp_path / "own" / "data")) == 1
    assert again.train.fingerprint == first.train.fingerprint and "(data_cache)" in "\n".join(again.report)


def test_a_file_that_changes_meanwhile_makes_no_entry(
    tmp_path: Path, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The key has the bytes from before, the tokens may be of those after: the next run would read them."""
    real, before = prepare_module.read, file.read_bytes()

    def meanwhile(*args: Any) -> Any:
        with file.open("a") as more:
            more.write(json.dumps({"messages": chat("More", "no")}) + "\n")
        return real(*args)

    with monkeypatch.context() as patched:
        patched.setattr(prepare_module, "read", meanwhile)
        assert get(tmp_path / "cache", file).report.samples == 9 and not entries(tmp_path / "cache")
    file.write_bytes(before)
    assert get(tmp_path / "cache", file).report.samples == 8 and len(entries(tmp_path / "cache")) == 1
