"""How weights are updated: one idea a file, and this table of names.

A new method is its file, a line in METHODS, and what others have to know of it:

    keyhole/__init__.py        its class, for those who use the library
    config/methods.py          its settings; config/schema.py: the section, and the name in `Method`
    config/rules.py            its learning rates, whether it streams, what it refuses
    plan/placement.py          the bytes it takes on the device (PLANNED)
    checkpoint/snapshot/background.py   who tells when its weights change; without, a checkpoint holds the next step up
    demo/run.py                its rate in the demo, if not the usual one
"""

from keyhole.methods.adam_offload.method import AdamOffload
from keyhole.methods.baselines.first_order import SGD, AdamW
from keyhole.methods.baselines.galore import GaLore
from keyhole.methods.baselines.lora import LoRA
from keyhole.methods.lomo.adalomo import AdaLOMO
from keyhole.methods.lomo.lomo_lora import LOMOLoRA
from keyhole.methods.lomo.method import LOMO
from keyhole.methods.lsp.method import LSP
from keyhole.methods.zo.method import ZO

METHODS = {
    "adamw": AdamW,
    "sgd": SGD,
    "zo": ZO,
    "lomo": LOMO,
    "adalomo": AdaLOMO,
    "lomo-lora": LOMOLoRA,
    "lora": LoRA,
    "galore": GaLore,
    "adam-offload": AdamOffload,
    "lsp": LSP,
}

__all__ = ["LOMO", "LSP", "METHODS", "SGD", "ZO", "AdaLOMO", "AdamOffload", "AdamW", "GaLore", "LOMOLoRA", "LoRA"]
