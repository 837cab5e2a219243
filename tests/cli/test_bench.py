"""`keyhole bench`: what the words of the command ask for."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from keyhole.bench import run
from keyhole.cli import main

ASKED = [
    (["zo"], ["judged"], 6),
    (["zo", "--table=mine.yaml"], ["all"], 6),
    (["zo", "--cases=a,,b*"], ["a", "b*"], 6),
    (["lomo"], ["all"], 2),
    (["lsp", "--cases=c", "--warm-up=4"], ["c"], 4),
]


@pytest.mark.parametrize("differ", [False, True])
@pytest.mark.parametrize(("words", "cases", "warm_up"), ASKED)
def test_tables(
    words: list[str], cases: list[str], warm_up: int, differ: bool, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """Of `zo` the judged cases, of others and of one's own table all; losses that differ are an error."""
    asked: dict[str, Any] = {}
    told = SimpleNamespace(markdown=lambda: "TABLE", paths=("a.json", "a.md"), differing=lambda: ["x"] * differ)
    monkeypatch.setattr(
        run, "bench_tables", lambda shipped, job, **how: asked.update(how, name=shipped, job=job) or told
    )
    more = ["--device=cpu", "--quick", "--steps=3", "--models=A,B", "--only=t", "--out=o"]
    assert main(["bench", *words, *more]) == int(differ)
    assert (asked["name"], asked["words"], asked["models"], asked["only"]) == (
        f"{words[0]}.yaml",
        cases,
        ["A", "B"],
        "t",
    )
    assert (asked["job"].warm_up, asked["job"].timed, asked["out"]) == (warm_up, 3, Path("o"))
    assert asked["file"] == (Path("mine.yaml") if "mine.yaml" in words[-1] else None)
    printed = capsys.readouterr()
    assert "TABLE" in printed.out and "wrote a.json and a.md" in printed.out and ("differ" in printed.err) == differ
