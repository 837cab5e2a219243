"""The published numbers, each against a value worked out by hand."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keyhole.data.tasks.spec import CHOICE, GENERATED, METRICS
from keyhole.eval import metrics

P, Y = [1, 0, 1, 1, 0, 0], [1, 0, 0, 1, 1, 0]  # TP 2, TN 2, FP 1, FN 1


def test_choices_by_hand() -> None:
    assert metrics.accuracy(P, Y) == 4 / 6
    assert metrics.f1(P, Y) == pytest.approx(2 * 2 / (2 * 2 + 1 + 1))
    assert metrics.matthews(P, Y) == pytest.approx((2 * 2 - 1 * 1) / math.sqrt(3 * 3 * 3 * 3))


def test_matthews_of_three_classes_by_hand() -> None:
    """R_K by its definition: (c s - sum p_k t_k) / sqrt((s^2 - sum p_k^2)(s^2 - sum t_k^2))."""
    chosen, right = [0, 0, 1, 1, 2], [0, 1, 1, 2, 2]
    c, s, pt, pp, tt = 3, 5, 2 * 1 + 2 * 2 + 1 * 2, 4 + 4 + 1, 1 + 4 + 4
    assert metrics.matthews(chosen, right) == pytest.approx((c * s - pt) / math.sqrt((s * s - pp) * (s * s - tt)))


def test_a_constant_has_no_correlation() -> None:
    """A model that always says yes gets 0, and no division by zero."""
    assert metrics.matthews([1, 1, 1], [0, 1, 1]) == metrics.pearson([2, 2], [1, 3]) == 0.0
    assert metrics.pearson([0.1] * 3, [0.1] * 3) == 0.0, "the mean of three times 0.1 is not 0.1"
    assert metrics.f1([0, 0], [0, 0]) == 0.0


@pytest.mark.parametrize(
    ("answer", "references", "exact", "overlap"),
    [
        ("The Eiffel Tower!", ["eiffel tower"], 1, 1),
        ("in Paris, France", ["Paris"], 0, 2 * 1 / (3 + 1)),
        ("Paris", ["London", "in Paris"], 0, 2 * 1 / (1 + 2)),
        ("a the an", ["an"], 1, 1),
        ("", ["Paris"], 0, 0),
        ("red red red", ["red blue"], 0, 2 * 1 / (3 + 2)),
        ("the answer is no", ["no answer"], 0, 0),
        ("No answer.", ["no answer"], 1, 1),
    ],
)
def test_texts_by_hand(answer: str, references: list[str], exact: float, overlap: float) -> None:
    """SQuAD's comparison: articles and punctuation do not count, the best reference does; `no answer` is no text of
    which a part could be right."""
    assert metrics.exact_match(answer, references) == exact
    assert metrics.token_f1(answer, references) == pytest.approx(overlap)


@pytest.mark.parametrize(
    ("text", "right"),
    [("so 1,000 in all.", 1), ("#### 1000", 1), ("$1000.00", 1), ("first 3, then -1000", 0), ("none", 0), ("100", 0)],
)
def test_the_last_number_counts(text: str, right: float) -> None:
    """GSM8K's answers: the last number, with or without commas, currency and decimals."""
    from keyhole.data.tasks.parse import read_spec

    pattern = read_spec("gsm8k").extract
    assert metrics.exact_number(metrics.extract(text, pattern), [metrics.extract("x 7 #### 1,000", pattern)]) == right


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=30))
def test_bounds(pairs: list[tuple[int, int]]) -> None:
    """Shares lie in [0, 1], correlations in [-1, 1]; a perfect model has 1 unless all is one class."""
    chosen, right = [p for p, _ in pairs], [y for _, y in pairs]
    assert all(0 <= metric(chosen, right) <= 1 for metric in (metrics.accuracy, metrics.f1, metrics.macro_f1))
    assert -1 - 1e-9 <= metrics.matthews(chosen, right) <= 1 + 1e-9
    assert metrics.macro_f1(right, right) == 1
    assert metrics.matthews(right, right) == pytest.approx(1 if len(set(right)) > 1 else 0)


def test_every_metric_of_task_files_is_here() -> None:
    assert {name for name, kind in METRICS.items() if kind == CHOICE} == {*metrics.OF_CHOICES, "pearson"}
    assert {name for name, kind in METRICS.items() if kind == GENERATED} == {*metrics.OF_TEXTS, "pass@1"}


def test_a_group_that_is_absent_is_no_match() -> None:
    """The last match that has the group counts; without any, nothing was answered."""
    assert metrics.extract("xy x", "x(y)?") == "y" and metrics.extract("x", "x(y)?") == ""


@pytest.mark.parametrize(
    ("answer", "reference", "right"),
    [
        ("9007199254740993", "9007199254740992", 0),  # one float
        ("12,345,678,901,234,567,890", "12345678901234567890.0", 1),
        ("1e3", "$1000.", 1),
        ("0.10", ".1", 1),
        ("nan", "nan", 0),
        ("inf", "inf", 0),
        ("1e99999999999999999999", "1e99999999999999999999", 0),
        ("", "", 0),
    ],
)
def test_numbers_are_compared_exactly(answer: str, reference: str, right: int) -> None:
    """However many digits they have; what is no finite number equals nothing."""
    assert metrics.exact_number(answer, [reference]) == right
