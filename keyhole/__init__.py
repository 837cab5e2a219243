"""keyhole: full-parameter fine-tuning of language models that do not fit your GPU.

model = keyhole.load("path-or-hub-id", placement="stream", gpu_memory="8GiB", dtype="bfloat16")
opt = keyhole.ZO(model, lr=1e-7, eps=1e-3)
for batch in loader:
    loss = opt.step(batch)
opt.flush()
model.save_pretrained("out")
"""

from typing import Any

from keyhole.methods import CLASSES
from keyhole.methods.traits import imported

__version__ = "0.2.0"

_WHERE = {
    "Workload": "keyhole.methods.workload:Workload",
    "load": "keyhole.loading:load",
    "Model": "keyhole.model.model:Model",
}
_WHERE |= {name: row.cls for name, row in CLASSES.items()}
__all__ = sorted(_WHERE)


def __getattr__(name: str) -> Any:
    """Imports on first use, so that the command line starts without PyTorch."""
    if name not in _WHERE:
        raise AttributeError(f"module 'keyhole' has no attribute {name!r}")
    return imported(_WHERE[name])


def __dir__() -> list[str]:
    return sorted([*globals(), *_WHERE])
