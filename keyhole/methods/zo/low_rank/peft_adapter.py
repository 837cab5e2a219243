"""What directions of low rank have learned, as an adapter of peft's beside the base.

    y = x W^T + (x V) A^T        V [I, k r], A [O, k r]: the periods one beside the other, the present one last

is LoRA with lora_A = V^T, lora_B = A and alpha equal to its rank, k r for k periods. So a run that keeps its factors
(zo.fold=false) can be saved without rounding W anew (zo.merge=false): the base as it is, with the norms, biases,
embedding and head that were learned as they are, and adapter/ beside it. Transformers and peft put them together, and
so does keyhole.load. Bytes on disk: 4 k r (I + O) per matrix.
"""

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from keyhole.methods.lora.peft_layers import ADAPTER, peft_config, write_adapter

if TYPE_CHECKING:
    from keyhole.methods.zo.low_rank.factors import Factors


def write_factors(factors: "Factors", path: Path) -> None:
    """path/adapter/; nothing where nothing was learned yet."""
    params: dict[str, nn.Parameter] = {}
    rank = 0
    for index, matrix in enumerate(factors.parts.matrices):
        if learned := factors.learned(index):
            a_kO, v_kI = (torch.cat([part.float() for part in parts]) for parts in zip(*learned, strict=True))
            stem, rank = matrix.tensor.name.removesuffix(".weight"), len(a_kO)
            params[f"{stem}.lora_A.{ADAPTER}.weight"] = nn.Parameter(v_kI.contiguous())
            params[f"{stem}.lora_B.{ADAPTER}.weight"] = nn.Parameter(a_kO.t().contiguous())
    if not params:
        return
    names = sorted({name.partition(".lora_")[0] for name in params})
    transposed = any(matrix.transposed for matrix in factors.parts.matrices)
    settings = {"r": rank, "lora_alpha": float(rank), "target_modules": names, "fan_in_fan_out": transposed}
    config = peft_config(factors.model, **settings)
    write_adapter(path, params, config)
