"""Shows that a change of the code changes no number: losses of two checkouts, recorded and compared to the last bit.

    python scripts/same_bits.py record CHECKOUT OUT     every shipped recipe (on the embedded model), the demo, the quick bench
    python scripts/same_bits.py compare OUT OTHER       exit 1 and the first difference where they differ
    python scripts/same_bits.py resume OUT CHECKOUT     goes on, with this checkout, from checkpoints that OUT holds

A change that claims to move code and nothing else is recorded before and after. Two runs of one checkout on one machine are
equal, so any difference is the change's. Times, memory and versions are not compared.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

STEPS = 12
SMALL = ["model=demo", "train_data=demo", "eval_data=demo", "device=cpu", "dtype=float32", f"max_steps={STEPS}"]
SMALL += ["max_length=128", "batch_size=4", "logging_steps=100", "gpu_memory=null", "wire=null"]
PAUSED = ["lr_scheduler_type=constant", "save_steps=6", "eval_steps=null"]


def keyhole(checkout: Path, *words: str) -> None:
    """Runs the command line of a checkout with this interpreter."""
    env = os.environ | {"PYTHONPATH": str(checkout.resolve()), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-m", "keyhole", *words], env=env, cwd=checkout, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"keyhole {' '.join(words)}\n{done.stdout}{done.stderr}")


def losses(run: Path) -> list[list[float]]:
    """[step, loss] and evaluations of a run, from its metrics."""
    rows = [json.loads(line) for line in (run / "run" / "metrics.jsonl").read_text().splitlines()]
    return [[row["step"], row.get("loss", row.get("eval_loss"))] for row in rows]


def recipes(checkout: Path) -> list[str]:
    return sorted(path.stem for path in (checkout / "keyhole" / "configs").glob("*.yaml"))


def record(checkout: Path, out: Path) -> None:
    """Everything that is compared, into out/losses.json; runs that can be resumed stay in out/paused-*."""
    out = out.resolve()
    out.mkdir(parents=True)
    found = {}
    for name in recipes(checkout):
        keyhole(checkout, "train", name, *SMALL, f"output_dir={out / name}")
        found[name] = losses(out / name)
        shutil.rmtree(out / name)
        if name.startswith("demo-"):
            keyhole(checkout, "train", name, *SMALL, *PAUSED, f"output_dir={out / name}")
            found[f"paused-{name}"] = losses(out / name)
            shutil.rmtree(out / name)
            keyhole(checkout, "train", name, *SMALL, *PAUSED, "max_steps=6", f"output_dir={out / f'paused-{name}'}")
    keyhole(checkout, "bench", "zo", "--quick", "--device", "cpu", "--steps", "2", "--warm-up", "2", "--out", str(out / "bench"))
    for path in (out / "bench").glob("*.json"):
        found["bench zo --quick"] = _bench_losses(json.loads(path.read_text()))
    keyhole(checkout, "demo", "--output-dir", str(out / "demo"))
    rows = json.loads((out / "demo" / "results.json").read_text())
    keys = ("accuracy_before", "accuracy_after", "loss_before", "loss_after", "losses")
    found["demo"] = {row["method"]: [row[key] for key in keys] for row in rows}
    (out / "losses.json").write_text(json.dumps(found, indent=1) + "\n")


def _bench_losses(value: object) -> object:
    """Whatever is called losses, wherever it is."""
    if isinstance(value, dict):
        own = {key: _bench_losses(item) for key, item in value.items() if key not in ("losses", "loss")}
        own |= {key: item for key, item in value.items() if key in ("losses", "loss")}
        return {key: item for key, item in own.items() if item not in (None, {}, [])} | (
            {"name": value["name"]} if "name" in value and ("losses" in value or "loss" in value) else {}
        )
    if isinstance(value, list):
        return [item for item in map(_bench_losses, value) if item not in (None, {}, [])]
    return None


def compare(one: Path, other: Path) -> None:
    """Equal to the last bit, or the first difference."""
    a, b = (json.loads((path / "losses.json").read_text()) for path in (one, other))
    differing = [name for name in sorted(a.keys() & b.keys()) if a[name] != b[name]]
    for name in sorted(a.keys() ^ b.keys()):
        print(f"only in one: {name}")
    for name in differing:
        print(f"DIFFERS: {name}\n  {str(a[name])[:300]}\n  {str(b[name])[:300]}")
    print(f"{len(a.keys() & b.keys())} compared, {len(differing)} differ")
    sys.exit(bool(differing))


def resume(out: Path, checkout: Path) -> None:
    """Goes on from the paused runs of another checkout; the losses must be those of its own run without a pause."""
    expected, bad = json.loads((out / "losses.json").read_text()), []
    for paused in sorted(out.glob("paused-*")):
        name = paused.name.removeprefix("paused-")
        copy = out / "going-on"
        shutil.copytree(paused, copy)
        for_resume = [*SMALL, *PAUSED, f"output_dir={copy.resolve()}"]
        keyhole(checkout, "train", name, *for_resume, "--resume")
        same = losses(copy) == expected[paused.name]
        print(f"{name}: {'goes on to the bit' if same else 'DIFFERS'}")
        bad += [] if same else [name]
        shutil.rmtree(copy)
    sys.exit(bool(bad))


if __name__ == "__main__":
    verb, first, second = sys.argv[1:]
    {"record": record, "compare": compare, "resume": resume}[verb](Path(first), Path(second))
