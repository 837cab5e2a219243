"""The embedded task: read a note in the guest book and choose the clerk's stamp.

    prompt      "<note>\\nStamp:"        candidates  " blue" (the guest was pleased), " red" (not)

The rule is ours and nowhere in the corpus, where stamps follow from nothing (corpus.py): a model that has
not been trained on the task is at chance; one that has must join two things, the pleased-or-not that it can
read from a note, and a word. Notes put two clauses on two topics side by side that the corpus never joins,
negations and "but" included, so no single word gives the answer away. Labels are balanced, notes are
unique, and the two splits share none.

A row is {"prompt", "completion", "candidates", "label"}: prompt and completion make it training data for
`keyhole train`, candidates and label make it a test for `keyhole eval`.
"""

import json
import random
from pathlib import Path
from typing import TypedDict

from scripts.demo_model.corpus import FAR, STAMPS, remark

TRAIN_ROWS, TEST_ROWS, SEED = 1000, 400, 20


class Row(TypedDict):
    prompt: str
    completion: str
    candidates: list[str]
    label: int


def row(rng: random.Random, label: int) -> Row:
    prompt = f"{remark(rng, label == 0, FAR)}\nStamp:"
    return {"prompt": prompt, "completion": STAMPS[label], "candidates": list(STAMPS), "label": label}


def make_rows(seed: int = SEED) -> tuple[list[Row], list[Row]]:
    """The training and the held-out rows: unique prompts, labels in turn."""
    rng, rows, seen = random.Random(seed), [], set()
    while len(rows) < TRAIN_ROWS + TEST_ROWS:
        candidate = row(rng, label=len(rows) % 2)
        if candidate["prompt"] not in seen:
            seen.add(candidate["prompt"])
            rows.append(candidate)
    return rows[:TRAIN_ROWS], rows[TRAIN_ROWS:]


def read_rows(path: Path) -> list[Row]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def rows_as_jsonl(rows: list[Row]) -> str:
    return "".join(json.dumps(row, ensure_ascii=True) + "\n" for row in rows)
