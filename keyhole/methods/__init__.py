"""How weights are updated: one idea a file, and this table of names."""

from keyhole.methods.adalomo import AdaLOMO
from keyhole.methods.adam_offload import AdamOffload
from keyhole.methods.first_order import SGD, AdamW
from keyhole.methods.galore import GaLore
from keyhole.methods.lomo import LOMO
from keyhole.methods.lomo_lora import LOMOLoRA
from keyhole.methods.lora import LoRA
from keyhole.methods.lsp import LSP
from keyhole.methods.zo import ZO

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
