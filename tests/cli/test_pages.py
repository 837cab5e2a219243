"""keyhole compare | report | push | replay: what is typed is what is asked for; what they print."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from keyhole.checkpoint import replay
from keyhole.cli import main
from keyhole.compare import execute
from keyhole.compare.file import comparisons
from keyhole.hub import push


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[tuple, dict[str, Any]]]:
    """The calls of what a verb hands over to."""
    calls: list[tuple[tuple, dict[str, Any]]] = []

    def call(result: Any) -> Any:
        return lambda *args, **options: calls.append((args, options)) or result

    monkeypatch.setattr(execute, "compare", call(7))
    monkeypatch.setattr(push, "push", call("https://hub/me/m"))
    monkeypatch.setattr(replay, "replay", call(SimpleNamespace(steps=3, seconds=1.25, total_seconds=2.5)))
    return calls


def test_compare(asked: list, capsys: Any) -> None:
    """Without a file it lists those that are shipped; the exit code is that of the comparison."""
    assert main(["compare"]) == 0 and not asked
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == list(comparisons())
    words = ["smollm2-sst2", "model=demo", "task_data=data", "output_dir=out"]
    for more, on in ((["--dry-run", "--retry", "--allow-code-execution"], True), ([], False)):
        assert main(["compare", *words, *more]) == 7
        (comparison,), options = asked.pop()
        assert options.pop("say") and options == {"dry_run": on, "retry": on, "allow_code_execution": on}
        assert (comparison.output_dir, list(comparison.models.values())) == ("out", ["demo"])


def test_push(asked: list, tiny_model: Path, capsys: Any) -> None:
    """Whether it is private is left to the hub if it was not said; a dry run prints the card and the files."""
    for more, private in (["--private"], True), ([], None):
        assert main(["push", "out", "me/m", *more]) == 0
        args, options = asked.pop()
        assert args == ("out", "me/m") and options.pop("say") and options == {"private": private}
    assert "https://hub/me/m" in capsys.readouterr().out
    assert main(["push", str(tiny_model), "me/m", "--dry-run"]) == 0 and not asked
    told = capsys.readouterr()
    assert (
        told.out.startswith("---\n")
        and f"{(tiny_model / 'config.json').stat().st_size:,} bytes  config.json" in told.err
    )


def test_replay(asked: list, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """The adapters beside the model are named, if there are any."""
    monkeypatch.setattr("keyhole.cli.models.check_journal", lambda path: None)
    words = ["replay", "base", "journal", str(tmp_path / "out")]
    assert main([*words, "--steps", "3", "device=cpu"]) == 0
    args, options = asked.pop()
    assert args == ("base", Path("journal"), tmp_path / "out") and options.pop("say")
    assert options == {"steps": 3, "device": "cpu"}
    assert capsys.readouterr().out == f"3 steps replayed in 1.2 s (2.5 s in all): {tmp_path / 'out'}\n"
    real, adapter = replay.replay, tmp_path / "out" / "adapter"
    monkeypatch.setattr(replay, "replay", lambda *args, **how: adapter.mkdir(parents=True) or real(*args, **how))
    assert main(words) == 0 and asked.pop()[1]["steps"] is None
    assert f"and its adapters in {adapter}: load both" in capsys.readouterr().out
