"""Where the embedded model and task lie, and what the word `demo` stands for in a config.

    model: demo         assets/model            a Hugging Face directory
    train_data: demo    assets/task/train.jsonl
    eval_data: demo     assets/task/test.jsonl  the held-out rows; also a task file for `keyhole eval`

`demo` always means the embedded one; a directory of that name is written ./demo.
"""

import os
from pathlib import Path

ASSETS = Path(__file__).parent
MODEL = ASSETS / "model"
TRAIN = ASSETS / "task" / "train.jsonl"
TEST = ASSETS / "task" / "test.jsonl"


def locate(value: str, stands_for: Path) -> str:
    """The value itself, or the embedded path where the value is `demo`."""
    return str(stands_for) if value == "demo" else value


def is_demo_model(model: str) -> bool:
    """Whether a config's model is the embedded one, by name or by path."""
    return model == "demo" or os.path.realpath(model) == os.path.realpath(MODEL)
