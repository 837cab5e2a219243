"""Every shipped task: the same question from Hugging Face's columns and from the original download's."""

from pathlib import Path

import pytest

from keyhole.data.tasks.draw import Numbers, load_task
from keyhole.data.tasks.spec import task_names
from tests.data.tasks.rows import CASES

FILES = [(task, name) for task, case in CASES.items() for name in case.files]


def test_every_task_is_tried() -> None:
    assert sorted(CASES) == task_names()
    assert all(len(case.files) > 1 for case in CASES.values())


@pytest.mark.parametrize(("task", "name"), FILES)
def test_both_styles_give_the_same_question(task: str, name: str, tmp_path: Path) -> None:
    case = CASES[task]
    (tmp_path / task.upper()).mkdir()
    (tmp_path / task.upper() / name).write_text(case.files[name], encoding="utf-8")
    question = load_task(task, str(tmp_path), Numbers(), training=False)["test"].questions[0]
    assert (question.prompt, question.candidates) == (case.prompt, case.candidates)
    assert (question.answer, question.also, question.value) == (case.answer, case.also, case.value)
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


def test_several_spellings_of_an_entity_are_right(tmp_path: Path) -> None:
    """ReCoRD's other right answers are kept beside the first, and are never wrong ones."""
    row = CASES["record"].files["validation.jsonl"].replace('["Ann", "Bob"]', '["Bob", "Ann", "Bobby"]')
    (tmp_path / "validation.jsonl").write_text(row.replace('["Bob"]', '["Bobby", "Bob", "Rob"]'))
    question = load_task("record", str(tmp_path), Numbers(), training=False)["test"].questions[0]
    assert (question.answer, question.also) == (2, (0,))
