"""A test on the model itself: do samples that are packed into one row keep apart?

Hugging Face models differ in whether they look at the jumps of position_ids (packing.py), and a config does not tell.
Measured on tiny random models of all families, transformers 5.23, in float32 and bfloat16:

    apart    Llama 1 to 4, Qwen 2 and 3 (dense, MoE), Gemma 1 to 3, Mistral, Mixtral, Phi 1 to 3, OLMo 1 to 3,
             OLMoE, GPT-2, GPT-NeoX, GPT-J, Cohere, GLM-4, Granite, SmolLM3, DeepSeek-V3, Starcoder 2, ...
    leaks    OPT, BLOOM, Falcon, MPT, XGLM, GPT-OSS, AFMoE; all recurrent layers tried (Mamba 1 and 2, RWKV, Falcon-H1,
             Qwen3-Next, Qwen 3.5, Nemotron-H, Granite hybrid, MiniMax) and convolutions (LFM2); BART and BERT decoders

So for each token of a sample the NLL is computed of the sample alone, packed after another sample, and concatenated
with it, the latter two with two different samples before it:

    |packed - alone|   <= OTHER_SHAPES * |joined - alone|       (largest over the tokens)
    |packed - packed'| <= ROUNDING * |joined - joined'|         ': with other tokens in the sample before

The concatenation shows how large an effect is in this model, whatever its size, weights and rounding. The first line
shows that a packed sample is computed as it would be alone, with the positions that the model gives it. Passes of other
shapes round differently: the ratio is 1e-5 or less in float32; in bfloat16 0 for small random models and about 0.02 for
a trained one of 135M parameters with rounding noise added to every layer. So the limit is 0.01, and 0.1 in 16 bits.
A leak can be smaller than that: the concatenated sample has other positions too, and the recurrence of Falcon-H1 and
the convolutions of LFM2-MoE are weak beside its attention (0.0003 to 0.03).

The second line finds these, in any dtype. Packed samples with both kinds of sample before them are rows of one batch,
and the two halves of its rows change places in another batch. So passes have the same shapes, and experts groups of the
same sizes: what is left is 0 where samples are apart (measured: all such families), and 0.0004 or more where they leak.

The same test decides whether users may pack (`check_packing` refuses) and whether rows are joined (joined_rows.py).
Cost: one sweep, with four short passes. The test works with any weights, so deferred updates (zo) are not applied
before it.
"""

from typing import Any

import torch

from keyhole.errors import UserError
from keyhole.model.batch import to_device
from keyhole.model.forward.evaluation import nll_by_token

OTHER_SHAPES, OTHER_SHAPES_16_BIT, ROUNDING = 0.01, 0.1, 1e-4
PROBE = 9  # tokens in each of the two samples


@torch.no_grad()
def find_leak(model: Any) -> tuple[float, float] | None:
    """(leak, effect of concatenation) in nats if packed samples of this decoder see each other; None: they do not."""
    tokens = min(_text_config(model).vocab_size, model.layout.table.shape[0])
    batches = [to_device(batch, model.device) for batch in _probes(tokens)]
    found = [x_N.double().cpu() for x_N in nll_by_token(model, batches)]
    alone, packed, packed_2, joined, joined_2 = found[0], *found[1].chunk(2), *found[3].chunk(2)
    swapped_2, swapped = found[2].chunk(2)
    other_shapes = OTHER_SHAPES if model.dtype in (torch.float32, torch.float64) else OTHER_SHAPES_16_BIT
    for effect, whole, limit in (
        (packed - alone, joined - alone, other_shapes),
        (torch.cat([packed - swapped_2, packed_2 - swapped]), joined - joined_2, ROUNDING),
    ):
        leak, yardstick = float(effect.abs().max()), float(whole.abs().max())
        if not leak <= limit * yardstick + 1e-6:  # also if it is not a number
            return leak, yardstick
    return None


def keeps_apart(model: Any) -> bool:
    """Whether samples that are packed into one row do not attend to each other; no if the model cannot run on them."""
    try:
        return find_leak(model) is None
    except Exception:
        return False


def check_packing(model: Any, max_length: int | None = None) -> None:
    """Refuses packing for a model in which packed samples attend to each other. max_length: tokens of a row."""
    name, chunk = type(model.module).__name__, getattr(_text_config(model), "attention_chunk_size", None)
    if chunk and max_length and max_length > chunk:
        raise UserError(
            f"packing is not supported by {name} at max_length={max_length}: its attention is cut every "
            f"{chunk} tokens of the row, in the middle of packed samples; set max_length={chunk} or less, "
            "or packing=false"
        )
    if (leak := find_leak(model)) is not None:
        raise UserError(
            f"packing is not supported by {name}: packed samples see each other "
            f"(a difference of {leak[0]:.2g} nats where joining them makes {leak[1]:.2g}); set packing=false, "
            "or give every sample a row of its own"
        )


def _text_config(model: Any) -> Any:
    return model.config.get_text_config() if hasattr(model.config, "get_text_config") else model.config


def _probes(vocab_size: int) -> list[dict[str, torch.Tensor]]:
    """The second sample alone; packed after one first sample and, in further rows, after another; the same with these
    halves of the rows exchanged; and concatenated with both. Row r trains only on its token r + 1: one NLL per token.
    Alone it has the positions that the model gives it, which need not begin at 0."""
    t, rows = PROBE, PROBE - 1
    second = torch.randint(0, vocab_size, (t,), generator=torch.Generator().manual_seed(0))
    first = second.roll(t // 2)  # a trained model that sees it copies tokens from it: clear
    labels = torch.full((rows, 2 * t), -100)
    labels[torch.arange(rows), torch.arange(t + 1, 2 * t)] = second[1:]
    one, other = (torch.cat([x, second]).repeat(rows, 1) for x in (first, (first + 1) % vocab_size))
    restart, onward = (x.repeat(2 * rows, 1) for x in (torch.arange(2 * t) % t, torch.arange(2 * t)))

    def both(halves: tuple[torch.Tensor, torch.Tensor], positions: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"input_ids": torch.cat(halves), "labels": labels.repeat(2, 1), "position_ids": positions}

    alone = {"input_ids": one[:, t:].contiguous(), "labels": labels[:, t:].contiguous()}
    return [alone, both((one, other), restart), both((other, one), restart), both((one, other), onward)]
