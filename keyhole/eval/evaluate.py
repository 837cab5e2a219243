"""`keyhole eval DIR --tasks FILE ...`: one table of tasks and data files.

A file whose rows have candidates is a task (tasks.py) and is scored by log-likelihood. Any other file is read
like training data (the five formats of keyhole.data) and gives the validation loss as training defines it,
the NLL over all trained tokens divided by their number, and perplexity = exp(loss). Tasks are read, and the
first row of every other file, before the model is loaded: a mistake in the last one does not cost the time of
the first.

The directory is one of ours or any Hugging Face model directory or hub id; `demo` is the embedded model.
Placement `auto` streams what does not fit the GPU.
"""

import io
import json
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from keyhole import assets
from keyhole.data.capacity import check_data, check_max_length, context_length
from keyhole.data.prepare import prepare
from keyhole.errors import UserError
from keyhole.eval.rows import BATCH_TOKENS, PASSES, not_finite, score_rows
from keyhole.eval.scoring import TaskScore, score_task
from keyhole.eval.tasks import Task, is_task, read_task, task_name
from keyhole.loading import load
from keyhole.methods.base import Workload
from keyhole.model.model import Model


@dataclass(frozen=True)
class DataScore:
    """Validation loss of a data file, over its trained tokens."""

    name: str
    samples: int
    tokens: int
    loss: float
    perplexity: float
    truncated: int


def evaluate(
    directory: str,
    tasks: Sequence[str],
    *,
    placement: str = "auto",
    gpu_memory: str | int | None = None,
    dtype: str | None = None,
    device: str | None = None,
    max_length: int | None = None,
    limit: int | None = None,
    json_path: str | Path | None = None,
    say: Callable[[str], None] = lambda line: print(f"keyhole: {line}", file=sys.stderr),
) -> str:
    """Scores every file and returns the table; json_path gets the numbers. limit: rows read of each file."""
    if not tasks:
        raise UserError("--tasks: name at least one task or data file, or demo")
    sources = [read_task(source, limit) if is_task(source) else source for source in tasks]
    model = load(
        assets.locate(directory, assets.MODEL),
        placement=placement,
        gpu_memory=gpu_memory,
        dtype=dtype or "auto",
        device=device,
        workload=Workload(method="eval", tokens=BATCH_TOKENS, passes=PASSES),
    )
    for line in model.describe():
        say(line)
    options = {"max_length": max_length, "watch": _progress}
    scores: list[TaskScore | DataScore] = []
    for source in sources:
        if isinstance(source, Task):
            scores.append(score_task(model, source, **options))
        else:
            scores.append(score_data(model, source, limit, **options))
    if json_path is not None:
        _write_json(Path(json_path), directory, model, scores)
    return table(scores)


def score_data(
    model: Model, source: str, limit: int | None = None, *, max_length: int | None = None, **options: Any
) -> DataScore:
    """Loss and perplexity of a file in any training format. options: see rows.py."""
    if model.tokenizer is None:
        raise UserError(f"{source}: the model directory has no tokenizer, so text cannot be scored")
    check_max_length(max_length, model.config, model.module)
    longest = max_length or context_length(model.config)
    stops = getattr(model.module.generation_config, "eos_token_id", None)
    stops = tuple(stops) if isinstance(stops, list) else () if stops is None else (stops,)
    data = prepare(source, model.tokenizer, max_length=longest, limit=limit, stop_token_ids=stops)
    check_data(data, model.source, model.config, model.module)
    nll_R, count_R = score_rows(model, data, **options)
    tokens = int(count_R.sum())
    loss = float(nll_R.sum()) / tokens
    if not math.isfinite(loss):
        raise not_finite(model, f"{source}: the loss is {loss}")
    perplexity = math.exp(loss) if loss < 700 else math.inf
    return DataScore(task_name(source), len(data), tokens, loss, perplexity, data.report.truncated)


def table(scores: Sequence[TaskScore | DataScore]) -> str:
    """The results for people: plain text that is also a Markdown table."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    columns = ("name", "rows", "accuracy", "chance", "by sum", "margin", "loss", "perplexity")
    made = Table(box=box.MARKDOWN)
    for column in columns:
        made.add_column(column, justify="left" if column == "name" else "right", no_wrap=True)
    for score in scores:
        made.add_row(*_cells(score))
    out = io.StringIO()
    Console(file=out, width=110).print(made)
    lines = [line.rstrip() for line in out.getvalue().splitlines() if line.strip()]
    cut = [f"{s.name}: {s.truncated} texts were too long and were cut" for s in scores if s.truncated]
    return "\n".join(lines + cut)


def _cells(score: TaskScore | DataScore) -> list[str]:
    if isinstance(score, DataScore):
        blank = ["-"] * 4
        return [score.name, f"{score.samples:,}", *blank, f"{score.loss:.4f}", f"{score.perplexity:.3f}"]
    shares = [f"{100 * x:.1f}%" for x in (score.accuracy, score.chance, score.accuracy_sum)]
    return [score.name, f"{score.questions:,}", *shares, f"{score.margin:+.3f}", f"{score.loss:.4f}", "-"]


def _write_json(path: Path, directory: str, model: Model, scores: Sequence[TaskScore | DataScore]) -> None:
    from keyhole.disk.files import write_text

    if not path.parent.is_dir():
        raise UserError(f"--json: {path.parent} is not a directory")
    dtype = str(model.dtype).removeprefix("torch.")
    about = {"model": directory, "dtype": dtype, "device": str(model.device)}
    write_text(path, json.dumps(about | {"results": [asdict(score) for score in scores]}, indent=1) + "\n")


def _progress(groups: list) -> Any:
    if not sys.stderr.isatty():
        return iter(groups)
    from rich.console import Console
    from rich.progress import track

    return track(groups, "scoring", console=Console(stderr=True), transient=True)
