"""`keyhole demo`: every method on the embedded model and task, one table, one HTML page.

For each method the embedded model is loaded fresh, scored on the held-out notes, trained (train.py), and scored again.
Every method of the table METHODS is in the demo (methods.yaml). If a method cannot run here (it raises a UserError),
the table shows the reason instead of numbers.

    accuracy    share of held-out notes whose right stamp is the more likely one, as in `keyhole eval`
    loss        NLL of the right stamp on held-out notes; the curves show the training loss, step by step
    seconds     the training steps alone
    memory      the peak above the process's memory before the model was loaded, host and GPU (peak_memory.py)
    moved       bytes over the link between host and device; 0 if everything is resident

Then a deeper model is trained with all weights on the device and within a budget smaller than its weights (train.py):
losses and weights must be the same.

Matrices here are so small that more threads would only wait for each other: the demo uses THREADS of them.
"""

from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

import torch

import keyhole
from keyhole.demo import peak_memory, train
from keyhole.demo.report import COLUMNS, cells, line_of, make_report, squeezed_line
from keyhole.demo.train import Result
from keyhole.disk.files import write_text, writing_to
from keyhole.disk.json_text import json_text
from keyhole.errors import UserError
from keyhole.eval.evaluate import read_task
from keyhole.eval.score import score_choices
from keyhole.machine.probe import environment
from keyhole.machine.text import aligned
from keyhole.methods import METHODS
from keyhole.training.rundir import FORMAT, inspect

THREADS = 1


def run_demo(
    output_dir: str | Path,
    methods: list[str] | None = None,
    seed: int = 0,
    steps: int | None = None,
    device: str | None = None,
) -> list[Result]:
    """Trains with every method (or those named), prints the table, writes report.html, results.json and the models.

    `steps` limits the steps of every method; it is meant for tests.
    """
    names = list(methods or METHODS)
    unknown = [name for name in names if name not in METHODS]
    if unknown:
        raise UserError(f"methods: {unknown[0]!r} is not one of {', '.join(METHODS)}")
    root = Path(output_dir)
    found = inspect(str(root), resume=True)  # a directory with other files is refused
    with writing_to(root):
        found.run.mkdir(parents=True, exist_ok=True)
        write_text(found.marker, json_text({"format": FORMAT, "keyhole": keyhole.__version__}) + "\n")
    _say(f"the embedded model and task, {len(names)} methods, seed {seed}; everything goes to {root}/")
    threads = torch.get_num_threads()
    with peak_memory.measured_beside(names, device) as peaks, ExitStack() as after:
        torch.set_num_threads(THREADS)
        after.callback(torch.set_num_threads, threads)
        results = [_run_method(Result(name, train.settings_of(name, steps)), root, seed, device) for name in names]
        squeezed = []
        for name in train.one_of_each_sweep(names):
            squeezed.append(train.squeeze(name, seed, min(steps or train.STEPS, train.STEPS), device))
            _say(squeezed_line(squeezed[-1]))
        measured = peaks()
    for result in results:
        result.host_bytes, result.gpu_bytes = measured.get(result.method, (0, 0))
    print("\n".join(["", *aligned([COLUMNS, *map(cells, results)]), ""]))
    with writing_to(root):
        write_text(root / "results.json", json_text([asdict(result) for result in results], indent=1) + "\n")
        write_text(root / "budget.json", json_text([asdict(each) for each in squeezed], indent=1) + "\n")
        write_text(root / "report.html", make_report(results, seed, environment(), squeezed))
    _say(f"report: {root / 'report.html'}")
    return results


def _run_method(result: Result, root: Path, seed: int, device: str | None) -> Result:
    """Loads, scores, trains, scores, saves; fills in the result."""
    try:
        model, method = train.start(result.method, result.settings, seed, device)
        task = read_task("demo")
        before, link = score_choices(model, task), model.engine
        moved_bytes = link.bytes_up + link.bytes_down
        result.losses, result.times_s = train.train(model, method, result.settings, seed)
        result.moved_bytes = link.bytes_up + link.bytes_down - moved_bytes
        after = score_choices(model, task)
        result.accuracy_before, result.loss_before = before.accuracy, before.loss
        result.accuracy_after, result.loss_after = after.accuracy, after.loss
        model.save_pretrained(root / result.method)
        model.close()
    except UserError as error:
        result.skipped = str(error)
    _say(line_of(result))
    return result


def _say(line: str) -> None:
    print(f"keyhole: {line}", flush=True)
