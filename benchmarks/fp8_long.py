"""Does rounding to 8 bits matter in a long zeroth-order run? `wire: fp8` beside bf16 and fp32, in one process.

    python benchmarks/fp8_long.py [MODEL TASK_DATA] [--task sst2] [--steps 20000] [--lr LR] [--tf32] [--out DIR]

Without MODEL: the embedded model and task. An update is far below the spacing d of E4M3 (an eighth to a sixteenth of
the weight), so stochastic rounding changes few weights, each by a full d: unbiased, with a variance of d |update| per
step, which accumulates over a run. The noise is proportional to rate x steps, and so is the learned change at small
rates: a tenth of the rate over ten times the steps gives the same noise. The amount of noise and its effect are two
questions, so there are two kinds of runs, all from the same weights, on the same batches, with the same directions:

    learning     fp32, bf16, fp8: each with updates from its own losses
    rounding     bf16 and fp8 weights that get the updates of the fp32 run, step by step: they differ from its
                 weights by rounding alone

Every --every steps: loss on held-out rows, accuracy on dev questions, and the squared distance of the blocks' matrices
from those of the fp32 run, as a share of their energy at the start. Runs compute in --dtype (float32), so that only the
storage differs. Writes fp8_long.json after every such line, and prints the table last.
"""

import argparse
import json
import platform
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch

import keyhole
from keyhole import assets
from keyhole.config import TrainConfig, resolve
from keyhole.config.data import data_settings
from keyhole.data.run import Data, load_data
from keyhole.eval.scoring import score_task
from keyhole.eval.tasks import read_task
from keyhole.methods.zo.update import Pending
from keyhole.training.validation import Judge, evaluate

WIRES = ("fp32", "bf16", "fp8")
QUICK = {"steps": 20, "every": 10, "questions": 40}


@dataclass
class Run:
    """One model on its way. learns: by its own losses; otherwise it gets the updates of the first run."""

    wire: str
    learns: bool
    model: keyhole.Model
    method: keyhole.ZO
    data: Data
    points: list[dict[str, float]] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.wire if self.learns else f"{self.wire}, updates of fp32"


def settings(args: argparse.Namespace) -> TrainConfig:
    """The data and the batch as `keyhole train` would have them."""
    about: dict[str, Any] = {"method": "zo", "model": args.model or "demo", "seed": args.seed, "dtype": args.dtype}
    about |= {
        "output_dir": "out/fp8_long",
        "max_steps": args.steps,
        "batch_size": args.batch_size,
        "learning_rate": args.lr,
    }
    if args.model is None:
        about |= {"train_data": "demo", "eval_data": "demo", "max_length": 128}
    else:
        about |= {"task": args.task, "task_data": str(args.task_data), "loss": "candidates", "max_length": 256}
        about |= {"num_train": 1000, "num_dev": 500, "num_eval": 1000}
    return resolve(TrainConfig(**about))[0]


def start(wire: str, learns: bool, config: TrainConfig, args: argparse.Namespace) -> Run:
    """A model in one format."""
    source = assets.locate(config.model, assets.MODEL)
    model = keyhole.load(source, dtype=args.dtype, wire=wire, device=args.device, tf32=args.tf32)
    method = keyhole.ZO(model, args.lr, seed=args.seed, distribution=args.distribution, fp8_steps=args.steps + 1)
    return Run(wire, learns, model, method, load_data(data_settings(config, None)))


def matrices(model: keyhole.Model) -> Iterator[torch.Tensor]:
    """Those of blocks, one at a time, in float64 (float32 would lose the distances of bf16)."""
    blocks = {id(t) for unit in model.layout.of_kind("block") for t in unit.tensors if len(t.shape) > 1}
    for tensor, (_, w) in zip(model.layout.tensors, model.named_tensors(), strict=True):
        if id(tensor) in blocks:
            yield w.double()


def measure(
    run: Run, first: Run, origin: list[torch.Tensor], step: int, config: TrainConfig, questions: int | None
) -> dict[str, float]:
    """A point of the curves. questions: of the embedded task, the first so many, and one batch of rows; None: all."""
    run.method.flush()
    point: dict[str, float] = {"step": step}
    energy = sum(float(w.square().sum()) for w in origin)
    for name, others in (("moved", origin), ("from_fp32", matrices(first.model))):
        pairs = zip(matrices(run.model), others, strict=True)
        point[name] = sum(float((w - other).square().sum()) for w, other in pairs) / energy
    if run.learns:
        batches = run.data.eval if questions is None else list(islice(run.data.eval, 1))
        point["loss"] = evaluate(run.model, batches)["eval_loss"]
        point["accuracy"] = accuracy(run, config, questions)
    return point


def accuracy(run: Run, config: TrainConfig, questions: int | None) -> float:
    """On dev questions."""
    if config.task is not None:
        judge = Judge(run.data.dev, run.data.test, config.max_length)
        return judge.dev_metrics(run.model, lambda: False)["eval_accuracy"]
    task = read_task("demo")
    return score_task(run.model, replace(task, questions=task.questions[:questions])).accuracy


def compare(args: argparse.Namespace) -> dict[str, Any]:
    """All runs side by side."""
    config = settings(args)
    kinds = [(wire, True) for wire in WIRES] + [(wire, False) for wire in WIRES[1:]]
    runs = [start(wire, learns, config, args) for wire, learns in kinds]
    first, origin, begin_s = runs[0], list(matrices(runs[0].model)), time.perf_counter()
    known: list[tuple[Pending, float]] = []
    found: dict[str, Any] = {"settings": {name: str(value) for name, value in vars(args).items()}}
    found |= {"torch": torch.__version__, "machine": platform.machine(), "python": platform.python_version()}
    if args.device == "cuda":
        found["gpu"] = torch.cuda.get_device_name()
    for step in range(args.steps + 1):
        if step % args.every == 0 or step == args.steps:
            for run in runs:
                if not run.learns and known:
                    for _ in run.method.replay(known):  # elementwise, so many steps at one visit of a unit
                        pass
                run.points.append(measure(run, first, origin, step, config, args.questions))
            known = []
            print(line(runs, step, time.perf_counter() - begin_s), flush=True)
            found["runs"] = {run.name: run.points for run in runs}
            args.out.mkdir(parents=True, exist_ok=True)
            (args.out / "fp8_long.json").write_text(json.dumps(found, indent=1) + "\n")
        if step == args.steps:
            break
        for run in runs:
            if run.learns:
                run.method.step(next(run.data.train))
        known.append((first.method.latest, 0.0))
    return found


def line(runs: list[Run], step: int, seconds: float) -> str:
    """Where all runs are."""
    parts = []
    for run in runs:
        point = run.points[-1]
        learned = f"loss {point['loss']:.4f}, accuracy {point['accuracy']:.3f}, " if run.learns else ""
        parts.append(f"{run.name}: {learned}{point['from_fp32']:.3%} from fp32")
    return f"step {step}, {seconds:.0f} s: " + "; ".join(parts)


def table(found: dict[str, Any]) -> str:
    """The ends of the runs, and the means of the last quarter: single points of zeroth-order runs are noisy."""
    rows = ["| weights | loss: start, last quarter | accuracy: start, last quarter, best | moved | from fp32 |"]
    rows.append("|---|---|---|---|---|")
    for name, points in found["runs"].items():
        late = points[-max(1, len(points) // 4) :]
        mean = {key: sum(p.get(key, 0.0) for p in late) / len(late) for key in ("loss", "accuracy")}
        best = max(p.get("accuracy", 0.0) for p in points)
        loss = f"{points[0]['loss']:.4f}, {mean['loss']:.4f}" if "loss" in points[0] else ""
        accuracy = f"{points[0]['accuracy']:.3f}, {mean['accuracy']:.3f}, {best:.3f}" if loss else ""
        rows.append(f"| {name} | {loss} | {accuracy} | {points[-1]['moved']:.3%} | {points[-1]['from_fp32']:.3%} |")
    return "\n".join(rows)


def main(argv: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", nargs="?")
    parser.add_argument("task_data", type=Path, nargs="?")
    parser.add_argument("--task", default="sst2")
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--every", type=int, default=500)
    parser.add_argument("--lr", type=float)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--distribution", default="gaussian", choices=["gaussian", "rademacher"])
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--tf32", action="store_true", help="float32 products in TF32")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=Path("out/fp8_long"))
    parser.set_defaults(questions=None)
    parser.add_argument("--quick", action="store_true", help="a few steps of the embedded model, on the CPU")
    args = parser.parse_args(argv)
    if args.quick:
        args.model, args.device = None, "cpu"
        args.steps, args.every, args.questions = QUICK["steps"], QUICK["every"], QUICK["questions"]
    if args.model is not None and args.task_data is None:
        parser.error("MODEL needs TASK_DATA, the directory with the task's files")
    args.lr = args.lr or (2e-5 if args.model is None else 8e-6)
    if args.device == "cpu":
        torch.set_num_threads(1)
    found = compare(args)
    print(table(found))
    return found


if __name__ == "__main__":
    main()
