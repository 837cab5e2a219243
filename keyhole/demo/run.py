"""`keyhole demo`: every method on the embedded model and task, one table, one HTML page.

For each method the embedded model is loaded fresh, scored on the held-out notes, trained, and scored again. Every
method of the table METHODS is in the demo (methods.yaml). If a method cannot run here (it raises a UserError), the
table shows the reason instead of numbers.

    accuracy    share of held-out notes whose right stamp is the more likely one, as in `keyhole eval`
    loss        NLL of the right stamp on held-out notes; the curves show the training loss, step by step
    seconds     the training steps alone
    memory      the peak of the training steps above what the process held before the model was loaded, host and GPU;
                a library that a method is the first to use counts too, and on the host nothing without Linux's /proc
    moved       bytes over the link between host and device; 0 if everything is resident

Then keyhole's main property: the same run within a budget smaller than the model gives the same bits. The embedded
model is so small that a batch of notes takes more memory than its weights. So `squeeze` builds a deeper model with
random weights (LAYERS blocks, the same tokenizer and notes) and trains it STEPS steps, twice: with all weights on the
device, and with gpu_memory set to SHARE of the weights alone. The budget must hold everything: slots, activations,
logits, the method's buffers. On a GPU it is enforced; without one the same code runs with plain copies instead of the
link: the losses, the weights and the bytes are the same.
"""

import time
from dataclasses import asdict, replace
from pathlib import Path

import torch
import yaml

import keyhole
from keyhole import assets
from keyhole.bench.measure import clean_up, device_memory, host_memory
from keyhole.data.batches import Loader, Padding
from keyhole.data.prepare import prepare
from keyhole.demo.report import COLUMNS, Demo, Result, Squeezed, cells, line_of, make_report, squeezed_line
from keyhole.disk.files import write_text, writing_to
from keyhole.disk.json_text import json_text
from keyhole.errors import UserError
from keyhole.eval.evaluate import read_task
from keyhole.eval.score import score_choices
from keyhole.machine.probe import environment
from keyhole.machine.text import aligned
from keyhole.methods import METHODS
from keyhole.methods.base import Method
from keyhole.methods.workload import Workload
from keyhole.model.structure.skeleton import read_config
from keyhole.model.structure.source import read_tokenizer
from keyhole.training.rundir import FORMAT, inspect
from keyhole.training.schedule import Schedule

THREADS = 1
MAX_LENGTH = 128
LAYERS, HIDDEN, STEPS, NOTES, LENGTH = 20, 96, 3, 2, 24  # of the deeper model and its batches
SHARE = 0.5  # of its weights


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
    if unknown := [name for name in names if name not in METHODS]:
        raise UserError(f"methods: {unknown[0]!r} is not one of {', '.join(METHODS)}")
    root = Path(output_dir)
    found = inspect(str(root), resume=False)  # a directory with other files, or a run of the user's, is refused
    with writing_to(root):
        found.run.mkdir(parents=True, exist_ok=True)
        write_text(found.marker, json_text({"format": FORMAT, "keyhole": keyhole.__version__}) + "\n")
    print(
        f"keyhole: the embedded model and task, {len(names)} methods, seed {seed}; everything goes to {root}/",
        flush=True,
    )
    threads = torch.get_num_threads()
    torch.set_num_threads(THREADS)
    try:
        # first: it uses the libraries that are loaded on first use, and that belong to no method
        squeezed = [squeeze(name, seed, min(steps or STEPS, STEPS), device) for name in one_of_each_sweep(names)]
        results = [_run_method(Result(name, settings_of(name, steps)), root, seed, device) for name in names]
    finally:
        torch.set_num_threads(threads)
    for in_budget in squeezed:
        print(f"keyhole: {squeezed_line(in_budget)}", flush=True)
    print("\n".join(["", *aligned([COLUMNS, *map(cells, results)]), ""]))
    with writing_to(root):
        write_text(root / "results.json", json_text([asdict(result) for result in results], indent=1) + "\n")
        write_text(root / "budget.json", json_text([asdict(each) for each in squeezed], indent=1) + "\n")
        write_text(root / "report.html", make_report(results, seed, environment(), squeezed))
    print(f"keyhole: report: {root / 'report.html'}", flush=True)
    return results


def _run_method(result: Result, root: Path, seed: int, device: str | None) -> Result:
    clean_up(torch.device("cpu"))
    held_bytes = host_memory()
    try:
        model, method = start(result.method, result.settings, seed, device)
        task = read_task("demo")
        before, link = score_choices(model, task), model.engine
        moved_bytes = link.bytes_up + link.bytes_down
        clean_up(model.device)
        result.losses, result.times_s = train(model, method, result.settings, seed)
        result.host_bytes = max(0, host_memory() - held_bytes)
        result.gpu_bytes = device_memory(model.device)["allocated_bytes"]
        result.moved_bytes = link.bytes_up + link.bytes_down - moved_bytes
        after = score_choices(model, task)
        result.accuracy_before, result.loss_before = before.accuracy, before.loss
        result.accuracy_after, result.loss_after = after.accuracy, after.loss
        model.save_pretrained(root / result.method)
        model.close()
    except UserError as error:
        result.skipped = str(error)
    print(f"keyhole: {line_of(result)}", flush=True)
    return result


def settings_of(name: str, steps: int | None = None) -> Demo:
    """The settings of a method in the demo; `steps` limits its steps."""
    settings = Demo(**yaml.safe_load(Path(__file__).with_name("methods.yaml").read_text()).get(name, {}))
    return settings if steps is None else replace(settings, steps=min(steps, settings.steps))


def start(name: str, settings: Demo, seed: int, device: str | None) -> tuple[keyhole.Model, Method]:
    model = keyhole.load(assets.MODEL, dtype="float32", device=device)
    return model, METHODS[name].load()(model, settings.lr, seed=seed, **settings.options)


def train(
    model: keyhole.Model, method: Method, settings: Demo, seed: int, length: int = MAX_LENGTH, kind: str = "linear"
) -> tuple[list[float], list[float]]:
    """The training loop: a rate, a batch, a step. Returns the loss of each step, and the seconds until it was done."""
    dataset = prepare(str(assets.TRAIN), read_tokenizer(str(assets.MODEL)), max_length=length)
    loader = Loader(dataset, settings.batch_size, seed=seed, padding=Padding(1))
    schedule = Schedule(kind, settings.lr, settings.steps)
    losses, times_s, begin_s = [], [], time.perf_counter()
    for step in range(settings.steps):
        method.lr = schedule.rate(step)
        losses.append(float(method.step(loader.next_step())))
        times_s.append(time.perf_counter() - begin_s)
    method.flush()
    return losses, times_s


def one_of_each_sweep(names: list[str]) -> list[str]:
    """The first streaming method of each kind of sweep."""
    kinds = {METHODS[name].sweep: name for name in reversed(names) if METHODS[name].streams}
    return [name for name in names if name in kinds.values()]


def squeeze(name: str, seed: int = 0, steps: int = STEPS, device: str | None = None) -> Squeezed:
    made = Squeezed(name)
    try:
        resident, made.losses = _train_deeper(name, seed, steps, device, None)
        made.weights_bytes = sum(t.numel() * t.element_size() for _, t in resident.named_tensors())
        made.budget_bytes = int(SHARE * made.weights_bytes)
        streamed, losses = _train_deeper(name, seed, steps, device, made.budget_bytes)
    except UserError as error:
        made.skipped = str(error)
        return made
    made.up_bytes, made.down_bytes = streamed.engine.bytes_up, streamed.engine.bytes_down
    made.same_losses, theirs = made.losses == losses, dict(streamed.named_tensors())
    made.same_weights = all(torch.equal(t.cpu(), theirs[key].cpu()) for key, t in resident.named_tensors())
    for model in (resident, streamed):
        model.close()
    return made


def _train_deeper(
    name: str, seed: int, steps: int, device: str | None, budget: int | None
) -> tuple[keyhole.Model, list[float]]:
    demo, config = replace(settings_of(name), steps=steps, batch_size=NOTES), read_config(str(assets.MODEL))
    config.num_hidden_layers, config.hidden_size, config.intermediate_size = LAYERS, HIDDEN, 3 * HIDDEN
    config.head_dim = HIDDEN // config.num_attention_heads
    settings = METHODS[name].settings(**demo.options)
    work = Workload(name, NOTES * LENGTH, settings.passes, settings)
    where = {"placement": "resident"} if budget is None else {"placement": "stream", "gpu_memory": budget}
    model = keyhole.load(config, init="random", dtype="float32", device=device, seed=seed, workload=work, **where)
    method = METHODS[name].load()(model, demo.lr, seed=seed, **demo.options)
    losses, _ = train(model, method, demo, seed, LENGTH, "constant")
    model.engine.wait_for_homes()
    return model, losses
