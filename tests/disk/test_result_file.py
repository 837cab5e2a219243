"""A file of results: refused before the work where nothing can be written, and said where the disk fails after it."""

from pathlib import Path

import pytest

from keyhole.disk.result_file import check_result_file, write_result
from keyhole.errors import UserError


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
