"""Which tasks of the harness are meant; needs no harness."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from keyhole.errors import UserError
from keyhole.harness.run import find_tasks

NAMES = ["arc_easy", "arc_challenge", "hellaswag"]


def manager() -> SimpleNamespace:
    """Knows names and patterns, as the harness does."""
    import fnmatch

    match = lambda words: sorted({n for word in words for n in fnmatch.filter(NAMES, word)})  # noqa: E731
    return SimpleNamespace(match_tasks=match, all_tasks=NAMES)


def test_names_patterns_and_files_are_found_once_each(tmp_path: Path) -> None:
    own = tmp_path / "mine.yaml"
    own.write_text("task: mine")
    found = find_tasks(manager(), ["hellaswag,arc_*", str(own), "arc_easy"])
    assert found == ["hellaswag", "arc_challenge", "arc_easy", str(own)]


@pytest.mark.parametrize(
    ("word", "says"),
    [("helaswag", "did you mean hellaswag?"), ("no.yaml", "there is no file no.yaml"), (",", "name at least one")],
)
def test_what_is_no_task_is_refused(word: str, says: str) -> None:
    with pytest.raises(UserError, match=says.replace("?", r"\?")):
        find_tasks(manager(), [word])
