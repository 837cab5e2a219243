"""Durable writes."""

import os
import stat
import zlib
from pathlib import Path

import pytest

from keyhole.disk import files
from keyhole.disk.files import cache_directory, digest_of_files, trim
from keyhole.errors import UserError


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


def test_a_staged_directory_is_new_and_goes_unless_it_was_moved(tmp_path: Path) -> None:
    """Also what a process of the same number has left, and after an error; missing parents are made."""
    parent, left = tmp_path / "a" / "b", f".c.saving-{os.getpid()}"
    (parent / left).mkdir(parents=True)
    (parent / left / "old").touch()
    with pytest.raises(ZeroDivisionError), files.staged(parent, "c") as path:
        assert path == parent / left and not list(path.iterdir())
        raise ZeroDivisionError
    assert not list(parent.iterdir())
    with files.staged(tmp_path / "d", "c") as path:
        path.rename(tmp_path / "d" / "c")
    assert os.listdir(tmp_path / "d") == ["c"]


def test_what_is_removed_is_the_link_and_not_its_target(tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "kept")
    (tmp_path / "file").touch()
    (tmp_path / "folder" / "in").mkdir(parents=True)
    for name in ("link", "file", "folder", "absent"):
        files.remove(tmp_path / name)
    assert os.listdir(tmp_path) == ["kept"]


def test_places_and_links_that_cannot_be_written_are_named(tmp_path: Path) -> None:
    """Trying leaves nothing behind; a link is not written through."""
    files.try_place(tmp_path / "new" / "out")
    assert not list(tmp_path.iterdir())
    with pytest.raises(OSError) as refused:
        files.try_place(Path("/proc/1/new/out"))
    assert refused.value.filename == "/proc/1"
    (tmp_path / "link").symlink_to(tmp_path / "victim")
    with pytest.raises(OSError, match="it is a symbolic link, which is not followed"):
        files.open_regular(tmp_path / "link", os.O_WRONLY | os.O_CREAT)
    with pytest.raises(UserError, match=f"output_dir: cannot write to {tmp_path}: odd"), files.writing_to(tmp_path):
        raise OSError(5, "odd")


def test_checksums_are_crc_32_of_whole_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read in pieces, in the order of the files, with leading zeros."""
    monkeypatch.setattr(files, "READ_BYTES", 4)
    contents = [b"", b"123456789", bytes(range(250))]
    for i, content in enumerate(contents):
        (tmp_path / str(i)).write_bytes(content)
    found = files.checksums([tmp_path / str(i) for i in range(3)])
    assert found[:2] == ["00000000", "cbf43926"] and found[2] == f"{zlib.crc32(contents[2]):08x}"
    assert len(set(files.versions([tmp_path / "0", tmp_path / "1"]))) == 2


def test_everything_below_a_directory_is_made_durable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the names of directories that are made, in each of their parents."""
    flushed: list[Path] = []
    monkeypatch.setattr(files, "flush", flushed.append)
    files.make_directories(tmp_path / "a" / "b")
    assert flushed == [tmp_path, tmp_path / "a"] and (tmp_path / "a" / "b").is_dir()
    (tmp_path / "a" / "file").touch()
    flushed.clear()
    files.flush_all(tmp_path / "a")
    assert (
        sorted(flushed) == [tmp_path / "a", tmp_path / "a" / "b", tmp_path / "a" / "file"]
        and flushed[-1] == tmp_path / "a"
    )
