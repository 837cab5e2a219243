"""`keyhole.load`: from a directory, a hub id or a config to a `Model`.

prepare.py    source, dtype, module, format, layout, placement: all that is decided before weights are read
model.py      the steps of loading, and the weights
homes.py      memory for every unit, and the engine
"""

from keyhole.loading.model import load
from keyhole.loading.prepare import choose_device

__all__ = ["choose_device", "load"]
