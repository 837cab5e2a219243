"""Every shipped task: the same question from Hugging Face's columns and from the original download's."""

import gzip
from pathlib import Path

import pytest

from keyhole.data.tasks.draw import Numbers, load_task
from keyhole.data.tasks.parse import read_spec
from keyhole.data.tasks.question import MARK
from keyhole.data.tasks.spec import GENERATED, METRICS, task_names
from keyhole.errors import UserError
from tests.data.tasks.rows import CASES

FILES = [(task, name) for task, case in CASES.items() for name in case.files]


def test_every_task_is_tried() -> None:
    """No shipped task without its rows here, each in two styles at least."""
    assert sorted(CASES) == task_names()
    assert all(len(case.files) > 1 for case in CASES.values())


@pytest.mark.parametrize(("task", "name"), FILES)
def test_both_styles_give_the_same_question(task: str, name: str, tmp_path: Path) -> None:
    """Prompt, candidates and answer are the published ones, whichever file the row stood in."""
    case = CASES[task]
    (tmp_path / task.upper()).mkdir()
    (tmp_path / task.upper() / name).write_text(case.files[name], encoding="utf-8")
    question = load_task(task, str(tmp_path), Numbers(), training=False)["test"].questions[0]
    assert (question.prompt, question.candidates) == (case.prompt, case.candidates)
    assert (question.answer, question.also, question.value) == (case.answer, case.also, case.value)
    if task != "humaneval":
        assert question.references == case.references


def test_files_that_are_labels(tmp_path: Path) -> None:
    """Subj's sentences have the name of their file for a label; the last of each file judge."""
    for name in ("plot", "quote"):
        path = tmp_path / "rotten_imdb" / f"{name}.tok.gt9.5000"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes("".join(f"{name} {i} caf\xe9 \n" for i in range(1002)).encode("latin-1"))
    drawn = load_task("subj", str(tmp_path), Numbers(train=None, dev=0, test=None))
    assert {(q.prompt.split()[0], q.answer) for task in drawn.values() for q in task.questions} == {
        ("plot", 0), ("quote", 1)
    }  # fmt: skip
    assert sorted(q.prompt for q in drawn["train"].questions) == [
        f"{name} {i} caf\xe9 This is" for name in ("plot", "quote") for i in range(2)
    ]
    assert len(drawn["test"].questions) == 2000 and "Latin-1" in drawn["test"].about


def test_cola_is_judged_by_both_dev_files(tmp_path: Path) -> None:
    """As GLUE's validation set is."""
    for name in ("in_domain_train", "in_domain_dev", "out_of_domain_dev"):
        (tmp_path / f"{name}.tsv").write_text(f"x\t1\t\t{name}\n")
    found = load_task("cola", str(tmp_path), Numbers())["test"].questions
    assert [question.prompt.split("\n")[0] for question in found] == ["in_domain_dev", "out_of_domain_dev"]


@pytest.mark.parametrize(
    ("task", "text"),
    [
        ("squad", "title,context,question,answers\nRain,It rains in May.,When?,May\n"),
        ("squad", "title,context,question,answers\nRain,It rains in May.,When?,\"{'text': ['May']}\"\n"),
        ("record", "passage,query,entities,answers\nAnn met Bob,@placeholder,\"['Ann', 'Bob']\",['Bob']\n"),
    ],
)
def test_a_list_in_a_cell_is_refused(task: str, text: str, tmp_path: Path) -> None:
    """A CSV has no lists: the first letter of the cell was the answer that squad trained on."""
    (tmp_path / "validation.csv").write_text(text)
    with pytest.raises(UserError, match=r"row 1: .*let\..* expected a list; a CSV or TSV holds none"):
        load_task(task, str(tmp_path), Numbers(), training=False)


def test_agnews_with_words_for_classes(tmp_path: Path) -> None:
    """Title and description apart, classes counted from 1 or spelled out."""
    (tmp_path / "test.csv").write_text("label,title,description\nSports,It,rains\n2,It,snows\n")
    assert [q.answer for q in load_task("agnews", str(tmp_path), Numbers(), training=False)["test"].questions] == [1, 1]


@pytest.mark.parametrize("task", task_names())
def test_parquet_and_gzip(task: str, tmp_path: Path) -> None:
    """Hugging Face's rows also come as Parquet, and text comes packed."""
    import json

    import pyarrow as pa
    import pyarrow.parquet as parquet

    name, text = next(iter(CASES[task].files.items()))
    stem = name.removesuffix(".jsonl")
    for kind in ("parquet", "gzip"):
        folder = tmp_path / kind / task
        folder.mkdir(parents=True)
        if kind == "parquet":
            rows = [json.loads(line) for line in text.splitlines()]
            parquet.write_table(pa.Table.from_pylist(rows), folder / f"{stem}-00000-of-00001.parquet")
        else:
            (folder / f"{name}.gz").write_bytes(gzip.compress(text.encode()))
        found = load_task(task, str(tmp_path / kind), Numbers(), training=False)["test"]
        assert found.questions[0].prompt == CASES[task].prompt


def test_the_nested_original_has_all_its_answers(tmp_path: Path) -> None:
    """MultiRC's line of one passage is one question per answer, in order."""
    (tmp_path / "val.jsonl").write_text(CASES["multirc"].files["val.jsonl"])
    questions = load_task("multirc", str(tmp_path), Numbers(), training=False)["test"].questions
    assert [(q.answer, '"Bob"' in q.prompt) for q in questions] == [(1, False), (0, True)]


def test_several_spellings_of_an_entity_are_right(tmp_path: Path) -> None:
    """ReCoRD's other right answers are kept beside the first, and are never wrong ones."""
    row = CASES["record"].files["validation.jsonl"].replace('["Ann", "Bob"]', '["Bob", "Ann", "Bobby"]')
    (tmp_path / "validation.jsonl").write_text(row.replace('["Bob"]', '["Bobby", "Bob", "Rob"]'))
    question = load_task("record", str(tmp_path), Numbers(), training=False)["test"].questions[0]
    assert (question.answer, question.also) == (2, (0,))


def test_a_program_has_a_place_for_the_completion(tmp_path: Path) -> None:
    """HumanEval's reference is the prompt, the model's text, the tests and their call."""
    (tmp_path / "test.jsonl").write_text(CASES["humaneval"].files["test.jsonl"])
    question = load_task("humaneval", str(tmp_path), Numbers(), training=False)["test"].questions[0]
    assert question.references == (f"def f(x):\n{MARK}\n\ndef check(g):\n    assert g(1) == 1\n\n\ncheck(f)\n",)


@pytest.mark.parametrize("task", task_names())
def test_every_file_says_where_its_data_are(task: str) -> None:
    """A title, metrics of one kind, and an address on the hub; generated answers stop somewhere."""
    spec = read_spec(task)
    assert spec.title and len({METRICS[metric] for metric in spec.metrics}) == 1
    assert task == "demo" or "/" in spec.hub["dataset"]
    assert spec.kind != GENERATED or spec.stop
