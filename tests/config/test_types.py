"""Typed reading of YAML nodes: the declared type decides, not YAML's guess."""

from typing import Annotated, Any, Literal

import pytest
import yaml

from keyhole.config.loader import parse_config
from keyhole.config.types import Mismatch, parse, show
from keyhole.errors import UserError
from keyhole.limits import Limit, describe
from keyhole.machine.sizes import Bytes

CASES = [
    ("2e-5", float, 2e-5),
    ("2e-5", str, "2e-5"),
    ('"2e-5"', float, 2e-5),
    ("no", str, "no"),
    ("no", bool, False),
    ("on", bool, True),
    ("True", bool, True),
    ("1:30", str, "1:30"),
    ("010", int, 10),
    ("1e4", int, 10_000),
    ("10_000", int, 10_000),
    ("null", int | None, None),
    ("~", str | None, None),
    ("None", str | None, None),
    ('"None"', str | None, "None"),
    ("2001-01-01", str, "2001-01-01"),
    ("8GiB", Bytes, 8 * 2**30),
    ("[a, 3]", list[str], ["a", "3"]),
    ("[a, b]", str | list[str], ["a", "b"]),
    ("a", str | list[str], "a"),
    ("gaussian", Literal["gaussian", "rademacher"], "gaussian"),
    ("1", Annotated[int, Limit(1)], 1),
    ("0", Annotated[float, Limit(0, 1)], 0.0),
]


@pytest.mark.parametrize(("text", "kind", "value"), CASES)
def test_the_type_decides_how_text_is_read(text: str, kind: Any, value: Any) -> None:
    found = parse(yaml.compose(text, Loader=yaml.SafeLoader), kind)
    assert found == value and type(found) is type(value) or isinstance(found, Bytes)


REFUSED = [
    ("true", int), ("1.5", int), ("eight", int), ("nan", float), (".inf", float), ("1e999", float),
    ("1e999", int), ("1" * 5000, int),
    ("null", int), ("null", str), ('""', str), (r'"a\0b"', str), ("[1]", int), ("{a: 1}", str),
    ("[]", list[str]),
    ("[[a]]", list[str]), ("[null]", list[str]), ("a", list[str]), ("8", Bytes), ("2", bool), ("maybe", bool),
    ("Gaussian", Literal["gaussian"]), ("0", Annotated[int, Limit(1)]), ("2", Annotated[float, Limit(0, 1)]),
    ("0", Annotated[float, Limit(0, above=True)]), ("x", Annotated[int, Limit(1)] | None),
]  # fmt: skip


def test_a_mapping_is_read_with_its_types_or_as_yaml_has_it() -> None:
    """Text where text is declared, JSON's values where nothing is."""
    node = yaml.compose("{a: no, b: 1.5}")
    assert parse(node, dict[str, str] | None) == {"a": "no", "b": "1.5"}
    assert parse(node, dict[str, object] | None) == {"a": False, "b": 1.5}
    assert parse(yaml.compose("{a: [1, {b: null}], c: x}"), dict[str, object]) == {"a": [1, {"b": None}], "c": "x"}
    for text in ("{a: 2025-01-01}", "[a]", "x", "{}"):
        with pytest.raises(Mismatch, match="mapping of names to values"):
            parse(yaml.compose(text), dict[str, object])


@pytest.mark.parametrize(("text", "kind"), REFUSED)
def test_what_does_not_fit_is_refused_in_words(text: str, kind: Any) -> None:
    """A value of another type is refused, and the message is the type in words."""
    with pytest.raises(Mismatch) as caught:
        parse(yaml.compose(text, Loader=yaml.SafeLoader), kind)
    assert str(caught.value).partition("; item")[0] == describe(kind) != ""


BAD_ITEMS = [
    ("[-1]", "; item 1 is `-1`"),
    ("[1, .nan, -1]", "; item 2 is `.nan`"),
    ("[1, [2]]", "; item 2 is a list"),
    ("[1, null]", "; item 2 is null"),
    ("[]", ""),
    ("{train: null}", "; `train` is null"),
    ("{train: a, test: [b]}", "; `test` is a list"),
    ("{train:a}", "; `train:a` is null; write a space after the colon"),
    ("{}", ""),
]


@pytest.mark.parametrize(("text", "says"), BAD_ITEMS)
def test_the_first_bad_item_is_named(text: str, says: str) -> None:
    """Also if the field may be something else; nothing is added if the list or mapping as a whole is wrong."""
    kind: Any = dict[str, str] if text.startswith("{") else list[Annotated[float, Limit(0)]]
    for each in (kind, kind | None):
        with pytest.raises(Mismatch) as caught:
            parse(yaml.compose(text, Loader=yaml.SafeLoader), each)
        assert str(caught.value) == describe(each, full=True) + says


def test_a_list_without_items_is_shown_as_empty() -> None:
    """`found a list, expected text or list of text` would be no help."""
    assert [show(yaml.compose(text, Loader=yaml.SafeLoader)) for text in ("[]", "[1]")] == ["an empty list", "a list"]


BEYOND = [f"{key}={value}" for key in ("batch_size", "zo.directions") for value in ("1e308", "1e12", "9" * 5000)]


@pytest.mark.parametrize("word", [*BEYOND, "num_train_epochs=1e308", f"gpu_memory={'9' * 400}.5GiB", "save_steps=-1"])
def test_a_number_beyond_all_reason_is_a_fault_and_no_traceback(word: str) -> None:
    """Later it would be an overflow, a list of 10^12 passes, or a machine out of memory."""
    text = "model: demo\nmethod: zo\ntrain_data: demo\noutput_dir: out\nmax_steps: 3\n"
    with pytest.raises(UserError, match=f"{word.partition('=')[0]}: found `.*`, expected "):
        parse_config(text, [word])
