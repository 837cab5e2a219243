"""The settings that data preparation reads, and nothing else of a config.

    PrepareSettings   how a row becomes tokens: what `prepare` takes
    DataSettings      the same, with where the rows come from and how they are batched: what a run takes

keyhole/config/data.py makes a DataSettings from a TrainConfig; whoever has no config makes one by hand.
"""

from dataclasses import dataclass

from keyhole.data.formats import check_format
from keyhole.errors import UserError

OVERLONG = ("truncate", "drop", "error")
TRAIN_ON = ("answers", "all")


@dataclass(frozen=True, kw_only=True)
class PrepareSettings:
    """How rows become tokens."""

    data_format: str | None = None
    max_length: int | None = 2048
    overlong: str = "truncate"
    packing: bool = False
    train_on: str = "answers"

    def __post_init__(self) -> None:
        check_format(self.data_format)
        for key, choices in (("overlong", OVERLONG), ("train_on", TRAIN_ON)):
            if getattr(self, key) not in choices:
                raise UserError(f"{key}={getattr(self, key)!r}: expected {' or '.join(choices)}")
        if self.packing and self.max_length is None:
            raise UserError("packing=true needs max_length: it is the length of a packed row")
        if self.max_length is not None and self.max_length < 2:
            raise UserError(f"max_length={self.max_length}: expected at least 2, one token to read and one to predict")


@dataclass(frozen=True, kw_only=True)
class DataSettings(PrepareSettings):
    """The data of a run."""

    model: str
    train_data: str | list[str]
    eval_data: str | list[str] | None = None
    batch_size: int = 8
    gradient_accumulation_steps: int = 1
    seed: int = 0
