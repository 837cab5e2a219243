"""`keyhole demo`: every method on the embedded model and task, one table, one HTML page.

For each name in METHODS the embedded model is loaded fresh, scored on the held-out notes, trained, and
scored again. A method that joins the table joins the demo, with the rate of its row. One that cannot run here (it says so with a UserError) gets its reason in the
table instead of numbers.

    accuracy    share of held-out notes whose right stamp is the likelier one; the score of `keyhole eval`
    loss        NLL of the right stamp on held-out notes; the curves show the training loss, step by step
    seconds     the training steps alone
    memory      the highest above what the process held before the model was loaded, host and GPU (memory.py)
    moved       bytes over the link between host and device; 0 where everything is resident

Matrices here are so small that more threads only wait for each other: the demo computes on THREADS of them.
"""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import keyhole
from keyhole import assets
from keyhole.errors import UserError
from keyhole.methods import METHODS
from keyhole.methods.base import Demo

THREADS = 1
MAX_LENGTH = 128
TABLE_WIDTH = 110  # a narrower terminal wraps it, which beats cutting numbers off


@dataclass
class Result:
    """What one method did. `skipped` says why it could not run; then the numbers mean nothing."""

    method: str
    settings: Demo
    skipped: str = ""
    accuracy_before: float = 0.0
    accuracy_after: float = 0.0
    loss_before: float = 0.0
    loss_after: float = 0.0
    host_bytes: int = 0
    gpu_bytes: int = 0
    moved_bytes: int = 0
    losses: list[float] = field(default_factory=list)
    times_s: list[float] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        return self.times_s[-1] if self.times_s else 0.0


def run_demo(
    output_dir: str | Path,
    methods: list[str] | None = None,
    seed: int = 0,
    steps: int | None = None,
    device: str | None = None,
) -> list[Result]:
    """Train with every method (or those named), print the table, write report.html, results.json and the models.

    `steps` caps the steps of every method; only tests want that.
    """
    from keyhole.demo.memory import measured_beside
    from keyhole.demo.report import make_report
    from keyhole.machine.probe import environment
    names = list(methods or METHODS)
    unknown = [name for name in names if name not in METHODS]
    if unknown:
        raise UserError(f"methods: {unknown[0]!r} is not one of {', '.join(METHODS)}")
    root = _own_directory(Path(output_dir))
    _say(f"the embedded model and task, {len(names)} methods, seed {seed}; everything goes to {root}/")
    with measured_beside(names, device) as peaks, _threads(THREADS):
        results = [_run_method(Result(name, settings_of(name, steps)), root, seed, device) for name in names]
        found = peaks()
    for result in results:
        result.host_bytes, result.gpu_bytes = found.get(result.method, (0, 0))
    _print_table(results)
    _write(root / "results.json", json.dumps([asdict(result) for result in results], indent=1) + "\n")
    _write(root / "report.html", make_report(results, seed, environment()))
    _say(f"report: {root / 'report.html'}")
    return results


def settings_of(name: str, steps: int | None = None) -> Demo:
    """How a method is run; `steps` caps its steps."""
    settings = METHODS[name].demo
    return settings if steps is None else replace(settings, steps=min(steps, settings.steps))


def start(name: str, settings: Demo, seed: int, device: str | None) -> tuple[Any, Any]:
    """The embedded model, fresh, and the method that will train it."""
    model = keyhole.load(assets.MODEL, dtype="float32", device=device)
    return model, METHODS[name].load()(model, settings.lr, seed=seed, **settings.options)


def train(model: Any, method: Any, settings: Demo, seed: int) -> list[tuple[float, float]]:
    """The training loop: a rate, a batch, a step. Gives loss and time (s) of each step."""
    from keyhole.data import Loader, prepare
    from keyhole.training.schedule import Schedule

    dataset = prepare(str(assets.TRAIN), model.tokenizer, max_length=MAX_LENGTH)
    loader = Loader(dataset, settings.batch_size, seed=seed, pad_to_multiple_of=1)
    schedule = Schedule("linear", settings.lr, settings.steps)
    curve, begin_s = [], time.perf_counter()
    for step in range(settings.steps):
        method.lr = schedule.rate(step)
        loss = float(method.step(loader.next_step()))
        curve.append((loss, time.perf_counter() - begin_s))
    method.flush()
    return curve


def _run_method(result: Result, root: Path, seed: int, device: str | None) -> Result:
    """Load, score, train, score, save; fills in the result."""
    from keyhole.eval.scoring import score_task
    from keyhole.eval.tasks import read_task

    try:
        model, method = start(result.method, result.settings, seed, device)
        task = read_task("demo")
        before, moved_bytes = score_task(model, task), _moved_bytes(model)
        curve = train(model, method, result.settings, seed)
        result.losses, result.times_s = [loss for loss, _ in curve], [time_s for _, time_s in curve]
        result.moved_bytes = _moved_bytes(model) - moved_bytes
        after = score_task(model, task)
        result.accuracy_before, result.loss_before = before.accuracy, before.loss
        result.accuracy_after, result.loss_after = after.accuracy, after.loss
        model.save_pretrained(root / result.method)
        model.close()
    except UserError as error:
        result.skipped = str(error)
    _say(_line(result))
    return result


def _moved_bytes(model: Any) -> int:
    return model.engine.bytes_up + model.engine.bytes_down


def _line(result: Result) -> str:
    if result.skipped:
        return f"{result.method}: skipped: {result.skipped}"
    accuracy = f"accuracy {result.accuracy_before:.1%} -> {result.accuracy_after:.1%}"
    return f"{result.method}: {result.settings.steps} steps in {result.seconds:.1f} s, {accuracy}"


@contextmanager
def _threads(count: int) -> Iterator[None]:
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(min(count, before))
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _own_directory(root: Path) -> Path:
    """The directory, marked as ours; one with somebody else's files is refused."""
    from keyhole.training.rundir import FORMAT, inspect

    found = inspect(str(root), resume=True)
    try:
        found.run.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"output_dir: cannot write to {root}: {error.strerror}") from error
    _write(found.marker, json.dumps({"format": FORMAT, "keyhole": keyhole.__version__}) + "\n")
    return root


def _write(path: Path, text: str) -> None:
    from keyhole.disk.files import write_text

    try:
        write_text(path, text)
    except OSError as error:
        raise UserError(f"output_dir: cannot write {path}: {error.strerror}") from error


def _say(line: str) -> None:
    print(f"keyhole: {line}", flush=True)


def _print_table(results: list[Result]) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    from keyhole.demo.report import COLUMNS, cells

    table = Table(box=SIMPLE_HEAD)
    for column in COLUMNS:
        table.add_column(column, justify="left" if column == COLUMNS[0] else "right", no_wrap=True)
    for result in results:
        table.add_row(*cells(result))
    width = Console().width
    Console(width=max(width, TABLE_WIDTH)).print(table)
