"""keyhole train: what reaches the trainer, and bad configs through the real command."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from keyhole.cli import main
from keyhole.training.start import Parts

GOOD = "model: some/model\nmethod: zo\ntrain_data: d.jsonl\noutput_dir: {out}\nmax_steps: 3\n"


@pytest.fixture
def calls(monkeypatch: Any) -> list[Any]:
    """Records calls of keyhole.training.start.train and returns exit code 0."""
    seen: list[Any] = []

    def train(config: Any, *, resume: str | None, dry_run: bool, parts: Any) -> int:
        assert not parts.allow_code_execution, "nobody asked for it"
        assert parts.own_process, "what the imports made may be frozen"
        seen.append((config, resume, dry_run))
        return 130 if dry_run else 0

    monkeypatch.setitem(sys.modules, "keyhole.training.start", SimpleNamespace(train=train, Parts=Parts))
    return seen


@pytest.fixture
def config(tmp_path: Path) -> str:
    """A config file that is in order."""
    path = tmp_path / "good.yaml"
    path.write_text(GOOD.format(out=tmp_path / "out"))
    return str(path)


def test_config_overrides_and_options_reach_the_trainer(config: str, calls: list[Any]) -> None:
    """The trainer gets the resolved config, and its exit code is the command's."""
    assert main(["train", config, "zo.eps=1e-2", "--resume"]) == 0
    assert main(["train", config, "--resume", "x/checkpoint-3", "seed=5", "--dry-run"]) == 130
    (first, resume, dry), (second, path, wet) = calls
    assert (first.zo.eps, first.learning_rate, resume, dry) == (1e-2, 1e-6, "last", False)
    assert (second.seed, path, wet) == (5, "x/checkpoint-3", True)


def test_settings_alone_are_a_config(tmp_path: Path, config: str, calls: list[Any]) -> None:
    """Without a file, and with a file after its settings."""
    words = ["method=zo", "model=some/model", "train_data=d.jsonl", f"output_dir={tmp_path / 'out'}", "max_steps=3"]
    assert main(["train", *words, "zo.eps=1e-2", "--resume"]) == 0
    assert main(["train", "zo.eps=1e-2", config, "--resume"]) == 0
    assert calls[0] == calls[1] and calls[0][1] == "last"


def test_a_model_instead_of_a_config_is_told_where_it_goes(tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert main(["train", str(tmp_path), "method=zo"]) == 2
    assert f"write model={tmp_path}" in capsys.readouterr().err


def test_a_recipe_can_be_named(calls: list[Any], capsys: Any) -> None:
    """A config that is no file but a shipped recipe is used, and the command says so."""
    assert main(["train", "demo-zo", "max_steps=2"]) == 0
    assert calls[0][0].max_steps == 2
    assert "demo-zo is a shipped recipe" in capsys.readouterr().err


def test_warnings_are_printed_and_do_not_stop(config: str, calls: list[Any], capsys: Any) -> None:
    assert main(["train", config, "adam_beta1=0.5"]) == 0
    assert "warning: command line: adam_beta1: has no effect" in capsys.readouterr().err


BAD = [
    ("dtype: bf16", (), "expected float32 | bfloat16 | float16 or null; did you mean `bfloat16`?"),
    ("", ("dtype=fp16",), "did you mean `float16`?"),
    ("", ("gpu_memory=8G",), "write 8GiB (of 1024) or 8GB (of 1000)"),
    ("gpu_memory: 8 gi", (), "write 8GiB (of 1024) or 8GB (of 1000)"),
    ("dtype: [bfloat16]", (), "one word is enough here: write bfloat16"),
    ("", ("report_to=[wandb, tensorbord]",), "did you mean `tensorboard`?"),
    ("eval_data: $NO_SUCH_VARIABLE/x.jsonl", (), "there is no variable NO_SUCH_VARIABLE in the environment"),
    ("", ("output_dir=~nosuchuser/x",), "found `~nosuchuser/x`, but there is no home directory of nosuchuser"),
    ("", ("seed",), "write key=value"),
    ("", ("learning_rate=",), "null stands for no value"),
    ("", ("--seed", "3"), "write seed=3"),
]


@pytest.mark.parametrize(("line", "words", "says"), BAD)
def test_bad_configs_are_one_message_exit_2_and_nothing_written(
    tmp_path: Path, line: str, words: tuple[str, ...], says: str, capsys: Any
) -> None:
    """Each mistake: exit code 2, what to change, no traceback, no output directory."""
    path = tmp_path / "bad.yaml"
    path.write_text(GOOD.format(out=tmp_path / "out") + line + "\n")
    before = sorted(tmp_path.iterdir())
    assert main(["train", str(path), *words]) == 2
    printed = capsys.readouterr()
    assert says in printed.err and "Traceback" not in printed.err and printed.out == ""
    assert sorted(tmp_path.iterdir()) == before
