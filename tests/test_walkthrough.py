"""docs/walkthrough.md is typed from its table to its last line, with the embedded model in place of the published."""

import io
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

from keyhole.cli import main

PAGE = Path(__file__).parents[1] / "docs" / "walkthrough.md"
PUBLISHED = "HuggingFaceTB/SmolLM2-135M"


def block(language: str) -> str:
    (found,) = re.findall(rf"```{language}\n(.*?)```", PAGE.read_text(), re.DOTALL)
    return found


def test_the_walk_through_from_a_csv_to_a_tuned_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """Every command of the page ends well, and does what the page says of it."""
    monkeypatch.chdir(tmp_path)
    for name in ("train.csv", "held-out.csv"):
        Path(name).write_text(block("csv"))
    config = block("yaml")
    assert PUBLISHED in config
    Path("my.yaml").write_text(config.replace(PUBLISHED, "demo") + "device: cpu\ndtype: float32\n")
    commands = re.findall(r"^    (keyhole .*)$", PAGE.read_text(), re.MULTILINE)
    monkeypatch.setattr(sys, "stdin", io.StringIO("Review: Warm soup.\nVerdict:\n"))
    said = {}
    for command in commands:
        words = shlex.split(command)[1:]
        words += ["device=cpu"] if words[0] in ("eval", "chat") else []
        assert main(words) == 0, f"{command}\n{capsys.readouterr().err}"
        said[words[0], len(said)] = capsys.readouterr().out
    verbs = [verb for verb, _ in said]
    assert verbs == ["data", "plan", "train", "train", "train", "eval", "chat", "push"]
    text = dict(zip(enumerate(verbs), said.values(), strict=True))
    assert "TRAINED" in text[0, "data"] and "prompt and completion from columns" in text[0, "data"]
    assert "take: " in text[1, "plan"]
    assert "the model is in out/reviews" in text[3, "train"] and "from out/reviews/checkpoint-6" in text[4, "train"]
    assert "perplexity" in text[5, "eval"] and "Review: {review}" in text[7, "push"]
    spaces: dict[str, Any] = {}
    exec(block("python"), spaces)
    assert spaces["model"].num_parameters() > 0
