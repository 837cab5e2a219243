"""The table of mixtures of experts in docs/methods.md, from the planner's formulas: no weights, no GPU.

    python scripts/plan_mixtures.py

GPU memory with everything streamed, for bf16 weights, TOKENS tokens per forward pass and block inputs on the GPU: with
experts as units of their own, and with whole stacks as units. A minute or two: modules are built without weights, and
run once on constants.
"""

import torch
from transformers import (
    DeepseekV3Config,
    GptOssConfig,
    MixtralConfig,
    OlmoeConfig,
    PretrainedConfig,
    Qwen3MoeConfig,
)

from keyhole.machine.sizes import GIB, MIB
from keyhole.methods import METHODS
from keyhole.methods.workload import Room, Workload
from keyhole.model.structure.layout import find_layout
from keyhole.model.structure.skeleton import build
from keyhole.model.weights.format import Wire
from keyhole.plan.fit import Costs, fit

TOKENS = 2048
WORKSPACE_BYTES = 32 * MIB  # of cuBLAS, from compute capability 9.0 on
COMPARED = ("zo", "lomo")
SHAPES: dict[str, PretrainedConfig] = {
    "Mixtral-8x7B": MixtralConfig(),
    "gpt-oss-20b": GptOssConfig(num_hidden_layers=24, num_local_experts=32),
    "gpt-oss-120b": GptOssConfig(num_hidden_layers=36, num_local_experts=128),
    "Qwen3-30B-A3B": Qwen3MoeConfig(
        hidden_size=2048,
        num_hidden_layers=48,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        moe_intermediate_size=768,
        num_experts=128,
        num_experts_per_tok=8,
    ),
    "OLMoE-7B": OlmoeConfig(),
    "DeepSeek-V3": DeepseekV3Config(),
}


def streamed_gib(module: torch.nn.Module, method: str, by_expert: bool) -> float:
    """GPU memory of a step with everything streamed."""
    row = METHODS[method]
    own = row.settings()
    costs = Costs(Workload(method, TOKENS, own.passes, own), Room(Wire(torch.bfloat16), WORKSPACE_BYTES), row)
    layout, _ = fit(module, costs, None, lambda module, most, rows, _: find_layout(module, most, rows, by_expert))
    return costs.of(layout, {unit.index for unit in layout.units[1:]}).total / GIB


def main() -> None:
    rows = {(method, by_expert): [] for method in COMPARED for by_expert in (True, False)}
    for config in SHAPES.values():
        module = build(config, torch.bfloat16)
        for (method, by_expert), row in rows.items():
            row.append(f"{streamed_gib(module, method, by_expert):.1f}")
    print("| GiB | " + " | ".join(SHAPES) + " |")
    print("|---" * (len(SHAPES) + 1) + "|")
    for (method, by_expert), row in rows.items():
        print(f"| `{method}`, {'experts' if by_expert else 'whole stacks'} | " + " | ".join(row) + " |")


if __name__ == "__main__":
    main()
