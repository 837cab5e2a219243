"""Tokenised data on disk: the same data set, found again only where everything is the same."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from keyhole.data.cache import LEAST_BYTES, SUFFIX, cached
from keyhole.data.run import load_data
from keyhole.data.settings import PrepareSettings
from keyhole.errors import UserError
from tests.data import chats
from tests.data.chats import chat, tokenizer
from tests.data.test_run import settings


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"messages": chat("Hello " * n, "yes")}) + "\n" for n in range(1, 9)))
    return path


def entries(directory: Path) -> list[Path]:
    return sorted(directory.glob(f"*{SUFFIX}"))


def get(directory: Path, file: Path, template: str = chats.CHATML, **how: Any) -> Any:
    return cached(directory, [str(file)], tokenizer(template), PrepareSettings(**how))


def test_a_second_run_reads_the_same_data(tmp_path: Path, file: Path) -> None:
    """Tokens, masks, places, cuts and report come back; the report says where from."""
    first = get(tmp_path / "cache", file, max_length=32)
    second = get(tmp_path / "cache", file, max_length=32)
    assert first.fingerprint == second.fingerprint and not first.report.cached and second.report.cached
    assert list(first.where) == list(second.where) and first.cuts == second.cuts
    assert first.end_token_ids == second.end_token_ids and list(first) == list(second)
    assert first.report.truncated == second.report.truncated > 0
    assert any("data_cache" in line for line in second.report.lines())


def test_anything_else_makes_another_entry(tmp_path: Path, file: Path) -> None:
    """Other settings, another template, another day for a template that prints it, other bytes in the file."""
    cache = tmp_path / "cache"
    dated = chats.CHATML + "{{ strftime_now('%d') }}"
    get(cache, file)
    get(cache, file, max_length=32)
    get(cache, file, template=chats.BARE)
    get(cache, file, template_date="2025-01-01")
    assert len(entries(cache)) == 3
    get(cache, file, template=dated, template_date="2025-01-01")
    get(cache, file, template=dated, template_date="2025-01-02")
    assert len(entries(cache)) == 5
    text, stamp = file.read_text(), file.stat().st_mtime_ns
    file.write_text(text.replace("Hello", "Hallo"))
    os.utime(file, ns=(stamp, stamp))
    changed = get(cache, file)
    assert len(entries(cache)) == 6 and "Hallo" in tokenizer().decode(changed[0].input_ids)


@pytest.mark.parametrize("damage", ["cut", "changed", "empty", "huge"])
def test_a_damaged_entry_is_made_again(tmp_path: Path, file: Path, damage: str) -> None:
    """Never trusted, never an error."""
    first = get(tmp_path, file)
    path = entries(tmp_path)[0]
    content = path.read_bytes()
    new = {"cut": content[:-7], "empty": b"", "changed": content[:-99] + b"\x01" * 99}
    new["huge"] = content[:8] + b"\xff" * 8 + content[16:]
    path.write_bytes(new[damage])
    again = get(tmp_path, file)
    assert again.fingerprint == first.fingerprint and not again.report.cached
    assert path.read_bytes() == content


def test_a_run_uses_its_cache(tmp_path: Path, tiny_model: Path, tiny_data: Path) -> None:
    """Both sets of a run are kept; packing shares the entry; a place that cannot be written is named."""
    given = {"eval_data": str(tiny_data), "data_cache": str(tmp_path / "cache")}
    first = load_data(settings(tiny_model, tiny_data, **given))
    second = load_data(settings(tiny_model, tiny_data, **given, packing=True))
    assert len(entries(tmp_path / "cache")) == 1 and len(second.train.dataset) < len(first.train.dataset)
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="data_cache: cannot write to"):
        load_data(settings(tiny_model, tiny_data, data_cache=str(tmp_path / "file")))


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


def test_a_file_that_changes_while_it_is_tokenised_makes_no_entry(
    tmp_path: Path, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The key has the bytes from before, the tokens may be of those after: the next run would read them."""
    from keyhole.data import cache

    def meanwhile(*args: Any) -> Any:
        with file.open("a") as more:
            more.write(json.dumps({"messages": chat("More", "no")}) + "\n")
        return tokenise(*args)

    tokenise = cache.tokenise
    before = file.read_bytes()
    monkeypatch.setattr(cache, "tokenise", meanwhile)
    assert get(tmp_path / "cache", file).report.samples == 9 and not entries(tmp_path / "cache")
    file.write_bytes(before)
    monkeypatch.undo()
    assert get(tmp_path / "cache", file).report.samples == 8 and len(entries(tmp_path / "cache")) == 1
