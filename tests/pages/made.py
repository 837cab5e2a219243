"""Pages with everything on them: many names that end together, long words, small and large numbers."""

import math
import re
from html.parser import HTMLParser
from pathlib import Path

from keyhole.compare import page as compare_page
from keyhole.compare.file import Comparison
from keyhole.compare.result import Result
from keyhole.compare.table import Cell, zero_shot_cell
from keyhole.data.report import Marked
from keyhole.demo.report import Demo, Squeezed, make_report
from keyhole.demo.report import Result as DemoResult
from keyhole.methods import METHODS
from keyhole.report import compared
from keyhole.report import page as run_page
from keyhole.report.curves import Curves
from keyhole.report.story import Answer, Answers, Planned, Story, View

VOID = ("meta", "br", "input")


class Reader(HTMLParser):
    """Checks that tags are closed in order, and that a browser would fetch and execute nothing; collects names."""

    @classmethod
    def of(cls, html: str) -> "Reader":
        reader = cls()
        reader.open, reader.names = [], set()
        reader.feed(html)
        assert reader.open == [] and not reader.names & {"script", "link", "img", "iframe", "object", "embed", "form"}
        assert not re.search(r"url\(|@import|https?:", html)
        return reader

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_startendtag(tag, attrs)
        self.open += [tag] if tag not in VOID else []

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.add(tag)
        assert not any(name in ("src", "srcset", "action", "data") or name.startswith("on") for name, _ in attrs)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


LONG = "meta-llama/Llama-3.1-70B-Instruct-with-a-name-that-goes-on"
ENVIRONMENT = {
    "versions": {"keyhole": "0.2.0", "torch": "2.13.0", "transformers": "5.22.2"},
    "os": "Linux-6.18", "cpu": {"name": "some CPU", "cores": 16}, "gpus": [{"name": "NVIDIA H200"}],
}  # fmt: skip


def curves(steps: int, height: float = 1.0, tasks: int = 3) -> Curves:
    made = Curves()
    for i in range(1, steps + 1):
        entry = {"step": i, "loss": height * (0.3 + 2 / math.sqrt(i)) * (1 + 0.2 * math.sin(7.0 * i)), "tokens": 4096}
        entry |= {"seconds": 0.46, "learning_rate": 1e-7 * (1 - i / steps), "tokens_per_second": 8904.0}
        made.add(entry | {"gpu_gib": 7.61, "projected_grad": 1e3 * math.cos(3.0 * i), "changed": 0.99})
        if i % max(1, steps // 6) == 0:
            scores = {f"eval_task-{n}_accuracy": 0.5 + 0.4 * i / steps for n in range(tasks)}
            made.add({"step": i, "eval_loss": height * (0.4 + 2 / math.sqrt(i)), "perplexity": 3.0, **scores})
    made.add({"step": steps, "test_accuracy": 0.871, "test_questions": 1000})
    return made


def story() -> Story:
    words = ["The", " soup", " was", " cold", ".", "\n", "W" * 300, " antidisestablishmentarianism" * 3]
    rows = [Answer("Is it? " * 40, "no\nnever " + "x" * 200, "yes", False), Answer("2 + 2 = ", "4", "4", True)]
    lines = [
        f"keyhole 0.2.0: zo on {LONG}",
        "  model: LlamaForCausalLM, 70,553,706,496 parameters",
        "    trained  80 x q",
    ]
    return Story(
        "id", "", "zo", LONG, "cuda", "running", "", "2026-11-16 08:00", "2026-11-16 09:00", 100_000,
        [*lines, f"  train: /a/very/long/path/{'that/goes/on/' * 12}train.jsonl"], ["warning: " + "w" * 400],
        Planned(8e9, {"homes": 3e9, "slots": 2e9, "activations": 2.5e9}, 1.4e11,
                {"total": 0.47, "compute": 0.2, "link": 0.45, "CPU": 0.0}, "link", "s"),
        {"device_bytes": 7.6e9, "host_bytes": 1.39e11},
        [Marked("train.jsonl, line 1", "9 tokens", [(False, words), (True, [" red", "<|end|>"])])],
        [Answers(10, "greedy", rows), Answers(20, "greedy", rows)],
    )  # fmt: skip


def run() -> str:
    return run_page.make_page(View("out-" + "x" * 60, Path("run"), story(), curves(3000), ENVIRONMENT, "seed: 0\n" * 9))


def report() -> str:
    names = [f"seed-{i}/out/{'long/' * 6}run" if i % 2 else f"run-{i}" for i in range(14)]
    made = [
        View(name, Path("run"), Story(method="lomo", model=LONG, total=900), curves(40 * (i + 1)),
             settings={"learning_rate": 1e-7 * i, "lomo": {"compile": bool(i % 2)}})
        for i, name in enumerate(names)
    ]  # fmt: skip
    return compared.make_page(made, Path("."))


def compare() -> str:
    def result(method: str, i: int) -> Result:
        known = {"dev_metric": "accuracy", "test_metric": "accuracy", "dev": 0.8, "test": 0.7, "gpu_gib": 1.5 * 2**i}
        curve = [[200 * k, 0.1 * 3**i * k, 0.5 + 0.05 * k, 0.7] for k in range(1, 6)]
        return Result("id", LONG, "sst2", method, [("learning_rate", "1e-7")], 0, **known | {"curve": curve})

    cells = [zero_shot_cell(result("zero-shot", 0))]
    for i, method in enumerate(METHODS):
        one = result(method, i % 8)
        chosen = (("learning_rate", "1e-7"),)
        cells.append(
            Cell(LONG, "sst2", method, chosen, "accuracy", 0.7, 0.01, "accuracy", 0.8, 9.0, one.gpu_gib, [one], [one])
        )
    comparison = Comparison("t" * 80, "source", {LONG: "dir"}, {"sst2": {}}, dict.fromkeys(METHODS, {}), [0], "out")
    return compare_page.make_page(comparison, cells, ENVIRONMENT)


def short() -> str:
    """Few names, and short ones."""
    made = [DemoResult(name, Demo(steps=9), losses=[1 / (k + 1) for k in range(9)]) for name in ("adamw", "mmw")]
    for one in made:
        one.times_s = [0.1 * (k + 1) for k in range(9)]
    return make_report(made, 0, ENVIRONMENT)


def demo() -> str:
    made = []
    for i, name in enumerate(METHODS):
        one = DemoResult(
            name, Demo(steps=60), accuracy_before=0.5, accuracy_after=0.97, loss_before=0.7, loss_after=0.1
        )
        one.losses = [0.05 + 1.2 / (1 + k) for k in range(60)]
        one.times_s = [0.1 * (i + 1) * (k + 1) for k in range(60)]
        made.append(one)
    shown = [Squeezed(name, "", 10**7, 5 * 10**6, 10**8, 10**7, [2.0], True, True) for name in ("zo", "lomo")]
    return make_report(made, 0, ENVIRONMENT, [*shown, Squeezed("lsp", "too small " * 60)])


PAGES = {"run": run, "report": report, "compare": compare, "demo": demo, "short": short}
