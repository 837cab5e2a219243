"""Task files of one's own: what they may say, and what is said of their mistakes."""

import math
from pathlib import Path

import pytest

from keyhole.data.tasks.parse import parse_spec, read_spec
from keyhole.data.tasks.spec import Expression, Text
from keyhole.errors import UserError

GOOD = """
title: sums
columns: {text: question, label: label}
prompt: "{{ text }}\\n"
candidates: [no, yes]
labels: [[no, 0], [yes, 1]]
metric: accuracy
"""

WRONG = [
    ("prompt: x", "columns, metric is missing"),
    (GOOD.replace("candidates:", "candidate:"), "did you mean `candidates`, the list"),
    (GOOD + "promt: x", "unknown key promt; did you mean `prompt`?; a task file may have title, columns"),
    (GOOD + "title: again", "line 8: title is given twice, also in line 2"),
    (GOOD.replace("accuracy", "acuracy"), "metric: expected accuracy, f1"),
    (GOOD.replace("accuracy", "[accuracy, exact_match]"), "do not go together"),
    (GOOD.replace("accuracy", "token_f1"), "token_f1 is for answers in free text, and there are candidates"),
    (GOOD.replace("[no, yes]", "[no, no]"), "two different texts"),
    (GOOD.replace("[[no, 0], [yes, 1]]", "[[no]]"), "1 of them for 2 candidates"),
    (GOOD.replace("[yes, 1]", "[yes, 0]"), "0 stands for two candidates"),
    (GOOD.replace(", label: label", ""), "label is missing"),
    (GOOD.replace("{{ text }}", "{{ text"), "prompt: not valid Jinja"),
    (GOOD + "value: text", "goes with metric pearson"),
    (GOOD + 'program: "{{ completion }}"', "goes with metric pass@1"),
    (GOOD + "optional: [other]", "other: not one of the columns text, label"),
    (GOOD + "max_new_tokens: many", "max_new_tokens: expected a whole number"),
    (GOOD + "end_token: 1", "expected true or false"),
    (GOOD + "hub: {name: x}", "hub: expected dataset"),
    (GOOD + "splits: {train: a}", "splits: expected train, test"),
    (GOOD + 'let: {a: "1 +"}', "let.a: not valid Jinja"),
    (GOOD + 'extract: "("', "not a regular expression"),
    (GOOD + "splits: []", "splits: expected names with values"),
    (GOOD + "answer: x", "answer: for tasks with answers in free text"),
    (GOOD + "stop: x", "stop: for tasks with answers in free text"),
    (GOOD + "max_new_tokens: 9", "max_new_tokens: for tasks with answers in free text"),
    (GOOD + 'right: "text"', "of no use beside `right`"),
    (GOOD.replace("[no, yes]", "[a, b, c]").replace("[yes, 1]]", "[yes], [1]]").replace("accuracy", "f1"),
     "there are 3; use macro_f1"),
    (GOOD.replace("candidates: [no, yes]", 'answer: "x"').replace("accuracy", "exact_match"),
     "labels: for tasks with candidates"),
    (GOOD.replace("{{ text }}", "{text} is"),
     "prompt: '{text} is\\n' names no column, so every row would ask the same; {text} is plain text here; write one of "
     "text in double braces, such as {{ text }}"),
    (GOOD.replace("{{ text }}", "{{ half }}") + 'let: {half: "1"}', "names no column"),
    (GOOD + "texts: [text]", "texts: 'text' names no column"),
    (GOOD.replace("candidates: [no, yes]", 'answer: "{{ text }}"').replace("{{ text }}\\n", "Say it:")
     .replace("labels: [[no, 0], [yes, 1]]\n", "").replace("accuracy", "exact_match"), "'Say it:' names no column"),
    (GOOD.replace("{{ text }}", "{{ text }} {{ label }}"),
     "prompt: reads label, which names the right candidate, so the question would give its answer away"),
    (GOOD + "texts: ['{{ text }} {{ label }}']", "texts: reads label"),
    ("- a list", "expected `key: value` lines"),
    ("a: [", "not valid YAML"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "says"), WRONG)
def test_mistakes_are_named(text: str, says: str) -> None:
    with pytest.raises(UserError) as caught:
        parse_spec(text, "my", "my.yaml")
    assert says in str(caught.value) and "task my.yaml" in str(caught.value)


@pytest.mark.parametrize(
    "changed",
    [
        GOOD.replace("{{ text }}", "").replace(
            "candidates: [no, yes]", 'candidate: "{{ text }} {{ candidate }}"\ncandidates: [no, yes]'
        ),
        GOOD.replace("{{ text }}", "")
        .replace("[no, yes]", '"text.split()"')
        .replace("labels: [[no, 0], [yes, 1]]\n", ""),
        GOOD.replace("{{ text }}", "{{ half }}") + 'let: {part: "text[:2]", half: "part"}',
        "columns: {text: text}\nprompt: Say\nanswer: '{{ text }}'\nmetric: perplexity",
    ],
)
def test_a_prompt_may_be_constant_where_rows_still_differ(changed: str) -> None:
    """By their candidates, by names that come from columns, or because the answer's likelihood is the result."""
    assert parse_spec(changed, "my", "my.yaml").columns["text"]


def test_words_stay_as_they_are_written() -> None:
    spec = parse_spec(GOOD, "my", "my.yaml")
    assert spec.candidates == ("no", "yes") and spec.labels == (("no", "0"), ("yes", "1"))


def test_an_unknown_name_is_told_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no task `sst`; did you mean `sst2`. There are agnews, .*sst2"):
        read_spec("sst")
    with pytest.raises(UserError, match="my.yaml: cannot be read: No such file"):
        read_spec(str(tmp_path / "my.yaml"))


ROW = {"review": "good", "spans": [{"start": 0, "end": 99_999}] * 50_000, "long": "x" * 100_000}


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in [1] %}" * 25 + "x" + "{% endfor %}" * 25,
        "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% block a %}{{ self.a() }}{% endblock %}",
        "{{ review | dictsort }}",
        "{{ review | xmlattr }}",
        "{% include '/etc/passwd' %}",
        "{% extends 'x' %}",
        "{{ super() }}",
        "{{ none_such }}",
        "{{ review }}{% for i in range(10**9) %}x{% endfor %}",
        "{{ review * 10**12 }}",
        "{{ review.__class__ }}",
        "{{ {}['a'] ~ review }}",
    ],
)
def test_whatever_a_text_raises_names_its_key(source: str) -> None:
    """SyntaxError of the generated code, RecursionError, AttributeError of a filter: all end as UserError."""
    with pytest.raises(UserError, match="^prompt: "):
        Text(source, "prompt").run(ROW)


def test_slices_are_the_marked_pieces() -> None:
    row = {"text": "Ann met Bob", "spans": [{"start": 0, "end": 2}, {"start": 8, "end": 10}]}
    assert Expression("spans | slices(text)", "x").run(row) == ["Ann", "Bob"]


def test_listed_refuses_a_text() -> None:
    """Of a text, `answers[0]` is a letter."""
    assert Expression("answers | listed", "x").run({"answers": ["May"]}) == ["May"]
    assert Expression("answers | listed", "x").run({"answers": None}) == []
    with pytest.raises(UserError, match="^x: found 'May', expected a list; a CSV or TSV holds none"):
        Expression("answers | listed", "x").run({"answers": "May"})


@pytest.mark.parametrize("value", [b"caf\xc3\xa9", b"", math.nan, math.inf, None, ["a"], {"a": 1}])
@pytest.mark.parametrize("source", ["{{ x }} It was", "{{ x | trim }}", "{{ 'a' ~ x }}"])
def test_a_value_without_a_text_is_refused(source: str, value: object) -> None:
    """Bytes (texts of Hive in Parquet), missing numbers of pandas: never as Python prints them."""
    with pytest.raises(UserError, match=r"^prompt: found (bytes|not a number|infinite|null|a list|an object)"):
        Text(source, "prompt").run({"x": value})
