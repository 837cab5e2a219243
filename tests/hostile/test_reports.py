"""Directories that `keyhole report` is pointed at: a stranger's metrics, settings and stories."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.hostile.harness import attempt


def names(run: Path) -> None:
    """A line of a thousand names each, all of them new."""
    lines = [json.dumps({"step": i, "loss": 1.0} | {f"n{i}-{j}": 1.0 for j in range(1000)}) for i in range(60)]
    (run / "metrics.jsonl").write_text("\n".join(lines))


def one_line(run: Path) -> None:
    (run / "metrics.jsonl").write_text('{"step": 1, "loss": ' + "[" * 20_000_000)


def numbers(run: Path) -> None:
    huge = "9" * 400
    (run / "metrics.jsonl").write_text(
        f'{{"step": {huge}, "loss": 1}}\n{{"step": 1, "loss": 1e308, "seconds": {huge}, "tokens": 1e308}}\n'
        '{"step": 2, "loss": -1e308, "seconds": 1e308}\n{"step": 3, "loss": 1e-320, "eval_loss": true}\n'
    )


def settings(run: Path) -> None:
    """An alias bomb, in the settings."""
    bomb = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    bomb += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 12)]
    (run / "config.yaml").write_text("\n".join(bomb))


def story(run: Path) -> None:
    told = {"format": 1, "title": "\x1b[2J", "method": "\x1b]0;x\x07", "model": "m" * 10**6, "lines": ["x" * 10**6] * 9}
    told |= {"spans": [["upload", "p", i, 1e90] for i in range(20_000)], "total": 10**300, "state": "\x1b[31m"}
    (run / "report.json").write_text(json.dumps(told))


def environment(run: Path) -> None:
    (run / "env.json").write_text('{"versions": {"x": {"y": 1}}, "gpus": [3], "cpu": [], "os": null}')


def pipes(run: Path) -> None:
    for name in ("config.yaml", "env.json", "report.json"):
        os.mkfifo(run / name)


CASES = [names, one_line, numbers, settings, story, environment, pipes]


@pytest.mark.parametrize("harm", CASES, ids=lambda harm: harm.__name__)
def test_a_strangers_run(harm: Callable[[Path], None], tmp_path: Path) -> None:
    run = tmp_path / "theirs" / "run"
    run.mkdir(parents=True)
    (run / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0, "tokens": 5, "seconds": 0.5}\n')
    harm(run)
    output = tmp_path / "ours"
    output.mkdir()
    ended = attempt(["report", str(tmp_path / "theirs"), "-o", str(output / "page.html")], output, tmp_path)
    assert ended.code == 0
    page = (output / "page.html").read_text()
    assert page.isprintable() or all(c.isprintable() or c in "\n\t" for c in page)
    assert len(page) < 2**21
