"""Settings of a run: typed, documented line by line, and checked before anything is loaded.

    schema.py    the settings themselves          loader.py   reads YAML and key=value, reports all faults at once
    rules.py     rules between settings           types.py    YAML nodes to typed values, and a config to YAML
    docs.py      the help and docs/config.md      fields.py   the table of all settings; those of a method
    recipes.py   CONFIG on the command line       faults.py   messages about faults

The settings of a method are in its own folder (methods/<name>/traits.py). Nothing here imports torch.
"""

from keyhole.config.loader import load_config, resolve
from keyhole.config.schema import OffloadConfig, TrainConfig
from keyhole.config.types import to_dict, to_yaml
from keyhole.machine.sizes import Bytes

__all__ = ["Bytes", "OffloadConfig", "TrainConfig", "load_config", "resolve", "to_dict", "to_yaml"]
