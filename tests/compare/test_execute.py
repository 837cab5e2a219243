"""A comparison as a whole: what is chosen, what survives a kill, what a failure costs, what is read once."""

import json
import os
import shutil
import signal
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from keyhole.assets import MODEL
from keyhole.compare import execute
from keyhole.compare import kept as kept_module
from keyhole.compare.execute import FAILED, compare
from keyhole.compare.file import read_comparison
from keyhole.compare.plan import plan
from keyhole.compare.result import Result, read_result, summarise, write_result
from keyhole.data.loader import order
from keyhole.disk import weight_files
from keyhole.errors import NonFinite, UserError
from keyhole.machine.out_of_memory import LOWER, MORE_ROOM
from keyhole.training import loop
from keyhole.training.lock import locked
from tests.compare.comparisons import TEXT, cell, run, table, write
from tests.matrix import in_every_run
from tests.training.children import draw_nothing, server

LACKS = f"out of host memory; {LOWER}, {MORE_ROOM}"
LACKS_8K = LACKS.replace(";", ": 8KiB more were asked for, in one piece;", 1)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, int]]:
    """A finished comparison, how often weights were opened and data prepared for it, and how many models were left when
    memory was given back."""
    root = tmp_path_factory.mktemp("undisturbed")
    counts = {"weights": 0, "data": 0, "models left": 0}
    models: weakref.WeakSet[Any] = weakref.WeakSet()
    load, free_memory = kept_module.load, execute.free_memory

    def loaded(*args: Any, **how: Any) -> Any:
        models.add(model := load(*args, **how))
        return model

    def freed() -> None:
        free_memory()
        counts["models left"] += len(models)

    with pytest.MonkeyPatch.context() as patch:
        for name, module, function in (("weights", weight_files, "_open_shard"), ("data", kept_module, "load_data")):
            real = getattr(module, function)

            def counted(*args: Any, real: Any = real, name: str = name) -> Any:
                counts[name] += 1
                return real(*args)

            patch.setattr(module, function, counted)
        patch.setattr(kept_module, "load", loaded)
        patch.setattr(execute, "free_memory", freed)
        assert run(write(root / "small.yaml"), root / "out") == 0
    return root / "out", counts


def test_the_best_settings_by_dev_are_taken_and_tested(undisturbed: tuple[Path, dict[str, int]]) -> None:
    """Each grid is run with the first seed, its best point with the other; mean and spread are those of test."""
    out, _ = undisturbed
    for method, better in (("adamw", "2e-3"), ("lomo", "5e-2")):
        found = cell(out, method)
        devs = {dict(map(tuple, run["point"]))["learning_rate"]: run["dev"] for run in found["grid"] if not run["seed"]}
        assert len(devs) == 2 and found["chosen"] == [["learning_rate", max(devs, key=lambda rate: devs[rate])]]
        assert found["chosen"] == [["learning_rate", better]]
        first, second = [run["test"] for run in found["runs"]]
        assert found["mean"] == pytest.approx((first + second) / 2)
        assert found["spread"] == pytest.approx(abs(first - second) / 2**0.5)
        assert len(found["grid"]) == 3, "the worse point is not run with the second seed"
    assert cell(out, "zero-shot")["mean"] is not None


def test_weights_and_data_are_read_once(undisturbed: tuple[Path, dict[str, int]]) -> None:
    """Six runs and a zero-shot in one process: one file of weights, two draws of data (one per seed). No model is there
    when the next one is loaded."""
    assert undisturbed[1] == {"weights": 1, "data": 2, "models left": 0}


def test_nothing_but_numbers_stays(undisturbed: tuple[Path, dict[str, int]]) -> None:
    out, _ = undisturbed
    assert not list(out.rglob("*.safetensors")) and not list(out.rglob("checkpoint-*"))
    assert {path.name for path in out.iterdir()} >= {"table.json", "table.md", "report.html", "runs", "results"}


@in_every_run(lambda says: says != LACKS_8K)  # tests/cli/test_main.py has its words
@pytest.mark.parametrize(
    ("error", "says"),
    [
        (MemoryError(), LACKS),
        (RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 8192 bytes."), LACKS_8K),
        (RuntimeError("no\nroom"), "RuntimeError: no\nroom"),
    ],
)
def test_a_model_that_cannot_be_scored_untrained_stops_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, says: str
) -> None:
    """Whatever the error is, and also if it has no text, the row says so and the next command tries again."""
    real, left = execute.Judge.test_metrics, [error]

    def test_metrics(self: Any, *args: Any) -> Any:
        if left:
            raise left.pop()
        return real(self, *args)

    monkeypatch.setattr(execute.Judge, "test_metrics", test_metrics)
    path, out = write(tmp_path / "a.yaml"), tmp_path / "out"
    words = ("seeds=0", "methods=lomo", "learning_rate=1e-3", "max_steps=1")
    assert run(path, out, *words) == FAILED
    assert cell(out, "zero-shot")["errors"] == [says] and cell(out, "lomo")["mean"] is not None
    assert run(path, out, *words) == 0
    assert cell(out, "zero-shot")["mean"] is not None


@pytest.mark.parametrize(("wire", "untrained"), [("wire: int4, ", "int4"), ("", None)])
def test_a_model_is_scored_untrained_in_the_format_of_all_its_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wire: str, untrained: str | None
) -> None:
    """It may fit host memory in no other; if one run keeps the weights as they are, the model is scored as it is."""
    asked = []

    def load(self: Any, source: str, **how: Any) -> Any:
        asked.append((how["workload"].method, how["wire"]))
        raise UserError("enough")

    monkeypatch.setattr(kept_module.Kept, "load", load)
    methods = f"{{a: {{method: lora, wire: int4}}, b: {{{wire}method: lora, lora.r: 4}}}}"
    text = TEXT[: TEXT.index("methods:")] + f"methods: {methods}\nseeds: [0]\n" + TEXT[TEXT.index("common:") :]
    assert run(write(tmp_path / "a.yaml", text), tmp_path / "out") == FAILED
    assert asked == [("eval", untrained), ("lora", "int4"), ("lora", untrained)]


def test_a_test_that_is_not_finite_is_no_damaged_result(tmp_path: Path) -> None:
    """A perplexity of infinity is null in metrics.jsonl: the run is not repeated for it."""
    comparison = read_comparison(write(tmp_path / "a.yaml"), [f"output_dir={tmp_path}"])
    trial = next(iter(plan(comparison, lambda model: "content")[0][0].trials.values()))
    (trial.directory / "run").mkdir(parents=True)
    lines = [
        {"step": 1, "loss": 900.0, "tokens": 8, "seconds": 0.5},
        {"step": 3, "loss": 1.0, "tokens": 8, "seconds": 1.0},
    ]
    lines += [{"step": 3, "eval_loss": 900.0}, {"step": 3, "test_perplexity": None, "test_questions": 24}]
    (trial.directory / "run" / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = summarise(trial, SimpleNamespace(dev=(), test=(), train=SimpleNamespace(dataset=[0])))
    assert found.tests == {"test_questions": 24} and found.seconds == 1.5
    write_result(tmp_path, found)
    assert read_result(tmp_path, trial.id) == found


def test_passes_over_more_rows_than_there_are_do_not_count(tmp_path: Path) -> None:
    """zo.guide takes the rows of the data, once each, before the first step of each period."""
    text = "models: {m: demo}\ntasks: [sst2]\nmethods: {zo: {zo: {rank: 1, refresh: 5, guide: 100000}}}\n"
    text += f"common: {{batch_size: 4, max_steps: 6}}\noutput_dir: {tmp_path}\n"
    comparison = read_comparison(write(tmp_path / "a.yaml", text))
    trial = next(iter(plan(comparison, lambda model: "content")[0][0].trials.values()))
    found = summarise(trial, SimpleNamespace(dev=(), test=(), train=SimpleNamespace(dataset=range(60))))
    passes = 2 * 60 / 4
    assert [found.forwards_at(step) for step in (0, 1, 5, 6)] == [0, passes + 2, passes + 10, 2 * passes + 12]


def killed(path: Path, out: Path, at: int) -> None:
    """A comparison whose process dies before this step of all its steps."""
    real, steps = loop.Run.step, []

    def step(self: loop.Run, number: int) -> None:
        steps.append(number)
        if len(steps) == at:
            os.kill(os.getpid(), signal.SIGKILL)
        real(self, number)

    draw_nothing()
    loop.Run.step = step
    run(path, out)


def test_killed_in_the_middle_and_resumed(undisturbed: tuple[Path, dict[str, int]], tmp_path: Path) -> None:
    """A comparison whose process was killed inside its second run ends with the same table."""
    path, out = write(tmp_path / "small.yaml"), tmp_path / "out"
    child = server.Process(target=killed, args=(path, out, 7))
    child.start()
    child.join()
    assert child.exitcode == -signal.SIGKILL
    assert len(list((out / "results").glob("*.json"))) == 2, "zero-shot and the first run"
    assert run(path, out) == 0
    assert table(out) == table(undisturbed[0])


@pytest.mark.matrix
@pytest.mark.parametrize("stop", [3, 14])
def test_interrupted_and_resumed(
    undisturbed: tuple[Path, dict[str, int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop: int
) -> None:
    """A signal ends the step and the comparison with 130; the same command goes on from the checkpoint."""
    path, out = write(tmp_path / "small.yaml"), tmp_path / "out"
    real, steps = loop.Run.step, []

    def step(self: loop.Run, number: int) -> None:
        steps.append(number)
        if len(steps) == stop:
            signal.raise_signal(signal.SIGINT)
        real(self, number)

    monkeypatch.setattr(loop.Run, "step", step)
    assert run(path, out) == 130
    assert (out / "report.html").exists() and list(out.rglob("checkpoint-*"))
    done = len(steps)
    assert run(path, out) == 0
    assert len(steps) == 24 and done == stop, "no step is taken twice"
    assert table(out) == table(undisturbed[0]) and not list(out.rglob("checkpoint-*"))
    steps.clear()
    assert run(path, out) == 0 and not steps, "everything is known"


def test_a_line_more_in_the_file_runs_what_is_new(undisturbed: tuple[Path, dict[str, int]], tmp_path: Path) -> None:
    """Finished runs are recognised by their settings, whatever file they came from."""
    out, _ = undisturbed
    before = {path.name: path.stat().st_mtime_ns for path in (out / "results").iterdir()}
    path = write(tmp_path / "more.yaml", TEXT.replace("  lomo:", "  sgd: {learning_rate: 5e-2}\n  lomo:"))
    try:
        assert run(path, out, "seeds=0") == 0
        after = {path.name: path.stat().st_mtime_ns for path in (out / "results").iterdir()}
        assert before.items() <= after.items() and len(after) == len(before) + 1
    finally:
        for name in {path.name for path in (out / "results").iterdir()} - before.keys():
            (out / "results" / name).unlink()
        assert run(write(tmp_path / "small.yaml"), out) == 0  # the table as it was


def test_tables_that_cannot_be_written_are_shown_and_refused(tmp_path: Path) -> None:
    """A directory of the name of a table, or a full disk: the numbers are printed, and written by the next call."""
    path, out, told = write(tmp_path / "small.yaml"), tmp_path / "out", []
    (out / "table.md").mkdir(parents=True)
    (out / "comparison.json").write_text("{}")
    asked = read_comparison(path, (f"output_dir={out}", "seeds=0", "methods=adamw", "learning_rate=1e-3"))
    with pytest.raises(UserError, match=f"the tables in {out} cannot be written: .*the same command writes the tables"):
        compare(asked, say=told.append)
    assert "| adamw |" in told[-1] and any("1 run;" in line for line in told)
    (out / "table.md").rmdir()
    assert compare(asked, say=told.append) == 0 and "| adamw |" in (out / "table.md").read_text()


def test_another_model_or_another_comparison_is_reported(tmp_path: Path) -> None:
    """A changed model is run again; tables of another comparison are replaced."""
    model, out = tmp_path / "m", tmp_path / "out"
    shutil.copytree(MODEL, model)
    words = (f"output_dir={out}", f"model={model}", "seeds=0", "methods=adamw", "learning_rate=1e-3", "max_steps=1")

    def told(name: str, text: str = TEXT) -> str:
        lines: list[str] = []
        assert compare(read_comparison(write(tmp_path / name, text), words), say=lines.append) == 0
        return "\n".join(lines)

    assert "last time" not in told("small.yaml") and "last time" not in told("small.yaml")
    tensors = load_file(model / "model.safetensors")
    save_file({name: tensor * 1.01 for name, tensor in tensors.items()}, model / "model.safetensors", {"format": "pt"})
    assert "m: the model has changed since the last time; its runs are done again" in told("small.yaml")
    again = told("other.yaml", TEXT.replace("# Small", "# Large"))
    assert "has the tables of another comparison, Small: they are replaced, its results stay" in again
    assert "1 run, 1 done" in again


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


def test_a_failing_run_is_recorded_and_the_others_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NaN and a lack of memory are results of their cells; they stay until --retry; a crash is tried again."""
    errors = {
        "1e-05": NonFinite("step 2: the loss is nan\n  batch: a"),
        "0.002": MemoryError(),
        "0.05": ZeroDivisionError("oh"),
    }
    real = loop.Run.step

    def step(self: loop.Run, number: int) -> None:
        error = errors.get(f"{self.schedule.peak:g}")
        if error is not None and number == 2:
            raise error
        real(self, number)

    path, out = write(tmp_path / "small.yaml", TEXT.replace("max_steps: 4", "max_steps: 2")), tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(loop.Run, "step", step)
        assert run(path, out, "seeds=0") == FAILED
    adamw, lomo = cell(out, "adamw"), cell(out, "lomo")
    assert adamw["errors"] == ["step 2: the loss is nan; batch: a", LACKS] and adamw["mean"] is None
    assert lomo["errors"] == ["ZeroDivisionError: oh"] and lomo["chosen"] == [["learning_rate", "1e-4"]]
    assert "the loss is nan" in (out / "table.md").read_text() and "failed" in (out / "report.html").read_text()
    assert run(path, out, "seeds=0") == FAILED, "also when the failure is one of before"
    assert cell(out, "adamw") == adamw, "it would fail again, so it is not run again"
    assert not cell(out, "lomo")["errors"]
    assert run(path, out, "seeds=0", retry=True) == 0
    assert cell(out, "adamw")["mean"] is not None and not cell(out, "adamw")["errors"]


def test_a_crashed_run_goes_on_from_its_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not from the beginning; after that its checkpoints are deleted."""
    real, steps = loop.Run.step, []

    def step(self: loop.Run, number: int) -> None:
        steps.append(number)
        if len(steps) == 4:
            raise ZeroDivisionError("oh")
        real(self, number)

    monkeypatch.setattr(loop.Run, "step", step)
    path, out = write(tmp_path / "small.yaml"), tmp_path / "out"
    words = ("seeds=0", "methods=lomo", "learning_rate=1e-3", "save_steps=1")
    assert run(path, out, *words) == FAILED and run(path, out, *words) == 0
    assert steps == [1, 2, 3, 4, 4] and cell(out, "lomo")["mean"] is not None
    assert not list(out.glob("runs/*/checkpoint-*"))


def test_mistakes_are_found_before_the_first_run(tmp_path: Path) -> None:
    """In the last task, in a setting of the last method, and a directory with somebody's files."""
    out, other = tmp_path / "o", f"tasks: {{demo: , sst2: {{task_data: {tmp_path}}}}}"
    with pytest.raises(UserError, match="no folder sst2/"):
        run(write(tmp_path / "a.yaml", TEXT.replace("tasks: [demo]", other)), out)
    assert not out.exists(), "nothing is written before the tasks are read"
    with pytest.raises(UserError, match="lomo on demo: 1 problem\n.*line 6: .*lerning_rate: unknown key"):
        run(write(tmp_path / "b.yaml", TEXT.replace("lomo: {learning", "lomo: {lerning")), out)
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
    """A model, a task, the files of a task: as the runs themselves would."""
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
    with pytest.raises(UserError, match="label: found 7, expected 1; 5"):
        run(path, out, *words, "seeds=3,0")
    assert not out.exists()


TASK = """columns: {review: text, label: stars}
prompt: "{{ review }} I would read it"
candidates: [" never", " again"]
labels: [["1"], ["5"]]
metric: accuracy
"""


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


def test_the_day_of_templates_is_that_on_which_the_comparison_began(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a template that prints the date would make the data of tomorrow other data."""
    path, out, days = write(tmp_path / "a.yaml"), tmp_path / "out", []
    real = kept_module.load_data
    monkeypatch.setattr(kept_module, "load_data", lambda how: (days.append(how.template_date), real(how))[1])
    short = ("seeds=0", "methods=adamw", "learning_rate=1e-3", "max_steps=1")
    assert run(path, out, *short) == 0
    marker = json.loads((out / "comparison.json").read_text())
    (out / "comparison.json").write_text(json.dumps(marker | {"day": "2025-01-31"}))
    assert run(path, out, *short) == 0
    assert days == [marker["day"], "2025-01-31"]


DAMAGED = {"point": 3, "dev": "abc", "seed": None, "tests": {"a": "b"}, "curve": [[1]], "id": "other", "steps": True}


@pytest.mark.parametrize("key", DAMAGED)
def test_a_result_with_wrong_values_is_no_result(tmp_path: Path, key: str) -> None:
    good = Result("a", "m", "t", "adamw", [["k", "v"]], 0, dev=1, curve=[[1, 0.5, None, 2.0]], losses=[[1, 0.5, 2.0]])
    write_result(tmp_path, good)
    assert read_result(tmp_path, "a") == good
    content = json.loads((tmp_path / "results" / "a.json").read_text())
    (tmp_path / "results" / "a.json").write_text(json.dumps(content | {key: DAMAGED[key]}))
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


def test_a_torn_result_is_no_result(tmp_path: Path) -> None:
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "a.json").write_text(json.dumps({"id": "a"})[:-3])
    assert read_result(tmp_path, "a") is None
