"""Results of a comparison on the disk: which count, which are damaged, and which belong to other rows or models."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from keyhole.assets import MODEL
from keyhole.compare.execute import compare
from keyhole.compare.file import read_comparison
from keyhole.compare.plan import plan
from keyhole.compare.result import Result, read_result, summarise, write_result
from keyhole.errors import UserError
from keyhole.training.rundir import locked
from tests.compare.comparisons import TASK, TEXT, cell, run, write


def summary(root: Path, lines: list[dict[str, Any]], log: str = "") -> Result:
    """The result of the first run of a comparison, whose files hold this."""
    comparison = read_comparison(write(root / "a.yaml"), [f"output_dir={root}"])
    trial = next(iter(plan(comparison, lambda model: "content")[0][0].trials.values()))
    (trial.directory / "run").mkdir(parents=True)
    (trial.directory / "run" / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (trial.directory / "run" / "log.txt").write_text(log)
    return summarise(trial, SimpleNamespace(dev=(), test=()))


def test_a_test_that_is_not_finite_is_no_damaged_result(tmp_path: Path) -> None:
    """A perplexity of infinity is null in metrics.jsonl: the run is not repeated for it."""
    lines: list[dict[str, Any]] = [{"step": 1, "loss": 900.0, "tokens": 8, "seconds": 0.5}]
    lines += [{"step": 3, "loss": 1.0, "tokens": 8, "seconds": 1.0}, {"step": 3, "eval_loss": 900.0}]
    found = summary(tmp_path, [*lines, {"step": 3, "test_perplexity": None, "test_questions": 24}])
    assert found.tests == {"test_questions": 24} and found.seconds == 1.5
    write_result(tmp_path, found)
    assert read_result(tmp_path, found.id) == found


def test_a_head_that_stays_as_it_was_drawn_is_noted(tmp_path: Path) -> None:
    """And a loss that has risen: the table must not show such a number without them. Other lines are the run's own."""
    head = "warning: head: classifier.weight: drawn from the seed, and not trained; take classifier out of `freeze`"
    risen = "warning: the loss has risen from 1 at step 32 to 9 at step 64"
    log = f"lora, m\n  {head}\n  {head}\n{risen}\nwarning: page failed\nstep 1/1\n"
    line = {"step": 1, "loss": 1.0, "tokens": 8, "seconds": 0.5}
    assert summary(tmp_path, [line], log).warnings == [head, risen]


def test_another_model_is_run_again(tmp_path: Path) -> None:
    """And another comparison in the same directory takes the results that it shares."""
    model, out = tmp_path / "m", tmp_path / "out"
    shutil.copytree(MODEL, model)
    words = (f"output_dir={out}", f"model={model}", "seeds=0", "methods=adamw", "learning_rate=1e-3", "max_steps=1")

    def told(name: str, text: str = TEXT) -> str:
        lines: list[str] = []
        assert compare(read_comparison(write(tmp_path / name, text), words), say=lines.append) == 0
        return "\n".join(lines)

    assert "1 done" not in told("small.yaml") and "1 run, 1 done" in told("small.yaml")
    tensors = load_file(model / "model.safetensors")
    save_file({name: tensor * 1.01 for name, tensor in tensors.items()}, model / "model.safetensors", {"format": "pt"})
    assert "1 done" not in told("small.yaml")
    assert "1 run, 1 done" in told("other.yaml", TEXT.replace("# Small", "# Large"))


def test_a_second_comparison_leaves_the_marker_of_the_first(tmp_path: Path) -> None:
    """It is refused before it writes anything."""
    path, out = write(tmp_path / "small.yaml"), tmp_path / "out"
    (out / "runs").mkdir(parents=True)
    (out / "comparison.json").write_text('{"title": "First"}')
    with locked(out / "runs" / "lock") as lock:
        lock.take()
        with pytest.raises(UserError, match="is training into"):
            run(path, out, "seeds=0")
    assert (out / "comparison.json").read_text() == '{"title": "First"}'


def test_other_rows_or_another_task_file_are_run_again(tmp_path: Path) -> None:
    """After any change of train, of test, or of what the task file says; numbers of old data are not reused."""
    rows = [{"text": f"good thing {i}", "stars": 5 if i % 2 else 1} for i in range(40)]
    (tmp_path / "data" / "my").mkdir(parents=True)

    def put(split: str, kept: list[dict[str, Any]]) -> None:
        lines = "".join(json.dumps(row) + "\n" for row in kept)
        (tmp_path / "data" / "my" / f"{split}.jsonl").write_text(lines)

    def go() -> tuple[int, list[str]]:
        """How many results are new, and what was said about changes."""
        before, said = {path.name for path in (out / "results").glob("*")}, []
        comparison = read_comparison(
            path, (f"output_dir={out}", "methods=sgd", "seeds=0", f"task_data={tmp_path}/data")
        )
        assert compare(comparison, say=said.append) == 0
        new = {path.name for path in (out / "results").glob("*")} - before
        return len(new), [line for line in said if "have changed" in line]

    task = write(tmp_path / "my.yaml", TASK)
    text = TEXT.replace("tasks: [demo]", f"tasks: {{mine: {{task: {task}}}}}").replace("max_steps: 4", "max_steps: 1")
    path, out = (
        write(tmp_path / "c.yaml", text.replace("  lomo: {", "  sgd: {").replace("[5e-2, 1e-4]", "1e-3")),
        tmp_path / "out",
    )
    put("train", rows), put("validation", rows)
    assert go() == (2, []), "zero-shot and a run"
    assert go() == (0, [])
    put("validation", [row | {"stars": 5} for row in rows])
    new, said = go()
    assert new == 2 and len(said) == 1 and "mine: the data or the task file have changed" in said[0]
    put("train", rows[:30])
    assert go()[0] >= 1
    task.write_text(TASK.replace("metric: accuracy", "metric: [f1, accuracy]"))
    assert go()[0] == 2 and "f1" in cell(out, "sgd")["metric"]
    task.write_text("title: The same\n" + task.read_text())
    assert go() == (0, [])


DAMAGED = {"point": 3, "dev": "abc", "seed": None, "tests": {"a": "b"}, "curve": [[1]], "id": "other", "steps": True}


@pytest.mark.parametrize("key", DAMAGED)
def test_a_result_with_wrong_values_is_no_result(tmp_path: Path, key: str) -> None:
    good = Result("a", "m", "t", "adamw", [("k", "v")], 0, dev=1, curve=[(1, 0.5, None, 2.0)])
    write_result(tmp_path, good)
    assert read_result(tmp_path, "a") == good
    content = json.loads((tmp_path / "results" / "a.json").read_text())
    content |= {key: DAMAGED[key]}
    (tmp_path / "results" / "a.json").write_text(json.dumps(content))
    assert read_result(tmp_path, "a") is None


def test_a_damaged_result_is_said_and_run_again(tmp_path: Path) -> None:
    path, out, said = write(tmp_path / "a.yaml"), tmp_path / "out", []
    words = (f"output_dir={out}", "seeds=0", "methods=adamw", "learning_rate=1e-3", "max_steps=1")
    assert compare(read_comparison(path, words), say=said.append) == 0
    results = {each: each.read_text() for each in (out / "results").glob("*.json")}
    for each in results:
        each.write_text('{"id": 1, "model": 1, "task": 1, "method": 1, "point": 3, "seed": 0}')
    said.clear()
    assert compare(read_comparison(path, words), say=said.append) == 0
    assert sum(": damaged;" in line for line in said) == len(results) == 2
    assert all(json.loads(each.read_text())["test"] == json.loads(text)["test"] for each, text in results.items())


def test_an_untrained_model_has_a_dev_perplexity(tmp_path: Path) -> None:
    """That of a run whose steps change nothing: curves of perplexity begin there."""
    rows = [json.dumps({"text": f"{i} and", "more": f" {i + 1} make {2 * i + 1}"}) + "\n" for i in range(24)]
    for name, part in (("train", rows[:16]), ("validation", rows[16:])):
        (tmp_path / f"{name}.jsonl").write_text("".join(part))
    columns = "{text: text, more: more}"
    (tmp_path / "sums.yaml").write_text(
        f'columns: {columns}\nprompt: "{{{{ text }}}}"\nanswer: "{{{{ more }}}}"\nmetric: perplexity\n'
    )
    text = f"models: [demo]\ntasks: {{{tmp_path}/sums.yaml: {{task_data: {tmp_path}}}}}\n"
    text += "methods: {lomo: {learning_rate: 1e-12}}\ncommon: {max_steps: 1, batch_size: 4, num_dev: 6, device: cpu}\n"
    assert run(write(tmp_path / "a.yaml", text), tmp_path / "out") == 0
    untrained, trained = cell(tmp_path / "out", "zero-shot"), cell(tmp_path / "out", "lomo")
    assert untrained["dev_metric"] == trained["dev_metric"] == "perplexity"
    assert untrained["dev_mean"] == pytest.approx(trained["dev_mean"], rel=1e-4)
