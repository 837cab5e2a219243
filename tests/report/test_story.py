"""run/report.json: what is written is read; a file with anything else is passed over."""

import json
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from keyhole.data.report import Marked
from keyhole.report.curves import Curves
from keyhole.report.page import make_page
from keyhole.report.story import MOST_ANSWERS, Answer, Answers, Planned, Story, View, read_story, write_story

WHOLE = Story(
    run="1", title="t", method="zo", model="m", device="cuda", state="done", outcome="o", began="b", updated="u",
    total=7, lines=["a: b"], events=["e"], planned=Planned(3.0, {"homes": 1.0}, bound_by="link"),
    measured={"host_bytes": 5.0},
    samples=[Marked("w", "a", [(True, ["x", "y"])])], answers=[Answers(4, "g", [Answer("p", "s", "e", True)])],
)  # fmt: skip
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=12,
)
broken = st.dictionaries(st.sampled_from(sorted(vars(Story()))), json_values)


def test_a_story_is_read_as_it_was_written(tmp_path: Path) -> None:
    write_story(tmp_path / "report.json", WHOLE)
    assert read_story(tmp_path / "report.json") == WHOLE


def test_no_story(tmp_path: Path) -> None:
    """Nothing, no JSON, another kind of file, another format."""
    path = tmp_path / "report.json"
    assert read_story(path) is None
    for text in ("", "{", "[1]", '{"format": 99}', "[" * 100_000):
        path.write_text(text)
        assert read_story(path) is None


@settings(max_examples=50)
@given(broken)
def test_any_values_give_a_page_or_no_story(values: dict[str, Any]) -> None:
    """A file that somebody else wrote breaks neither the reader nor the page."""
    import tempfile

    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "report.json"
        path.write_text(json.dumps({"format": 1} | values))
        story = read_story(path)
    if story is not None:
        assert make_page(View("n", Path("x"), story, Curves())).endswith("</html>\n")


def test_the_first_answers_and_the_newest_stay() -> None:
    """A run of many evaluations keeps a few; a run that goes back forgets what came later."""
    story = Story()
    for step in range(1, 20):
        story.answered(Answers(step, ""))
    assert [each.step for each in story.answers] == [1, *range(20 - MOST_ANSWERS + 1, 20)]
    story.went_back(16)
    assert [each.step for each in story.answers] == [1, 15, 16]
    story.answered(Answers(16, "again"))
    assert [each.about for each in story.answers if each.step == 16] == ["again"]
