"""Samples packed into one row must not attend to each other: how a model is told, and how that is checked.

A packed batch has `position_ids` that begin at 0 in every sample, and no attention mask. Hugging Face models that pass
position_ids to their mask function detect the jumps and make attention block-diagonal. That depends on each model's
code, not on the library. Measured on tiny random models, transformers 5.22 with sdpa and eager (the commoner ones with
5.17 and in bf16 as well):

    apart    Llama 1 to 4, Qwen 2 and 3 (dense, MoE), Gemma 1 to 3, Mistral, Mixtral, Phi 1 to 3, OLMo 1 to 3,
             OLMoE, GPT-2, GPT-NeoX, GPT-J, Cohere, GLM-4, Granite, SmolLM3, DeepSeek-V3, Starcoder 2, ...
    leaks    OPT, BLOOM, Falcon, MPT, XGLM, GPT-OSS, AFMoE; all recurrent layers tried (Mamba 1 and 2, RWKV,
             Qwen3-Next, Qwen 3.5, Nemotron-H, Granite hybrid, MiniMax) and convolutions (LFM2); BART and BERT decoders

So `check_packing` tests the model before the first packed batch and refuses on a leak. For each token of a sample it
computes the NLL of the sample alone, packed after another sample, and concatenated with it, the latter two with two
different samples before it:

    |packed - alone|   <= LEAK * |joined - alone|        (largest over the tokens)
    |packed - packed'| <= LEAK * |joined - joined'|      ': with other tokens in the sample before

The concatenation shows how large an effect is in this model, whatever its size, weights and rounding. The first line
shows that a packed sample is computed as it would be alone. If samples are separate, its ratio is 1e-5 or less in fp32;
in bf16, 0 for small random models and about 0.02 for a trained one of 135M parameters with rounding noise added to
every layer. But the concatenated sample has other positions too, beside which a leak can be small: 0.3 to 2 % in random
models with learned positions, 0.3 % in a random RecurrentGemma. The second line compares passes of the same shapes and
positions: its ratio is 0 where samples are separate, in any dtype (rounding, where experts have other tokens), and 0.3
or more where they leak. So the limit is 0.01, and 0.1 for 16-bit weights. Two random models are in between: attention
keeps samples apart, but the recurrence of Falcon-H1 and the convolutions of LFM2-MoE do not, and are weak (0.001 to
0.03). So rows that nobody asked to pack (joined_rows.py) have the limit ROUNDING in the second line.

A user's packed batch may also have a mask. Models look for jumps only if there is no mask, so the mask of a packed
batch is dropped: `separate` gives the padding at the end of a row its own positions, as one more sample that no other
token attends to.
"""

from typing import Any

import torch

from keyhole.errors import UserError

LEAK, LEAK_16_BIT, ROUNDING = 0.01, 0.1, 1e-4
PROBE = 9  # tokens in each of the two samples


def is_packed(position_ids_BT: torch.Tensor, mask_BT: torch.Tensor | None) -> bool:
    """Whether positions jump between two neighbouring tokens of a row that are both unmasked."""
    jumps_BT = position_ids_BT[:, 1:] - position_ids_BT[:, :-1] != 1
    if mask_BT is not None:
        jumps_BT = jumps_BT & mask_BT[:, 1:].bool() & mask_BT[:, :-1].bool()
    return bool(jumps_BT.any())


def separate(position_ids_BT: torch.Tensor, mask_BT: torch.Tensor) -> torch.Tensor:
    """Position ids that replace the mask of a packed batch: the padding after the last token becomes a sample."""
    mask_BT = mask_BT.bool()
    if bool((~mask_BT[:, :-1] & mask_BT[:, 1:]).any()):
        raise UserError(
            "batch: attention_mask hides tokens before the end of a row whose position_ids restart (packed samples); "
            "pad packed rows at their end, or leave such tokens out"
        )
    padding_BT = torch.cumsum(~mask_BT, dim=1) - 1
    return torch.where(mask_BT, position_ids_BT, padding_BT.to(position_ids_BT.dtype))


def check_packing(model: Any, max_length: int | None = None) -> None:
    """Refuses packing for a model in which packed samples attend to each other.

    `model` is a Hugging Face module, or anything with `.nll(batch) -> (nll_B, count_B)` such as keyhole's
    Model, whose placement is then respected. Costs five forward passes over a few short rows.
    """
    module = getattr(model, "module", model)
    config = module.config.get_text_config() if hasattr(module.config, "get_text_config") else module.config
    name = type(module).__name__
    chunk = getattr(config, "attention_chunk_size", None)
    if chunk and max_length and max_length > chunk:
        raise UserError(
            f"packing is not supported by {name} at max_length={max_length}: its attention is cut every "
            f"{chunk} tokens of the row, in the middle of packed samples; set max_length={chunk} or less, "
            "or packing=false"
        )
    nll = model.nll if hasattr(model, "nll") else lambda batch: _nll(model, batch)
    for leak, yardstick in leaks([nll(batch)[0] for batch in probes(config.vocab_size)], module.dtype):
        raise UserError(
            f"packing is not supported by {name}: packed samples see each other "
            f"(a difference of {leak:.2g} nats where joining them makes {yardstick:.2g}); set packing=false, "
            "or give every sample a row of its own"
        )


def leaks(nll: list[torch.Tensor], dtype: torch.dtype, strict: bool = False) -> list[tuple[float, float]]:
    """(leak, effect of concatenation) in nats, of those that are too large, from the NLLs of the probes. strict: what
    comes from the sample before may be rounding only."""
    alone, packed, joined, packed_2, joined_2 = (x.double().cpu() for x in nll)
    most, found = LEAK if dtype in (torch.float32, torch.float64) else LEAK_16_BIT, []
    effects = (
        (packed - alone, joined - alone, most),
        (packed - packed_2, joined - joined_2, ROUNDING if strict else most),
    )
    for one, other, limit in effects:
        leak, yardstick = float(one.abs().max()), float(other.abs().max())
        found += [] if leak <= limit * yardstick + 1e-6 else [(leak, yardstick)]  # also if it is not a number
    return found


def probes(vocab_size: int) -> list[dict[str, torch.Tensor]]:
    """The second sample alone, packed, concatenated, the latter two also with another first sample; row r trains only
    on its token r + 1: one NLL per token. Alone it has the positions that the model gives it, which need not begin at
    0."""
    t, rows = PROBE, PROBE - 1
    second = torch.randint(0, vocab_size, (t,), generator=torch.Generator().manual_seed(0))
    ids = torch.cat([second.roll(t // 2), second])  # a trained model that sees the first copies tokens from it: clear
    labels = torch.full((rows, 2 * t), -100)
    labels[torch.arange(rows), torch.arange(t + 1, 2 * t)] = ids[t + 1 :]
    pair = {"input_ids": ids.repeat(rows, 1), "labels": labels}
    another = pair | {"input_ids": torch.cat([(ids[:t] + 1) % vocab_size, second]).repeat(rows, 1)}
    restart, onward = ({"position_ids": x.repeat(rows, 1)} for x in (torch.arange(2 * t) % t, torch.arange(2 * t)))
    alone = {name: x[:, t:].contiguous() for name, x in pair.items()}
    return [alone, pair | restart, pair | onward, another | restart, another | onward]


@torch.no_grad()
def _nll(module: torch.nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Summed NLL and trained tokens of each row. No cache: with one, models do not detect packing."""
    batch = {name: x.to(next(module.parameters()).device) for name, x in batch.items()}
    labels = batch.pop("labels")[:, 1:]
    was_training = module.training
    logits = module.eval()(**batch, use_cache=False).logits[:, :-1].float()
    module.train(was_training)
    nll = torch.nn.functional.cross_entropy(logits.transpose(1, 2), labels, reduction="none", ignore_index=-100)
    return nll.sum(1), (labels != -100).sum(1)
