"""Remake the embedded default: tokenizer, model and task, from nothing but this repository.

    python -m scripts.demo_model [--output keyhole/assets] [--steps 1500] [--threads 1]

The corpus (corpus.py) is generated, a byte-level BPE tokenizer is trained on its first texts,
and a Llama of about a quarter of a million weights is trained on all of it with AdamW, about seven minutes
on one core. Each row of a batch is whole texts, end to end, each closed by <|end|>; the rest of the row is
padding.

    weights = vocab x hidden (tied) + layers x (4 hidden^2 + 3 hidden x intermediate + 2 hidden) + hidden

The same seed, torch build, thread count and kind of CPU give the same bytes; elsewhere the last digits of a
float sum differ, and with them the weights, though not what they know. The task files are the same bytes
everywhere.
"""

import argparse
import math
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from scripts.demo_model.corpus import ASSISTANT, END, USER, documents
from scripts.demo_model.task import make_rows, rows_as_jsonl

PAD = "<|pad|>"
CONTEXT, VOCAB, HIDDEN, INTERMEDIATE, LAYERS, HEADS = 256, 1536, 64, 192, 3, 4
ROWS, PEAK_LR, WARMUP_STEPS, SEED = 8, 8e-3, 50, 7
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def make_tokenizer(seed: int) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=[PAD, END, USER, ASSISTANT],
        show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    texts = documents(seed, 20_000)
    tokenizer.train_from_iterator(
        (t.replace(USER, "").replace(ASSISTANT, "").replace(END, "\n") for t in texts), trainer
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=PAD,
        model_max_length=CONTEXT,
        additional_special_tokens=[USER, ASSISTANT],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def make_model(tokenizer: PreTrainedTokenizerFast, seed: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=HIDDEN,
            intermediate_size=INTERMEDIATE,
            num_hidden_layers=LAYERS,
            num_attention_heads=HEADS,
            num_key_value_heads=HEADS,
            max_position_embeddings=CONTEXT,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            dtype=torch.float32,
        )
    )


def packed_rows(tokenizer: PreTrainedTokenizerFast, seed: int) -> Iterator[list[int]]:
    """Endless rows of CONTEXT tokens: whole texts end to end, then padding."""
    row: list[int] = []
    for text in documents(seed, 10**9):
        ids = tokenizer(text).input_ids + [tokenizer.eos_token_id]
        if len(row) + len(ids) > CONTEXT:
            yield row + [tokenizer.pad_token_id] * (CONTEXT - len(row))
            row = []
        row += ids


def learning_rate(step: int, steps: int) -> float:
    """Linear warm-up, then half a cosine down to a tenth."""
    if step < WARMUP_STEPS:
        return PEAK_LR * (step + 1) / WARMUP_STEPS
    done = (step - WARMUP_STEPS) / max(1, steps - WARMUP_STEPS)
    return PEAK_LR * (0.1 + 0.45 * (1 + math.cos(math.pi * done)))


def train(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, steps: int, seed: int) -> float:
    """AdamW over fresh texts (no text is repeated on purpose); the mean loss of the last 50 steps."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_LR, betas=(0.9, 0.98), weight_decay=0.05)
    rows, losses, begin_s = packed_rows(tokenizer, seed), [], time.perf_counter()
    for step in range(steps):
        ids_BT = torch.tensor([next(rows) for _ in range(ROWS)])
        labels_BT = ids_BT.masked_fill(ids_BT == tokenizer.pad_token_id, -100)
        loss = model(input_ids=ids_BT, labels=labels_BT).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.param_groups[0]["lr"] = learning_rate(step, steps)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step % 50 == 0 or step + 1 == steps:
            print(f"step {step:5d}  loss {losses[-1]:.4f}  {time.perf_counter() - begin_s:6.1f} s", flush=True)
    return sum(losses[-50:]) / len(losses[-50:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path(__file__).parents[2] / "keyhole/assets")
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    begin_s = time.perf_counter()
    tokenizer = make_tokenizer(args.seed)
    model = make_model(tokenizer, args.seed)
    print(f"{sum(p.numel() for p in model.parameters()):,} weights, {len(tokenizer)} tokens in the vocabulary")
    loss = train(model, tokenizer, args.steps, args.seed)
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, max_new_tokens=48
    )
    model.save_pretrained(args.output / "model")
    tokenizer.save_pretrained(args.output / "model")
    train_rows, test_rows = make_rows()
    (args.output / "task").mkdir(parents=True, exist_ok=True)
    (args.output / "task/train.jsonl").write_text(rows_as_jsonl(train_rows), encoding="utf-8")
    (args.output / "task/test.jsonl").write_text(rows_as_jsonl(test_rows), encoding="utf-8")
    print(f"loss {loss:.4f} (mean of the last 50 steps), {time.perf_counter() - begin_s:.0f} s, {args.output}")


if __name__ == "__main__":
    main()
