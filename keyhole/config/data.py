"""The part of a config that data preparation needs, as a DataSettings of keyhole.data.

keyhole.config itself does not import this file, because it does not depend on keyhole.data.
"""

import dataclasses
from typing import Any

from keyhole.config.schema import TrainConfig
from keyhole.data.settings import AUTO, BEFORE, DataSettings
from keyhole.errors import UserError


def data_settings(config: TrainConfig, loader: dict[str, Any] | None = None) -> DataSettings:
    """All settings that are fields of DataSettings. loader: the loader state of a resumed run, which keeps the day it
    began (for template_date), its padding and its order."""
    names = {field.name for field in dataclasses.fields(TrainConfig)}
    same = [field.name for field in dataclasses.fields(DataSettings) if field.name in names]
    settings = DataSettings(**{name: vars(config)[name] for name in same})
    if loader is None:
        return settings
    asked, *numbers = _padding(loader.get("padding", [BEFORE, BEFORE, None]))
    began = settings.template_date or loader.get("date")
    kept = tuple(numbers) if asked == AUTO else None
    strata = loader.get("stratified", False) is True if settings.stratify == AUTO else settings.stratify
    return dataclasses.replace(settings, template_date=began, pad_to_multiple_of=asked, padding=kept, stratify=strata)


def _padding(kept: Any) -> list[Any]:
    """The padding in the loader's state: the setting, the multiple, and the largest number of tokens per row."""
    try:
        asked, multiple, most = kept
        whole = all(type(n) is int and n > 0 for n in (multiple, 1 if most is None else most))
        if whole and (asked in (AUTO, None) or (type(asked) is int and asked > 0)):
            return [asked, multiple, most]
    except (TypeError, ValueError):
        pass
    raise UserError(
        f"--resume: the padding of the batches cannot be true ({str(kept):.100}); the checkpoint or journal was "
        "edited: go on from another one"
    )
