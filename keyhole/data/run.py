"""The data of a run: what the trainer and `keyhole data` call.

    load_data(settings) -> Data: a resumable loader of train_data, batches of eval_data, and the report

Both sets are prepared in the same way. Evaluation is never packed: it has no use for it, and its loss then
does not depend on a setting of training. Both are held against what the model can take (capacity.py), so that
a text too long for it is refused here and not in the middle of the run.
"""

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from keyhole.assets import MODEL, TEST, TRAIN, locate
from keyhole.data.capacity import check_data, padding_multiple
from keyhole.data.dataset import Dataset
from keyhole.data.loader import EvalBatches, Loader
from keyhole.data.prepare import prepare
from keyhole.data.preview import preview
from keyhole.data.settings import DataSettings, PrepareSettings
from keyhole.errors import UserError
from keyhole.model.structure.tokenizer import read_tokenizer


@dataclass(frozen=True)
class Data:
    """Everything a run needs to know about its data."""

    train: Loader
    eval: EvalBatches
    report: list[str]
    end_token_ids: list[int]


def load_tokenizer(model: str) -> Any:
    """The tokenizer that lies with a model."""
    model = locate(model, MODEL)
    _model_config(model)  # says so in plain words when there is no model at all
    tokenizer = read_tokenizer(model)
    if tokenizer is None:
        raise UserError(f"model: {model} has no tokenizer; copy its tokenizer files in")
    return tokenizer


def load_data(settings: DataSettings, tokenizer: Any = None) -> Data:
    """Loaders and report. tokenizer: None takes the model's."""
    tokenizer = tokenizer or load_tokenizer(settings.model)
    known = _model_config(settings.model)
    train, report = _prepare(settings, settings.train_data, TRAIN, tokenizer, known)
    report = [f"train: {line}" for line in report]
    loader = Loader(
        train,
        settings.batch_size,
        settings.gradient_accumulation_steps,
        settings.seed,
        pad_to_multiple_of=padding_multiple(train, known),
    )
    if not settings.eval_data:
        return Data(loader, EvalBatches(None, settings.batch_size), report, train.end_token_ids)
    held_out, lines = _prepare(replace(settings, packing=False), settings.eval_data, TEST, tokenizer, known)
    report += [f"eval:  {line}" for line in lines]
    batches = EvalBatches(held_out, settings.batch_size, padding_multiple(held_out, known))
    return Data(loader, batches, report, train.end_token_ids)


def preview_data(settings: DataSettings, count: int = 3, *, color: bool = False) -> str:
    """What `keyhole data` prints: the report and the first samples of train_data."""
    tokenizer = load_tokenizer(settings.model)
    dataset, lines = _prepare(settings, settings.train_data, TRAIN, tokenizer, _model_config(settings.model))
    return "\n".join([*lines, "", preview(dataset, tokenizer, count, color=color)])


def _model_config(model: str) -> Any:
    from keyhole.model.structure.skeleton import read_config

    return read_config(locate(model, MODEL))


def _prepare(
    settings: DataSettings, source: str | list[str], demo: Path, tokenizer: Any, known: Any
) -> tuple[Dataset, list[str]]:
    """A data set that the model of HF config `known` can take, and its report."""
    sources = [locate(name, demo) for name in ([source] if isinstance(source, str) else source)]
    how = {field.name: getattr(settings, field.name) for field in fields(PrepareSettings)}
    data = prepare(sources, tokenizer, **how)
    warnings = check_data(data, settings.model, known)
    return data, [*data.report.lines(), *warnings]
