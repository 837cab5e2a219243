"""Whether a model keeps packed samples apart, found out by trying.

A packed row holds several samples; position ids that start again at 0 tell the model where one begins. Most
HF decoders build a block-diagonal attention mask from them. Some never look at them (in Transformers 5: OPT,
BLOOM, Falcon, GPT-OSS, all state-space models), so that a sample attends to its neighbours, without a word.
No list of names stays right, so we ask the model itself: two packed rows with the same second sample behind
different first ones.

    [ a | c ]
    [ b | c ]        nll of c must be the same number in both, up to rounding
"""

import torch

from keyhole.errors import UserError
from keyhole.model.model import Model

LENGTH = 16  # tokens a sample
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 5e-3, torch.float16: 1e-3}


def keeps_samples_apart(model: Model) -> bool:
    """One forward pass on 4 x LENGTH tokens."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, model.layout.table.shape[0], (3, LENGTH), generator=generator)
    input_ids = torch.stack([torch.cat([ids[0], ids[2]]), torch.cat([ids[1], ids[2]])])
    labels = input_ids.clone()
    labels[:, : LENGTH + 1] = -100
    position_ids = torch.arange(LENGTH).repeat(2, 2)
    nll_B, _ = model.nll({"input_ids": input_ids, "labels": labels, "position_ids": position_ids})
    return bool((nll_B[0] - nll_B[1]).abs() <= TOLERANCE[model.dtype] * nll_B[0].abs())


def refuse_leaky_packing(model: Model) -> None:
    """Raises UserError where packed samples would see each other. Call it once before training with packing."""
    if not keeps_samples_apart(model):
        raise UserError(
            f"packing: {type(model.module).__name__} lets packed samples attend to each other (it does not look at "
            "position_ids), which would train on mixed-up text; set packing=false"
        )
