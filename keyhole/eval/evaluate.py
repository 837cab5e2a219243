"""`keyhole eval DIR --tasks NAME ...`: one table of tasks and data files.

A name such as sst2, or a task file (my.yaml), is a task of keyhole.data.tasks. It is scored on the test rows of a
training run (num_eval of them), in its own metric (score.py). A file whose rows have candidates is a task too, that of
library/demo.yaml, but for its prompt, which may be a chat, and which candidates follow byte for byte:

    {"prompt": "The soup was cold.\nStamp:", "candidates": [" blue", " red"], "answer": 1}

Any other file is read like training data (the five formats of keyhole.data) and gives the validation loss of training,
the NLL over all trained tokens divided by their number, and perplexity = exp(loss). Tasks, and the first row of every
other file, are read before the model is loaded, so that mistakes are found early.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from tqdm import tqdm

from keyhole import assets
from keyhole.data.capacity import check_data, check_max_length, context_length
from keyhole.data.prepare import prepare
from keyhole.data.sources import read
from keyhole.data.tasks.draw import Numbers, built, load_task, warning_lines
from keyhole.data.tasks.parse import read_spec
from keyhole.data.tasks.question import Task
from keyhole.data.tasks.spec import Expression
from keyhole.data.tasks.tables import pick
from keyhole.data.tokenizer import needed
from keyhole.disk.json_text import json_text, write_result
from keyhole.errors import UserError
from keyhole.eval.asked import asked_names, is_library_task
from keyhole.eval.metrics import as_published
from keyhole.eval.rows import BATCH_TOKENS, PASSES
from keyhole.eval.score import AnswerScore, DataScore, Score, TaskScore, check_code, data_score, score
from keyhole.loading import load
from keyhole.machine.text import markdown, printable
from keyhole.methods.workload import Workload
from keyhole.model.model import Model

NUM_EVAL = Numbers.test


def evaluate(
    directory: str,
    tasks: Sequence[str],
    *,
    placement: str = "auto",
    gpu_memory: str | int | None = None,
    dtype: str | None = None,
    wire: str | None = None,
    device: str | None = None,
    max_length: int | None = None,
    limit: int | None = None,
    json_path: str | Path | None = None,
    task_data: str | None = None,
    task_splits: dict[str, str] | None = None,
    num_eval: int | None = NUM_EVAL,
    allow_code_execution: bool = False,
    columns: dict[str, str] | None = None,
    prompt: str | None = None,
    completion: str | None = None,
    say: Callable[[str], None] = lambda line: print(f"keyhole: {line}", file=sys.stderr),
) -> str:
    """Scores every task and file and returns the table; json_path: file for the numbers. limit: rows read of each file;
    columns, prompt, completion: how rows of data files are read, as in training."""
    names = asked_names(tasks, task_data, task_splits, json_path)

    def asked(name: str) -> Task | str:
        if not is_library_task(name):
            return read_task(name, limit) if is_task(name) else name
        drawn = load_task(name, task_data, Numbers(test=num_eval), task_splits, training=False)["test"]
        check_code(drawn, allow_code_execution)
        used = replace(drawn, questions=drawn.questions[:limit])
        first = f"the first {len(used.questions):,} of " if len(used.questions) < len(drawn.questions) else ""
        for line in (f"task {drawn.name}: {first}{drawn.about} ({used.fingerprint})", *warning_lines(drawn)):
            say(line)
        return used

    sources = [asked(name) for name in names]  # a mistake in the last one is found before the model is loaded
    model = load(
        assets.locate(directory, assets.MODEL),
        placement=placement,
        gpu_memory=gpu_memory,
        dtype=dtype or "auto",
        wire=wire,
        device=device,
        workload=Workload(method="eval", tokens=BATCH_TOKENS, passes=PASSES),
    )
    for line in model.describe():
        say(line)
    watch = partial(tqdm, desc="scoring", disable=None, leave=False)  # None: not without a terminal
    options: dict[str, Any] = {"max_length": max_length, "watch": watch}
    scores: list[Score] = []
    try:
        for source in sources:
            if isinstance(source, Task):
                scores.append(score(model, source, allow_code_execution=allow_code_execution, **options))
            else:
                how = {"columns": columns, "prompt": prompt, "completion": completion}
                scores.append(score_data(model, source, limit, how, **options))
    except BaseException:  # also Ctrl-C: what took hours is not lost
        for line in table(scores).splitlines() if scores else ():
            say(line)
        raise
    shown = table(scores)
    if json_path is not None:
        about = {"model": directory, "dtype": str(model.dtype).removeprefix("torch."), "device": str(model.device)}
        kept = json_text(about | {"results": [asdict(each) for each in scores]}, indent=1)
        write_result("--json", Path(json_path), kept + "\n", shown)
    return shown


def is_task(source: str) -> bool:
    """Whether the first row of a source has candidates; otherwise it is plain data."""
    return "candidates" in next(iter(read(assets.locate(source, assets.TEST)))).row


def read_task(source: str, limit: int | None = None) -> Task:
    """All questions of a file, glob or directory, or the first `limit`; `demo` is the embedded task."""
    name = task_name(source)
    spec = replace(read_spec("demo"), name=name, prompt=Expression("prompt", "prompt"))
    records = islice(read(assets.locate(source, assets.TEST)), limit)
    return Task(name, built([pick(record, spec) for record in records], spec), spec)


def task_name(source: str) -> str:
    """`demo`, or folder and file without the suffix: data/rte/val.jsonl is rte/val."""
    path = Path(source)
    return source if source == "demo" else f"{path.parent.name}/{path.stem}".lstrip("/")


def score_data(
    model: Model,
    source: str,
    limit: int | None = None,
    how: dict[str, Any] | None = None,
    *,
    max_length: int | None = None,
    **options: Any,
) -> DataScore:
    """Loss and perplexity of a file in any training format. how: settings for its rows; options: see rows.py."""
    if model.classifies:
        raise UserError(f"{source}: {type(model.module).__name__} classifies texts; --tasks: name a task, such as sst2")
    tokenizer = needed(model.tokenizer)
    check_max_length(max_length, model.config, model.module)
    longest = max_length or context_length(model.config)
    stops = getattr(model.module.generation_config, "eos_token_id", None)
    stops = tuple(stops) if isinstance(stops, list) else () if stops is None else (stops,)
    data = prepare(source, tokenizer, max_length=longest, limit=limit, stop_token_ids=stops, **(how or {}))
    check_data(data, model.source, model.config, model.module)
    losses = replace(data.report, truncated=0).losses()  # what was cut has a line of its own
    return data_score(model, task_name(source), source, data, data.report.truncated, losses, **options)


def table(scores: Sequence[Score]) -> str:
    columns = ["name", "rows", "result", "accuracy by chance", "accuracy by sum", "margin", "loss", "perplexity"]
    shown = markdown(columns, [[printable(cell) for cell in _cells(each)] for each in scores], numbers=True)
    room = "half of what the model or max_length has room for"
    told = [
        *((s, ", ".join(as_published(*pair) for pair in s.metrics.items())) for s in scores if len(s.metrics) > 1),
        *((s, f"{s.truncated} texts were too long and were cut") for s in scores if s.truncated),
        *(
            (s, f"answers end after {s.shortened} tokens, {room}")
            for s in scores
            if isinstance(s, AnswerScore) and s.shortened
        ),
        *((s, line) for s in scores if isinstance(s, DataScore) for line in s.losses),
    ]
    return "\n".join([shown, *(f"{s.name}: {line}" for s, line in told)])


def _cells(found: Score) -> list[str]:
    if isinstance(found, DataScore):
        return [found.name, f"{found.samples:,}", *["-"] * 4, f"{found.loss:.4f}", f"{found.perplexity:.3f}"]
    cells = [found.name, f"{found.questions:,}", as_published(found.metric, found.value)]
    if isinstance(found, AnswerScore):
        return [*cells, *["-"] * 5]
    chance = "-" if found.chance is None else f"{100 * found.chance:.1f}%"
    by_sum = ["-", "-"]
    if isinstance(found, TaskScore):
        by_sum = [f"{100 * found.accuracy_sum:.1f}%", f"{found.margin:+.3f}"]
    return [*cells, chance, *by_sum, f"{found.loss:.4f}", "-"]
