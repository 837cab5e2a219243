"""Labels in all their spellings, and rows that are no question."""

import json
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keyhole.data.opened import Record
from keyhole.data.tasks.draw import Numbers, load_task
from keyhole.data.tasks.parse import parse_spec, read_spec
from keyhole.data.tasks.question import build
from keyhole.data.tasks.spec import task_names
from keyhole.data.tasks.tables import NO_LABEL, pick_all, spelled
from keyhole.errors import UserError

COPA = {"premise": "a", "choice1": "b", "choice2": "c", "question": "cause", "label": 0}
LABELLED = [name for name in task_names() if read_spec(name).labels]


def dressed(word: str) -> st.SearchStrategy:
    """The ways in which a file may write a label."""
    ways = [word, word.upper(), word.capitalize(), f" {word}\t"]
    if word.isdecimal():
        ways += [int(word), float(word), f"{word}.0"]
    if word in ("true", "false"):
        ways.append(word == "true")
    return st.sampled_from(ways)


@given(data=st.data(), task=st.sampled_from(LABELLED))
def test_every_spelling_means_its_label(data: st.DataObject, task: str) -> None:
    labels = read_spec(task).labels
    index = data.draw(st.integers(0, len(labels) - 1))
    value = data.draw(st.sampled_from(labels[index]).flatmap(dressed))
    assert [i for i, words in enumerate(labels) if spelled(value) in words] == [index]


@given(value=st.one_of(st.text(), st.integers(), st.floats(), st.none(), st.booleans()))
def test_any_other_label_is_refused_or_unlabelled(value: object) -> None:
    spec, record = read_spec("rte"), Record("a.jsonl", "line", 3, {"premise": "a", "hypothesis": "b", "label": value})
    left_out: Counter[str] = Counter()
    picked = list(pick_all([record], spec, left_out))
    known = {word: i for i, words in enumerate(spec.labels) for word in words}
    if spelled(value) in NO_LABEL:
        assert not picked and left_out["without a label"] == 1
    elif spelled(value) in known:
        assert build(picked[0], spec).answer == known[spelled(value)]
    else:
        with pytest.raises(UserError, match="a.jsonl, line 3: label: found"):
            build(picked[0], spec)


@pytest.mark.parametrize(
    ("task", "row", "says"),
    [
        ("sst2", {"review": "a", "label": 1}, "needs the column sentence .also called text.; found: review, label"),
        ("sst2", {"sentence": "a"}, "needs the column label"),
        ("sst2", {"review": "a", "label": 1}, "found: review, label. Rename it, or give"),
        ("drop", {"passage": "p", "question": "q", "answers_spans": {"types": ["number"]}}, "Rename it, or give"),
        ("drop", {"passage": "p", "question": "q", "answers_spans.spans": "four"}, "expected a list; a CSV or TSV"),
        ("squad", {"title": "t", "context": "c", "question": "q", "answers": "May"}, "let\\..* expected a list; a CSV"),
        ("squad", {"title": "t", "context": "c", "question": "q", "answers": "{'text': []}"}, "a CSV or TSV holds"),
        ("copa", COPA | {"choice2": "b"}, "are the same"),
        ("copa", COPA | {"choice2": ""}, "not empty, found ''"),
        ("copa", COPA | {"question": "why"}, "prompt"),
        ("record", {"passage": "a", "query": "b", "entities": "['c']", "answers": ["c"]}, "expected a list; a CSV"),
        ("record", {"passage": "a", "query": "b", "entities": ["c", "d"], "answers": ["e"]}, "none of e is one of"),
        ("stsb", {"sentence1": "a", "sentence2": "b", "score": "high"}, "score: expected a number|label"),
        ("sst2", {"sentence": "\ud800", "label": 1}, "half of a character"),
    ],
)
def test_rows_that_do_not_fit_are_refused_with_their_place(task: str, row: dict, says: str) -> None:
    with pytest.raises(UserError, match=says) as caught:
        spec = read_spec(task)
        build(next(pick_all([Record("a.jsonl", "line", 3, row)], spec, Counter())), spec)
    assert "a.jsonl, line 3" in str(caught.value)


def test_answers_inside_an_object_need_a_format_that_has_objects(tmp_path: Path) -> None:
    (tmp_path / "val.csv").write_text("passage,question,answers_spans\np,q,\"{'spans': ['x']}\"\n")
    with pytest.raises(UserError, match="no cell of a CSV can hold: give JSON rows"):
        load_task("drop", str(tmp_path), Numbers(), training=False)
    (tmp_path / "val.csv").unlink()
    row = {"passage": "p", "question": "q"} | {"answers_spans": {"spans": ["x"]}}
    (tmp_path / "val.jsonl").write_text(json.dumps(row))
    (question,) = load_task("drop", str(tmp_path), Numbers(), training=False)["test"].questions
    assert question.references == ("x",)


def test_a_question_without_an_answer_is_left_out(tmp_path: Path) -> None:
    """DROP has rows whose answer is empty: they are no question, and are counted."""
    row = '{"passage": "p", "question": "q", "answers_spans": {"spans": [%s]}}\n'
    (tmp_path / "val.jsonl").write_text(row % '"x"' + row % "")
    task = load_task("drop", str(tmp_path), Numbers(), training=False)["test"]
    assert len(task.questions) == 1 and "1 without an answer left out" in task.about


@pytest.mark.parametrize(
    ("candidates", "row", "says"),
    [
        ("x", {"x": ["a"] * 1001, "label": 0}, "a list of 2 to 1000 texts, found .'a'"),
        ("x", {"x": ["a", 7], "label": 0}, "texts that are not empty, found 7 in .'a', 7."),
        ("'never, again'", {"x": "a", "label": 0}, "candidates: 'never' is undefined"),
        ("x", {"x": ["a", "b"], "label": "b"}, 'from 0 to 1 .other spellings.*`right: "label"`'),
    ],
)
def test_what_is_wrong_with_candidates_is_said(tmp_path: Path, candidates: str, row: dict, says: str) -> None:
    head = (
        f"columns: {{x: x, label: label}}\nprompt: '{{{{ x | length }}}}'\ncandidates: {candidates}\nmetric: accuracy\n"
    )
    (tmp_path / "own.yaml").write_text(head)
    with pytest.raises(UserError, match=f"line 3: .*{says}"):
        build(Record("a.jsonl", "line", 3, row), read_spec(str(tmp_path / "own.yaml")))
    if row["label"] == "b":
        (tmp_path / "own.yaml").write_text(head + 'right: "label"\n')
        assert build(Record("a.jsonl", "line", 3, row), read_spec(str(tmp_path / "own.yaml"))).answer == 1


@pytest.mark.parametrize(
    ("row", "says"),
    [
        (
            {"text": "Who?", "fine": 1},
            "label: found nothing, .*nothing in coarse_label, label-coarse or .*, line",
        ),
        ({"sentence": "Who?", "coarse_label": 1}, "found null where a text is written.*nothing in text, "),
    ],
)
def test_a_column_that_is_missing_is_named(row: dict, says: str) -> None:
    """TREC's label and question may be in any of several columns; those that the row has are listed."""
    spec = read_spec("trec")
    (record,) = pick_all([Record("a.jsonl", "line", 3, row)], spec, Counter())
    with pytest.raises(UserError, match=f"a.jsonl, line 3: .*{says}.*; its columns are {', '.join(row)}$"):
        build(record, spec)


def test_references_are_texts(tmp_path: Path) -> None:
    text = "columns: {x: x}\nprompt: '{{ x | length }}'\nanswer: a\nreferences: x\nmetric: exact_match\n"
    (tmp_path / "own.yaml").write_text(text)
    with pytest.raises(UserError, match="references: found None, expected texts"):
        build(Record("a.jsonl", "line", 3, {"x": [None]}), read_spec(str(tmp_path / "own.yaml")))


OWN = """
columns: {text: text, label: label}
prompt: "{{ text }}"
candidates: [bad, mixed, good]
labels: [[-1.0], [0.0], [1.0, "-"]]
metric: accuracy
"""


REGRESSION = """
columns: {text: text, score: score}
prompt: "{{ text }}"
candidates: ["-2", "-0.5", "1"]
value: score
metric: pearson
"""


def test_a_number_needs_no_label() -> None:
    """The nearest candidate is right; -1 is a number where the candidates reach that far, and no label elsewhere."""
    rows = [Record("a", "line", i, {"text": "x", "score": score}) for i, score in enumerate((-1, "0.9", -9.5, None))]
    found: dict[str, list[tuple[int, float | None]]] = {}
    for name, text in (("wide", REGRESSION), ("narrow", REGRESSION.replace("-2", "-0.9"))):
        spec = parse_spec(text, "my", "my.yaml")
        questions = [build(record, spec) for record in pick_all(rows, spec, Counter())]
        found[name] = [(question.answer, question.value) for question in questions]
    assert found == {"wide": [(1, -1.0), (2, 0.9), (0, -9.5)], "narrow": [(2, 0.9), (0, -9.5)]}
    with pytest.raises(UserError, match="candidates: expected a number, found 'low'"):
        build(rows[0], parse_spec(REGRESSION.replace("-2", "low"), "my", "my.yaml"))


def test_spaces_at_the_beginning_of_a_prompt_are_left_out() -> None:
    """As MeZO does, so that the first word has its usual tokens; line breaks stay, and so does code."""
    row = {"passage": "  \n It rains", "question": "does it rain", "label": 1}
    made = build(Record("x.jsonl", "line", 1, row), read_spec("boolq"))
    assert made is not None and made.prompt == "\n It rains Does it rain?\n"
    spec = parse_spec('columns: {a: a, b: b}\nprompt: "{{ a }}"\nanswer: "{{ b }}"\nmetric: perplexity\n', "t", "t")
    free = build(Record("x.jsonl", "line", 1, {"a": "    if x:", "b": " y"}), spec)
    assert free is not None and free.prompt == "    if x:"
