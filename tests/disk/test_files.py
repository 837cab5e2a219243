"""Durable writes."""

import os
import stat
from pathlib import Path

import pytest

from keyhole.disk import files
from keyhole.disk.files import cache_directory, digest_of_files, trim


def test_a_failed_write_leaves_the_old_file_and_no_temporary(tmp_path: Path) -> None:
    """Whatever ends the block: the file is the old one."""
    files.write_text(tmp_path / "file", "old")
    with pytest.raises(ZeroDivisionError), files.replacing(tmp_path / "file") as file:
        file.write(b"half")
        raise ZeroDivisionError
    assert (tmp_path / "file").read_text() == "old" and len(list(tmp_path.iterdir())) == 1


def test_written_files_have_ordinary_modes(tmp_path: Path) -> None:
    """As open() would have made them: others may read them where the user's umask says so."""
    files.write_text(tmp_path / "ours", "")
    (tmp_path / "theirs").touch()
    modes = [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("ours", "theirs")]
    assert modes[0] == modes[1]


def test_only_regular_files_are_read(tmp_path: Path) -> None:
    """A pipe, a device and a file that is too large are refused at once; none is waited for."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "large").write_bytes(bytes(100))
    for path in (tmp_path / "pipe", Path("/dev/zero"), tmp_path / "large"):
        with pytest.raises(OSError, match="not a regular file|100 bytes"):
            files.read_small(path, 99)
    assert files.read_small(tmp_path / "large", 100) == bytes(100)


def test_the_least_recently_used_go_first(tmp_path: Path) -> None:
    """By the times of the files."""
    for i, name in enumerate(("b.kept", "c.kept", "a.kept")):
        (tmp_path / name).write_bytes(b"x" * 100)
        os.utime(tmp_path / name, ns=(i, i))
    trim(tmp_path, ".kept", 250)
    assert sorted(os.listdir(tmp_path)) == ["a.kept", "c.kept"]
    trim(tmp_path / "absent", ".kept", 0)


def test_a_cache_has_at_most_4_gib(tmp_path: Path) -> None:
    """Of every kind, by the sizes of its files, which may have holes."""
    for i, name in enumerate(("a.kept", "b.kept")):
        with (tmp_path / name).open("wb") as file:
            file.truncate(2**31)
        os.utime(tmp_path / name, ns=(i, i))
    trim(tmp_path, ".kept")
    assert len(os.listdir(tmp_path)) == 2
    (tmp_path / "c.kept").write_bytes(b"x")
    trim(tmp_path, ".kept")
    assert sorted(os.listdir(tmp_path)) == ["b.kept", "c.kept"]


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
