"""A frozen base in 4 bits: adapters over it, and models that fit host memory in no other format.

    python benchmarks/frozen_base.py [--only lora,unpack,175B] [--steps 5] [--out DIR] [--quick]

lora     Llama-3-8B's shape in bfloat16, 4 x 1024 tokens, rank 8 beside every linear layer, random weights:
             peft      peft's own layers on the plain Hugging Face module, bf16 weights resident, torch's fused AdamW,
                       Hugging Face's checkpointing: the usual loop (bitsandbytes is not needed)
             keyhole   bf16 and int4, resident and streamed in 4 GiB
         Resident runs keep all activations if they fit, or recompute every block, as in 4 GiB. The floor of a streamed
         step is max(compute, link): the resident step of the same weights with every block recomputed, and the bytes
         of a step at the link's rate of this run.
unpack   one block of that shape from int4, int8 and nf4 to bfloat16, beside a copy of as many bytes
175B     OPT-175B's shape, all 96 blocks, int4, packed piece by piece from the generator, never in 16 bits (350 GB):
         low-rank zeroth-order steps over it (1 x 2048 tokens) in 8 and in 7.5 GiB of GPU memory, whose losses must be
         equal, with seconds per step and the peaks of GPU and host memory
         (70B: the same with Llama-3-70B's shape, in 8 and 4 GiB). Floor: max(compute, link), where compute is the
         resident step of 2 and of 8 blocks, continued to all of them

--quick: the same on tiny shapes, also on a CPU. Seconds are of timed steps after one warm-up step; every case frees its
memory before the next.
"""

import argparse
import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

import keyhole
from keyhole.bench.link import measure_link
from keyhole.bench.measure import clean_up, clear_device, device_memory, host_memory, random_batch, time_steps
from keyhole.bench.rates import copy_rate
from keyhole.bench.shapes import opt_config
from keyhole.machine.sizes import GIB
from keyhole.methods import METHODS
from keyhole.ops.lowbit import Grid, lowbit_decode

LLAMA = {
    "8B": {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "intermediate_size": 14336},
    "70B": {"hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64, "intermediate_size": 28672},
    "quick": {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 160},
}
VOCABULARY, QUICK_VOCABULARY = 128256, 512
BUDGET = "4GiB"


def llama(name: str, quick: bool) -> Any:
    from transformers import LlamaConfig

    shape = LLAMA["quick" if quick else name]
    heads = 2 if quick else 8
    words = QUICK_VOCABULARY if quick else VOCABULARY
    return LlamaConfig(**shape, num_key_value_heads=heads, vocab_size=words, max_position_embeddings=4096)


class Peft:
    """The baseline: peft on the module itself."""

    def __init__(self, model: keyhole.Model) -> None:
        from peft import LoraConfig, get_peft_model

        names = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
        module = model.module.train()
        module.gradient_checkpointing_enable({"use_reentrant": False})
        module.enable_input_require_grads()
        self.device = model.device
        self.module = get_peft_model(module, LoraConfig(r=8, lora_alpha=16, target_modules=names))
        trained = [p for p in self.module.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=2e-4, fused=self.device.type == "cuda")

    def step(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        loss = self.module(**{k: v.to(self.device) for k, v in batch.items()}, use_cache=False).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()


def measured(
    model: keyhole.Model, step: Callable[[], torch.Tensor], device: torch.device, steps: int
) -> dict[str, Any]:
    """Seconds, bytes and losses of a case."""
    clean_up(device)
    found = time_steps(step, model.engine, warm_up=2, timed=steps)
    return found | {"gpu": device_memory(device)["reserved_bytes"], "host": host_memory()}


def say(row: dict[str, Any]) -> None:
    """At once: the table comes last, and a run may be cut."""
    memory = f"GPU {row['gpu'] / GIB:.2f} GiB, host {row['host'] / GIB:.1f} GiB, {row['bytes_up'] / 1e9:.2f} GB up"
    print(f"{row['case']}, {row['name']}: {row['step_s']:.4f} s per step, {memory}, {row['losses'][:3]}", flush=True)


def case_lora(args: argparse.Namespace, device: torch.device) -> list[dict[str, Any]]:
    """Rows of the table of adapters."""
    tokens = (2, 32) if args.quick else (4, 1024)
    budget = None if args.quick else BUDGET
    work = keyhole.Workload("lora", tokens=tokens[0] * tokens[1], passes=1, length=tokens[1])
    plans: list[tuple[str, dict[str, Any]]] = [
        ("peft, bf16, resident", {}),
        ("bf16, resident", {}),
        ("int4, resident", {"wire": "int4"}),
        ("bf16, resident, blocks run twice", {"activations": "block"}),
        ("int4, resident, blocks run twice", {"wire": "int4", "activations": "block"}),
        ("nf4, resident, blocks run twice", {"wire": "nf4", "activations": "block"}),
        (f"bf16, streamed in {budget}", {"placement": "stream", "gpu_memory": budget}),
        (f"int4, streamed in {budget}", {"wire": "int4", "placement": "stream", "gpu_memory": budget}),
        (f"nf4, streamed in {budget}", {"wire": "nf4", "placement": "stream", "gpu_memory": budget}),
    ]
    rows = []
    for name, how in plans:
        kept = {key: how.pop(key) for key in ("activations",) if key in how}
        model = keyhole.load(
            llama("8B", args.quick), init="random", dtype="bfloat16", device=device, workload=work, **how
        )
        method = Peft(model) if name.startswith("peft") else keyhole.LoRA(model, lr=2e-4, r=8, **kept)
        batch = random_batch(*tokens, model.config.vocab_size)
        found = measured(model, lambda method=method, batch=batch: method.step(batch), device, args.steps)
        planned = 0 if model.placed is None else model.placed.device_bytes.total
        rows.append({"case": "lora", "name": name, "tokens": tokens, "planned": planned, **found})
        say(rows[-1])
        model.close()
        del model, method
        clear_device(device)
    return rows


def case_unpack(args: argparse.Namespace, device: torch.device) -> list[dict[str, Any]]:
    """Seconds that it takes to unpack a block."""
    n = 1 << 16 if args.quick else 218_103_808
    rate = copy_rate(device, 2**20 if args.quick else None)
    rows = []
    for name in ("int4", "nf4", "int8"):
        grid = Grid(name)
        codes = torch.randint(0, 256, (grid.code_bytes(n),), dtype=torch.uint8, device=device)
        scales = torch.rand(grid.scale_count(n), device=device).half()
        out = torch.empty(n, dtype=torch.bfloat16, device=device)
        unpack = partial(_unpack, codes, scales, out, grid)
        found = time_steps(unpack, _Clock(device), warm_up=3, timed=20)  # type: ignore[arg-type]
        moved = codes.nbytes + scales.nbytes + out.nbytes
        rows.append(
            {"case": "unpack", "name": name, "step_s": found["step_s"], "floor_s": moved / rate, "bytes": moved}
        )
    return rows


def _unpack(codes: torch.Tensor, scales: torch.Tensor, out: torch.Tensor, grid: Grid) -> torch.Tensor:
    lowbit_decode(codes, scales, out, grid)
    return out[0]


class _Clock:
    """What time_steps asks of an engine, where nothing moves."""

    bytes_up = bytes_down = 0

    def __init__(self, device: torch.device) -> None:
        self.device = device


def case_whole(name: str, args: argparse.Namespace, device: torch.device) -> list[dict[str, Any]]:
    """All blocks of a model in 4 bits, zeroth-order steps of low rank over it, in two budgets, and their floor."""
    length = 16 if args.quick else 2048
    config = opt_config("175B", length, quick=args.quick) if name == "175B" else llama(name, args.quick)
    blocks, few = config.num_hidden_layers, (2, 3) if args.quick else (2, 8)
    rows = []
    for budget in ("8GiB", "7.5GiB") if name == "175B" else ("8GiB", "4GiB"):
        how = {"placement": "stream", "gpu_memory": None if args.quick else budget}
        rows.append({"case": name, "name": f"int4, rank 2, {budget}", **low_rank_steps(config, how, args, device)})
        say(rows[-1])
    resident = []
    for count in few:  # what a block takes if it is resident: t(blocks) is a straight line
        config.num_hidden_layers = count
        resident.append(low_rank_steps(config, {"placement": "resident"}, args, device)["step_s"])
    per_block = (resident[1] - resident[0]) / (few[1] - few[0])
    compute = resident[0] + (blocks - few[0]) * per_block
    print(
        f"{name}, resident: {resident[0]:.4f} and {resident[1]:.4f} s for {few} blocks, so {compute:.3f} s for {blocks}"
    )
    return [row | {"compute_s": compute} for row in rows]


def low_rank_steps(config: Any, how: dict[str, Any], args: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Steps of rank 2 over a base in 4 bits: seconds, bytes, losses."""
    length, own, row = 16 if args.quick else 2048, {"rank": 2, "refresh": 100, "fold": False}, METHODS["zo"]
    work = keyhole.Workload("zo", tokens=length, passes=2, settings=row.fill(row.settings(**own)), length=length)
    clean_up(device)
    begin_s = time.monotonic()
    model = keyhole.load(config, init="random", dtype="bfloat16", device=device, workload=work, wire="int4", **how)
    loaded, load_s = host_memory(), time.monotonic() - begin_s
    method = keyhole.ZO(model, lr=1e-7, **own)
    batch = random_batch(1, length, model.config.vocab_size)
    found = measured(model, partial(method.step, batch), device, args.steps)
    weights = sum(model.formats.home_bytes(unit) for unit in model.layout.units)
    found |= {"weights": weights, "host_loading": loaded, "load_s": load_s, "blocks": model.layout.block_count}
    model.close()
    del model, method
    clear_device(device)
    return found | {"tokens": (1, length)}


def table(rows: list[dict[str, Any]], link: dict[str, float]) -> list[str]:
    """Markdown."""
    up = link.get("up", 0.0) * 1e9
    lines = [f"Link: {link.get('up', 0.0):.1f} GB/s up.", ""]
    lines += ["| case | | GPU | host | up per step | step | tokens/s | against max(compute, link) | against peft |"]
    lines += ["|---|---|---|---|---|---|---|---|---|"]
    peft = next((row["step_s"] for row in rows if row["name"].startswith("peft")), None)
    for row in (row for row in rows if "gpu" in row):
        count = row["tokens"][0] * row["tokens"][1]
        same = f"{row['name'].partition(',')[0]}, resident, blocks run twice"  # what a small budget has no room to keep
        resident = next((r for r in rows if (r["case"], r["name"]) == (row["case"], same)), None)
        compute = resident["step_s"] if resident else row.get("compute_s", 0.0)
        floor = max(compute, row["bytes_up"] / up if up else 0.0)
        ratio = f"{row['step_s'] / floor:.2f}" if floor and "resident" not in row["name"] else ""
        gained = f"{peft / row['step_s']:.2f}" if peft and row["case"] == "lora" else ""
        memory = f"{row['gpu'] / GIB:.1f} GiB | {row['host'] / GIB:.1f} GiB | {row['bytes_up'] / 1e9:.2f} GB"
        pace = f"{row['step_s']:.3f} s | {count / row['step_s']:,.0f}"
        lines.append(f"| {row['case']} | {row['name']} | {memory} | {pace} | {ratio} | {gained} |")
    unpacks = [row for row in rows if row["case"] == "unpack"]
    if unpacks:
        lines += ["", "| unpack | seconds | of a copy of as many bytes |", "|---|---|---|"]
        lines += [f"| {r['name']} | {r['step_s']:.2e} | {r['step_s'] / r['floor_s']:.2f} |" for r in unpacks]
    for name in ("175B", "70B"):
        budgets = [row["losses"] for row in rows if row["case"] == name]
        if len(budgets) > 1:
            lines += ["", f"{name}: losses in two budgets are {'equal' if budgets[0] == budgets[1] else 'DIFFERENT'}."]
    return lines


def main(argv: list[str] | None = None) -> list[dict[str, Any]]:
    ask = argparse.ArgumentParser()
    ask.add_argument("--only", default="lora,unpack")
    ask.add_argument("--steps", type=int, default=5)
    ask.add_argument("--out", type=Path)
    ask.add_argument("--quick", action="store_true")
    args = ask.parse_args(argv)
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    cases = {"lora": case_lora, "unpack": case_unpack}
    rows: list[dict[str, Any]] = []
    for name in args.only.split(","):
        rows += cases[name](args, device) if name in cases else case_whole(name, args, device)
    link = measure_link(128 * 2**20) if device.type == "cuda" else {}
    where = torch.cuda.get_device_name(0) if device.type == "cuda" else "CPU"
    text = [f"torch {torch.__version__}, {where}", "", *table(rows, link)]
    print("\n".join(text))
    if args.out is not None:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "frozen_base.json").write_text(json.dumps({"rows": rows, "link": link}, default=str, indent=1))
        (args.out / "frozen_base.md").write_text("\n".join(text) + "\n")
    return rows


if __name__ == "__main__":
    main()
