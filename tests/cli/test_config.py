"""keyhole config ls | cp | show."""

from pathlib import Path
from typing import Any

from keyhole.cli import main
from keyhole.config.fields import settings
from keyhole.config.loader import parse_config
from keyhole.config.recipes import recipes


def test_ls_names_every_recipe_with_its_title(capsys: Any) -> None:
    assert main(["config", "ls"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(recipes())
    assert all(len(line.split()) > 3 for line in lines)


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


def test_cp_of_an_unknown_recipe_suggests_one(capsys: Any) -> None:
    assert main(["config", "cp", "demo-z"]) == 2
    assert "did you mean `demo-zo`?" in capsys.readouterr().err


def test_show_explains_all_settings(capsys: Any) -> None:
    assert main(["config", "show"]) == 0
    text = capsys.readouterr().out
    assert all(f"  {key} = " in text for key in settings())


def test_show_prints_a_config_that_runs(capsys: Any) -> None:
    """With CONFIG the output is YAML, resolved, with the overrides in it."""
    assert main(["config", "show", "demo-zo", "zo.directions=3", "learning_rate=null"]) == 0
    config, _ = parse_config(capsys.readouterr().out)
    assert config.zo.directions == 3 and config.learning_rate == 1e-6
