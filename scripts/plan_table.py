"""The table "your GPU, your model, which method" of the README, from the planner's formulas: no weights, no GPU.

    python scripts/plan_table.py

Two Markdown tables for bf16 weights, TOKENS tokens per forward pass and block inputs in host memory. The first has the
share of the weights that stays on the GPU when `lomo` trains within a card's memory less RESERVE_BYTES, which the CUDA
context and the desktop need. The second has, per method, the GPU memory with everything streamed and with everything
resident, and the host memory of weights and optimizer state. tests/test_docs.py compares one model with the README.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from keyhole.machine.sizes import GIB, MIB
from keyhole.methods import METHODS
from keyhole.methods.lsp.memory import count_numbers
from keyhole.methods.workload import Room, Workload
from keyhole.model.forward.memory import host_bytes
from keyhole.model.structure.layout import find_layout
from keyhole.model.structure.skeleton import build
from keyhole.model.weights.format import Wire
from keyhole.plan.fit import Costs, fit

TOKENS = 2048
CARDS_GIB = (8, 16, 24, 48, 80)
RESERVE_BYTES = GIB
WORKSPACE_BYTES = 32 * MIB  # of cuBLAS, from compute capability 9.0 on
FORMATS = Wire(torch.bfloat16)
SHAPES = {  # width, blocks, heads, key and value heads, MLP, vocabulary
    "Llama-2 7B": (4096, 32, 32, 32, 11008, 32000),
    "Llama-3 8B": (4096, 32, 32, 8, 14336, 128256),
    "Llama-2 13B": (5120, 40, 40, 40, 13824, 32000),
    "Llama 30B": (6656, 60, 52, 52, 17920, 32000),
    "Llama-3 70B": (8192, 80, 64, 8, 28672, 128256),
}
COMPARED = ("adam-offload", "muon", "lsp", "lomo", "zo")
SHOWN = ("Llama-3 8B", "Llama-2 13B", "Llama-3 70B")  # in the second table


def module_of(name: str) -> nn.Module:
    """A model of this shape without weights."""
    from transformers import LlamaConfig

    keys = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size")
    return build(LlamaConfig(**dict(zip((*keys, "vocab_size"), SHAPES[name], strict=True))), torch.bfloat16)


def costs_of(method: str, limit_bytes: int | None = None, **changes: Any) -> Costs:
    """The planner's view of one step."""
    row = METHODS[method]
    own = row.settings(**changes)
    if hasattr(own, "activations"):
        own = replace(own, activations="host")
    work = Workload(method, TOKENS, own.passes, own)
    return Costs(work, Room(FORMATS, WORKSPACE_BYTES, limit_bytes), row)


def weights_bytes(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters()) * torch.bfloat16.itemsize


def share_on_gpu(module: nn.Module, card_gib: int) -> str:
    """ "all", or the share of the weights that the budget of a card keeps on the GPU with lomo."""
    budget, costs = card_gib * GIB - RESERVE_BYTES, costs_of("lomo")
    whole = find_layout(module)
    if costs.of(whole, set()).total <= budget:
        return "all"
    layout, streamed = fit(module, costs, budget)
    away = host_bytes(layout, streamed, FORMATS)
    return f"{1 - away / weights_bytes(module):.0%}".replace("%", " %")


def share_row(name: str) -> str:
    """A row of the first table."""
    module = module_of(name)
    shares = [share_on_gpu(module, card) for card in CARDS_GIB]
    return f"| {name} | {weights_bytes(module) / GIB:.0f} GiB | {' | '.join(shares)} |"


def gpu_range(module: nn.Module, method: str) -> tuple[float, float]:
    """GiB of GPU memory: everything streamed, in the smallest units; and everything resident."""
    changes = {"optimizer_on": "cpu"} if method == "lsp" else {}
    least = costs_of(method, **changes)
    largest = max(u.numel for u in find_layout(module, 1, least.may_cut_rows).of_kind("block"))
    layout = find_layout(module, largest, least.may_cut_rows)
    streamed = least.of(layout, {u.index for u in layout.units[1:]}).total
    return streamed / GIB, costs_of(method).of(find_layout(module), set()).total / GIB


def host_gib(module: nn.Module, method: str) -> float:
    """GiB of host memory with everything streamed and optimizer state on the host."""
    layout = find_layout(module)
    streamed = {u.index for u in layout.units[1:]}
    row = METHODS[method]
    state = 12 * sum(count_numbers(layout, row.settings()).of.values()) if method == "lsp" else 0
    if row.costs.host_state is not None:
        state = row.costs.host_state(layout, streamed, torch.bfloat16.itemsize, row.settings(), None)[1]
    return (host_bytes(layout, streamed, FORMATS) + state) / GIB


def cell(module: nn.Module, method: str) -> str:
    """A cell of the second table: GiB of the GPU, streamed to resident, and GiB of host memory."""
    streamed, resident = gpu_range(module, method)
    return f"{streamed:.1f} to {resident:.0f}; {host_gib(module, method):.0f}"


if __name__ == "__main__":
    print(f"| model | weights | {' | '.join(f'{card} GiB' for card in CARDS_GIB)} |")
    print("|---|---|" + "---|" * len(CARDS_GIB))
    for name in SHAPES:
        print(share_row(name))
    print(f"\n| method | {' | '.join(SHOWN)} |\n|---|" + "---|" * len(SHOWN))
    modules = [module_of(name) for name in SHOWN]
    for method in COMPARED:
        print(f"| `{method}` | {' | '.join(cell(module, method) for module in modules)} |")
