"""Words typer does not know: settings as options, --resume alone, several --tasks."""

import pytest

from keyhole.cli import main
from keyhole.cli.arguments import refuse_other_style, repeat_option, with_resume_value
from keyhole.errors import UserError

RESUME = [
    (["c.yaml", "--resume"], ["c.yaml", "--resume", "last"]),
    (["c.yaml", "--resume", "out/checkpoint-5"], ["c.yaml", "--resume", "out/checkpoint-5"]),
    (["c.yaml", "--resume", "seed=3"], ["c.yaml", "--resume", "last", "seed=3"]),
    (["c.yaml", "--resume", "runs/lr=3/checkpoint-1"], ["c.yaml", "--resume", "runs/lr=3/checkpoint-1"]),
    (["c.yaml", "--resume", "--dry-run"], ["c.yaml", "--resume", "last", "--dry-run"]),
    (["--resume", "c.yaml"], ["--resume", "last", "c.yaml"]),
    (["seed=3", "--resume", "c.yaml"], ["seed=3", "--resume", "last", "c.yaml"]),
    (["seed=3", "--resume", "o/checkpoint-9"], ["seed=3", "--resume", "o/checkpoint-9"]),  # not there: still no config
    (["--resume", "old", "c.yaml"], ["--resume", "old", "c.yaml"]),
    (["--resume", "c.yaml", "sed=3"], ["--resume", "last", "c.yaml", "sed=3"]),
]


@pytest.mark.parametrize(("typed", "seen"), RESUME)
def test_resume_takes_a_path_or_nothing(typed: list[str], seen: list[str]) -> None:
    assert with_resume_value(typed, "last") == seen


STYLES = [
    (["c.yaml", "--learning_rate", "1e-4"], "write learning_rate=1e-4"),
    (["c.yaml", "--learning-rate=1e-4"], "write learning_rate=1e-4"),
    (["c.yaml", "--lr", "1e-4"], "write learning_rate=1e-4"),
    (["c.yaml", "--zo.eps", "1e-4"], "write zo.eps=1e-4"),
    (["c.yaml", "--packing"], "write packing=..."),
    (["c.yaml", "--learnin_rate", "3"], "did you mean `learning_rate`"),
]


@pytest.mark.parametrize(("args", "says"), STYLES)
def test_settings_written_as_options_are_told_the_right_style(args: list[str], says: str) -> None:
    """The flag style of other trainers is answered with the exact word to write."""
    with pytest.raises(UserError) as caught:
        refuse_other_style(args, {"--resume", "--dry-run"})
    assert says in str(caught.value)


def test_options_written_as_settings_are_told_the_right_style(capsys: pytest.CaptureFixture[str]) -> None:
    """`max_new_tokens=5` was answered with `max_minutes`; a file without --tasks with nothing that helps."""
    assert main(["chat", "demo", "max_new_tokens=5"]) == 2
    assert "write --max-new-tokens 5" in capsys.readouterr().err
    assert main(["plan", "demo", "tokens=4x64"]) == 2
    assert "write --tokens 4x64" in capsys.readouterr().err
    assert main(["eval", "demo", "held-out.jsonl"]) == 2
    assert "`held-out.jsonl`: write --tasks before" in capsys.readouterr().err


@pytest.mark.parametrize("args", [["c.yaml", "--resume"], ["c.yaml", "--nonsense"], ["--", "--seed", "3"]])
def test_real_options_and_strangers_pass(args: list[str]) -> None:
    """Options of the verb, unknown words (typer's business) and everything after -- are left alone."""
    assert refuse_other_style(args, {"--resume"}) is None


TASKS = [
    (["dir", "--tasks", "a", "b"], ["dir", "--tasks", "a", "--tasks", "b"]),
    (["dir", "--tasks", "a", "--tasks", "b", "c"], ["dir", "--tasks", "a", "--tasks", "b", "--tasks", "c"]),
    (["dir", "--tasks", "a", "--json"], ["dir", "--tasks", "a", "--json"]),
    (["dir"], ["dir"]),
]


@pytest.mark.parametrize(("typed", "seen"), TASKS)
def test_tasks_takes_all_words_that_follow(typed: list[str], seen: list[str]) -> None:
    assert repeat_option(typed, "--tasks") == seen
