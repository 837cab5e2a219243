"""How weights are updated: one idea a file, and this table of names."""

from keyhole.methods.first_order import SGD, AdamW
from keyhole.methods.zo import ZO

METHODS = {"adamw": AdamW, "sgd": SGD, "zo": ZO}

__all__ = ["METHODS", "SGD", "ZO", "AdamW"]
