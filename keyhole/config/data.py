"""The part of a config that concerns the data, as keyhole.data takes it.

Not imported by keyhole.config itself: keyhole.data needs torch, and reading a config does not.
"""

import dataclasses

from keyhole.config.schema import TrainConfig
from keyhole.data.settings import DataSettings


def data_settings(config: TrainConfig, began: str | None = None) -> DataSettings:
    """Every setting that DataSettings has a field for. began: the day a resumed run began, for template_date."""
    names = {field.name for field in dataclasses.fields(TrainConfig)}
    same = [field.name for field in dataclasses.fields(DataSettings) if field.name in names]
    settings = DataSettings(**{name: getattr(config, name) for name in same})
    return settings if settings.template_date else dataclasses.replace(settings, template_date=began)
