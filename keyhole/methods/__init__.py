"""How weights are updated: one idea a file, and this table of names."""

from keyhole.methods.first_order import SGD, AdamW
from keyhole.methods.galore import GaLore
from keyhole.methods.lora import LoRA
from keyhole.methods.zo import ZO

METHODS = {"adamw": AdamW, "sgd": SGD, "zo": ZO, "lora": LoRA, "galore": GaLore}

__all__ = ["METHODS", "SGD", "ZO", "AdamW", "GaLore", "LoRA"]
