"""The trials of `keyhole bench lomo` and `keyhole bench lsp`: one per row of a table (tables/lomo.yaml, lsp.yaml)."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from keyhole.bench.rows import list_of, one_of, read_yaml, row_as
from keyhole.bench.shapes import LLAMA
from keyhole.errors import UserError
from keyhole.methods import METHODS

NATIVE = "native"  # torch's own optimizer on the plain Hugging Face module


@dataclass(frozen=True)
class Trial:
    """A Llama shape, a system, and how it is set up."""

    name: str
    shape: str = one_of(LLAMA)
    system: str = one_of((NATIVE, *METHODS))
    batch: int = 4
    length: int = 1024
    micro_batches: int = 1  # per step
    gpu_memory: str | None = None  # the budget; None: all of the device
    quick_gpu_memory: str | None = None  # the budget of a quick run
    streamed: bool = False
    compare: str | None = None  # a streamed trial: the resident one whose step is its compute floor
    # of the method; for native: `optimizer`, and arguments of torch.optim. A row of a table is checked with this type
    options: dict = field(default_factory=dict)  # type: ignore[type-arg]


def read_trials(path: Path, only: str, quick: bool) -> list[Trial]:
    """Trials with `only` in their name, in the order in which they run; with the changes of a quick run, or
    unchanged."""
    found = read_yaml(path)
    trials = [row_as(Trial, row, f"{path}: trial {i}") for i, row in enumerate(list_of(found, "trials", str(path)), 1)]
    chosen = [trial for trial in trials if only in trial.name]
    if not chosen:
        raise UserError(f"--only: no trial of {path.stem} has {only!r} in its name; it has {trials[0].name!r}, ...")
    return [_quick(trial, found.get("quick", {})) for trial in chosen] if quick else chosen


def _quick(trial: Trial, changes: dict[str, Any]) -> Trial:
    changed = {key: changes.get(key, value) for key, value in trial.options.items()}
    return replace(trial, options=changed, gpu_memory=trial.quick_gpu_memory)
