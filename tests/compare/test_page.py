"""The page: it parses, fetches nothing, and shows names as text, whatever they are."""

import re
from typing import Any

import pytest

from keyhole.compare import page as page_module
from keyhole.compare.file import Comparison
from keyhole.compare.page import make_page
from keyhole.compare.result import Result
from keyhole.compare.table import Cell, to_markdown, zero_shot_cell
from tests.pages.made import Reader

EVIL = "<script>alert(1)</script>\"'&|`</style>"
ENVIRONMENT = {"versions": {"torch": EVIL}, "gpus": [{"name": EVIL}], "cpu": {"name": EVIL, "cores": 2}, "os": EVIL}


def result(method: str, **values: Any) -> Result:
    curve = [[2, 0.5, 0.6, 0.7], [4, 1.0, 0.8, 0.5]]
    known = {"dev_metric": "accuracy", "test_metric": "accuracy", "dev": 0.8, "test": 0.7, "gpu_gib": 1.5}
    return Result("id", EVIL, EVIL, method, [("learning_rate", EVIL)], 0, **known | {"curve": curve} | values)


def page(cells: list[Cell]) -> str:
    comparison = Comparison(EVIL, EVIL, {EVIL: "dir"}, {EVIL: {}}, {EVIL: {}}, [0, 1], "out", words=(EVIL,), text=EVIL)
    return make_page(comparison, cells, ENVIRONMENT)


def cells() -> list[Cell]:
    good = result(EVIL)
    failed = result(EVIL, error=EVIL, kind="refused", dev=None, test=None, curve=[])
    chosen = (("learning_rate", EVIL),)
    one = Cell(EVIL, EVIL, EVIL, chosen, "accuracy", 0.7, 0.01, "accuracy", 0.8, 2.0, 1.5, [good, good], [good, failed])
    return [zero_shot_cell(result("zero-shot")), one, Cell(EVIL, EVIL, "broken", grid=[failed])]


def test_the_page_is_whole_and_escapes_everything() -> None:
    """Hostile names of models, tasks, methods, settings, errors and machines are text."""
    html = page(cells())
    assert {"table", "svg", "details"} <= Reader.of(html).names
    assert "<script" not in html and html.count("</style>") == 1
    assert "No run is finished yet" in page([Cell(EVIL, EVIL, EVIL, missing=2)])


def test_markdown_and_page_have_no_html_links_or_control_characters_of_names() -> None:
    """Also of messages, which may quote anything, and of a name that ends with a backslash."""
    evil = "<img src=x>![a](http://x)\x1b[31m\\"
    failed = result(evil, error=evil, kind="refused")
    comparison = Comparison(evil, evil, {evil: "dir"}, {evil: {}}, {evil: {}}, [0], "out")
    made = [Cell(evil, evil, evil, grid=[failed])]
    text = to_markdown(comparison, made)
    assert "<img" not in text and "&lt;img" in text and "\x1b" not in text and "![" not in text
    (row,) = [line for line in text.splitlines() if line.startswith("| &lt;") and line.endswith("failed |")]
    assert len(re.findall(r"(?<!\\)(?:\\\\)*\|", row)) == 3
    assert "\x1b" not in make_page(comparison, made, ENVIRONMENT)


@pytest.mark.parametrize("runs", [[result("a")], [result("a"), result("a", error="oh", test=None)]])
def test_a_mean_over_fewer_seeds_than_asked_for_is_marked(runs: list[Result]) -> None:
    """Of a seed that is missing, and of one that failed; in the table and on the page."""
    comparison = Comparison("a", "a", {"m": "dir"}, {"t": {}}, {"a": {}}, [0, 1], "out")
    made = Cell("m", "t", "a", (), "accuracy", 0.7, runs=runs, seeds=2)
    assert "| a | 70.0 (1 of 2 seeds) |" in to_markdown(comparison, [made])
    assert "1 of 2 seeds" in make_page(comparison, [made], ENVIRONMENT)
    made.seeds = 1
    assert "1 seeds" not in to_markdown(comparison, [made]) + make_page(comparison, [made], ENVIRONMENT)


def test_warnings_of_runs_are_told() -> None:
    """Once for all the runs that have one, in the table and on the page."""
    head, rise = "warning: head: drawn from the seed, and not trained", "warning: the loss has risen"
    runs = [result("a", warnings=[head]), result("a", warnings=[head, rise])]
    for i, run in enumerate(runs):
        run.id, run.seed = str(i), i
    made = [Cell("m", "t", "a", (), "accuracy", 0.7, runs=runs, grid=runs[:1], seeds=2)]
    text, html = to_markdown(Comparison("c", "s", {"m": "d"}, {}, {}, [0, 1], "out"), made), page(made)
    assert f"- m, t, a, 2 runs: {head}" in text and text.count(rise) == 1 and ", seed 1: warning: the loss" in text
    assert html.count(head) == html.count(rise) == 1 and "2 runs: warning: head" in html


def test_methods_with_one_number_lead_together() -> None:
    """Equal is what is published as equal."""
    comparison = Comparison("a", "a", {"m": "dir"}, {"t": {}}, {"x": {}}, [0], "out")

    def lead(*means: float) -> str:
        made = [
            Cell("m", "t", name, (), "matthews", mean, runs=[result(name)])
            for name, mean in zip("abc", means, strict=True)
        ]
        (said,) = re.findall(r"<p class='lead'>(.*?)</p>", make_page(comparison, made, ENVIRONMENT))
        return said

    assert lead(0.0, 0.0, 0.0) == "<b>t</b>: a and b and c lead with 0.0 matthews."
    assert lead(0.2, 0.51234, 0.51235) == "<b>t</b>: b and c lead with 51.2 matthews."
    assert lead(0.2, 0.5, 0.4) == "<b>t</b>: b leads with 50.0 matthews."


def test_a_number_stands_under_its_own_task() -> None:
    """Also where a task has no untrained model (a new head); then there is no mean over tasks either."""
    comparison = Comparison("a", "a", {"m": "dir"}, {"s": {}, "t": {}, "u": {}}, {"x": {}}, [0], "out")
    made = [Cell("m", task, "x", (), "accuracy", 0.7, runs=[result("x")]) for task in "stu"]
    made += [Cell("m", task, "zero-shot", (), "accuracy", 0.5, runs=[result("zero-shot")]) for task in "tu"]
    text, html = to_markdown(comparison, made), make_page(comparison, made, ENVIRONMENT)
    assert "| x | 70.0 | 70.0 | 70.0 | 70.0 |" in text and "| zero-shot | - | 50.0 | 50.0 |  |" in text
    assert html.count("<td class='mean'></td>") == 1 and html.count("<td class='mean'>70.0</td>") == 1


@pytest.mark.parametrize(
    ("metrics", "heading", "mean"),
    [
        (["accuracy", "accuracy"], "mean", "60.0"),
        (["f1", "accuracy", "matthews"], "mean of f1, accuracy and matthews", "60.0"),
        (["accuracy", None], "mean", ""),
        (["accuracy", "perplexity"], None, None),
        (["accuracy"], None, None),
    ],
)
def test_the_mean_over_tasks_is_of_metrics_in_percent(
    metrics: list[str | None], heading: str | None, mean: str | None
) -> None:
    """Its heading names them if they differ; perplexities have no mean with anything. None: no run is done yet."""
    tasks = "stu"[: len(metrics)]
    comparison = Comparison("a", "a", {"m": "dir"}, {task: {} for task in tasks}, {"x": {}}, [0], "out")
    values = {2: (0.5, 0.7), 3: (0.5, 0.6, 0.7), 1: (0.5,)}[len(metrics)]
    made = [
        Cell("m", task, "x", (), metric, None if metric is None else value)
        for task, metric, value in zip(tasks, metrics, values, strict=True)
    ]
    text, html = to_markdown(comparison, made), make_page(comparison, made, ENVIRONMENT)
    first, _, row = next(part for part in text.split("\n\n") if part.startswith("| method")).splitlines()[:3]
    assert (first.split(" | ")[-1] == f"{heading} |") == (heading is not None) and ("mean" in first) == bool(heading)
    if heading is None:
        assert len(row.split(" | ")) == 1 + len(tasks) and "<td class='mean'>" not in html
    else:
        assert row.endswith(f"| {mean} |") and f"<td class='mean'>{mean}</td>" in html
        assert f"<th>mean<small>{heading[5:]}</small></th>" in html


def test_the_page_names_the_model_where_there_are_several() -> None:
    comparison = Comparison("a", "a", {"m": "dir", "n": "dir"}, {"t": {}}, {"x": {}}, [0], "out")
    good, bad = result("x"), result("x", error="oh")
    made = [Cell(model, "t", "x", (), "matthews", 0.5, runs=[good], grid=[good, bad]) for model in "mn"]
    html = make_page(comparison, made, ENVIRONMENT)
    for model in "mn":
        assert f"<b>t, {model}</b>: x leads" in html and f"<b>x</b> on t, {model}," in html
        assert html.count(f"<td class='left'>t, {model}</td>") == 2
    assert "<th class='left'>task</th>" in html, "above its column"
    assert "t, m" not in make_page(comparison, made[:1], ENVIRONMENT)


def test_charts_and_bars_are_of_the_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A curve is the mean of the seeds that did not fail, between the lowest and the highest; a test score lies at the
    peak of memory; the longest bar is the best cell's, also where less is better; accuracies are in percent."""
    comparison = Comparison("c", "s", {"m": "d"}, {"t": {}}, {"a": {}, "b": {}, "c": {}}, [0, 1], "out")
    drawn: list[Any] = []
    monkeypatch.setattr(page_module, "chart", lambda lines, *about: drawn.append((lines, about)) or "")
    later = [[3, 0.7, 0.2], [6, 1.2, None], [9, 2.0, 0.1]]
    for metric, scale, widths in (("accuracy", 100, [6, 53, 100]), ("perplexity", 1, [100, 53, 6])):
        runs = [result("a", dev_metric=metric, curve=[[2, 0.5, 0.6], [4, 1.0, 0.8]])]
        runs += [result("a", dev_metric=metric, curve=later), result("a", error="oh", curve=[[2, 0.5, 9.0]])]
        how = {"metric": metric, "dev_metric": metric, "gpu_gib": 1.5, "spread": 0.01, "runs": runs}
        made = [Cell("m", "t", name, (), mean=mean, **how) for name, mean in (("a", 0.5), ("b", 0.6), ("c", 0.7))]
        made.append(Cell("m", "t", "zero-shot", dev_metric=metric, dev_mean=0.3))
        drawn.clear()
        html = make_page(comparison, made, ENVIRONMENT)
        ((line, *_), about), ((by_time, *_), _), (points, _) = drawn
        assert (line.x, line.y) == ([2.5, 5.0], pytest.approx([0.4 * scale, 0.8 * scale]))
        assert (line.low, line.high) == (
            pytest.approx([0.2 * scale, 0.8 * scale]),
            pytest.approx([0.6 * scale, 0.8 * scale]),
        )
        assert by_time.x == pytest.approx([0.6, 1.1]) and about[-1] == pytest.approx(0.3 * scale)
        assert [(point.x, point.low, point.high) for point in points] == [
            ([1.5], pytest.approx([(mean - 0.01) * scale]), pytest.approx([(mean + 0.01) * scale]))
            for mean in (0.5, 0.6, 0.7)
        ]
        assert [int(width) for width in re.findall(r"class='bar'><span style='width:(\d+)%", html)] == widths
        best = "70.0" if scale == 100 else "0.500"
        assert re.findall(r"<td class='best'><b>([\d.]+)", html) == [best]
