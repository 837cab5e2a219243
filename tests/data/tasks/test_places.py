"""Where the files of a task are found, and what is said where they are not."""

import json
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest

from keyhole.data.tasks.parse import read_spec
from keyhole.data.tasks.places import find_splits, read_split
from keyhole.errors import UserError

ROW = json.dumps({"sentence": "good", "label": 1}) + "\n"


def files_of(folder: Path, *names: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / name).write_text(ROW)
    return folder


@pytest.mark.parametrize(
    ("task", "names", "train", "test"),
    [
        ("sst2", ("SST-2/train.jsonl", "SST-2/validation.jsonl"), "train.jsonl", "validation.jsonl"),
        ("sst2", ("SST-2/train.jsonl", "SST-2/dev.jsonl", "SST-2/test.jsonl"), "train.jsonl", "dev.jsonl"),
        ("sst2", ("SST-2/train.jsonl", "SST-2/test.jsonl"), "train.jsonl", "test.jsonl"),
        ("sst2", ("SST-2/train-00000-of-00002.json", "SST-2/train-00001-of-00002.json", "SST-2/val.json"),
         "train-00000-of-00002.json train-00001-of-00002.json", "val.json"),
        ("sst2", ("SST-2/sst2_train.jsonl", "SST-2/sst2_dev.jsonl"), "sst2_train.jsonl", "sst2_dev.jsonl"),
        ("sst2", ("SST-2/train-v1.1.json", "SST-2/dev-v1.1.json", "SST-2/README.md"), "train-v1.1.json",
         "dev-v1.1.json"),
        ("sst2", ("sst2/data/train-00000-of-00001.json", "sst2/data/validation-00000-of-00001.json", "sst2/README.md"),
         "train-00000-of-00001.json", "validation-00000-of-00001.json"),
        ("gsm8k", ("gsm8k/main/train.json", "gsm8k/main/test.json", "gsm8k/socratic/train.json"), "train.json",
         "test.json"),
        ("alpaca", ("alpaca/data/train-00000-of-00001-a09b74b3ef9c3b56.json",),
         "train-00000-of-00001-a09b74b3ef9c3b56.json", "train-00000-of-00001-a09b74b3ef9c3b56.json"),
        ("sst2", ("train/b.json", "train/a.json", "validation/b.json"), "a.json b.json", "b.json"),
        ("cola", ("cola_public/raw/in_domain_train.tsv", "cola_public/raw/in_domain_dev.tsv",
                  "cola_public/raw/out_of_domain_dev.tsv", "cola_public/tokenized/in_domain_train.tsv"),
         "in_domain_train.tsv", "in_domain_dev.tsv out_of_domain_dev.tsv"),
        ("mnli", tuple(f"multinli_1.0/multinli_1.0_{name}" for name in (
            "train.jsonl", "train.txt", "dev_matched.jsonl", "dev_matched.txt", "dev_mismatched.jsonl")),
         "multinli_1.0_train.jsonl", "multinli_1.0_dev_matched.jsonl"),
        ("drop", ("drop_dataset/drop_dataset_train.json", "drop_dataset/drop_dataset_dev.json"),
         "drop_dataset_train.json", "drop_dataset_dev.json"),
    ],
)  # fmt: skip
def test_names_and_folders(tmp_path: Path, task: str, names: tuple[str, ...], train: str, test: str) -> None:
    for name in names:
        files_of((tmp_path / name).parent, Path(name).name)
    found = find_splits(read_spec(task), str(tmp_path))
    assert [" ".join(Path(name).name for name in found[split].names) for split in ("train", "test")] == [train, test]


def test_a_data_set_that_save_to_disk_wrote(tmp_path: Path) -> None:
    for split in ("train", "validation"):
        files_of(tmp_path / "sst2" / split, "data-0.arrow", "dataset_info.json", "state.json")
    (tmp_path / "sst2" / "dataset_dict.json").write_text("{}")
    assert find_splits(read_spec("sst2"), str(tmp_path))["test"].names == (str(tmp_path / "sst2" / "validation"),)


def test_parts_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "val.jsonl").write_text("".join(ROW.replace("good", str(i)) for i in range(6)))
    spec, given = read_spec("sst2"), {"train": "val[:3]", "test": "val.jsonl[-2:]"}
    found = find_splits(spec, str(tmp_path), given)
    rows = {name: [r.row["sentence"] for r in read_split(spec, split, Counter())] for name, split in found.items()}
    assert rows == {"train": ["0", "1", "2"], "test": ["4", "5"]}
    assert str(found["train"]) == "val.jsonl[:3]"


@pytest.mark.parametrize(
    ("names", "given", "says"),
    [
        (
            ("train.jsonl", "other.jsonl"),
            None,
            "no file for test (looked for validation, test); it holds other.jsonl, train.jsonl",
        ),
        (("train.jsonl", "train.tsv", "val.jsonl"), None, "train.jsonl, train.tsv could all be `train`"),
        (("train.jsonl", "val.jsonl"), {"test": "val[1:2:3]"}, "expected a name such as validation"),
        (("train.jsonl", "val.jsonl"), {"test": "nowhere"}, "test (looked for nowhere)"),
        (("proof.jsonl", "proof.json", "test.jsonl"), {"train": "proof"}, "could all be `proof`"),  # "of" is no part
        (("dev_proof.jsonl", "old_proof.jsonl", "test.jsonl"), {"train": "proof"}, "could all be `proof`"),
    ],
)
def test_what_is_missing_is_named(tmp_path: Path, names: tuple[str, ...], given: dict | None, says: str) -> None:
    files_of(tmp_path / "sst2", *names)
    with pytest.raises(UserError) as caught:
        find_splits(read_spec("sst2"), str(tmp_path), given)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    "names",
    [("train-00001-of-00002.json",), (f"train-0-of-{'9' * 40}.json",),
     ("train-00000-of-00001.json", "train-00000-of-00002.json"),
     ("train-00000-of-00001.json", "train-00000-of-00001.jsonl"), ("train-00000-of-00001.json", "train-1.json")],
)  # fmt: skip
def test_parts_that_are_missing_or_there_twice_are_refused(tmp_path: Path, names: tuple[str, ...]) -> None:
    """A split of which half is not there is not the split; a file that is named is read alone."""
    files_of(tmp_path / "sst2", *names, "test.jsonl")
    with pytest.raises(UserError, match=f"not one of each part; .* task_splits: {{train: {names[0]}}}"):
        find_splits(read_spec("sst2"), str(tmp_path))
    found = find_splits(read_spec("sst2"), str(tmp_path), {"train": names[0]})
    assert [Path(name).name for name in found["train"].names] == [names[0]]


def test_no_directory_and_no_folder(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such directory"):
        find_splits(read_spec("sst2"), str(tmp_path / "none"))
    files_of(tmp_path / "rte", "train.jsonl", "val.jsonl")  # another task's are never read as this one's
    with pytest.raises(UserError, match="no folder sst2/ .* it holds rte"):
        find_splits(read_spec("sst2"), str(tmp_path))
    for name in ("SST-2", "sst2"):
        files_of(tmp_path / name, "train.jsonl", "val.jsonl")
    with pytest.raises(UserError, match="SST-2, sst2 could all be the folder of task sst2; rename one"):
        find_splits(read_spec("sst2"), str(tmp_path))


def test_the_hub_is_asked_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def load_dataset(*args: str, split: str) -> list[dict]:
        asked.append((*args, split))
        return [{"sentence": "good", "label": 1}, {"sentence": "x", "label": -1}]

    spec = read_spec("sst2")
    monkeypatch.setattr("keyhole.data.tasks.places.find_spec", lambda name: None)
    with pytest.raises(UserError, match="needs `datasets`: pip install datasets, or set task_data=DIR"):
        find_splits(spec, None)
    monkeypatch.setattr("keyhole.data.tasks.places.find_spec", lambda name: object())
    fake = ModuleType("datasets")
    fake.load_dataset = load_dataset
    monkeypatch.setitem(sys.modules, "datasets", fake)
    left_out: Counter[str] = Counter()
    rows = read_split(spec, find_splits(spec, None)["test"], left_out)
    assert asked == [("nyu-mll/glue", "sst2", "validation")]
    assert len(rows) == 1 and left_out == {"without a label": 1}


@pytest.mark.parametrize("name", ["a" * 300, "\u00e9" * 200, f"dev[{'9' * 5000}:]", "a\0b"])
def test_an_absurd_split_is_refused(tmp_path: Path, name: str) -> None:
    files_of(tmp_path, "train.jsonl", "dev.jsonl")
    with pytest.raises(UserError, match="splits: found|has no file for train"):
        find_splits(read_spec("sst2"), str(tmp_path), {"train": name, "test": "dev"})


@pytest.mark.parametrize("name", ["dev[:200%]", "dev[101%:]", "dev[-500%:]"])
def test_more_than_all_rows_are_refused(tmp_path: Path, name: str) -> None:
    """A percentage is of the rows that are there; 100 is the largest."""
    files_of(tmp_path, "train.jsonl", "dev.jsonl")
    with pytest.raises(UserError, match=r"splits: found 'dev\[.* for test .*at most 100; all rows are 'dev'"):
        find_splits(read_spec("sst2"), str(tmp_path), {"test": name})
    assert str(find_splits(read_spec("sst2"), str(tmp_path), {"test": "dev[:100%]"})["test"]) == "dev.jsonl[:100%]"


OWN = """
columns: {sentence: sentence, label: label}
prompt: "{{ sentence }}"
candidates: [" bad", " good"]
labels: [[0], [1]]
metric: accuracy
"""


@pytest.mark.parametrize(
    ("names", "given", "expected"),
    [
        (("train", "dev", "test"), {}, {"train": "train", "dev": "dev", "test": "test"}),
        (("train", "dev", "test"), {"test": "validation"}, {"train": "train", "test": "dev"}),
        (
            ("train", "dev", "test"),
            {"dev": "validation", "test": "test"},
            {"train": "train", "dev": "dev", "test": "test"},
        ),
        (("train", "dev", "test", "more"), {"train": "more"}, {"train": "more", "dev": "dev", "test": "test"}),
        (("train", "dev"), {}, {"train": "train", "test": "dev"}),
        (("train", "test"), {}, {"train": "train", "test": "test"}),
        (("test",), {}, {"test": "test"}),
    ],
)
def test_three_files_of_a_task_of_one_s_own(
    tmp_path: Path, names: tuple[str, ...], given: dict[str, str], expected: dict[str, str]
) -> None:
    """Each is what its name says; the public tasks are judged by the validation file."""
    (tmp_path / "my.yaml").write_text(OWN)
    files_of(tmp_path / "my", *(f"{name}.jsonl" for name in names))
    found = find_splits(read_spec(str(tmp_path / "my.yaml")), str(tmp_path), given)
    assert {split: Path(place.names[0]).stem for split, place in found.items()} == expected
