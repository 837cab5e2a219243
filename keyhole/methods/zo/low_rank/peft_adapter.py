"""What low-rank directions have learned, as a peft adapter beside the base model.

    y = x W^T + (x V) A^T        V [I, K], A [O, K]: the sum of earlier periods, then period by period

is LoRA with lora_A = V^T, lora_B = A and alpha equal to its rank: k r for k periods, fewer if they were folded, and
then different for each matrix (peft's rank_pattern). So a run that keeps its factors (zo.fold=false) can be saved
without rounding W again (zo.merge=false): the base model unchanged, except for trained norms, biases, embedding and
head, and adapter/ beside it. Transformers and peft combine them, and so does keyhole.load. Bytes on disk: 4 K (I + O)
per matrix.
"""

from pathlib import Path

import torch
from torch import nn

from keyhole.methods.lora.adapted_linear import ADAPTER
from keyhole.methods.lora.peft_layers import peft_config, write_adapter
from keyhole.methods.zo.low_rank.factors import Factors


def write_factors(factors: Factors, path: Path) -> None:
    """Writes path/adapter/; nothing if nothing was learned yet."""
    params: dict[str, nn.Parameter] = {}
    ranks: dict[str, int] = {}
    for index, matrix in enumerate(factors.parts.matrices):
        if learned := factors.learned(index):
            a_KO, v_KI = (torch.cat(parts) for parts in zip(*learned, strict=True))
            stem = matrix.tensor.name.removesuffix(".weight")
            ranks[stem] = len(a_KO)
            params[f"{stem}.lora_A.{ADAPTER}.weight"] = nn.Parameter(v_KI.contiguous())
            params[f"{stem}.lora_B.{ADAPTER}.weight"] = nn.Parameter(a_KO.t().contiguous())
    if not params:
        return
    rank = max(ranks.values())
    others = {name: own for name, own in ranks.items() if own != rank}
    transposed = any(matrix.transposed for matrix in factors.parts.matrices)
    own = {"rank_pattern": others, "alpha_pattern": {name: float(own) for name, own in others.items()}}
    own = {"target_modules": sorted(ranks), "fan_in_fan_out": transposed} | (own if others else {})
    config = peft_config(factors.model, r=rank, lora_alpha=float(rank), **own)
    write_adapter(path, params, config)
