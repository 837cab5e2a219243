"""Several samples per row, none of which sees another.

Padding wastes what the longest sample of a batch does not fill. Packing fills rows of max_length tokens
with whole samples instead: the longest first, each into the fullest row where it still fits (best fit
decreasing; never more than 11/9 of the fewest rows, plus one). It depends on the lengths alone, so it is
the same in every run. No sample is cut.

Plain concatenation would let a sample read the one before it. Here a packed batch carries `position_ids`
that begin at 0 in every sample, and no attention mask: Hugging Face models that pass position_ids on to
their mask see the jumps and make attention block-diagonal. That is a property of each model's code, not of
the library. Measured on tiny random models, transformers 5.22 with sdpa and eager (the commoner ones with
5.17 and in bf16 as well):

    apart    Llama 1 to 4, Qwen 2 and 3 (dense, MoE), Gemma 1 to 3, Mistral, Mixtral, Phi 1 to 3, OLMo 1 to 3,
             OLMoE, GPT-2, GPT-NeoX, GPT-J, Cohere, GLM-4, Granite, SmolLM3, DeepSeek-V3, Starcoder 2, LFM2, ...
    leaks    OPT, BLOOM, Falcon, MPT, XGLM, GPT-OSS, AFMoE; all recurrent layers tried (Mamba 1 and 2, RWKV,
             Qwen3-Next, Qwen 3.5, Nemotron-H, Granite hybrid, MiniMax); BART and BERT decoders

So `check_packing` asks the model itself before the first step and refuses on a leak. For each token of a
sample it takes the NLL alone, packed behind another sample, and plainly joined to it:

    |packed - alone| <= LEAK * |joined - alone|          (largest over the tokens)

The join is the yardstick for what a leak looks like in this model, whatever its size, weights and rounding.
Kept apart, the ratio is 1e-5 or less in fp32; in bf16, 0 for small random models and about 0.02 for a
trained one of 135M parameters with rounding noise added to every layer. Where samples leak it is 0.1 to 1.
So the limit is 0.01, and 0.1 for 16-bit weights.
"""

from bisect import bisect_left, insort
from typing import Any

import torch

from keyhole.errors import UserError

LEAK, LEAK_16_BIT = 0.01, 0.1
PROBE = 9  # tokens in each of the two samples


def pack(lengths: list[int], max_length: int) -> list[list[int]]:
    """Rows of sample indices, each of at most max_length tokens; every sample is in exactly one."""
    rows: list[list[int]] = []
    by_space: dict[int, list[int]] = {}  # free tokens -> rows with just that much room
    spaces: list[int] = []  # its keys, sorted
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        assert lengths[i] <= max_length, "samples are cut or dropped before they are packed"
        at = bisect_left(spaces, lengths[i])
        if at == len(spaces):
            row, space = len(rows), max_length
            rows.append([])
        else:
            space = spaces[at]
            row = by_space[space].pop()
            if not by_space[space]:
                del by_space[space], spaces[at]
        rows[row].append(i)
        left = space - lengths[i]
        if left and left not in by_space:
            by_space[left] = []
            insort(spaces, left)
        if left:
            by_space[left].append(row)
    return rows


def check_packing(model: Any, max_length: int | None = None) -> None:
    """Refuse packing for a model that lets packed samples see each other.

    `model` is a Hugging Face module, or anything with `.nll(batch) -> (nll_B, count_B)` such as keyhole's
    Model, whose placement is then respected. Costs three forward passes over a few short rows.
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
    alone, packed, joined = (nll(batch)[0].double().cpu() for batch in _probes(config.vocab_size))
    leak, yardstick = (packed - alone).abs().max(), (joined - alone).abs().max()
    limit = LEAK if module.dtype in (torch.float32, torch.float64) else LEAK_16_BIT
    if not leak <= limit * yardstick + 1e-6:
        raise UserError(
            f"packing is not supported by {name}: packed samples see each other "
            f"(a difference of {leak:.2g} nats where joining them makes {yardstick:.2g}); set packing=false"
        )


def _probes(vocab_size: int) -> list[dict[str, torch.Tensor]]:
    """The second sample alone, packed, joined; row r trains on its token r + 1 alone: one NLL per token."""
    t, rows = PROBE, PROBE - 1
    second = torch.randint(0, vocab_size, (t,), generator=torch.Generator().manual_seed(0))
    ids = torch.cat([second.roll(t // 2), second])  # a trained model that sees the first copies from it, loudly
    labels = torch.full((rows, 2 * t), -100)
    labels[torch.arange(rows), torch.arange(t + 1, 2 * t)] = ids[t + 1 :]
    pair = {"input_ids": ids.repeat(rows, 1), "labels": labels}
    restart, onward = torch.arange(2 * t) % t, torch.arange(2 * t)
    return [
        {name: x[:, t:].contiguous() for name, x in pair.items()} | {"position_ids": onward[:t].repeat(rows, 1)},
        pair | {"position_ids": restart.repeat(rows, 1)},
        pair | {"position_ids": onward.repeat(rows, 1)},
    ]


@torch.no_grad()
def _nll(module: torch.nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Summed NLL and trained tokens of each row. No cache: with one, models do not look for packing."""
    batch = {name: x.to(next(module.parameters()).device) for name, x in batch.items()}
    labels = batch.pop("labels")[:, 1:]
    was_training = module.training
    logits = module.eval()(**batch, use_cache=False).logits[:, :-1].float()
    module.train(was_training)
    nll = torch.nn.functional.cross_entropy(logits.transpose(1, 2), labels, reduction="none", ignore_index=-100)
    return nll.sum(1), (labels != -100).sum(1)
