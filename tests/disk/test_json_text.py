"""What keyhole writes as JSON is JSON for everybody."""

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keyhole.compare.file import read_comparison
from keyhole.compare.result import Result, read_result, write_result
from keyhole.compare.table import Cell, to_json
from keyhole.disk.json_text import ABSENT, check_result_file, edited, json_text
from keyhole.disk.json_text import write_result as write_file
from keyhole.errors import UserError
from keyhole.pages.frame import page
from keyhole.report.story import Planned, Story, read_story, write_story
from tests.compare.comparisons import write

LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4)
VALUES = st.recursive(LEAVES, lambda inner: st.lists(inner) | st.dictionaries(st.text(max_size=3), inner), max_leaves=9)


def parsed(text: str) -> Any:
    """As any other program reads it: `NaN` and `Infinity` are errors."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)


def without(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: without(item) for key, item in value.items()}
    if isinstance(value, list):
        return [without(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


@given(VALUES)
def test_finite_values_survive_and_others_are_null(value: Any) -> None:
    """Also inside of lists and objects, and of what `default` makes of unknown things."""
    assert parsed(json_text(value)) == without(value)
    assert parsed(json_text([object()], default=lambda _: [value])) == [[without(value)]]


def test_results_of_a_comparison_are_json(tmp_path: Path) -> None:
    """A diverged run: its file, and the table of all runs; the file is read again, with nothing in the place of the
    numbers."""
    made = Result("a-0", "m", "t", "zo", [["learning_rate", "1"]], 0, dev=math.inf, test=math.nan)
    made.curve, made.tests = [[1, 2.0, math.inf, math.nan]], {}
    write_result(tmp_path, made)
    parsed((tmp_path / "results" / "a-0.json").read_text())
    found = read_result(tmp_path, "a-0")
    assert found is not None and found.dev is None and found.test is None and found.curve == [(1, 2.0, None, None)]
    cell = Cell("m", "t", "zo", (("learning_rate", "1"),), mean=math.inf, runs=[made])
    comparison = read_comparison(write(tmp_path / "small.yaml"), ())
    assert parsed(to_json(comparison, [cell], {"rate": math.nan}))["cells"][0]["mean"] is None


def test_the_story_of_a_run_is_json(tmp_path: Path) -> None:
    """A plan without an end, a pace of nothing."""
    write_story(
        tmp_path / "report.json", Story(planned=Planned(seconds={"link": math.inf}), measured={"pace": math.nan})
    )
    parsed((tmp_path / "report.json").read_text())
    assert read_story(tmp_path / "report.json").measured == {}


def test_a_place_is_tried_before_the_work(tmp_path: Path) -> None:
    """A directory, no directory, one in which nothing can be made; a good place is left as it was."""
    with pytest.raises(UserError, match="--json: .* is a directory"):
        check_result_file("--json", tmp_path)
    with pytest.raises(UserError, match="--json: .*r.json cannot be written: No such file"):
        check_result_file("--json", tmp_path / "none" / "r.json")
    with pytest.raises(UserError, match="cannot be written"):
        check_result_file("--json", Path("/proc/r.json"))
    check_result_file("--json", tmp_path / "r.json")
    assert list(tmp_path.iterdir()) == []


def test_results_are_not_lost_with_the_file(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"(?s)cannot be written: .*would have held:\n\| a table \|"):
        write_file("--json", Path("/proc/r.json"), "{}", "| a table |")
    write_file("--json", tmp_path / "r.json", "{}", "| a table |")
    assert (tmp_path / "r.json").read_text() == "{}"


def test_a_file_that_is_no_earlier_result_is_not_replaced(tmp_path: Path) -> None:
    """Rows, a config, somebody's page, a pipe; an empty file and an earlier result are."""
    kept = tmp_path / "kept"
    for text in ('{"prompt": "a"}\n', '{\n "model_type": "llama"\n}', '[{"results": 1}]', "<!doctype html><p>mine"):
        kept.write_text(text)
        with pytest.raises(UserError, match="--json: .* is no earlier result"):
            check_result_file("--json", kept)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UserError, match="is a pipe or a device"):
        check_result_file("--json", tmp_path / "pipe")
    (tmp_path / "empty").touch()
    (tmp_path / "link").symlink_to(tmp_path / "empty")  # as /dev/stdout is, where the output goes to a file
    with pytest.raises(UserError, match="is a link"):
        check_result_file("--json", tmp_path / "link")
    earlier = json.dumps({"model": "m", "dtype": "float32", "device": "cpu", "results": []}, indent=1)
    for text in ("", earlier, json.dumps({"results": {}}, indent=1), page("Runs", [])):
        (tmp_path / "r").write_text(text)
        check_result_file("--json", tmp_path / "r")


OBJECTS = st.dictionaries(st.text(max_size=3), VALUES, max_size=4)


@given(OBJECTS, st.text(max_size=3), VALUES | st.just(ABSENT), st.sampled_from([None, 0, 2, "\t"]), st.booleans())
def test_a_key_is_edited_and_nothing_else(found: Any, key: str, value: Any, indent: Any, ascii: bool) -> None:
    """Whatever the style of the text: the other members stay to the character, in their order, also one level down."""
    text = json.dumps(found, indent=indent, ensure_ascii=ascii) + "\n"
    wanted = {name: each for name, each in found.items() if value is not ABSENT or name != key}
    wanted |= {} if value is ABSENT else {key: value}
    now = edited(text, [key], value)
    assert repr(json.loads(now)) == repr(json.loads(json.dumps(wanted)))
    assert all(json.dumps(name, ensure_ascii=ascii) in now for name in wanted if name != key)
    within = edited(json.dumps({"a": 1, "in": found, "z": 2}, indent=indent), ["in", key], value)
    assert repr(json.loads(within)) == repr(json.loads(json.dumps({"a": 1, "in": wanted, "z": 2})))


def test_an_edit_keeps_the_style_of_a_text() -> None:
    text = '{\r\n    "a" :1,\r\n    "ü": [2.50],\r\n    "c": {"d": null}\r\n}\r\n'
    assert edited(text, ["a"], 7) == text.replace(":1", ":7")
    assert edited(text, ["c", "d"], "ö") == text.replace("null", '"ö"')
    assert edited(text, ["ü"], ABSENT) == text.replace('    "ü": [2.50],\r\n', "")
    assert edited(text, ["e"], [1]) == text.replace("}\r\n}", '},\r\n    "e": [\r\n      1\r\n    ]\r\n}')
