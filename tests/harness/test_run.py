"""Which tasks of the harness are meant; needs no harness."""

import importlib
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import keyhole.harness
from keyhole.errors import UserError
from keyhole.harness.run import find_tasks

REGISTRY = """
class Registry(dict):
    calls = []

    def register(self, name, target):
        self.calls.append((name, target))
        self[name] = target

MODEL_REGISTRY = Registry()
"""
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


def test_the_model_is_registered_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under its name, with whatever harness is there; not over what an entry point has registered."""
    for name in [name for name in sys.modules if name.split(".")[0] == "lm_eval"]:
        monkeypatch.delitem(sys.modules, name)
    for file, text in {"__init__": "", "models/__init__": "", "api/__init__": "", "api/registry": REGISTRY}.items():
        (path := tmp_path / f"lm_eval/{file}.py").parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    for _ in range(2):
        importlib.reload(keyhole.harness)
    registry = sys.modules["lm_eval.api.registry"].MODEL_REGISTRY
    assert registry.calls == [("keyhole", "keyhole.harness.lm:KeyholeLM")]
    for name in [name for name in sys.modules if name.split(".")[0] == "lm_eval"]:
        monkeypatch.delitem(sys.modules, name)
