"""Config files, settings on the command line and names of files that are damaged or made to harm."""

import os
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keyhole.config.fields import settings as known_settings
from tests.hostile.conftest import MANY, Place
from tests.hostile.values import ESCAPE

YAML: dict[str, str] = {
    "bomb": "a: &a [x, x]\n"
    + "".join(f"{b}: &{b} [*{a}, *{a}]\n" for a, b in zip("abcdefghi", "bcdefghij", strict=True)),
    "object": "model: !!python/object/apply:os.system ['touch ran']\n",
    "deep": "model: " + "[" * 700,  # beyond the limit of recursion; twice as deep takes twenty times as long
    "merged": "<<: &a {<<: *a}\n",
    "alias to nothing": "model: *nothing\n",
    "tabs": "\tmodel: x\n",
    "escape": f"{ESCAPE}: 1\n",
    "quoted escape": '"\\e]0;owned\\a": 1\n',
    "number as key": "1: 2\n? [a]\n: b\n",
    "two documents": "model: a\n---\nmodel: b\n",
    "nothing": "",
    "list": "- a\n",
    "zero byte": "model: a\0b\n",
    "many keys": "".join(f"k{i}: 1\n" for i in range(5000)),
    "long": "model: " + "x" * 2**22,
}


@pytest.mark.parametrize("name", YAML)
def test_a_config_that_is_none_is_refused(place: Place, name: str) -> None:
    """Nothing is built, imported or multiplied, and the message is short."""
    place.config.write_text(YAML[name], encoding="utf-8")
    message = place.refused("train", str(place.config), "--dry-run")
    assert len(message) < 15_000 and not (place.root / "ran").exists()


@pytest.mark.parametrize("name", ["pipe", "zero", "directory", "missing", "binary", "x" * 5000, "a\nb\x1b[2J"])
def test_a_config_that_is_no_file_is_refused(place: Place, name: str) -> None:
    path = place.root / name
    makes = {"pipe": os.mkfifo, "zero": lambda p: p.symlink_to("/dev/zero"), "directory": lambda p: p.mkdir()}
    makes["binary"] = lambda p: p.write_bytes(bytes(range(256)))
    makes.get(name, lambda p: None)(path)
    place.refused("train", str(path), "--dry-run")


@pytest.mark.parametrize("name", ["pipe", "zero", "sparse", "deep", "bomb", "object", "binary"])
def test_task_files_and_comparisons_that_are_none_are_refused(place: Place, name: str) -> None:
    """They are YAML too, and read by other code."""
    path = place.root / "mine.yaml"
    makes = {"pipe": os.mkfifo, "zero": lambda p: p.symlink_to("/dev/zero")}
    makes["sparse"] = lambda p: (p.touch(), os.truncate(p, 2**36))
    makes["binary"] = lambda p: p.write_bytes(bytes(range(256)))
    makes.get(name, lambda p: p.write_text(YAML[name]))(path)
    place.refused("train", str(place.config), f"task={path}", "train_data=null", "--dry-run")
    place.refused("eval", str(place.model), "--tasks", str(path), "device=cpu")
    place.refused("compare", str(path), "--dry-run")


WORDS = [
    "", "null", "nan", "inf", "-1", "0", "0.5", "1e308", "1e12", "9" * 5000, "true", "[]", "{}", "[[", "[1, a]",
    "{a: {b: c}}", ESCAPE, "../../../etc/passwd", "/dev/zero", "~/x", "$HOME", "x" * 10_000, "\ufffd",
]  # fmt: skip


@settings(parent=MANY, max_examples=60)
@given(key=st.sampled_from(sorted(known_settings())), word=st.sampled_from(WORDS))
def test_odd_settings(new_place: Callable[[], Place], key: str, word: str) -> None:
    """Any word for any setting: it is taken, or refused by name. Of steps and sizes, none that would take days."""
    place = new_place()
    if key not in ("output_dir", "data_cache"):  # they may write where they are told to
        place.checked(f"{key}={word}")


@pytest.mark.parametrize("name", ["\0", "x" * 300, "a/" * 3000, "/proc/self/mem", "/dev/null/x", "model"])
def test_an_output_dir_that_cannot_be_is_refused(place: Place, name: str) -> None:
    """Before anything is read; the model's own directory is somebody's files."""
    place.refused("train", str(place.config), f"output_dir={place.root / name if name == 'model' else name}")


@pytest.mark.parametrize(
    "args",
    [
        ["train", "--resume", "/dev/zero"],
        ["eval", "\x1b[2J", "--tasks", "demo"],
        ["eval", "demo", "--tasks", "/dev/zero"],
        ["replay", "demo", "/dev/zero", "out"],
        ["chat", "a/b/c"],
        ["bench", "zo", "--quick", "--table=/dev/zero"],
        ["config", "show", "/dev/zero"],
        ["config", "cp", "../../etc/passwd", "x"],
        ["\x1b[2J"],
        ["train", "\x1b[2J=1"],
    ],
    ids=ascii,
)
def test_odd_arguments(place: Place, args: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place.root)
    place.refused(*args)
