"""What the planner says of small shapes, number by number: tests/planned.txt, one line a case.

Formulas are held to what was measured within 10 % (tests/plan/test_recorded.py); a slip in one term of many is less.
So every number is written down, and a line that differs is either a fault or a change that was meant: then

    python -m tests.planned        rewrites the file, and its diff is read

The shapes are such that no two parts are equal, and what a block does per token is given (it depends on transformers).
"""

from collections.abc import Collection, Iterator
from dataclasses import replace
from difflib import unified_diff
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from transformers import LlamaConfig, MixtralConfig, OPTConfig

from keyhole.machine.sizes import MIB
from keyhole.methods import METHODS
from keyhole.methods.work import experts_share
from keyhole.methods.workload import Room, Workload
from keyhole.model.forward.memory import evaluation_bytes, host_bytes
from keyhole.model.structure import find
from keyhole.model.structure.block_counts import BlockCounts
from keyhole.model.structure.layout import find_layout
from keyhole.model.structure.skeleton import build
from keyhole.model.weights.format import Wire
from keyhole.plan import advice
from keyhole.plan.fit import Costs, fit
from keyhole.plan.placement import Placement
from keyhole.plan.seconds import PROFILES, trust
from keyhole.plan.table import Question, rows

FILE = Path(__file__).with_suffix(".txt")
SIZES = {"vocab_size": 1000, "hidden_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4}
GQA = SIZES | {"num_key_value_heads": 2, "intermediate_size": 208}
SHAPES = {
    "llama": (LlamaConfig(**GQA), BlockCounts(38, 61.5, 2231.0, 1403.0)),
    "mixtral": (MixtralConfig(**GQA, tie_word_embeddings=True, num_local_experts=8), None),
    "opt": (OPTConfig(**SIZES, ffn_dim=400, max_position_embeddings=512), BlockCounts(13, 35.5, 1205.0, 877.0)),
}
CHANGES: dict[str, list[dict[str, Any]]] = {  # settings of which a formula depends; {} is always there
    "zo": [{"directions": 3, "weight_decay": 0.1}, {"estimator": "fzoo"}, {"write_back_every": 3}, {"rank": 2}]
    + [{"rank": 4, "guide": 6, "directions": 2}, {"rank": 2, "fold": False, "refresh": 7}, {"compile": True}],
    "lomo": [{"rounding": "kahan"}, {"activations": "none", "compile": True}, {"activations": "auto"}],
    "adalomo": [{"activations": "host"}],
    "lomo-lora": [{"target_modules": "q_proj", "r": 3}],
    "lora": [{"activations": "none"}, {"activations": "host", "target_modules": ["k_proj", "v_proj"]}],
    "lsp": [{"d": 32, "optimizer_on": "gpu"}, {"d": 80, "optimizer_on": "cpu"}, {"d": 48, "preset": "paper"}]
    + [{"d": 32, "others": "frozen", "activations": "host"}],
    "adam-offload": [{"activations": "none"}, {"gpu_updates": True}],
    "muon": [{"moments": "float32", "ns_steps": 3}],
    "sgd": [{"momentum": 0.9}],
    "galore": [{"rank": 24, "activations": "block"}],
}
STEPS = [  # of a model that is small for a GPU, and of one whose passes are long; several passes; ranks
    {"tokens": 24, "length": 12},
    {"tokens": 8192, "length": 2048, "clips": True, "steps": 300},
    {"tokens": 6000, "length": 500, "passes": 3, "rows": 4, "trained": 2.5, "chooses": True},
    {"tokens": 48, "length": 48, "passes": 2, "ranks": 4, "local_ranks": 2},
]


@cache
def module(shape: str, dtype: torch.dtype = torch.bfloat16) -> torch.nn.Module:
    config, counts = SHAPES[shape]
    made = build(config, dtype)
    vars(made)["keyhole_counts"] = counts
    return made


def told(found: object) -> str:
    """The numbers of a dataclass that are not zero, and its properties."""
    more = {name: getattr(found, name) for name in ("during_a_step", "total") if hasattr(found, name)}
    return " ".join(f"{name}={value:.10g}" for name, value in (vars(found) | more).items() if value)


def of_methods(names: Collection[str]) -> Iterator[str]:
    """Bytes and work of a step, resident, streamed and in part, with settings and formats of these methods."""
    for name, row in ((name, METHODS[name]) for name in METHODS if name in names):
        for n, change in enumerate([{}, *CHANGES.get(name, [])]):
            own = row.settings(**change).filled()
            wires = [None, *(w for w in row.all_wires(own) if w not in ("bf16", "fp16"))]
            for i, shape in enumerate(SHAPES, 3 * n + len(name)):
                dtype, step, wire = (torch.bfloat16, torch.float16)[i % 5 == 4], STEPS[i % 4], wires[i % len(wires)]
                step = step | {"passes": step.get("passes", 1) * own.passes}
                work = Workload(name, settings=own, experts=experts_share(module(shape).config), **step)
                if row.ranks != "shards":
                    work = replace(work, ranks=1)
                whole, rates = find_layout(module(shape, dtype)), PROFILES[("h200", "laptop")[i % 2]]
                costs = Costs(work, Room(Wire(dtype, wire), MIB // 4), row)
                limit = (None, int(1.3 * costs.of(whole, set()).total), 4 * MIB)[i // 3 % 3]
                room = replace(costs.room, limit_bytes=limit)
                costs, placed = Costs(work, room, row), [(whole, set[int]())]
                if row.streams and own.keeps != "none":
                    placed.append(fit(module(shape, dtype), costs, None))
                    cut = None if costs.keeps_blocks_whole else 1 << 15
                    fine = find_layout(module(shape, dtype), cut, costs.may_cut_rows, costs.may_cut_experts)
                    placed.append((fine, {u.index for u in fine.units[2::2]}))
                for layout, away in placed:
                    lines = [told(costs.of(layout, away)), told(row.planned_work(layout, away, work, room, rates))]
                    if row.costs.host_state is not None:
                        lines.append("{} {}".format(*row.costs.host_state(layout, away, 2, own, costs.cut(layout))))
                    lines.append(f"host={costs.host_bytes(layout, away)} slots={costs.slot_count(layout)}")
                    head = f"{name} {change or ''} {shape} {wire or dtype} {i % 4} {len(away)}/{len(layout.units)}"
                    yield f"{head}: {' | '.join(lines)}"


def of_plans() -> Iterator[str]:
    """Rows of whole tables, what would make a run fit, batches in an evaluation, and the machines."""
    for i, (machine, shape) in enumerate(zip(PROFILES, 3 * [*SHAPES], strict=False)):
        rates, dtype = PROFILES[machine], (torch.bfloat16, torch.float32)[i % 2]
        if i == 4:
            rates = replace(rates, gpu_bytes=None)
        gib, ram = (None if i == 4 else (3 + 2 * i) * MIB), (1 << 30) + (900 + 100 * i) * MIB
        asked = Question(module(shape, dtype), dtype, rates, gib, ram, 2, 64 << i % 3, 1 + i % 2, clips=i % 2 == 0)
        table = rows(replace(asked, methods=tuple([*METHODS][i % 3 :: 3])))
        for row in table:
            shown = {name: f"{x:.8g}" if isinstance(x, float) else x for name, x in row.to_dict().items()}
            parts = {name: f"{x:.8g}" for name, x in shown.pop("parts_seconds").items()}
            yield f"{machine} {shape}: {' '.join(f'{k}={v}' for k, v in (shown | parts).items() if v)}"
        chosen = advice.recommended(table)
        if chosen is not None:
            said = f"{advice.settings_of(chosen, asked)}: {advice.reason(chosen, table)}"
            yield f"{machine} {shape} takes {said}"
        for method in ("zo", "lomo", "lsp"):
            for change in advice.cheapest_changes(asked, method, "resident", count=9):
                yield f"{machine} {shape} {method} could be {change}, {change.row.step_seconds:.8g} s"
        yield f"{machine}: {trust(rates, 10**9 << i)} {rates}"
    for i, shape in enumerate(SHAPES):
        layout, formats = find_layout(module(shape)), Wire(torch.bfloat16, (None, "fp32", "fp8")[i])
        away, work = {u.index for u in layout.units[1:]}, Workload("zo", 512, 2)
        for budget in (None, 6 * MIB, 20 * MIB):
            planned = Costs(work, Room(formats, MIB, budget), METHODS["zo"]).of(layout, away)
            placed = Placement(away, 3, planned, work, formats, MIB, budget)
            more = [evaluation_bytes(layout, tokens=64, passes=n, formats=formats, workspace_bytes=MIB) for n in (1, 5)]
            said = (placed.evaluation_passes(layout, 40), host_bytes(layout, away, formats), *more)
            yield f"forward {shape} {formats.name} {budget}: {said}"


def found(names: Collection[str] | None) -> list[str]:
    """The lines of these methods, or of plans; stacks of experts count as large, so that they are cut."""
    with patch.object(find, "STACK_NUMEL", 1 << 16):
        return [*(of_plans() if names is None else of_methods(names))]


def check(*names: str) -> None:
    """The lines of these methods, or without names those of plans, are in the file, and no others of them."""
    now = found(names or None)
    was = [line for line in FILE.read_text().splitlines() if (line.split()[0] in METHODS) == bool(names)]
    was = [line for line in was if not names or line.split()[0] in names]
    assert was == now, "\n".join(
        unified_diff(was, now, "tests/planned.txt", "python -m tests.planned", n=0, lineterm="")
    )


if __name__ == "__main__":
    FILE.write_text("\n".join([*found(METHODS), *found(None)]) + "\n")
