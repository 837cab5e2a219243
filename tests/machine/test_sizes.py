"""Sizes: units, refusals, and an exact round trip."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keyhole.machine.sizes import UNITS, Bytes, about, enough


@given(st.integers(min_value=1, max_value=2**50))
def test_str_and_parse_are_inverse(count: int) -> None:
    """Any number of bytes survives being written and read."""
    assert Bytes.parse(str(Bytes(count))) == count


def test_units_are_read_in_any_case() -> None:
    """8GiB, 8gib and 8 GiB are the same number; a fraction is a size, and GB is not GiB."""
    for unit, count in UNITS.items():
        assert all(Bytes.parse(text) == 8 * count for text in (f"8{unit}", f"8{unit.lower()}", f" 8 {unit.upper()} "))
    assert (Bytes.parse("7.5GiB"), Bytes.parse("8GB")) == (15 * 2**29, 8_000_000_000)


NOT_SIZES = ["8", "8G", "GiB", "-8GiB", "0GiB", "0.1B", "8 potatoes", "", "1e3GiB", 0, -1, 8, 2**20 - 1, True]


@pytest.mark.parametrize("text", NOT_SIZES)
def test_what_is_not_a_size_is_refused(text: object) -> None:
    """Without a unit, with an ambiguous one, or below one byte: refused with an example."""
    with pytest.raises(ValueError, match="8GiB"):
        Bytes.parse(text)


AS_WRITTEN = ["8GB", "8GiB", "0.04GiB", "7.5GiB", "5MiB", "800MiB", "20KiB", "512MiB", "1.5GiB", "2TiB", "17GB", "999B"]


@pytest.mark.parametrize("text", AS_WRITTEN)
def test_a_size_is_printed_as_a_person_writes_it(text: str) -> None:
    """Whatever unit it was given in."""
    assert str(Bytes.parse(text)) == about(Bytes.parse(text)) == text


@given(st.integers(min_value=0, max_value=2**50))
def test_about_is_within_half_a_percent(count: int) -> None:
    """A message has a short number with a unit, close to the count; plain bytes only where they are few."""
    text = about(count)
    assert count < 1024 or text != f"{count}B"
    number = float(text.rstrip("TGMKiB "))
    assert len(text) <= 9 and abs(number * UNITS[text.lstrip("0123456789. ")] - count) <= 0.005 * count


def test_ints_are_bytes() -> None:
    """A large int, and a size that was read before, however small."""
    assert Bytes.parse(2**33) == 2**33 and Bytes.parse(Bytes(20)) == 20


@given(st.integers(min_value=1, max_value=2**50))
def test_enough_is_at_least_the_count(count: int) -> None:
    """The limit that a message names can be used as it stands, and is not far above."""
    assert count <= Bytes.parse(enough(count)) <= max(1.1 * count, count + 1)
