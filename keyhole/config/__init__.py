"""Settings of a run: typed, documented line by line, and checked before anything is loaded.

    schema.py    the settings themselves          loader.py   YAML and key=value in, all faults at once
    methods.py   those of each method             dump.py     YAML out
    rules.py     what fields demand of each other faults.py   what is wrong, in words
    types.py     a YAML node as a typed value     limits.py   bounds of numbers; machine/sizes.py: "8GiB"
    docs.py      the help and docs/config.md      fields.py   the table of all settings, which both need
    recipes.py   the configs that are shipped

Nothing here imports torch.
"""

from keyhole.config.dump import to_dict, to_yaml
from keyhole.config.loader import load_config, resolve
from keyhole.config.methods import (
    AdaLOMOConfig,
    AdamOffloadConfig,
    AdamWConfig,
    GaLoreConfig,
    LOMOConfig,
    LOMOLoRAConfig,
    LoRAConfig,
    LSPConfig,
    SGDConfig,
    ZOConfig,
)
from keyhole.config.schema import OffloadConfig, TrainConfig
from keyhole.machine.sizes import Bytes

__all__ = [
    "AdaLOMOConfig", "AdamOffloadConfig", "AdamWConfig", "Bytes", "GaLoreConfig", "LOMOConfig", "LOMOLoRAConfig",
    "LSPConfig", "LoRAConfig", "OffloadConfig", "SGDConfig", "TrainConfig", "ZOConfig", "load_config", "resolve",
    "to_dict", "to_yaml",
]  # fmt: skip
