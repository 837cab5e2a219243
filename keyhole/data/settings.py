"""The settings of data: where the rows come from, how a row becomes tokens, and how rows are batched.

They are settings of a run (keyhole/config/schema.py); `data_settings` takes them from a config. Without one, make a
DataSettings directly: it has no cache, and samples of up to 2048 tokens.
"""

import datetime
import os
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from keyhole.config.schema import RunConfig
from keyhole.data.examples import AUTO, TABLE, RowTemplate
from keyhole.data.turns import OWN_VARIABLES
from keyhole.disk.files import read_small
from keyhole.errors import UserError, as_user_error, printable
from keyhole.limits import describe, fits
from keyhole.methods.settings import kinds

OF_DATA = (  # all that the data of a run depend on
    "model", "train_data", "eval_data", "train_weights", "data_cache", "data_format", "columns", "prompt", "completion",
    "max_length", "overlong", "packing", "train_on", "train_end_token", "dedup", "chat_template",
    "chat_template_kwargs", "template_date", "task", "test_task", "task_data", "task_splits", "num_train", "num_dev",
    "num_eval", "loss", "head", "num_labels", "batch_size", "gradient_accumulation_steps", "seed",
    "pad_to_multiple_of", "stratify",
)  # fmt: skip
MOST_TEMPLATE_BYTES = 2**20


def today() -> datetime.date:
    return datetime.date.today()


@dataclass(frozen=True, kw_only=True)
class DataSettings(RunConfig):
    """A run of which only the data are known (OF_DATA). stop_token_ids: tokens that end an answer of the model, besides
    eos. padding: (multiple, most) of a resumed run that began with auto (batches.py)."""

    model: str = ""
    method: str = ""
    output_dir: str = ""
    max_length: int | None = 2048
    data_cache: str | None = None
    stop_token_ids: tuple[int, ...] = ()
    padding: tuple[int, int | None] | None = None

    def __post_init__(self) -> None:
        for key in OF_DATA:
            if not fits(value := vars(self)[key], kind := kinds(RunConfig)[key]):
                raise UserError(f"{key}={value!r}: expected {describe(kind, full=True)}")
        if self.row_templates and self.data_format not in (None, TABLE):
            made = " and ".join(self.row_templates)
            raise UserError(
                f"data_format={self.data_format}: with {made} set the rows are read as {TABLE}; leave data_format out"
            )
        if self.packing and self.max_length is None:
            raise UserError("packing=true needs max_length: it is the length of a packed row")
        if own := [name for name in OWN_VARIABLES if name in (self.chat_template_kwargs or {})]:
            where = f"; write {own[0]} into the column {own[0]}" if own[0] in ("tools", "documents") else ""
            raise UserError(f"chat_template_kwargs: {own[0]} comes from the data, row by row; leave it out{where}")
        _ = self.day

    @cached_property
    def row_templates(self) -> dict[str, RowTemplate]:
        given = {"prompt": self.prompt, "completion": self.completion}
        return {key: RowTemplate(text, key) for key, text in given.items() if text is not None}

    @cached_property
    def day(self) -> datetime.date:
        """The date that templates may print; today if none is set."""
        if self.template_date is None:
            return today()
        try:
            return datetime.date.fromisoformat(self.template_date)
        except ValueError:
            raise UserError(f"template_date={self.template_date!r}: expected a date such as 2025-01-31") from None

    @cached_property
    def template_text(self) -> str | None:
        """The text of the template that chat_template names or contains; None: the tokenizer's."""
        given = self.chat_template
        if given is None or "{{" in given or "{%" in given:
            return given
        try:
            return read_small(Path(os.path.expanduser(given)), MOST_TEMPLATE_BYTES).decode()
        except UnicodeDecodeError:
            raise UserError(f"chat_template: {printable(given, 200)}: not UTF-8 text; is it a template?") from None
        except OSError as error:
            what = f"{error.strerror}; give the path of a Jinja template, or its text"
            raise UserError(f"chat_template: {printable(given, 200)}: {what}") from None


def data_settings(config: RunConfig, loader: dict[str, Any] | None = None) -> DataSettings:
    """The settings of a config that data depend on. loader: the loader state of a resumed run, which keeps the day it
    began (for template_date), its padding and its order."""
    settings = DataSettings(**{name: vars(config)[name] for name in OF_DATA})
    if loader is None:
        return settings
    with as_user_error("--resume: what the checkpoint says of its data cannot be used"):
        asked, *numbers = loader["padding"]
        began = settings.template_date or loader.get("date")
        padding = tuple(numbers) if asked == AUTO else None
        strata = loader.get("stratified", False) is True if settings.stratify == AUTO else settings.stratify
        return replace(settings, template_date=began, pad_to_multiple_of=asked, padding=padding, stratify=strata)
