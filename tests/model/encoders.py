"""Tiny random encoders with a head for classification: what "any encoder" is tested on.

They differ in what could go wrong: token types, positions that depend on padding, pooling or none, a bias of attention
that is computed outside of the blocks and used in all of them, and a decoder that classifies by its last token.
"""

from typing import Any

import torch
import transformers as hf

VOCAB = 99
_SIZE = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
_SIZE |= {"vocab_size": VOCAB, "max_position_embeddings": 40}
_SIZE |= dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0)
ENCODERS = {
    "bert": ("BertConfig", "BertForSequenceClassification", {}),
    "roberta": ("RobertaConfig", "RobertaForSequenceClassification", {"type_vocab_size": 1}),
    "mpnet": ("MPNetConfig", "MPNetForSequenceClassification", {}),
    "llama": ("LlamaConfig", "LlamaForSequenceClassification", {}),
}


def config(name: str, labels: int = 3, **changes: Any) -> Any:
    """A fresh config, ready for keyhole.load(config, init="random", device="cpu")."""
    cls, architecture, own = ENCODERS[name]
    made = getattr(hf, cls)(**_SIZE | own | {"initializer_range": 0.1} | changes)
    made.pad_token_id, made.num_labels, made.architectures = 1, labels, [architecture]
    return made


def batch(rows: int = 4, seed: int = 0, labels: int = 3, types: bool = False) -> dict[str, torch.Tensor]:
    """Random rows of 4 to 9 tokens, padded on the right, each with a label (a number where labels is 1)."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(4, 10, (rows, 1), generator=generator)
    mask = (torch.arange(int(lengths.max())) < lengths).long()
    ids = torch.randint(3, VOCAB, mask.shape, generator=generator) * mask + (1 - mask)
    made = {"input_ids": ids, "attention_mask": mask}
    made["labels"] = torch.randint(labels, (rows,), generator=generator)
    if labels == 1:
        made["labels"] = torch.randn(rows, generator=generator)
    if types:
        made["token_type_ids"] = (torch.arange(mask.shape[1]) >= 3).long() * mask
    return made


def plain_loss(module: torch.nn.Module, batches: list[dict[str, torch.Tensor]]) -> torch.Tensor:
    """Hugging Face's own loss of a row, averaged over the rows of all batches."""
    rows = sum(len(one["labels"]) for one in batches)
    return torch.stack([module(**one).loss * len(one["labels"]) for one in batches]).sum() / rows
