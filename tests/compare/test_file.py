"""Comparison files: what they may say, what the command line changes, and those that are shipped."""

from dataclasses import replace
from pathlib import Path

import pytest

from keyhole.compare.file import comparisons, find_comparison, read_comparison
from keyhole.compare.plan import plan, settings_hash
from keyhole.compare.result import blank
from keyhole.compare.table import cell_of, choose, shown
from keyhole.errors import UserError
from tests.compare.comparisons import TEXT, write


def points(path: Path, *words: str) -> dict[str, list[str]]:
    """Method -> the settings of its grid, as text."""
    groups, _ = plan(read_comparison(path, words), lambda model: "content")
    return {group.method: [", ".join(f"{k}={v}" for k, v in point) for point in group.points] for group in groups}


def test_a_list_is_a_grid_and_a_list_of_lists_one_of_lists(tmp_path: Path) -> None:
    """Grids multiply; a setting that is a list by nature is one value."""
    text = TEXT.replace(
        "  lomo: {learning_rate: [5e-2, 1e-4]}",
        "  lora: {warmup_ratio: [0.1, 0], learning_rate: [1e-3, 1e-4], lora: {target_modules: [q_proj, v_proj]}}\n"
        "  two: {method: lora, lora: {target_modules: [[q_proj], [q_proj, v_proj]]}}",
    )
    found = points(
        write(tmp_path / "a.yaml", text.replace("  adamw: {", "  zo: {freeze: [null, embeddings]}\n  adamw: {"))
    )
    assert found["zo"] == ["freeze=null", "freeze=embeddings"], "null is no item of a list of texts"
    assert found["lora"] == [f"warmup_ratio={w}, learning_rate={r}" for w in ("0.1", "0") for r in ("1e-3", "1e-4")]
    assert found["two"] == ['lora.target_modules=["q_proj"]', 'lora.target_modules=["q_proj", "v_proj"]']


def test_the_command_line_counts_most(tmp_path: Path) -> None:
    """A setting replaces a grid; names select; steps replace epochs."""
    path = write(tmp_path / "a.yaml", TEXT.replace("max_steps: 4", "num_train_epochs: 3"))
    assert points(path, "learning_rate=1e-2", "methods=lomo") == {"lomo": [""]}
    made = read_comparison(path, ("model=a/b,c/d", "tasks=rte", "seeds=[3, 4]", "max_steps=9"))
    assert made.models == {"b": "a/b", "d": "c/d"} and list(made.tasks) == ["rte"] and made.seeds == [3, 4]
    groups, warnings = plan(made, lambda model: "content")
    config = next(iter(groups[0].trials.values())).config
    assert (config.max_steps, config.num_train_epochs, config.task) == (9, None, "rte")
    assert not any("num_train_epochs" in warning for warning in warnings)


@pytest.mark.parametrize("tasks", ["[rte, my/plants.yaml]", "{rte: , my/plants.yaml: {num_train: 5}}"])
def test_a_task_file_is_called_as_everywhere(tmp_path: Path, tasks: str) -> None:
    """By its name without directory and suffix, in a list, with settings and on the command line; twice is refused."""
    path = write(tmp_path / "a.yaml", TEXT.replace("tasks: [demo]", f"tasks: {tasks}"))

    def configs(*words: str) -> dict[str, str]:
        groups, _ = plan(read_comparison(path, words), lambda model: "content")
        return {group.task: next(iter(group.trials.values())).config.task for group in groups}

    assert configs() == {"rte": "rte", "plants": "my/plants.yaml"}
    assert configs("tasks=plants") == configs("tasks=my/plants.yaml") == {"plants": "my/plants.yaml"}
    assert configs("tasks=your/plants.yaml") == {"plants": "your/plants.yaml"}
    with pytest.raises(UserError, match="`plants` is named twice"):
        configs("tasks=my/plants.yaml,your/plants.yaml")


def test_the_hash_knows_what_changes_numbers(tmp_path: Path) -> None:
    """Settings and the content of the model do; the place of the output and how often it prints do not."""
    path = write(tmp_path / "a.yaml")

    def ids(*words: str, content: str = "x") -> list[str]:
        groups, _ = plan(read_comparison(path, words), lambda model: content)
        return [trial.id.rpartition("-")[2] for group in groups for trial in group.trials.values()]

    same = ids()
    assert len(set(same)) == len(same) == 8
    assert ids("output_dir=elsewhere", "logging_steps=3", "save_steps=2") == same
    assert not set(ids("batch_size=4")) & set(same) and not set(ids(content="y")) & set(same)
    groups, _ = plan(read_comparison(path), lambda model: None)
    config = next(iter(groups[0].trials.values())).config
    assert settings_hash(config, None) != settings_hash(config, "x")


@pytest.mark.parametrize(
    "change, says",
    [
        (("models: [demo]", "modells: [demo]"), "line 2: modells: unknown key; did you mean `models`"),
        (("seeds: [0, 1]", "common: {max_steps: 3}"), "line 8: common: given twice, also in line 7"),
        (("seeds: [0, 1]", "seeds: [0, 0]"), "seeds: expected a list of different whole numbers"),
        (("seeds: [0, 1]", "seeds: 3"), "seeds: expected a list of different whole numbers"),
        (("seeds: [0, 1]", "choose_by: luck"), "choose_by: found `luck`, expected first-seed or all-seeds"),
        (("seeds: [0, 1]", "batch_size: 3"), "batch_size: unknown key; a setting of all runs stands under `common`"),
        (("models: [demo]", "model: demo"), "line 2: model: unknown key; models are compared: write `models: "),
        (("models: [demo]", "models: [[demo]]"), "models: found a list"),
        (("adamw: {learning_rate: [1e-5, 2e-3]}", "adamw: 3"), "line 5: found `3`, expected settings"),
        (("[1e-5, 2e-3]", "[1e-5, 1e-5]"), "learning_rate=1e-5, seed 0 are one run"),
        (("[1e-5, 2e-3]", "[1e-5, 0.00001]"), "learning_rate=1e-5, seed 0 and .*=0.00001, seed 0 are one run"),
        (("[1e-5, 2e-3]", "1e-5, logging_steps: [1, 2]"), "logging_steps=1, seed 0 and .*=2, seed 0 are one run"),
        (
            ("[1e-5, 2e-3]", "[]"),
            r"a\.yaml: adamw on demo: 1 problem\n  line 5: learning_rate: an empty list is no grid",
        ),
        (("[1e-5, 2e-3]", "[1e-5, fast]"), "adamw on demo: 1 problem\n.*line 5: learning_rate: found `fast`"),
        (("models: [demo]", "models: {a: [demo]}"), "line 2: models: a list under `a`, expected a directory"),
        (("models: [demo]", "models: {a: }"), "line 2: models: null under `a`, expected a directory"),
        (("models: [demo]", "models: {[a]: demo}"), "line 2: models: a name must be a word, found a list"),
        (("  adamw:", "  [adamw]:"), "line 5: methods: a name must be a word, found a list"),
        (("models: [demo]", "models: [a/m, ./a/m]"), "line 2: models: `a/m` is named twice"),
        (("tasks: [demo]", "tasks: [demo, demo]"), "line 3: tasks: `demo` is named twice"),
        (
            ("tasks: [demo]", "tasks: [demo, {sst2: {num_train: 3}}]"),
            "line 3: tasks: found a list, expected a list of names, or a mapping with a line",
        ),
        (("tasks: [demo]", "tasks:"), "line 3: tasks: found null, expected a list of names"),
        (("  lomo:", "  adamw:"), "methods: `adamw` is named twice"),
        (("models: [demo]", 'models: {"a\\e[31m": demo}'), r"models: the name 'a\\x1b\[31m' .* control characters"),
        (("tasks: [demo]", 'tasks: {"a\\u202e": {task: demo}}'), r"tasks: the name 'a\\u202e' .* control characters"),
        (("  lomo:", "  zero-shot:"), "methods: `zero-shot` is the row of the model as it is"),
        (("  lomo: {", "  lomo: {model: a/m, "), "line 6: model: cannot stand under `lomo`; .*`models: "),
        (("  lomo: {", "  lomo: {seed: [3, 4], "), "line 6: seed: cannot stand under `lomo`; .*`seeds: "),
        (("  lomo: {", "  lomo: {seeds: [3, 4], "), "line 6: seeds: cannot stand under `lomo`; .*`seeds: "),
        (("  lomo: {", "  lomo: {output_dir: zz, "), "line 6: output_dir: cannot stand under `lomo`; .*one"),
        (("  lomo: {", "  lomo: {task: demo, "), "line 6: task: cannot stand under `lomo`; .*`tasks: "),
        (("tasks: [demo]", "tasks: {demo: {method: zo}}"), "line 3: method: cannot stand under `demo`; .*`methods: "),
        (("common: {", "common: {seed: 3, "), "line 8: seed: cannot stand in `common`; .*`seeds: "),
        (("  lomo:", "  lommo:"), "method: found `lommo`, expected .*did you mean `lomo`"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, change: tuple[str, str], says: str) -> None:
    path = write(tmp_path / "a.yaml", TEXT.replace(*change))
    with pytest.raises(UserError, match=says):
        points(path)


@pytest.mark.parametrize("word", ["methods=", "tasks= ", "model=", "seeds=[]", "output_dir=", "choose_by="])
def test_an_empty_selection_is_refused(tmp_path: Path, word: str) -> None:
    """An unset variable of the shell does not select everything; nor is one of two selections dropped."""
    path = write(tmp_path / "small.yaml")
    with pytest.raises(UserError, match=f"{word.partition('=')[0]}: nothing is named"):
        read_comparison(path, [word])
    with pytest.raises(UserError, match="as model= and as models="):
        read_comparison(path, ["model=demo", "models=other"])


def test_models_of_one_last_name_are_told_apart(tmp_path: Path) -> None:
    """By as much of their paths as differs; on the command line too."""
    path = write(tmp_path / "a.yaml", TEXT.replace("models: [demo]", "models: [x/a/m, x/b/m, m, c/d]"))
    known = {"a/m": "x/a/m", "b/m": "x/b/m", "m": "m", "d": "c/d"}
    assert read_comparison(path).models == known
    assert read_comparison(path, ("model=x/a/m,x/b/m",)).models == {"a/m": "x/a/m", "b/m": "x/b/m"}
    assert read_comparison(path, ("models=a/m,d",)).models == {"a/m": "x/a/m", "d": "c/d"}


@pytest.mark.parametrize("word", ["seed=3", "task=rte", "method=lomo"])
def test_what_is_compared_is_not_a_setting_of_the_command_line(tmp_path: Path, word: str) -> None:
    with pytest.raises(UserError, match=f"command line: {word.partition('=')[0]}: cannot stand here; .*s="):
        read_comparison(write(tmp_path / "a.yaml"), (word,))


@pytest.mark.parametrize(
    "first, title", [("# Small\u202e", "Small\\u202e"), ("#", "mine"), ("", "mine"), ("---", "mine")]
)
def test_the_title_is_a_comment_or_the_name_of_the_file(tmp_path: Path, first: str, title: str) -> None:
    text = TEXT.replace("# Small", first).removeprefix("\n")
    assert read_comparison(write(tmp_path / "mine.yaml", text)).title == title


def test_unknown_names_are_refused(tmp_path: Path) -> None:
    """With the nearest and all shipped ones; an empty file is sent to them, not to the recipes of single runs."""
    with pytest.raises(UserError, match="did you mean `smollm2-sst2`. Shipped are lomo-table3, "):
        find_comparison("smolm2-sst2")
    with pytest.raises(UserError, match="no such comparison file. Shipped are lomo-table3, "):
        find_comparison("elsewhere/q.yaml")
    with pytest.raises(UserError, match="the file is empty; start from a shipped comparison: `keyhole compare` lists"):
        read_comparison(write(tmp_path / "b.yaml", "# nothing\n"))
    with pytest.raises(UserError, match="`sgd` is not in the file"):
        read_comparison(write(tmp_path / "a.yaml"), ("methods=sgd",))


@pytest.mark.parametrize("name", comparisons())
def test_shipped_comparisons_are_right(name: str) -> None:
    """Every run of them has a config without faults, without a setting that does nothing, and with rates of zo that are
    known to work, for another model too."""
    for words in ((), ("model=demo", "output_dir=out", "task_data=data")):
        comparison = read_comparison(comparisons()[name], words)
        groups, warnings = plan(comparison, lambda model: "content")
        assert groups and comparison.title
        assert [w for w in warnings if "zo is known" in w or "has no effect" in w and "task_data" not in w] == []


def test_without_dev_a_grid_has_nothing_to_choose_by(tmp_path: Path) -> None:
    """Test never chooses: a grid is refused, single settings are run to their last step."""
    text = TEXT.replace("num_dev: 12", "num_dev: 0")
    assert text != TEXT
    with pytest.raises(UserError, match="adamw on demo: num_dev=0 leaves nothing to choose one of 2 points"):
        plan(read_comparison(write(tmp_path / "a.yaml", text)), lambda name: None)
    single = text.replace("[1e-5, 2e-3]", "2e-3").replace("[5e-2, 1e-4]", "5e-2")
    groups, _ = plan(read_comparison(write(tmp_path / "b.yaml", single)), lambda name: None)
    assert not any(trial.config.load_best_model_at_end for group in groups for trial in group.trials.values())


@pytest.mark.parametrize(
    ("metric", "greater", "best"), [("accuracy", None, 1), ("accuracy", False, 0), ("loss", None, 0), ("loss", True, 1)]
)
def test_the_best_point_is_that_of_greater_is_better(
    metric: str, greater: bool | None, best: int, tmp_path: Path
) -> None:
    """As within a run: the metric's own direction, unless the setting says another."""
    group = plan(read_comparison(write(tmp_path / "small.yaml"), []), lambda model: "content")[0][0]
    assert len(group.points) == 2
    asked = {
        place: replace(t, config=replace(t.config, greater_is_better=greater)) for place, t in group.trials.items()
    }
    group = replace(group, trials=asked)
    results = {}
    for value, point in zip((0.25, 0.75), group.points, strict=True):
        result = blank(group.trials[point, 0])
        result.dev, result.dev_metric = value, metric
        results[result.id] = result
    assert choose(group, [0], results) == group.points[best]


def test_every_run_that_is_not_done_is_counted(tmp_path: Path) -> None:
    """With all seeds for choose_by: all-seeds, so that an unfinished cell is not taken for one without a number."""
    for choose_by, done, missing in (("all-seeds", [0], 2), ("all-seeds", [0, 1], 0), ("first-seed", [0], 1)):
        comparison = read_comparison(write(tmp_path / "small.yaml"), [f"choose_by={choose_by}"])
        group = plan(comparison, lambda model: "content")[0][0]
        results = {}
        for point in group.points:
            for seed in done:
                result = blank(group.trials[point, seed])
                result.dev = result.test = 0.5
                result.dev_metric = result.test_metric = "accuracy"
                results[result.id] = result
        cell = cell_of(group, comparison, results)
        assert cell.missing == missing and (shown(cell) == "...") == (cell.chosen is None)


def test_the_output_directory_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind `output_dir=` no shell replaces ~ and $NAME; a home or a variable that is not there is no directory."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PLACE", "here")
    path = write(tmp_path / "a.yaml")
    assert read_comparison(path, ("output_dir=~/$PLACE",)).output_dir == f"{tmp_path}/here"
    for name in ("~nosuchuser/out", "$NO_SUCH_VARIABLE/out"):
        with pytest.raises(UserError, match="output_dir: found .*, but there is no"):
            plan(read_comparison(path, (f"output_dir={name}",)), lambda model: None)
