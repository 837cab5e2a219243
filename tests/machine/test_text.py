"""Text from files on its way to a terminal."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keyhole.machine.text import counted, duration, printable, without_controls

SURROGATES = st.text(st.characters(codec=None, exclude_categories=()))


@given(SURROGATES)
def test_nothing_that_a_terminal_obeys_is_left(text: str) -> None:
    """Whatever the text holds, half characters and bidirectional marks included."""
    shown = printable(text)
    shown.encode()  # a lone surrogate could not be
    assert shown.isprintable()


@given(SURROGATES)
def test_an_answer_keeps_its_lines(text: str) -> None:
    """Only control characters go; joiners and accents of a language stay."""
    shown = without_controls(text)
    assert "\x1b" not in shown and "\x9b" not in shown and shown.count("\n") == text.count("\n")


def test_one_has_no_s() -> None:
    """Zero has one."""
    assert [counted(n, "row") for n in (0, 1, 2, 3000)] == ["0 rows", "1 row", "2 rows", "3,000 rows"]


def test_printable_text_is_left_alone() -> None:
    """What people write is not escaped."""
    assert printable("naïve ≤ 你好 😀 \\n") == "naïve ≤ 你好 😀 \\n"
    assert printable("a\x1b[31mred\nb") == "a\\x1b[31mred\\nb"
    assert without_controls("नमस्ते\t\u200d\x1b[2J\n") == "नमस्ते\t\u200d[2J\n"


@pytest.mark.parametrize("size", [10, 10**6])
def test_long_text_is_cut_and_counted(size: int) -> None:
    """A megabyte becomes a line."""
    shown = printable("x" * size, 100)
    assert len(shown) < 150 and (f"{size - 100:,} more characters" in shown) == (size > 100)


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.2, "0 s"), (59.4, "59 s"), (125, "2 min 5 s"), (7800, "2 h 10 min"), (273600, "3 d 4 h")]
)
def test_times_for_people(seconds: float, text: str) -> None:
    """Two units, the larger first."""
    assert duration(seconds) == text
