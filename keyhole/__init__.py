"""keyhole: full-parameter fine-tuning of language models that do not fit your GPU.

model = keyhole.load("path-or-hub-id", placement="stream", gpu_memory="8GiB", dtype="bfloat16")
opt = keyhole.ZO(model, lr=1e-7, eps=1e-3)
for batch in loader:
    loss = opt.step(batch)
opt.flush()
model.save_pretrained("out")
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_WHERE = {
    "load": "keyhole.loading",
    "Model": "keyhole.model.model",
    "AdaLOMO": "keyhole.methods",
    "AdamOffload": "keyhole.methods",
    "AdamW": "keyhole.methods",
    "LOMO": "keyhole.methods",
    "LOMOLoRA": "keyhole.methods",
    "LSP": "keyhole.methods",
    "GaLore": "keyhole.methods",
    "LoRA": "keyhole.methods",
    "SGD": "keyhole.methods",
    "Workload": "keyhole.model.forward.memory",
    "ZO": "keyhole.methods",
}
__all__ = sorted(_WHERE)


def __getattr__(name: str) -> Any:
    """Imports on first use, so that the command line starts without PyTorch."""
    if name not in _WHERE:
        raise AttributeError(f"module 'keyhole' has no attribute {name!r}")
    return getattr(import_module(_WHERE[name]), name)
