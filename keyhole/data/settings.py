"""The settings of data: where the rows come from, how a row becomes tokens, and how rows are batched.

keyhole/config/data.py makes a DataSettings from a TrainConfig; without a config, make one directly.
"""

import datetime
import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from keyhole.data.examples import AUTO, COLUMNS, TABLE, RowTemplate
from keyhole.data.turns import OWN_VARIABLES
from keyhole.disk.files import read_small
from keyhole.errors import UserError, printable

OVERLONG = ("truncate", "split", "drop", "error")
TRAIN_ON = ("answers", "all")
MOST_TEMPLATE_BYTES = 2**20
BEFORE = 8  # pad_to_multiple_of of runs from before the setting existed


def today() -> datetime.date:
    """The day by this computer's clock."""
    return datetime.date.today()


@dataclass(frozen=True, kw_only=True)
class DataSettings:
    """The data of a run: train_data and eval_data, or tasks by name. stop_token_ids: tokens that end an answer of the
    model, besides eos. padding: (multiple, most) of a resumed run that began with auto (batches.py)."""

    model: str = ""
    train_data: str | list[str] | None = None
    eval_data: str | list[str] | None = None
    train_weights: list[float] | None = None
    data_cache: str | None = None
    data_format: str | None = None
    columns: dict[str, str] | None = None
    prompt: str | None = None
    completion: str | None = None
    max_length: int | None = 2048
    overlong: str = "truncate"
    packing: bool = False
    train_on: str = "answers"
    train_end_token: bool | None = None
    dedup: bool = False
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    template_date: str | None = None
    stop_token_ids: tuple[int, ...] = ()
    task: str | list[str] | None = None
    test_task: str | list[str] | None = None
    task_data: str | None = None
    task_splits: dict[str, str] | None = None
    num_train: int | None = 1000
    num_dev: int = 500
    num_eval: int | None = 1000
    loss: str = "tokens"
    head: str | None = None
    num_labels: int | None = None
    batch_size: int = 8
    gradient_accumulation_steps: int = 1
    seed: int = 0
    pad_to_multiple_of: int | str | None = AUTO
    padding: tuple[int, int | None] | None = None
    stratify: bool | str = AUTO

    def __post_init__(self) -> None:
        formats = (AUTO, *COLUMNS)
        for key, choices in (("data_format", formats), ("overlong", OVERLONG), ("train_on", TRAIN_ON)):
            if (value := vars(self)[key]) not in choices and not (value is None and choices is formats):
                raise UserError(f"{key}={value!r}: expected {', '.join(choices)}")
        if self.row_templates and self.data_format not in (None, AUTO, TABLE):
            made = " and ".join(self.row_templates)
            raise UserError(
                f"data_format={self.data_format}: with {made} set the rows are read as {TABLE}; leave data_format out"
            )
        if self.packing and self.max_length is None:
            raise UserError("packing=true needs max_length: it is the length of a packed row")
        if self.max_length is not None and self.max_length < 2:
            raise UserError(f"max_length={self.max_length}: expected at least 2, one token to read and one to predict")
        if own := [name for name in OWN_VARIABLES if name in (self.chat_template_kwargs or {})]:
            where = f"; write {own[0]} into the column {own[0]}" if own[0] in ("tools", "documents") else ""
            raise UserError(f"chat_template_kwargs: {own[0]} comes from the data, row by row; leave it out{where}")
        _ = self.day

    @cached_property
    def row_templates(self) -> dict[str, RowTemplate]:
        """The templates of columns that are made from others."""
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
