"""Which questions train, choose and judge."""

import json
import re
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from keyhole.data.run import load_data
from keyhole.data.settings import DataSettings
from keyhole.data.tasks.draw import Numbers, load_task
from keyhole.data.tasks.spec import check_names
from keyhole.errors import UserError


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """60 rows to train on, 20 to judge."""
    path = tmp_path_factory.mktemp("data")
    for name, count in (("train", 60), ("validation", 20)):
        rows = [{"sentence": f"{name} {i}", "label": i % 2} for i in range(count)]
        (path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@settings(max_examples=30)
@given(
    train=st.one_of(st.none(), st.integers(1, 80)),
    dev=st.integers(0, 80),
    test=st.one_of(st.none(), st.integers(1, 30)),
    seed=st.integers(0, 2**31),
)
def test_train_and_dev_share_no_row(folder: Path, train: int | None, dev: int, test: int | None, seed: int) -> None:
    """Sizes as asked for, as far as the rows go; dev takes two of five at most; the same draw again."""
    numbers = Numbers(train=train, dev=dev, test=test, seed=seed)
    drawn = load_task("sst2", str(folder), numbers)
    prompts = {split: [q.prompt for q in task.questions] for split, task in drawn.items()}
    assert not set(prompts["train"]) & set(prompts["dev"])
    assert len(prompts["dev"]) == min(dev, 24)
    assert len(prompts["train"]) == min(train or 60, 60 - len(prompts["dev"]))
    assert len(prompts["test"]) == min(test or 20, 20) and all("validation" in prompt for prompt in prompts["test"])
    again = load_task("sst2", str(folder), numbers)
    assert {k: v.fingerprint for k, v in drawn.items()} == {k: v.fingerprint for k, v in again.items()}


OUT_OF_REACH = {
    "stop": ({"answer": "one\\n{{ n }}", "stop": ["\\n"], "metric": "exact_match"}, "one of the stop strings, '\\\\n'"),
    "extract": ({"answer": "{{ n }}", "extract": "[a-z]+", "metric": "exact_match"}, "`extract` finds nothing"),
}


@pytest.mark.parametrize("name", OUT_OF_REACH)
def test_answers_that_no_model_can_give_are_counted(tmp_path: Path, name: str) -> None:
    given, says = OUT_OF_REACH[name]
    for split in ("train", "validation"):
        rows = [{"text": f"{split} {i}", "n": i} for i in range(1, 11)]
        (tmp_path / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    file = tmp_path / "mine.yaml"
    file.write_text(yaml.safe_dump({"columns": {"text": "text", "n": "n"}, "prompt": "{{ text }}", **given}))
    (told,) = load_task(str(file), str(tmp_path), Numbers(train=10, dev=0, test=10))["test"].warnings
    assert told.startswith("10 of the 10 rows") and says in told


def test_another_seed_draws_other_rows_and_the_same_test(folder: Path) -> None:
    one, two = (load_task("sst2", str(folder), Numbers(train=20, dev=5, test=5, seed=seed)) for seed in (1, 2))
    assert one["train"].fingerprint != two["train"].fingerprint
    assert one["test"].fingerprint == two["test"].fingerprint
    assert one["train"].about == "20 of 60 rows of train.jsonl"


def test_splits_may_be_named(folder: Path) -> None:
    given = {"train": "validation[:15]", "sst2.test": "validation[15:]", "rte.test": "nowhere", "dev": "train[:7]"}
    drawn = load_task("sst2", str(folder), Numbers(), given)
    assert [len(drawn[split].questions) for split in ("train", "dev", "test")] == [15, 7, 5]
    with pytest.raises(UserError, match="task_splits: found sst2.valid"):
        load_task("sst2", str(folder), Numbers(), {"sst2.valid": "train"})


@pytest.mark.parametrize(
    ("task", "files"),
    [("sst2", {"val.jsonl": 5}), ("sst2", {"train.jsonl": 5}), ("boolq", {"val.jsonl": 20}), ("sst2", {"x.jsonl": 2})],
)
def test_advice_on_splits_works(tmp_path: Path, task: str, files: dict[str, int]) -> None:
    """Where rows are there and no split fits, the task_splits that the message gives does, whatever their number."""
    row = {"sentence": "a", "label": 1, "passage": "p", "question": "q"}
    for name, count in files.items():
        (tmp_path / name).write_text("".join(json.dumps(row | {"sentence": str(i)}) + "\n" for i in range(count)))
    with pytest.raises(UserError, match="task_splits: {") as caught:
        load_task(task, str(tmp_path), Numbers())
    assert task != "sst2" or "val.jsonl" not in files or "test_task=sst2" in str(caught.value)
    advice = re.search("task_splits: ({.*?})", str(caught.value))[1]
    drawn = load_task(task, str(tmp_path), Numbers(dev=0), yaml.safe_load(advice))
    count = sum(files.values())
    assert [len(drawn[split].questions) for split in ("train", "test")] == [count * 4 // 5, count - count * 4 // 5]


def test_questions_in_two_splits_are_counted(tmp_path: Path) -> None:
    """A file that repeats rows of another: nothing is refused, and the report says how many, from the cache too."""
    for name, rows in (("train", range(30)), ("dev", range(20, 35))):
        text = "".join(json.dumps({"sentence": f"row {i}", "label": i % 2}) + "\n" for i in rows)
        (tmp_path / f"{name}.jsonl").write_text(text)
    for _ in range(2):
        drawn = load_task("sst2", str(tmp_path), Numbers(train=None, dev=0), cache=str(tmp_path / "cache"))
        assert drawn["test"].warnings == ("10 of the 15 questions of test are also among those of train",)
        assert not drawn["train"].warnings and not drawn["dev"].warnings
    settings = DataSettings(model="demo", task="sst2", task_data=str(tmp_path), num_dev=0, data_cache=None)
    told = [line for line in load_data(settings).report if "are also among" in line]
    assert told == ["warning: task sst2: 10 of the 15 questions of test are also among those of train"]


@pytest.mark.parametrize("text", ["", "sentence\tlabel\n"])
def test_why_a_file_has_no_row(tmp_path: Path, text: str) -> None:
    (tmp_path / "dev.tsv").write_text(text)
    with pytest.raises(UserError, match="is there a row below the header, and was the download cut off"):
        load_task("sst2", str(tmp_path), Numbers(), training=False)


def test_rows_without_labels_are_counted(tmp_path: Path) -> None:
    row = {"sentence1": "a", "sentence2": "b", "gold_label": "-"}
    (tmp_path / "dev_matched.jsonl").write_text(json.dumps(row) + "\n" + json.dumps(row | {"gold_label": "neutral"}))
    task = load_task("mnli", str(tmp_path), Numbers(), training=False)["test"]
    assert len(task.questions) == 1 and task.about.endswith("1 without a label left out")
    (tmp_path / "dev_matched.jsonl").write_text(json.dumps(row))
    with pytest.raises(UserError, match="no row that could be used; 1 without a label left out"):
        load_task("mnli", str(tmp_path), Numbers(), training=False)


def test_two_tasks_of_one_name_are_refused() -> None:
    with pytest.raises(UserError, match="a/my.yaml and b/my.yaml are both called my"):
        check_names(["a/my.yaml", "sst2", "b/my.yaml"], None)


@pytest.mark.parametrize(
    "splits",
    [
        {"train": "validation", "test": "validation"},
        {"train": "validation[:12]", "test": "validation[-9:]"},
        {"dev": "validation"},
        {"dev": "train[:5]"},
    ],
)
def test_splits_that_share_rows_are_refused(folder: Path, splits: dict[str, str]) -> None:
    """Nothing is judged, or chosen, by rows that it was trained on; parts without a common row are good."""
    with pytest.raises(UserError, match="share rows"):
        load_task("sst2", str(folder), Numbers(), splits)
    load_task("sst2", str(folder), Numbers(), {"train": "validation[:12]", "test": "validation[-8:]"})
