"""Runs side by side: what is told of each, whatever their files hold, and what the command does with them."""

import json
import multiprocessing
import os
import re
import tempfile
from html import unescape
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urljoin, urlsplit

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keyhole.cli import main
from keyhole.errors import UserError
from keyhole.machine.text import last_parts
from keyhole.report import compared
from keyhole.report import page as run_page
from keyhole.report.compared import cells, table
from keyhole.report.curves import Curves
from keyhole.report.story import Story, View, find_runs, read_view, write_story

EVIL = "<script>alert(1)</script>\"'&"
NAMES = st.sampled_from(
    ["loss", "eval_loss", "eval_accuracy", "test_accuracy", "test_questions", "seconds", "tokens", EVIL]
)
VALUES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3)
ENTRIES = st.lists(st.dictionaries(NAMES, VALUES).map(lambda entry: entry | {"step": 1}), max_size=12)


def made(root: Path, name: str, losses: list[float], story: Story | None = None, **options: Any) -> Path:
    """The output_dir of a run."""
    run = root / name / "run"
    run.mkdir(parents=True)
    entries = [{"step": i, "loss": loss, "tokens": 10, "seconds": 0.1} for i, loss in enumerate(losses, 1)]
    entries.append({"step": len(losses), "eval_loss": losses[-1] + 0.5, "eval_accuracy": 0.75})
    (run / "metrics.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries) + '{"step": 9, "lo')
    (run / "config.yaml").write_text("".join(f"{key}: {json.dumps(value)}\n" for key, value in options.items()))
    if story is not None:
        write_story(run / "report.json", story)
        (run / "report.html").write_text("a page")
    return root / name


def test_a_table_and_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each run has a row and a curve, in its order; what differs in the settings is shown, what does not is not."""
    story = Story(method="lomo", model="/models/opt", state="done", total=3)
    made(tmp_path / "runs", "b", [3.0, 2.0, 1.0], story, method="lomo", model="/models/opt", seed=1, batch_size=4)
    made(tmp_path / "runs", "a", [5.0, 4.0], None, method="zo", model="/models/opt", seed=2, batch_size=4, max_steps=8)
    output = tmp_path / "page.html"
    assert main(["report", str(tmp_path / "runs"), "-o", str(output)]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[1].split()[:3] == ["a", "zo", "opt"] and "5.0000 -> 4.0000" in printed[1]
    assert printed[2].split()[:4] == ["b", "lomo", "opt", "done"] and "loss 1.5000, accuracy 75.0" in printed[2]
    page = output.read_text()
    columns = re.findall("<th[^>]*>([^<]*)</th>", page.partition("</thead>")[0])
    assert columns == printed[0].split()  # without those that are empty, such as GPU GiB
    assert "<a href='runs/b/run/report.html'>b</a>" in page and "runs/a/run" not in page
    heads = re.findall(r"<th class='left'>(\w+)</th>", page.partition("Settings that differ")[2])
    assert heads == ["method", "seed", "max_steps"]
    assert "lowest held-out loss is <b>1.5000</b>, of <b>b</b>" in page
    assert page.count('<polyline class="line c0') == page.count('<polyline class="line c1') > 0


def test_dev_and_test_are_of_one_step(tmp_path: Path) -> None:
    """The step that was chosen, and so tested; if there is no room for all metrics, the mean over tasks stays."""
    run = made(tmp_path, "a", [3.0, 2.0, 1.0]) / "run"
    entries = [
        {"step": 1, "loss": 3.0, "tokens": 10, "seconds": 0.1},
        {"step": 1, "eval_loss": 2.5, "eval_x_f1": 0.2, "eval_x_accuracy": 0.4, "eval_y_f1": 0.6, "eval_score": 0.4},
        {"step": 2, "loss": 2.0, "tokens": 10, "seconds": 0.1},
        {"step": 2, "eval_loss": 1.5, "eval_x_f1": 0.1, "eval_x_accuracy": 0.3, "eval_y_f1": 0.5, "eval_score": 0.3},
        {"step": 1, "test_x_f1": 0.1, "test_score": 0.7, "test_questions": 8},
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    told = cells(read_view(run))
    assert told[6:8] == ["step 1: loss 2.5000, score 40.0, x_f1 20.0, x_accuracy 40.0", "step 1: x_f1 10.0, score 70.0"]
    said = run_page.lead(read_view(run))
    assert "Dev of step 1: <b>loss 2.5000, score 40.0" in said and "Test of step 1: <b>x_f1 10.0" in said
    (run / "metrics.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries[:4]))
    assert cells(read_view(run))[6:8] == ["loss 1.5000, score 30.0, x_f1 10.0, x_accuracy 30.0", "-"]


def test_the_mean_over_tasks_is_shown() -> None:
    """It comes after theirs in the file, as a score, or under the name of the metric that all tasks have."""
    tasks = {f"eval_t{i}_accuracy": i / 10 for i in range(4)}
    told = run_page.shown_metrics({"eval_loss": 1.5, **tasks, "eval_accuracy": 0.15, "eval_questions": 9}, "eval")
    assert told == "loss 1.5000, accuracy 15.0, t0_accuracy 0.0, t1_accuracy 10.0"
    assert run_page.shown_metrics({"test_macro_f1": 0.5, "test_f1": 0.2}, "test") == "macro_f1 50.0, f1 20.0"


def test_a_learning_rate_is_drawn_as_it_was_set(tmp_path: Path) -> None:
    """A running mean would show rates that were never used where a schedule jumps, as in a run that was prolonged."""
    run = made(tmp_path, "a", [1.0] * 60) / "run"
    rates = [1.0 - i / 30 for i in range(30)] * 2
    rows = [{"step": i, "loss": 1.0, "learning_rate": rate, "seconds": 0.1} for i, rate in enumerate(rates, 1)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    main(["report", str(tmp_path / "a"), "-o", str(tmp_path / "both.html")])
    for page in (run_page.make_page(read_view(run)), (tmp_path / "both.html").read_text()):
        picture = page.partition('aria-label="learning rate by step"')[2].partition("</svg>")[0]
        drawn = [float(pair.split(",")[1]) for pair in re.search(r'points="([^"]*)"', picture)[1].split()]
        assert picture.count("<polyline") == 1 and drawn[30] == pytest.approx(drawn[0], abs=0.11)


@pytest.mark.parametrize("name", ["lr=1e-3#2", "what?", "50%25", "zo:rank=2", "a'b <c>", "größe"])
def test_a_link_leads_to_the_run_whatever_its_name(tmp_path: Path, name: str) -> None:
    """A browser resolves it to the run's own page: no fragment, no query, no scheme."""
    one = made(tmp_path, name, [1.0])
    (one / "run" / "report.html").write_text("")
    assert main(["report", str(one), "-o", str(tmp_path / "p.html")]) == 0
    (link,) = re.findall(r"<a href='([^']*)'>", (tmp_path / "p.html").read_text())
    found = urlsplit(urljoin((tmp_path / "p.html").as_uri(), unescape(link)))
    assert Path(unquote(found.path)) == one / "run" / "report.html" and not found.query + found.fragment


def test_a_name_that_is_not_utf_8_has_a_page(tmp_path: Path) -> None:
    """In the table, in the curves and as the title."""
    name = os.fsdecode(b"bad\xff")
    for names in ([name], [name, "good"]):
        views = [View(one, tmp_path / one / "run", Story(), Curves()) for one in names]
        for view in views:
            view.curves.add({"step": 1, "loss": 1.0})
        assert "bad" in compared.make_page(views, tmp_path).encode().decode()
        assert "bad?" in run_page.make_page(views[0]).encode().decode()


def test_lines_that_are_left_out_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In the table and on the page; a line that is not yet whole, or empty, is no loss."""
    good, bad = made(tmp_path, "good", [2.0, 1.0]), made(tmp_path, "bad", [2.0, 1.0])
    with (bad / "run" / "metrics.jsonl").open("ab") as file:  # the first ends the line that `made` leaves open
        file.write(b'\nno json\n\n[]\n{"step": 3, "note": "' + b"x" * 200_000 + b'"}\n{"step": 3, "loss": 0.5}\n{"st')
    assert main(["report", str(good), str(bad), "-o", str(tmp_path / "p.html")]) == 0
    said = "bad: 4 of the lines of metrics.jsonl cannot be read, and are left out"
    printed, page = capsys.readouterr().out, (tmp_path / "p.html").read_text()
    assert f"warning: {said}" in printed and said in page and "good: " not in printed + page
    assert "2.0000 -> 0.5000" in printed


def test_runs_are_told_apart(tmp_path: Path) -> None:
    """By as much of their paths as it takes; one that is named twice is one."""
    places = [tmp_path / "x" / "out" / "run", tmp_path / "y" / "out" / "run"]
    names = [place.parent for place in places]
    assert last_parts(names) == ["x/out", "y/out"] and last_parts(names[:1]) == ["out"]
    one = made(tmp_path, "one", [1.0])
    assert main(["report", str(one), str(one / "run"), "-o", str(tmp_path / "p.html")]) == 0
    assert "1 run" in (tmp_path / "p.html").read_text()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["nothing"], "no run is here"),
        (["run-a", "-o", "run-a"], "is a directory; name a file"),
        (["run-a", "-o", "no/such/page.html"], "cannot be written: No such file"),
    ],
)
def test_mistakes_are_named(
    words: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    made(tmp_path, "run-a", [1.0])
    assert main(["report", *words]) == 2
    assert says in capsys.readouterr().err


@settings(max_examples=25)
@given(ENTRIES, ENTRIES)
def test_any_numbers_give_pages(first: list[dict[str, Any]], second: list[dict[str, Any]]) -> None:
    """Whatever the lines of metrics.jsonl hold, both pages and the table are made, and names are text."""
    views = []
    for name, entries in ((EVIL, first), ("b", second)):
        curves = Curves()
        for entry in entries:
            curves.add(entry)
        views.append(View(name, Path("run"), Story(method=EVIL, model=EVIL, total=3), curves, settings={EVIL: name}))
    for page in (compared.make_page(views, Path(".")), *map(run_page.make_page, views)):
        assert "<script" not in page and page.endswith("</html>\n")
    assert len(table(views)) == 3 and len(cells(views[0])) == len(compared.COLUMNS)


def test_a_directory_that_may_not_be_read_is_passed_over(tmp_path: Path) -> None:
    """Beside runs it holds none; alone it is named. (Root may read everything: so a child without its rights.)"""
    if os.geteuid() != 0:
        pytest.skip("only root can become nobody")
    run = made(tmp_path, "a", [1.0])
    locked = tmp_path / "lost+found"
    locked.mkdir(mode=0o700)
    for place in (tmp_path, *tmp_path.parents):
        if place.stat().st_uid == 0 and str(place).startswith(tempfile.gettempdir() + os.sep):
            place.chmod(0o755)

    def look() -> None:
        os.setuid(65534)
        with pytest.raises(UserError, match=r"lost\+found cannot be read"):
            find_runs([locked])
        assert find_runs([tmp_path]) == [run / "run"]

    child = multiprocessing.get_context("fork").Process(target=look)
    child.start()
    child.join()
    assert child.exitcode == 0
