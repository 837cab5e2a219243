"""Steps on short, ragged batches beside plain PyTorch loops: the host, not the GPU, is the bottleneck.

    python benchmarks/short_batches.py [--shape smollm2|llama8b] [--only lomo,zo] [--steps 40] [--profile CASE]
                                       [--budget 1GiB] [--json FILE]

smollm2: SmolLM2-135M's shape in float32, 16 rows of 10 to 60 tokens (as in SST-2), padded to a multiple of 16. llama8b:
Llama-3-8B's shape (128k vocabulary) in bfloat16, 8 x 64 tokens. Random weights. The loss is that of the last token of
each row. All cases of a run are in one process, one after the other; a ratio compares a method with its plain loop,
which runs before it even if --only does not name it:

    lomo           SGD (torch.optim.SGD, foreach), no checkpointing
    adalomo, lsp, adam-offload    AdamW (torch.optim.AdamW, fused if torch has it)
    lomo compiled  SGD: blocks through torch.compile, all activations kept
    zo             MeZO's published loop with in-place sums

The floor of a step is printed beside it, from rates measured in this run. It is the largest of:

    compute    6 (first-order) or 4 (zeroth-order) x (parameters of the blocks x tokens + the output matrix x rows)
               operations, at the rate of a square product in the same dtype
    memory     every weight read once and written once, at the rate of a copy on the device
    link       every weight over the link once (streamed cases)
"""

import argparse
import gc
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

import keyhole
from keyhole.bench.baselines import Textbook
from keyhole.bench.measure import copy_rate, link_rates, product_rate

SMOLLM2 = {
    "hidden_size": 576,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "intermediate_size": 1536,
    "vocab_size": 49152,
    "tie_word_embeddings": True,
}
LLAMA8B = {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "tie_word_embeddings": False,
}
TINY = SMOLLM2 | {
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
}


COMPILED = {"activations": "none", "compile": True}
KEEPS = {"activations": "auto"}  # what fits is kept, as a plain loop without checkpointing keeps everything


@dataclass(frozen=True)
class Shape:
    """What is trained, and on how much."""

    config: dict[str, Any]
    dtype: torch.dtype
    rows: int
    shortest: int
    longest: int
    multiple: int = 16


SHAPES = {
    "smollm2": Shape(SMOLLM2, torch.float32, 16, 10, 60),
    "llama8b": Shape(LLAMA8B, torch.bfloat16, 8, 64, 64),
    "tiny": Shape(TINY, torch.float32, 16, 10, 60),
}


def batches_of(shape: Shape, count: int) -> list[dict[str, torch.Tensor]]:
    """Ragged batches, padded on the right; one trained token per row."""
    generator = torch.Generator().manual_seed(1)
    found = []
    for _ in range(count):
        lengths = torch.randint(shape.shortest, shape.longest + 1, (shape.rows,), generator=generator)
        width = -(-int(lengths.max()) // shape.multiple) * shape.multiple
        ids = torch.randint(5, shape.config["vocab_size"], (shape.rows, width), generator=generator)
        at = torch.arange(width)
        mask = (at < lengths[:, None]).long()
        labels = torch.where(at == lengths[:, None] - 1, ids, -100)
        found.append({"input_ids": ids * mask, "attention_mask": mask, "labels": labels})
    return found


def config_of(shape: Shape) -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(**shape.config, max_position_embeddings=2048)


def plain(shape: Shape, device: str, make: Callable[[Any], Any]) -> Callable[[dict], Any]:
    """A loop over the Hugging Face module with a torch optimizer."""
    from transformers import AutoModelForCausalLM

    with torch.device(device):
        module = AutoModelForCausalLM.from_config(config_of(shape), dtype=shape.dtype)
    opt = make(module.parameters())

    def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        loss = module(**{k: v.to(device, non_blocking=True) for k, v in batch.items()}, use_cache=False).loss
        loss.backward()
        opt.step()
        opt.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def textbook(shape: Shape, device: str) -> Callable[[dict], Any]:
    from transformers import AutoModelForCausalLM

    with torch.device(device):
        module = AutoModelForCausalLM.from_config(config_of(shape), dtype=shape.dtype)
    return Textbook(module, 1e-6, in_place=True).step


def ours(shape: Shape, device: str, make: Callable[[Any], Any], method: str, **how: Any) -> Callable[[dict], Any]:
    """A method of keyhole."""
    tokens = shape.rows * -(-shape.longest // shape.multiple) * shape.multiple
    how |= {"dtype": shape.dtype, "device": device, "workload": keyhole.Workload(method=method, tokens=tokens)}
    model = keyhole.load(config_of(shape), init="random", **how)
    return make(model).step


def cases(shape: Shape, device: str, budget: str) -> dict[str, tuple[str | None, Callable[[], Callable]]]:
    """Name -> (the plain loop it is compared with, how to make its step)."""
    fused = device != "cpu"
    d = min(384, shape.config["hidden_size"]) if shape.dtype == torch.float32 else 2048
    return {
        "sgd": (None, lambda: plain(shape, device, lambda p: torch.optim.SGD(p, 1e-4))),
        "lomo": ("sgd", lambda: ours(shape, device, lambda m: keyhole.LOMO(m, 1e-4, **KEEPS), "lomo")),
        "lomo clipped": (
            "sgd",
            lambda: ours(shape, device, lambda m: keyhole.LOMO(m, 1e-4, max_grad_norm=1.0, **KEEPS), "lomo"),
        ),
        "lomo compiled": ("sgd", lambda: ours(shape, device, lambda m: keyhole.LOMO(m, 1e-4, **COMPILED), "lomo")),
        "adamw": (None, lambda: plain(shape, device, lambda p: torch.optim.AdamW(p, 1e-5, fused=fused))),
        "adalomo": ("adamw", lambda: ours(shape, device, lambda m: keyhole.AdaLOMO(m, 5e-4, **KEEPS), "adalomo")),
        "lsp": ("adamw", lambda: ours(shape, device, lambda m: keyhole.LSP(m, 2e-5, d=d, learn=False, **KEEPS), "lsp")),
        "adam-offload": (
            "adamw",
            lambda: ours(shape, device, lambda m: keyhole.AdamOffload(m, 1e-5, **KEEPS), "adam-offload"),
        ),
        "mezo": (None, lambda: textbook(shape, device)),
        "zo": ("mezo", lambda: ours(shape, device, lambda m: keyhole.ZO(m, 1e-6), "zo")),
        "zo streamed": (
            "mezo",
            lambda: ours(
                shape, device, lambda m: keyhole.ZO(m, 1e-6), "zo", placement="stream", gpu_memory=budget or None
            ),
        ),
        **{
            f"{name} in 4GiB": (plain, partial(ours, shape, device, make, name, gpu_memory="4GiB"))
            for name, plain, make in (
                ("lomo", "sgd", lambda m: keyhole.LOMO(m, 1e-4, **KEEPS)),
                ("adam-offload", "adamw", lambda m: keyhole.AdamOffload(m, 1e-5, **KEEPS)),
            )
        },
        "lomo streamed": (
            "sgd",
            lambda: ours(shape, device, lambda m: keyhole.LOMO(m, 1e-4), "lomo", placement="stream"),
        ),
    }


def floors(shape: Shape, device: str, batches: list[dict]) -> Callable[[str], float]:
    """The least milliseconds that a step of a case can take."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(config_of(shape), dtype=shape.dtype)
    where = torch.device(device)
    total = sum(p.numel() for p in module.parameters())
    table = shape.config["vocab_size"] * shape.config["hidden_size"]
    in_blocks = total - table * (1 if shape.config["tie_word_embeddings"] else 2)
    tokens = sum(batch["input_ids"].numel() for batch in batches) / len(batches)
    operations = in_blocks * tokens + table * shape.rows
    weights_bytes = total * shape.dtype.itemsize
    products, copies = product_rate(where, shape.dtype), copy_rate(where)
    link = link_rates(64 * 2**20)["up"] * 1e9 if device != "cpu" else None
    over_link = f", link {link / 1e9:.1f} GB/s" if link else ""
    print(f"products {products / 1e12:.1f} TFLOP/s, copies {copies / 1e9:.0f} GB/s{over_link}", flush=True)

    def floor_ms(name: str) -> float:
        times = 4 if name.startswith(("zo", "mezo")) else 6
        found = [times * operations / products, 2 * weights_bytes / copies]
        return 1e3 * max([*found, weights_bytes / link] if link and "streamed" in name else found)

    return floor_ms


def timed(step: Callable, batches: list[dict], steps: int, device: str) -> dict[str, float]:
    """Milliseconds per step: of the fastest and the mean of three rounds, after a warm-up over all shapes twice."""
    wait = torch.cuda.synchronize if device != "cpu" else lambda: None
    begin = time.perf_counter()
    for i in range(steps):
        step(batches[i % len(batches)])
    wait()
    warm = time.perf_counter() - begin
    rounds = []
    for _ in range(3):
        begin = time.perf_counter()
        for i in range(steps):
            step(batches[i % len(batches)])
        wait()
        rounds.append((time.perf_counter() - begin) / steps * 1e3)
    return {"ms": min(rounds), "mean_ms": sum(rounds) / 3, "warm_up_s": warm}


def profile(step: Callable, batches: list[dict], device: str) -> None:
    """Where the time of ten steps goes."""
    from torch.profiler import ProfilerActivity as Activity

    for i in range(60):
        step(batches[i % len(batches)])
    kinds = [Activity.CPU] + ([Activity.CUDA] if device != "cpu" else [])
    with torch.profiler.profile(activities=kinds) as prof:
        for i in range(10):
            step(batches[i % len(batches)])
        if device != "cpu":
            torch.cuda.synchronize()
    print(prof.key_averages().table(sort_by="self_cpu_time_total", row_limit=25, max_name_column_width=60))
    if device != "cpu":
        print(prof.key_averages().table(sort_by="self_cuda_time_total", row_limit=15, max_name_column_width=60))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--shape", default="smollm2", choices=SHAPES)
    parser.add_argument("--only", default="")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--budget", default="")
    parser.add_argument("--profile", default="")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    shape, device = SHAPES[args.shape], "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        torch.set_num_threads(1)
    table, found = cases(shape, device, args.budget), {}
    batches = batches_of(shape, 8)
    wanted = args.only.split(",") if args.only else list(table)
    if unknown := [name for name in wanted if name not in table]:
        parser.error(f"--only: {', '.join(unknown)}: choose among {', '.join(table)}")
    baselines = {table[name][0] for name in wanted}
    floor_ms = floors(shape, device, batches)
    for name in (name for name in table if name in wanted or name in baselines):
        try:
            step = table[name][1]()
            if name == args.profile:
                profile(step, batches, device)
            found[name] = timed(step, batches, args.steps, device)
        except Exception as error:  # a case that fails is a row too
            print(f"{name}: {type(error).__name__}: {error}"[:600], flush=True)
            continue
        finally:
            step = None
            gc.collect()
            if device != "cpu":
                torch.cuda.empty_cache()
        base = found.get(table[name][0] or "")
        ratio = f"{base['ms'] / found[name]['ms']:.2f}x of {table[name][0]}" if base else ""
        found[name]["floor_ms"] = floor_ms(name)
        floor = f"floor {floor_ms(name):7.2f} ({found[name]['ms'] / floor_ms(name):.1f})"
        print(
            f"{name:16s} {found[name]['ms']:8.2f} ms  mean {found[name]['mean_ms']:8.2f}  {floor}  {ratio}", flush=True
        )
    if args.json:
        args.json.write_text(json.dumps({"shape": args.shape, "torch": torch.__version__, "rows": found}, indent=1))


if __name__ == "__main__":
    main()
