"""`keyhole.load`: from a directory, a hub id or a config to a `Model`.

source.py     config, files, and the module without weights
model.py      the steps of loading, and the weights
homes.py      memory for every unit, and the engine
device.py     chooses the device
"""

from keyhole.loading.device import choose_device
from keyhole.loading.model import load

__all__ = ["choose_device", "load"]
