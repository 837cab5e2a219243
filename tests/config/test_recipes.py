"""CONFIG and settings as typed: which word is a file, and settings that are the whole config."""

from pathlib import Path
from typing import Any

import pytest

from keyhole.cli import main
from keyhole.config.recipes import config_of_settings, find_config, recipes, split_words
from keyhole.errors import UserError

WORDS = [
    (["my.yaml", "seed=3"], ("my.yaml", ["seed=3"])),
    (["seed=3", "my.yaml", "zo.eps=1"], ("my.yaml", ["seed=3", "zo.eps=1"])),
    (["model=d", "method=zo"], (None, ["model=d", "method=zo"])),
    (["modle=d", "method=zo"], (None, ["modle=d", "method=zo"])),
    (["runs/lr=3/my.yaml"], ("runs/lr=3/my.yaml", [])),
    (["lr=3.yaml"], ("lr=3.yaml", [])),
    (["output_dir=my.yaml"], (None, ["output_dir=my.yaml"])),
    (["prompt={sentence} = what?"], (None, ["prompt={sentence} = what?"])),
    (["demo-zo"], ("demo-zo", [])),
]


@pytest.mark.parametrize(("typed", "read"), WORDS)
def test_the_first_word_that_is_no_setting_is_the_file(typed: list[str], read: tuple[str | None, list[str]]) -> None:
    """Settings may stand before it; a misspelt setting is one, and a path with = in it is a path."""
    assert split_words(typed) == read


def test_a_file_of_that_name_is_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("seed=3").write_text("model: demo\n")
    assert split_words(["seed=3", "seed=4"]) == ("seed=3", ["seed=4"])


def test_settings_alone_are_checked_like_a_file() -> None:
    """All faults at once, and that no file was named; with all that is needed, a config."""
    with pytest.raises(UserError) as caught:
        config_of_settings(["modle=demo", "method=zo", "max_steps=2"])
    said = str(caught.value)
    assert "no config file was named" in said and "did you mean `model`" in said and "output_dir: missing" in said
    with pytest.raises(UserError, match="method: missing, and there is no default.* One of .*lomo"):
        config_of_settings(["model=demo"])
    words = ["model=demo", "method=zo", "train_data=demo", "output_dir=o", "max_steps=2", "zo.eps=0.5"]
    assert config_of_settings(words)[0].zo.eps == 0.5


def test_cp_copies_byte_for_byte_and_never_over_a_file(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    """A copy lands here, in a directory, or under a new name; an existing file stays as it was."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    for dest, made in ((None, "demo-zo.yaml"), ("folder", "folder/demo-zo.yaml"), ("mine.yaml", "mine.yaml")):
        assert main(["config", "cp", "demo-zo", *([dest] if dest else [])]) == 0
        assert Path(made).read_bytes() == recipes()["demo-zo"].read_bytes()
    Path("mine.yaml").write_text("precious")
    assert main(["config", "cp", "demo-zo", "mine.yaml"]) == 2
    assert Path("mine.yaml").read_text() == "precious" and "exists" in capsys.readouterr().err
    assert main(["config", "cp", "demo-zo", "no/such/folder.yaml"]) == 2


@pytest.mark.parametrize("typed", ["demo-zo", "demo-zo.yaml", "configs/demo-zo.yaml"])
def test_a_recipe_is_found_by_name_from_anywhere(typed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With or without the ending; a file of that name in the current directory comes first."""
    monkeypatch.chdir(tmp_path)
    assert find_config(typed) == (recipes()["demo-zo"], True)
    Path("configs").mkdir()
    Path(typed).write_text("model: mine")
    assert find_config(typed) == (Path(typed), False)


def test_what_is_no_config_is_told_from_what_is_meant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run, a model and another directory; a misspelt file, then a misspelt recipe; a recipe of another place."""
    monkeypatch.chdir(tmp_path)
    for file in ("out/run/config.yaml", "model/config.json", "mine.yaml"):
        Path(file).parent.mkdir(parents=True, exist_ok=True)
        Path(file).touch()
    told = {
        "out": "the config of that run is out/run/config.yaml",
        "model": "to name a model, write model=model",
        "model/..": "a config is a YAML file",
        "min.yaml": "did you mean `mine.yaml`?",
        "demo-zoo": "did you mean `demo-zo`?",
        "out/demo-zo": "no such config file",
    }
    for typed, hint in told.items():
        with pytest.raises(UserError) as caught:
            find_config(typed)
        assert hint in str(caught.value)
