"""Update rules: a folder per method, and what they share.

base.py             the class that a method implements
settings.py         what a method's settings are, and what follows from them
traits.py           the row by which all other code knows a method
workload.py         what formulas of bytes and FLOPs are asked: a step, and the device that it runs on
work.py             memory, FLOPs, bytes and launches of a step
frame.py            a step of every method with gradients
torch_optimizer.py  for torch's schedulers            by_torch.py            updates by a torch optimizer
weight_decay.py     which parameters decay            dropout.py             the model's own dropout
shards.py           gradients on several ranks        step_numbers.py        numbers of a step for CUDA graphs
states.py           state of optimizers, in the formats of one table

To add a method, add its folder, its row below, and its test. This file and every traits.py import no torch.
"""

from keyhole.methods.adam_offload.traits import ADAM_OFFLOAD
from keyhole.methods.apollo_mini.traits import APOLLO_MINI
from keyhole.methods.baselines.traits import ADAMW, GALORE, SGD
from keyhole.methods.lomo.traits import ADALOMO, LOMO, LOMO_LORA
from keyhole.methods.lora.traits import LORA
from keyhole.methods.lsp.traits import LSP
from keyhole.methods.muon.traits import MUON
from keyhole.methods.traits import Traits
from keyhole.methods.zo.traits import ZO

ROWS = (ZO, LOMO, ADALOMO, LOMO_LORA, APOLLO_MINI, LSP, ADAM_OFFLOAD, MUON, ADAMW, SGD, LORA, GALORE)
METHODS: dict[str, Traits] = {row.name: row for row in ROWS}
CLASSES = {row.cls.rpartition(":")[2]: row for row in METHODS.values()}  # for `keyhole.ZO` and its like


def streaming_methods() -> str:
    """`zo, lomo or lsp`, for messages: the methods that do not need a resident model."""
    *first, last = [row.name for row in METHODS.values() if row.streams]
    return f"{', '.join(first)} or {last}"
