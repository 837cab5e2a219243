"""The page: every method is in it, and nothing outside is needed to show it."""

from keyhole.demo.report import COLOURS, Demo, Result, cells, make_report, size
from tests.pages.made import Reader

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


def test_every_method_is_there_and_nothing_is_fetched() -> None:
    """Names, numbers and curves of all methods stand in one file without links, scripts or addresses."""
    names = ["adamw", "sgd", "zo", "some-new-method"]
    page = make_report([result(name) for name in names], 0, ENVIRONMENT)
    for name in names:
        assert page.count(name) >= 4
    assert page.count("97.5%") >= len(names) and page.count('class="line') == 2 * len(names)
    Reader.of(page)


def test_skipped_methods_say_why() -> None:
    """In the table, escaped, without a curve; there is a page too when no method could run, or more than colours."""
    page = make_report([result("adamw"), result("lsp", skipped="needs <a GPU>")], 3, ENVIRONMENT)
    assert "needs &lt;a GPU&gt;" in page and page.count('class="line') == 2
    assert "torch 2.13.0" in page and "triton" not in page and "Seed 3" in page
    assert "No method could run" in make_report([result("zo", skipped="no")], 0, ENVIRONMENT)
    many = [result(f"m{i}") for i in range(len(COLOURS) + 3)]
    assert f"c{len(COLOURS)}" not in make_report(many, 0, ENVIRONMENT)


def test_cells_of_terminal_and_page_agree() -> None:
    """The page holds every cell of the printed row; sizes are in MiB and GiB, and nothing is a dash."""
    one = result("zo", moved_bytes=3 * 2**20, gpu_bytes=7 * 2**20)
    page = make_report([one], 0, ENVIRONMENT)
    assert all(cell.replace(">", "&gt;") in page for cell in cells(one))
    assert [size(count) for count in (0, 1000, 2**20, 5 * 2**30)] == ["-", "0.0 MiB", "1.0 MiB", "5.00 GiB"]
