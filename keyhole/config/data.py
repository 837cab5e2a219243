"""The part of a config that concerns the data, as keyhole.data takes it.

Not imported by keyhole.config itself: keyhole.data needs torch, and reading a config does not.
"""

import dataclasses

from keyhole.config.schema import TrainConfig
from keyhole.data.settings import DataSettings


def data_settings(config: TrainConfig) -> DataSettings:
    """Every field of DataSettings has the name of a setting."""
    return DataSettings(**{field.name: getattr(config, field.name) for field in dataclasses.fields(DataSettings)})
