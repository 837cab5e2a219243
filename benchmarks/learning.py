"""What methods learn on a real model: the runs of the tables in learning_*.md, one after the other, in one process.

    python benchmarks/learning.py MODEL TASK_DATA OUT [--minutes 9] [--only sst2,rte-lsp] [--seeds 1,2]
                                  [--list] [key=value ...]

MODEL: a directory of SmolLM2-135M (any other model has other rates), for runs called encoder-.. of all-MiniLM-L6-v2;
TASK_DATA: <task>/train, <task>/val as `task_data` takes them. Runs on the same task with the same seeds, over weights
in the same format, are one comparison (`keyhole compare`), which reads data and weights once and scores the untrained
model once; the first seed of all of them comes first. A line per run is printed as soon as it has ended; the table goes
to OUT under the name of the first run, with the dev metric by step and the median seconds per step. Comparisons that
there is no time for are named. --only: the run of this name, or runs whose name begins so; --seeds: others than the
table's. key=value: settings for all runs, such as loss=candidates.

All runs: float32 weights with products in TF32, batches of 16 (those made of LARGE: bfloat16, batches of 128 or as they
say; sst2-zo-128: batches of 128), 1,000 examples (sst2-zo-guided-fzoo: 60,000), the loss over candidates (RTE and
Alpaca by first-order methods: over tokens), linear decay, the step that is best on dev is tested.

Rates of `zo`: what a run learns goes with the sum of its rates, what noise does to the weights with the root of the sum
of their squares times the gradient noise of a batch. With 128 rows instead of 16 that noise is 2.8 times smaller, so
1,000 steps at 1.5e-4 go as far as 3,750 at 4e-5, for less noise. Directions of low rank bear about half of the dense
rate, in batches in which the dense rate is at its limit.
"""

import argparse
import faulthandler
import json
import shutil
import statistics
import time
from pathlib import Path
from typing import Any

from keyhole.cli import main as keyhole

COMMON = {
    "loss": "candidates",
    "dtype": "float32",
    "tf32": True,
    "batch_size": 16,
    "num_train": 1000,
    "num_dev": 300,
    "num_eval": 1000,
    "lr_scheduler_type": "linear",
    "warmup_ratio": 0.06,
    "max_length": 256,
}
LSP = {"method": "lsp", "lsp": {"d": 256, "r": 8, "alpha": 0.3, "check_freq": 100}}
LOMO_LORA = {"method": "lomo-lora", "learning_rate": 1e-3, "lomo_lora": {"adapter_lr": 5e-4}}
FIRST_ORDER = {
    "adamw": {"method": "adamw", "learning_rate": 3e-5},
    "adam-offload": {"method": "adam-offload", "learning_rate": 3e-5},
    "lsp": LSP | {"learning_rate": 5e-5},
    "adalomo": {"method": "adalomo", "learning_rate": 5e-4},
    "lomo": {"method": "lomo", "learning_rate": 2e-2, "max_grad_norm": 1.0},
    "lomo-lora": LOMO_LORA,
}
MUON = {"method": "muon", "learning_rate": 3e-5}
RTE = {"lomo": {"learning_rate": 4e-2}, "adalomo": {"learning_rate": 3e-4}}  # SST-2's do not suit it
ZO = {"method": "zo", "max_steps": 3000, "eval_steps": 500, "warmup_ratio": 0.0}
BF16 = {"dtype": "bfloat16"}
RANK = {"rank": 2, "refresh": 50}
CLIP = {"clip": 5.0}  # of the projected gradient, which is about twice as large in the first steps as later
BLOCKS = {"freeze": "embeddings"}
LOWER = ["embeddings", "model.layers.[0-9].*"]  # what is left has most of the signal for its curvature (LOG.md)
UPPER = {"freeze": LOWER}
TOP = {"freeze": [*LOWER, "model.layers.1[0-9].*"]}  # layers 20 to 29
ATTENTION = {"freeze": [*LOWER, "*.mlp.*", "*norm*"]}
DEV = {"num_dev": 500, "eval_steps": 1000}
LARGE = ZO | BF16 | {"batch_size": 128, "max_steps": 1000, "eval_steps": 500, "pad_to_multiple_of": 64}  # one width
GUIDE = {"rank": 1, "refresh": 100, "guide": 1024}  # V from the errors of 1,024 rows
SEVEN = {"zo": GUIDE | {"estimator": "fzoo", "directions": 7}, "num_train": 60000}  # eight passes
GUIDED = LARGE | DEV | UPPER | {"zo": GUIDE | {"clip": 3.0}, "eval_steps": 500}
GUIDED_16 = ZO | DEV | UPPER | {"zo": GUIDE | {"clip": 5.0}}
GUIDED_2000 = GUIDED_16 | {  # so many forward passes, with those for V
    "learning_rate": 2e-4,
    "max_steps": 800,
    "eval_steps": 400,
    "zo": {"rank": 1, "refresh": 150, "guide": 512, "clip": 5.0},
}
SHORT = {"max_steps": 400, "eval_steps": 400}
MINUTES = {"max_steps": 6000, "eval_steps": 2000, "pad_to_multiple_of": "auto"}  # max_steps by the GPU's pace
TOKENS = {"loss": "tokens"}
METRICS = ("eval_loss", "eval_accuracy")  # the latter where there is one
FZOO = ZO | {"learning_rate": 1e-3, "zo": {"estimator": "fzoo"}}
PERPLEXITY = {  # two to five times the rates of the sixth run, at whose end all still improved
    "lsp": LSP | {"learning_rate": 1e-4},
    "adam-offload": {"method": "adam-offload", "learning_rate": 3e-5},
    "lora": {"method": "lora", "learning_rate": 1e-3},
    "galore": {"method": "galore", "learning_rate": 3e-4},
}


HEAD = {"head": "classification", "num_dev": 500, "max_length": 128}
ENCODER = {  # all-MiniLM-L6-v2; in `zo` embeddings and layers 0 to 3 stay as they are
    "adamw": {"method": "adamw", "learning_rate": 1e-4, "num_train_epochs": 5, "eval_steps": 63},
    "lsp": {"method": "lsp", "lsp": {"d": 128}, "learning_rate": 2e-4, "num_train_epochs": 5, "eval_steps": 63},
    "lomo": {"method": "lomo", "learning_rate": 3e-2, "num_train_epochs": 5, "eval_steps": 63},
    "zo": ZO
    | {"learning_rate": 3e-3, "freeze": ["embeddings", "*layer.[0-3].*"], "batch_size": 64}
    | {"zo": {"rank": 1, "refresh": 50, "clip": 5.0}, "max_steps": 600, "eval_steps": 150},
}


def first_order(epochs: int, steps_per_epoch: int = 63) -> dict[str, Any]:
    return {"num_train_epochs": epochs, "eval_steps": steps_per_epoch * max(1, epochs // 5)}


RUNS: dict[str, tuple[str, list[int], dict[str, Any]]] = {
    "sst2-zo": ("sst2", [0, 1, 2], ZO | {"learning_rate": 2.5e-5}),
    "sst2-zo-directions": ("sst2", [0, 1, 2], ZO | {"learning_rate": 1e-4, "zo": {"directions": 4}}),
    "sst2-zo-128": ("sst2", [0, 1, 2], ZO | {"learning_rate": 1.5e-4, "batch_size": 128}),
    "sst2-zo-constant": ("sst2", [0], ZO | {"learning_rate": 2e-5, "lr_scheduler_type": "constant"}),
    "sst2-zo-long": ("sst2", [0], ZO | {"learning_rate": 2e-5, "max_steps": 12000, "eval_steps": 1000}),
    "sst2-zo-high": ("sst2", [0], ZO | {"learning_rate": 8e-5}),
    "sst2-zo-tokens": ("sst2", [0], ZO | {"learning_rate": 4e-5} | TOKENS),
    "sst2-zo-bf16": ("sst2", [0, 1, 2], LARGE | {"learning_rate": 1.5e-4}),
    "sst2-zo-rank": ("sst2", [0, 1, 2], LARGE | {"learning_rate": [1e-4, 6e-5], "zo": RANK}),
    "sst2-zo-int4": (
        "sst2",
        [0, 1, 2],
        LARGE | {"learning_rate": 8e-5, "zo": RANK | {"fold": False}, "wire": "int4"},
    ),
    "sst2-zo-clip": ("sst2", [0, 1, 2], ZO | DEV | {"learning_rate": 8e-5, "zo": CLIP}),
    "sst2-zo-clip-blocks": ("sst2", [0, 1, 2], ZO | DEV | BLOCKS | {"learning_rate": 8e-5, "zo": CLIP}),
    "sst2-zo-rank-clip": ("sst2", [0, 1, 2], LARGE | DEV | {"learning_rate": 1.5e-4, "zo": RANK | CLIP}),
    "sst2-zo-int4-clip": (
        "sst2",
        [0, 1, 2],
        LARGE | DEV | {"learning_rate": 1.5e-4, "zo": RANK | CLIP | {"fold": False}, "wire": "int4"},
    ),
    "sst2-zo-rank-minutes": (
        "sst2",
        [0, 1, 2],
        LARGE | DEV | {"max_steps": 3300, "eval_steps": 1100, "learning_rate": 1e-4, "zo": RANK | CLIP},
    ),
    "sst2-zo-upper-16": ("sst2", [0, 1, 2], ZO | DEV | UPPER | {"learning_rate": 1.5e-4}),
    "sst2-zo-upper-minutes": (
        "sst2",
        [0, 1, 2],
        LARGE
        | DEV
        | UPPER
        | {"learning_rate": 8e-5, "zo": RANK | {"clip": 3.0}, "max_steps": 8000, "eval_steps": 2000},
    ),
    "sst2-zo-upper-512": (
        "sst2",
        [0, 1, 2],
        LARGE | DEV | UPPER | {"batch_size": 512, "learning_rate": [1e-3, 2e-3], "zo": {"clip": 3.0}},
    ),
    "sst2-zo-upper-512-rank": (
        "sst2",
        [0, 1, 2],
        LARGE | DEV | UPPER | {"batch_size": 512, "learning_rate": 1e-3, "zo": RANK | {"clip": 3.0}},
    ),
    "sst2-zo-guided": (
        "sst2",
        [0, 1, 2],
        GUIDED | {"learning_rate": 2.3e-4, "max_steps": 7000, "eval_steps": 3500},
    ),
    "sst2-zo-guided-fzoo": (
        "sst2",
        [0, 1, 2],
        GUIDED | SEVEN | {"learning_rate": 1.1e-3, "max_steps": 2750, "eval_steps": 1375},
    ),
    "sst2-zo-guided-1000": ("sst2", [0, 1, 2], GUIDED | {"learning_rate": [2.5e-4, 5e-4]}),
    "sst2-zo-guided-16": ("sst2", [0, 1, 2], GUIDED_16 | {"learning_rate": 8e-5}),
    "sst2-zo-guided-2000": ("sst2", [0, 1, 2], GUIDED_2000),
    "sst2-zo-top": (
        "sst2",
        [0, 1, 2],
        LARGE | DEV | TOP | {"learning_rate": [1e-3, 2e-3], "zo": RANK | {"clip": 1.2}, "max_steps": 3000},
    ),
    "sst2-zo-top-16": ("sst2", [0, 1, 2], ZO | DEV | TOP | {"learning_rate": 5e-4}),
    "sst2-zo-attention-16": ("sst2", [0, 1, 2], ZO | DEV | ATTENTION | {"learning_rate": 6e-4}),
    "sst2-zo-upper": (
        "sst2",
        [0],
        LARGE | DEV | UPPER | {"learning_rate": [3e-4, 6e-4], "zo": RANK | {"clip": 3.0}},
    ),
    "sst2-zo-attention": (
        "sst2",
        [0],
        LARGE | DEV | ATTENTION | {"learning_rate": [7e-4, 2e-3], "zo": RANK | {"clip": 1.75}},
    ),
    "sst2-zo-minutes": ("sst2", [0], LARGE | MINUTES | {"learning_rate": 7e-5}),
    **{
        f"sst2-zo-sweep-{rank}x{refresh}": (
            "sst2",
            [0],
            LARGE | SHORT | {"learning_rate": 1.2e-4, "zo": {"rank": rank, "refresh": refresh}},
        )
        for refresh in (50, 10, 100, 1)
        for rank in (1, 2, 4, 8)
    },
    "sst2-zo-fzoo": ("sst2", [0], FZOO | {"max_steps": 666, "eval_steps": 222}),
    "sst2-zo-2000": ("sst2", [0], FZOO | {"learning_rate": [5e-4, 1e-3, 2e-3], "max_steps": 222, "eval_steps": 111}),
    **{f"sst2-{name}": ("sst2", [0, 1, 2], how | first_order(5)) for name, how in FIRST_ORDER.items()},
    **{
        f"{task}-muon-{moments}": (task, [1, 2, 3, 4, 5], MUON | {"muon": {"moments": moments}} | first_order(5))
        for task in ("sst2", "qnli", "boolq")
        for moments in ("bfloat16", "float32")
    },
    **{  # by their default rates
        f"{task}-default-{method}": (task, [1, 2, 3], {"method": method} | first_order(5))
        for task in ("sst2", "qnli", "boolq")
        for method in ("adamw", "apollo-mini", "adalomo")
    },
    **{  # with a seed that does not judge the default
        f"{task}-apollo-mini-rates": (
            task,
            [4],
            {"method": "apollo-mini", "learning_rate": [5e-5, 1e-4, 2e-4, 5e-4]} | first_order(5),
        )
        for task in ("sst2", "qnli", "boolq")
    },
    "sst2-adam-offload-rates": (
        "sst2",
        [0],
        FIRST_ORDER["adam-offload"] | first_order(5) | {"learning_rate": [5e-5, 1.5e-5], "num_dev": 500},
    ),
    "sst2-lomo-streamed": ("sst2", [0], FIRST_ORDER["lomo"] | first_order(5) | {"placement": "stream"}),
    **{
        f"rte-{name}": ("rte", [0], how | RTE.get(name, {}) | first_order(20 if name == "lomo" else 10) | TOKENS)
        for name, how in FIRST_ORDER.items()
    },
    "rte-adam-offload-plain": (  # as a plain loop: one rate throughout, and the weights of the last step
        "rte",
        [0, 1, 2],
        FIRST_ORDER["adam-offload"]
        | TOKENS
        | {"max_steps": 600, "eval_steps": 600, "lr_scheduler_type": "constant", "warmup_ratio": 0.0}
        | {"load_best_model_at_end": False},
    ),
    "rte-adam-offload-rates": (  # of 10 epochs the fourth was the best
        "rte",
        [0],
        FIRST_ORDER["adam-offload"] | first_order(5) | TOKENS | {"learning_rate": [2e-5, 3e-5, 5e-5], "num_dev": 500},
    ),
    **{
        f"{task}-{name}": (task, [0], FIRST_ORDER[name] | first_order(10, steps))
        for task, steps in (("cb", 13), ("copa", 19), ("boolq", 63))
        for name in ("adam-offload", "lsp", "lomo")
    },
    **{f"encoder-{name}": ("sst2", [0], how | HEAD) for name, how in ENCODER.items()},
    **{f"alpaca-{name}": ("alpaca", [0], how | first_order(2, 25) | TOKENS) for name, how in PERPLEXITY.items()},
    "rte-zo": ("rte", [0], ZO | {"learning_rate": 3e-5}),
    "rte-guided": ("rte", [0], GUIDED_16 | {"learning_rate": 8e-5}),
    "rte-guided-2000": ("rte", [0], GUIDED_2000),
}


def grouped(names: list[str], seeds: str) -> list[list[str]]:
    """Runs that make one comparison: the same task, seeds and format of the weights (the untrained model is scored in
    it)."""
    groups: dict[tuple[Any, ...], list[str]] = {}
    for name in names:
        task, own, settings = RUNS[name]
        kind = settings.get("wire"), settings.get("head")
        groups.setdefault((task, seeds or tuple(own), kind), []).append(name)
    return list(groups.values())


def write(names: list[str], args: argparse.Namespace, minutes: float) -> list[str]:
    """The words of `keyhole compare` for these runs."""
    task, seeds, _ = RUNS[names[0]]
    seeds = [int(seed) for seed in args.seeds.split(",")] if args.seeds else seeds
    common = dict(COMMON)
    if task in ("cb", "copa"):
        common |= {"num_train": 200, "num_dev": 50}
    methods = {name: RUNS[name][2] for name in names}
    if any("head" in how for how in methods.values()):
        del common["loss"]
    asked = {"models": {"model": args.model}, "tasks": [task], "methods": methods, "seeds": seeds}
    file = args.out / f"{names[0]}.yaml"
    file.write_text(json.dumps(asked | {"common": common, "output_dir": str(args.out / "runs" / names[0])}))
    minutes_of = [f"max_minutes={minutes:.2f}"] if not any(w.startswith("max_minutes=") for w in args.settings) else []
    return ["compare", str(file), *minutes_of, f"task_data={args.task_data}", *args.settings]


def told(directory: Path) -> list[str]:
    """The dev metric by step of every run (where it is finite), and its median seconds per step."""
    lines = []
    for file in sorted(directory.rglob("metrics.jsonl")):
        rows = [json.loads(line) for line in file.read_text().splitlines() if line.strip()]
        dev = {row["step"]: round(row[metric], 4) for row in rows for metric in METRICS if row.get(metric) is not None}
        seconds = [row["seconds"] for row in rows if "seconds" in row and "loss" in row]
        pace = f", {statistics.median(seconds):.4f} s per step" if seconds else ""
        lines.append(f"  {file.parent.parent.name}: dev {dev}{pace}")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("task_data")
    parser.add_argument("out", type=Path)
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--only", default="")
    parser.add_argument("--seeds", default="")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("settings", nargs="*", metavar="key=value")
    args = parser.parse_intermixed_args()
    asked = args.only.split(",")
    if unknown := [one for one in asked if not any(name.startswith(one) for name in RUNS)]:
        parser.error(f"--only: no run is called {', '.join(unknown)}; --list shows them")
    names = [name for one in asked for name in ([one] if one in RUNS else RUNS) if name.startswith(one)]
    if args.list:
        print(*names, sep="\n")
        return
    faulthandler.enable()
    args.out.mkdir(parents=True, exist_ok=True)
    begin_s = time.monotonic()
    for group in grouped(list(dict.fromkeys(names)), args.seeds):
        left, name = args.minutes - (time.monotonic() - begin_s) / 60, group[0]
        if left < 0.3:
            print(f"{', '.join(group)}: no time left", flush=True)
            continue
        words = write(group, args, left)
        started_s = time.monotonic()
        try:
            code: Any = keyhole(words)
        except SystemExit as ended:
            code = ended.code
        found = args.out / "runs" / name
        print(f"{name}: exit {code}, {time.monotonic() - started_s:.0f} s", flush=True)
        if (found / "table.md").exists():
            for kind in ("md", "json"):
                shutil.copy(found / f"table.{kind}", args.out / f"{name}.{kind}")
        print(*told(found), sep="\n", flush=True)


if __name__ == "__main__":
    main()
