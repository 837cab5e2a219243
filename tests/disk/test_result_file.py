"""A file of results: refused before the work where nothing can be written, and said where the disk fails after it."""

import json
import os
from pathlib import Path

import pytest

from keyhole.disk.result_file import check_result_file, write_result
from keyhole.errors import UserError
from keyhole.pages.frame import page


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
        write_result("--json", Path("/proc/r.json"), "{}", "| a table |")
    write_result("--json", tmp_path / "r.json", "{}", "| a table |")
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
