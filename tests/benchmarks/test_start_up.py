"""The benchmark of the start: times of lines, and a table that judges the second run."""

import os
import random
import sys
from pathlib import Path

from benchmarks.start_up import make_task, table, timed, words


def test_lines_are_timed_in_order() -> None:
    """The first line with a mark counts; what never comes has no time."""
    code = "print('keyhole 1: zo on m'); print('step  1/20 a'); print('step  1/20 b')"
    marks = {"start block": r"keyhole \S+: ", "step 1": r"step +1/", "last step": r"step +20/"}
    times, said = timed([sys.executable, "-c", code], marks, dict(os.environ))
    assert 0 < times["start block"] <= times["step 1"] <= times["end"] and "last step" not in times
    assert said.count("\n") == 3


def test_the_second_run_is_judged() -> None:
    """Five seconds beyond its own imports are allowed to it, and to no other."""
    first = {"start block": 9.0, "step 1": 20.0, "last step": 31.0, "beyond": 13.8, "phases": ""}
    runs = {"a": [first, first | {"step 1": 11.0, "beyond": 4.8}], "b": [first, first | {"beyond": 5.3}]}
    lines = table(6.2, 0.4, runs, 20).splitlines()
    ends = [line.split("|")[-2].strip() for line in lines if line.startswith("| `")]
    assert ends == ["13.8 s", "4.8 s (within 5)", "13.8 s", "5.3 s (beyond 5)"]


def test_the_made_up_task_has_the_form_of_the_public_one(tmp_path: Path) -> None:
    """A header, then a sentence and a label per line, the same every time."""
    make_task(tmp_path)
    lines = (tmp_path / "SST-2" / "dev.tsv").read_text().splitlines()
    assert lines[0] == "sentence\tlabel" and len(lines) == 873
    assert all(line.count("\t") == 1 and line[-1] in "01" for line in lines[1:])
    assert words(5, random.Random(1)) == words(5, random.Random(1))
