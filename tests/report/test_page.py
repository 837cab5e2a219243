"""The sections of a run's page, from what is known of the run; and the entries that its curves are made of."""

import re
from pathlib import Path

import pytest

from keyhole.data.report import Marked
from keyhole.report import entries, parts
from keyhole.report.curves import Curves
from keyhole.report.entries import read_lines
from keyhole.report.page import make_page
from keyhole.report.story import Answer, Answers, Planned, Story, View


def text(html: str) -> str:
    return " ".join(re.sub("<[^>]*>", " ", html).split())


def test_memory_and_pace_stand_beside_what_was_planned() -> None:
    """Bars are shares of the larger of the two; parts of nothing are left out; the GPU only where there is one."""
    seconds = {"total": 2.0, "link": 1.5, "kernels": 0.0}
    plan = Planned(2.0**30, {"homes": 3 * 2.0**28, "slots": 2.0**28, "none": 0.0}, 2.0**29, seconds, "link")
    story = Story(device="cuda", planned=plan, measured={"device_bytes": 2.0**31, "host_bytes": 2.0**20})
    curves = Curves()
    curves.add({"step": 1, "loss": 1.0, "tokens": 100, "seconds": 4.0})
    made = parts.memory_and_pace(story, curves)
    assert re.findall(r"width:([\d.]+)%", made) == ["37.50", "12.50", "100.00", "100.00", "0.20"]
    told = text(made)
    assert "GPU, planned 1.00 GiB GPU, measured 2.00 GiB homes 0.75 GiB slots 0.25 GiB host, planned 0.50 GiB" in told
    assert "host, measured 1.0 MiB A step takes 4 s , 25 tokens per second" in told
    assert "planned 2 s , bound by link (link 1.5 s)." in told
    story.device = "cpu"
    assert "GPU" not in parts.memory_and_pace(story, Curves()) and "A step" not in parts.memory_and_pace(
        story, Curves()
    )


def test_data_answers_and_decisions_are_shown_as_they_are() -> None:
    """Trained tokens are marked, the last answers come first, indented lines belong to the one before; markup of the
    data is text."""
    story = Story(lines=["start", "  dtype: <b>", "    one", "    two", "  free text", f"  {'k' * 25}: v"])
    story.samples = [Marked("f.jsonl", "2 tokens", [(False, ["<i>"]), (True, ["x", "y"])])]
    made = parts.data(story)
    assert "f.jsonl · 2 tokens" in made and "<span>&lt;i&gt;</span><span class=on>x</span><span class=on>y" in made
    assert parts.answers(story) == ""
    rows = [Answer("p", "s", "e", right) for right in (True, False, None)]
    story.answers = [Answers(1000, "", rows[:1]), Answers(2000, "greedy", rows)]
    told = text(parts.answers(story))
    assert "After step 2,000: greedy." in told and told.index("After step 2,000") < told.index("after step 1,000")
    assert told.count("p s e right") == 2 and told.count("p s e wrong") == 1 and told.count("p s e") == 4
    decided = parts.decisions(story)
    assert "<dt>dtype</dt><dd>&lt;b&gt;</dd><dt></dt><dd>" in decided and "one\n" in decided
    assert "<dt></dt><dd>free text</dd>" in decided and f"<dt></dt><dd>{'k' * 25}: v</dd>" in decided
    assert "class='why'" not in parts.decisions(Story())


@pytest.mark.parametrize("loss", ["tokens", "candidates"])
def test_losses_of_two_kinds_are_not_drawn_as_one(tmp_path: Path, loss: str) -> None:
    """Trained by candidates a loss is per question; that of an evaluation is per token."""
    curves = Curves()
    for entry in ({"step": 1, "loss": 0.7}, {"step": 1, "eval_loss": 5.0, "eval_tokens": 9}):
        curves.add(entry)
    made = make_page(View("x", tmp_path, Story(method="lomo", model="m", total=1), curves, settings={"loss": loss}))
    two = loss == "candidates"
    assert ("Loss over candidates <b>0.7000</b>" in made and "Dev: <b>loss per token 5.0000" in made) == two
    assert ("loss over candidates by step" in made and "loss per token by step" in made) == two
    assert ("loss by step" in made and "Loss <b>0.7000</b>" in made and "Dev: <b>loss 5.0000" in made) != two


@pytest.mark.parametrize("state", ["running", "done", "stopped", "failed"])
def test_only_the_page_of_a_run_that_goes_on_loads_itself_again(state: str, tmp_path: Path) -> None:
    made = make_page(View("x", tmp_path, Story(state=state, total=1), Curves()))
    assert ("http-equiv" in made) == (state == "running")


def test_lines_that_are_no_entries_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """But not one that is still being written; a line without end is left behind whole, and so is a huge file."""
    path = tmp_path / "metrics.jsonl"
    assert read_lines(path) == ([], 0)
    monkeypatch.setattr(entries, "MOST_LINE", 64)
    good = ['{"step": 0}', '{"step": 9007199254740991, "loss": 1}']
    bad = [
        '{"step": -1}',
        '{"step": true}',
        '{"step": 9007199254740992}',
        "[1]",
        "}",
        '{"step": 1, "x": "' + "y" * 200 + '"}',
    ]
    path.write_text("\n".join([good[0], *bad, "", good[1], '{"step": 2, "lo']))
    assert read_lines(path) == ([{"step": 0}, {"step": 2**53 - 1, "loss": 1}], len(bad))
    monkeypatch.setattr(entries, "MOST_METRICS", path.stat().st_size - 1)
    assert read_lines(path) == ([], 0)
