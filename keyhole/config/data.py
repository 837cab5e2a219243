"""The part of a config that data preparation needs, as a DataSettings of keyhole.data.

keyhole.config itself does not import this file, because it does not depend on keyhole.data.
"""

import dataclasses
from typing import Any

from keyhole.config.schema import TrainConfig
from keyhole.data.examples import AUTO
from keyhole.data.settings import DataSettings


def data_settings(config: TrainConfig, loader: dict[str, Any] | None = None) -> DataSettings:
    """All settings that are fields of DataSettings. loader: the loader state of a resumed run, which keeps the day it
    began (for template_date), its padding and its order."""
    names = {field.name for field in dataclasses.fields(TrainConfig)}
    same = [field.name for field in dataclasses.fields(DataSettings) if field.name in names]
    settings = DataSettings(**{name: vars(config)[name] for name in same})
    if loader is None:
        return settings
    asked, *numbers = loader["padding"]
    began = settings.template_date or loader.get("date")
    padding = tuple(numbers) if asked == AUTO else None
    strata = loader.get("stratified", False) is True if settings.stratify == AUTO else settings.stratify
    return dataclasses.replace(
        settings, template_date=began, pad_to_multiple_of=asked, padding=padding, stratify=strata
    )
