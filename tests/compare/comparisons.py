"""A comparison that takes seconds (the embedded model and task, a few steps), and a task of one's own."""

import json
from pathlib import Path
from typing import Any

from keyhole.compare.execute import compare
from keyhole.compare.file import read_comparison

TASK = """columns: {review: text, label: stars}
prompt: "{{ review }} I would read it"
candidates: [" never", " again"]
labels: [["1"], ["5"]]
metric: accuracy
"""
TEXT = """# Small
models: [demo]
tasks: [demo]
methods:
  adamw: {learning_rate: [1e-5, 2e-3]}
  lomo: {learning_rate: [5e-2, 1e-4]}
seeds: [0, 1]
common: {max_steps: 4, eval_steps: 2, batch_size: 8, num_train: 32, num_dev: 12, num_eval: 12, max_length: 128,
         device: cpu, dtype: float32}
"""
TIMED = {"seconds", "gpu_gib", "environment", "source"}


def write(path: Path, text: str = TEXT) -> Path:
    path.write_text(text)
    return path


def run(path: Path, out: Path, *words: str, **how: Any) -> int:
    return compare(read_comparison(path, (f"output_dir={out}", *words)), say=lambda line: None, **how)


def table(out: Path) -> Any:
    """table.json without what depends on the clock."""
    return without_times(json.loads((out / "table.json").read_text()))


def without_times(value: Any) -> Any:
    if isinstance(value, dict):
        kept = {key: without_times(each) for key, each in value.items() if key not in TIMED}
        return kept | ({"curve": [[p[0], *p[2:]] for p in value["curve"]]} if "curve" in value else {})
    return [without_times(each) for each in value] if isinstance(value, list) else value


def cell(out: Path, method: str) -> Any:
    (found,) = [each for each in table(out)["cells"] if each["method"] == method]
    return found
