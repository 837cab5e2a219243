"""keyhole config ls | cp | show."""

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
