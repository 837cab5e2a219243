"""The data of a run, out of its config: what the trainer and `keyhole data` call.

    from_config(config) -> Data: a resumable loader of train_data, batches of eval_data, and the report

Both sets are prepared in the same way. Evaluation is never packed: it has no use for it, and its loss then
does not depend on a setting of training.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from keyhole.data.dataset import Dataset
from keyhole.data.loader import EvalBatches, Loader
from keyhole.data.prepare import prepare
from keyhole.data.preview import preview
from keyhole.demo.paths import MODEL, TEST, TRAIN, locate
from keyhole.errors import UserError


@dataclass(frozen=True)
class Data:
    """Everything a run needs to know about its data."""

    train: Loader
    eval: EvalBatches
    report: list[str]
    end_token_ids: list[int]


def load_tokenizer(model: str) -> Any:
    """The tokenizer that lies with a model."""
    from transformers import AutoTokenizer

    from keyhole.model.skeleton import read_config

    model = locate(model, MODEL)
    try:
        return AutoTokenizer.from_pretrained(model)
    except Exception as error:  # missing files, a bad name, no network: each has its own type
        read_config(model)  # says so in plain words when there is no model at all
        kind = "directory" if Path(model).is_dir() else "model"
        raise UserError(f"model={model}: no tokenizer can be loaded from this {kind}: {error}") from None


def from_config(config: Any, tokenizer: Any = None) -> Data:
    """Loaders and report for a TrainConfig."""
    tokenizer = tokenizer or load_tokenizer(config.model)
    train = _prepare(config, config.train_data, TRAIN, tokenizer, config.packing)
    held_out = _prepare(config, config.eval_data, TEST, tokenizer, packing=False) if config.eval_data else None
    report = [f"train: {line}" for line in train.report.lines()]
    report += [f"eval:  {line}" for line in held_out.report.lines()] if held_out else []
    loader = Loader(train, config.batch_size, config.gradient_accumulation_steps, config.seed)
    return Data(loader, EvalBatches(held_out, config.batch_size), report, train.end_token_ids)


def preview_config(config: Any, count: int = 3, *, color: bool = False) -> str:
    """What `keyhole data` prints: the report and the first samples of train_data."""
    tokenizer = load_tokenizer(config.model)
    dataset = _prepare(config, config.train_data, TRAIN, tokenizer, config.packing)
    return "\n".join([*dataset.report.lines(), "", preview(dataset, tokenizer, count, color=color)])


def _prepare(config: Any, source: str | list[str], demo: Path, tokenizer: Any, packing: bool) -> Dataset:
    sources = [locate(name, demo) for name in ([source] if isinstance(source, str) else source)]
    return prepare(
        sources, tokenizer, data_format=config.data_format, max_length=config.max_length,
        overlong=config.overlong, packing=packing, train_on=config.train_on,
    )  # fmt: skip
