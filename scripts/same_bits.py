"""Shows that a change of the code changes no number: losses of two checkouts, recorded and compared to the last bit.

    python scripts/same_bits.py record CHECKOUT OUT     shipped recipes (on the embedded model), quick bench, demo
    python scripts/same_bits.py compare OUT OTHER       exit 1 where two records differ, with both values
    python scripts/same_bits.py resume OUT CHECKOUT     this checkout goes on from the checkpoints that OUT holds

A change that claims to move code and nothing else is recorded before and after. Two runs of one checkout on one machine
are equal, so any difference is the change's. Times, memory and versions are not compared.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

SMALL = (
    "model=demo train_data=demo eval_data=demo device=cpu dtype=float32 max_steps=12 max_length=128 batch_size=4 "
    "logging_steps=100 gpu_memory=null wire=null"
).split()
PAUSED = "lr_scheduler_type=constant save_steps=6 eval_steps=null".split()
BENCH = "bench zo --quick --device cpu --steps 2 --warm-up 2".split()
SCORES = ("accuracy_before", "accuracy_after", "loss_before", "loss_after", "losses")  # of a method in the demo


def keyhole(checkout: Path, *words: str) -> None:
    """Runs the command line of a checkout with this interpreter."""
    env = os.environ | {"PYTHONPATH": str(checkout.resolve()), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "keyhole", *words]
    done = subprocess.run(command, env=env, cwd=checkout, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"keyhole {' '.join(words)}\n{done.stdout}{done.stderr}")


def train(checkout: Path, recipe: str, out: Path, *words: str) -> list[list[float]]:
    """Runs a recipe on the embedded model; [step, loss] of its steps and evaluations."""
    keyhole(checkout, "train", recipe, *SMALL, f"output_dir={out}", *words)
    return [[row["step"], row.get("loss", row.get("eval_loss"))] for row in metrics(out)]


def metrics(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "run" / "metrics.jsonl").read_text().splitlines()]


def record(checkout: Path, out: Path) -> None:
    """Writes everything that is compared to out/losses.json; runs that can be resumed stay in out/paused-*."""
    out = out.resolve()
    out.mkdir(parents=True)
    found: dict[str, Any] = {}
    for name in sorted(path.stem for path in (checkout / "keyhole" / "configs").glob("*.yaml")):
        found[name] = train(checkout, name, out / name)
        shutil.rmtree(out / name)
        if name.startswith("demo-"):
            found[f"paused-{name}"] = train(checkout, name, out / name, *PAUSED)
            shutil.rmtree(out / name)
            train(checkout, name, out / f"paused-{name}", *PAUSED, "max_steps=6")
    keyhole(checkout, *BENCH, "--out", str(out / "bench"))
    (path,) = (out / "bench").glob("*.json")
    cases = [case for case in json.loads(path.read_text())["records"] if "losses" in case]
    found["bench zo --quick"] = {"records": [{"losses": case["losses"], "name": case["name"]} for case in cases]}
    keyhole(checkout, "demo", "--output-dir", str(out / "demo"))
    rows = json.loads((out / "demo" / "results.json").read_text())
    found["demo"] = {row["method"]: [row[key] for key in SCORES] for row in rows}
    (out / "losses.json").write_text(json.dumps(found, indent=1) + "\n")


def _records(out: Path) -> dict[str, Any]:
    """What was recorded, with a record for each method of the demo: one more method is no difference of the others."""
    found = json.loads((out / "losses.json").read_text())
    return found | {f"demo: {method}": scores for method, scores in found.pop("demo").items()}


def compare(one: Path, other: Path) -> None:
    """Exits with 1 where the two differ in a bit."""
    a, b = (_records(path) for path in (one, other))
    both = sorted(a.keys() & b.keys())
    differing = [name for name in both if a[name] != b[name]]
    for name in sorted(a.keys() ^ b.keys()):
        print(f"only in one: {name}")
    for name in differing:
        print(f"DIFFERS: {name}\n  {str(a[name])[:300]}\n  {str(b[name])[:300]}")
    print(f"{len(both)} compared, {len(differing)} differ")
    sys.exit(bool(differing))


def resume(out: Path, checkout: Path) -> None:
    """Goes on from the paused runs of another checkout; the losses must be those of its own run without a pause."""
    expected, differing = json.loads((out / "losses.json").read_text()), 0
    for paused in sorted(out.resolve().glob("paused-*")):
        name, copy = paused.name.removeprefix("paused-"), paused.with_name("going-on")
        shutil.copytree(paused, copy)
        at_its_end = [[row["step"], row["eval_loss"]] for row in metrics(paused) if "eval_loss" in row]
        rows = train(checkout, name, copy, *PAUSED, "--resume")
        same = [row for row in rows if row not in at_its_end] == expected[paused.name]
        print(f"{name}: {'goes on to the bit' if same else 'DIFFERS'}")
        differing += not same
        shutil.rmtree(copy)
    sys.exit(bool(differing))


if __name__ == "__main__":
    verb, first, second = sys.argv[1:]
    {"record": record, "compare": compare, "resume": resume}[verb](Path(first), Path(second))
