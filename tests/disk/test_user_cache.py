"""Files that the next run starts from: whole, trusted only if they are, and bounded."""

import os
from pathlib import Path

import pytest

from keyhole.disk.files import cache_directory, digest_of_files, trim


def test_the_least_recently_used_go_first(tmp_path: Path) -> None:
    """By the times of the files."""
    for i, name in enumerate(("b.kept", "c.kept", "a.kept")):
        (tmp_path / name).write_bytes(b"x" * 100)
        os.utime(tmp_path / name, ns=(i, i))
    trim(tmp_path, ".kept", 250)
    assert sorted(os.listdir(tmp_path)) == ["a.kept", "c.kept"]
    trim(tmp_path / "absent", ".kept", 0)


def test_files_of_the_user_stay(tmp_path: Path) -> None:
    """KEYHOLE_CACHE=~/project, whose data/ holds data sets: they are neither counted nor deleted. What a killed process
    left of an entry goes."""
    for name in ("train.jsonl", "a.kept", ".x.kept.tmp"):
        (tmp_path / name).write_bytes(b"x" * 100)
        os.utime(tmp_path / name, ns=(0, 0))
    trim(tmp_path, ".kept", 250)
    assert len(os.listdir(tmp_path)) == 3
    trim(tmp_path, ".kept", 0)
    assert os.listdir(tmp_path) == ["train.jsonl"]


def test_where_it_lies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Our own variable, then the desktop's, then the home directory; a relative path is no place."""
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.delenv("KEYHOLE_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_directory("data") == Path("/home/me/.cache/keyhole/data")
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert cache_directory("data") == Path("/x/keyhole/data")
    monkeypatch.setenv("KEYHOLE_CACHE", "/y")
    assert cache_directory("data") == Path("/y/data")
    monkeypatch.setenv("KEYHOLE_CACHE", "y")
    assert cache_directory("data") is None


def test_a_digest_tells_files_apart(tmp_path: Path) -> None:
    """Two files are not the one that holds both."""
    for name, text in (("a", "ab"), ("b", "c"), ("ab", "abc")):
        (tmp_path / name).write_text(text)
    paths = {name: tmp_path / name for name in ("a", "b", "ab")}
    assert digest_of_files([paths["a"], paths["b"]]) != digest_of_files([paths["ab"]])
    assert digest_of_files([paths["a"], paths["b"]]) != digest_of_files([paths["b"], paths["a"]])
