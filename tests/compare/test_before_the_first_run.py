"""What a comparison refuses before its first run, and what a dry run says."""

import json
from pathlib import Path

import pytest

from keyhole.compare.execute import compare
from keyhole.compare.file import read_comparison
from keyhole.data.batches import order
from keyhole.errors import UserError
from tests.compare.comparisons import TASK, TEXT, run, write


def test_mistakes_are_found_before_the_first_run(tmp_path: Path) -> None:
    """In the last task, in a setting of the last method, in the number that chooses, and a directory with somebody's
    files."""
    out, other = tmp_path / "o", f"tasks: {{demo: , sst2: {{task_data: {tmp_path}}}}}"
    with pytest.raises(UserError, match="no folder sst2/"):
        run(write(tmp_path / "a.yaml", TEXT.replace("tasks: [demo]", other)), out)
    assert not out.exists(), "nothing is written before the tasks are read"
    with pytest.raises(UserError, match="lomo on demo: 1 problem\n.*line 6: .*lerning_rate: unknown key"):
        run(write(tmp_path / "b.yaml", TEXT.replace("lomo: {learning", "lomo: {lerning")), out)
    with pytest.raises(
        UserError, match="metric_for_best_model=f1: an evaluation here gives loss, perplexity, accuracy"
    ):
        run(write(tmp_path / "b.yaml"), out, "metric_for_best_model=f1")
    assert not out.exists(), "each run would fail after the model was loaded"
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter.txt").write_text("dear")
    with pytest.raises(UserError, match="letter.txt"):
        run(write(tmp_path / "c.yaml"), tmp_path / "mine")


@pytest.mark.parametrize(("words", "last"), [((), "6 runs (choose_by"), (("seeds=0",), "4 runs")])
def test_a_dry_run_says_how_many_runs_there_will_be(tmp_path: Path, words: tuple[str, ...], last: str) -> None:
    """Of a grid only the best point is run with the other seeds, so more are listed than are run."""
    lines: list[str] = []
    comparison = read_comparison(write(tmp_path / "a.yaml"), (f"output_dir={tmp_path / 'o'}", *words))
    assert compare(comparison, dry_run=True, say=lines.append) == 0
    assert len(lines) == (9 if not words else 5) and lines[-1].startswith(last)
    assert not (tmp_path / "o").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("tasks=nosuch",), "nosuch"),
        (("model=./missing",), "missing"),
        (("tasks=sst2", "task_data=missing"), "missing"),
    ],
)
def test_a_dry_run_refuses_what_is_not_there(tmp_path: Path, words: tuple[str, ...], said: str) -> None:
    comparison = read_comparison(write(tmp_path / "a.yaml"), (f"output_dir={tmp_path / 'o'}", *words))
    with pytest.raises(UserError, match=said):
        compare(comparison, dry_run=True, say=lambda line: None)


def test_a_wrong_label_that_a_later_seed_draws_is_found_before_the_first_run(tmp_path: Path) -> None:
    """Seed 3 draws 2 + 2 of the rows without the wrong one, seed 0 with it; the order of the seeds does not matter."""
    rows = [{"text": f"good thing {i}", "stars": 5 if i % 2 else 1} for i in range(12)]
    drawn = {seed: set(order(len(rows), seed, 0)[:4].tolist()) for seed in (3, 0)}
    rows[min(drawn[0] - drawn[3])]["stars"] = 7
    (tmp_path / "data" / "my").mkdir(parents=True)
    for split, own in (("train", rows), ("validation", [row | {"stars": 5} for row in rows])):
        (tmp_path / "data" / "my" / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in own))
    text = TEXT.replace("tasks: [demo]", f"tasks: {{mine: {{task: {write(tmp_path / 'my.yaml', TASK)}}}}}")
    path, out = write(tmp_path / "c.yaml", text), tmp_path / "out"
    words = (f"task_data={tmp_path}/data", "num_train=2", "num_dev=2", "methods=adamw")
    with pytest.raises(UserError, match="label: found 7, expected 1; 5 .`labels` of the task's file lists"):
        run(path, out, *words, "seeds=3,0")
    assert not out.exists()
