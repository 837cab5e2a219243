"""Tiny base encoders with tokenizers of their own, and a crafted task of two classes for them."""

import json
import random
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from tests.model.encoders import config

WORDS = [f"w{i}" for i in range(24)]
KINDS, OTHER = (WORDS[:2], WORDS[2:4]), WORDS[4:]
SPECIAL = {"bert": ("[CLS]", "[PAD]", "[SEP]", "[UNK]"), "roberta": ("<s>", "<pad>", "</s>", "<unk>")}
PAIRS = {"bert": "[CLS] $A [SEP] $B:1 [SEP]:1", "roberta": "<s> $A </s> </s> $B </s>"}
CLASSES = {"bert": hf.BertModel, "roberta": hf.RobertaModel}


def save_tokenizer(name: str, path: Path) -> None:
    """A tokenizer of whole words that puts one text, or two, between special tokens as the family does."""
    begin, pad, end, unknown = SPECIAL[name]
    vocabulary = {word: i for i, word in enumerate([*SPECIAL[name], *WORDS])}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token=unknown))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    ids = [(token, vocabulary[token]) for token in (begin, end)]
    made.post_processor = processors.TemplateProcessing(f"{begin} $A {end}", PAIRS[name], ids)
    inputs = ["input_ids", "attention_mask", *(["token_type_ids"] if name == "bert" else [])]
    tokens = {"cls_token": begin, "pad_token": pad, "sep_token": end, "unk_token": unknown}
    hf.PreTrainedTokenizerFast(tokenizer_object=made, model_input_names=inputs, **tokens).save_pretrained(path)


def save_encoder(name: str, path: Path, **changes: Any) -> Path:
    """A base encoder, no head in its files. Its weights are large enough for a head to tell words apart at once."""
    torch.manual_seed(0)
    CLASSES[name](config(name, **{"initializer_range": 0.3, "num_hidden_layers": 2} | changes)).save_pretrained(path)
    save_tokenizer(name, path)
    return path


def write_task(path: Path) -> dict[str, Any]:
    """Settings of a run whose label is whether the second of two texts has good words or bad ones."""
    (path / "data" / "own").mkdir(parents=True)
    draw = random.Random(0)
    for split, count in (("train", 120), ("dev", 40)):
        rows = []
        for i in range(count):
            other, telling = (
                [draw.choice(words) for _ in range(draw.randint(2, 5))] for words in (OTHER, KINDS[i % 2])
            )
            rows.append({"a": " ".join(other[:2]), "b": " ".join(telling), "label": i % 2, "score": i % 2 + 0.5})
        (path / "data" / "own" / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (path / "own.yaml").write_text(
        "columns: {a: a, b: b, label: label}\nprompt: '{{ a }} {{ b }}'\ntexts: ['{{ a }}', '{{ b }}']\n"
        "candidates: [' w0', ' w2']\nlabels: [[0, bad], [1, good]]\nmetric: [accuracy, f1]\n"
    )
    made = {"task": str(path / "own.yaml"), "task_data": str(path / "data"), "head": "classification"}
    return made | {"num_train": 60, "num_dev": 40, "batch_size": 10, "device": "cpu"}
