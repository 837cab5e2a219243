"""The page: every method is in it, and nothing outside is needed to show it."""

import re
from html.parser import HTMLParser

import pytest

from keyhole.demo.report import COLOURS, cells, make_report, size
from keyhole.demo.train import Demo, Result

ENVIRONMENT = {
    "versions": {"keyhole": "0.1.0", "torch": "2.13.0", "triton": None},
    "os": "Linux",
    "cpu": {"name": "some CPU", "cores": 2},
    "gpus": [],
}


def result(name: str, **changes: object) -> Result:
    steps = 20
    made = Result(name, Demo(steps=steps), accuracy_before=0.5, accuracy_after=0.975, loss_before=0.75, loss_after=0.1)
    made.losses = [1.0 - i / 40 for i in range(steps)]
    made.times_s = [0.1 * (i + 1) for i in range(steps)]
    made.host_bytes = 30 * 2**20
    for key, value in changes.items():
        setattr(made, key, value)
    return made


class Checker(HTMLParser):
    """Collects tags, and attributes that would make a browser fetch something."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.fetched: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in ("meta", "br", "line", "polyline"):
            self.open.append(tag)
        self.fetched += [f"{tag} {key}" for key, _ in attrs if key in ("src", "href", "srcset", "data", "action")]
        self.fetched += [tag] * (tag in ("script", "link", "iframe", "object", "embed", "img"))

    def handle_endtag(self, tag: str) -> None:
        if tag not in ("line", "polyline"):
            assert self.open.pop() == tag


def test_every_method_is_there_and_nothing_is_fetched() -> None:
    """Names, numbers and curves of all methods stand in one file without links, scripts or addresses."""
    names = ["adamw", "sgd", "zo", "some-new-method"]
    page = make_report([result(name) for name in names], 0, ENVIRONMENT)
    for name in names:
        assert page.count(name) >= 4
    assert page.count("97.5%") >= len(names) and page.count('class="line') == 2 * len(names)
    assert not re.search(r"https?:|//[a-z]|url\(|@import", page)
    checker = Checker()
    checker.feed(page)
    assert checker.fetched == [] and checker.open == []


def test_skipped_methods_say_why() -> None:
    """A method that could not run has its reason in the table, escaped, and no curve."""
    page = make_report([result("adamw"), result("lsp", skipped="needs <a GPU>")], 0, ENVIRONMENT)
    assert "needs &lt;a GPU&gt;" in page and page.count('class="line') == 2


def test_report_without_any_result() -> None:
    """When no method could run there is still a page."""
    page = make_report([result("zo", skipped="no")], 0, ENVIRONMENT)
    assert "No method could run" in page


def test_more_methods_than_colours() -> None:
    """Colours repeat rather than run out."""
    many = [result(f"m{i}") for i in range(len(COLOURS) + 3)]
    page = make_report(many, 0, ENVIRONMENT)
    assert f"c{len(COLOURS)}" not in page and many[-1].method in page


def test_versions_are_written_down() -> None:
    """What is installed is named; what is not is left out."""
    page = make_report([result("zo")], 3, ENVIRONMENT)
    assert "torch 2.13.0" in page and "triton" not in page and "Seed 3" in page


@pytest.mark.parametrize(
    ("count", "text"), [(0, "-"), (2**20, "1.0 MiB"), (2**30, "1.00 GiB"), (5 * 2**30, "5.00 GiB"), (1000, "0.0 MiB")]
)
def test_sizes(count: int, text: str) -> None:
    """Sizes are in MiB and GiB; nothing is a dash."""
    assert size(count) == text


def test_cells_of_terminal_and_page_agree() -> None:
    """The page holds every cell of the printed row."""
    one = result("zo", moved_bytes=3 * 2**20, gpu_bytes=7 * 2**20)
    page = make_report([one], 0, ENVIRONMENT)
    assert all(cell.replace(">", "&gt;") in page for cell in cells(one))
