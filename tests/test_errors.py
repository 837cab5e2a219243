"""What is printed of things found in files: no escapes, no half characters, no endless lists."""

from hypothesis import given
from hypothesis import strategies as st

from keyhole.errors import NonFinite, UserError, listed, printable


def test_terminal_escapes_in_a_message_are_written_out() -> None:
    """Escapes, C1 controls, direction marks and lone surrogates are shown as text; line breaks stay."""
    error = UserError("a.csv: column \x1b]0;owned\x07 \x9b2J \u202e \ud83d\nnext line")
    assert str(error) == r"a.csv: column \x1b]0;owned\x07 \x9b2J \u202e \ud83d" + "\nnext line"
    assert "\x1b" not in str(NonFinite("\x1b[2J"))


@given(st.text())
def test_any_message_can_be_printed(text: str) -> None:
    """Whatever the text holds, the message encodes as UTF-8 and holds no control character but line break and tab."""
    shown = printable(text)
    assert shown.encode() and all(c.isprintable() or c in "\n\t" for c in shown) if text else shown == ""


def test_long_lists_and_long_messages_are_cut() -> None:
    """A hundred thousand names are a line; the number of those left out is given."""
    assert listed("abc") == "a, b, c"
    many = listed(f"column {i}" for i in range(100_000))
    assert len(many) < 300 and many.endswith("and 99,988 more") and many.startswith("column 0, column 1")
    assert len(listed(["x" * 10**6, "a\nb"])) < 200
    assert len(str(UserError("x" * 10**6))) < 11_000
