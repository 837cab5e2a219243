"""Update rules: a folder per method (base.py describes its contents), and the table of their rows.

base.py is the class that a method implements, traits.py the row by which all other code knows it, workload.py what its
formulas of bytes and FLOPs are asked. memory.py, weight_decay.py and dropout.py are shared by several methods. To add a
method, add its folder, its row below, and its test. This file and every traits.py import no torch.
"""

from keyhole.methods.adam_offload.traits import ADAM_OFFLOAD
from keyhole.methods.apollo_mini.traits import APOLLO_MINI
from keyhole.methods.baselines.traits import ADAMW, GALORE, SGD
from keyhole.methods.lomo.traits import ADALOMO, LOMO, LOMO_LORA
from keyhole.methods.lora.traits import LORA
from keyhole.methods.lsp.traits import LSP
from keyhole.methods.traits import Traits
from keyhole.methods.zo.traits import ZO

METHODS: dict[str, Traits] = {
    row.name: row for row in (ZO, LOMO, ADALOMO, LOMO_LORA, APOLLO_MINI, LSP, ADAM_OFFLOAD, ADAMW, SGD, LORA, GALORE)
}
CLASSES = {row.cls.rpartition(":")[2]: row for row in METHODS.values()}  # for `keyhole.ZO` and its like


def streaming_methods() -> str:
    """`zo, lomo or lsp`, for messages: the methods that do not need a resident model."""
    *first, last = [row.name for row in METHODS.values() if row.streams]
    return f"{', '.join(first)} or {last}"
