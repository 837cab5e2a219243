"""What the planner says of every shipped recipe for a card: no weights, no GPU, no network.

    python scripts/recipe_plans.py            the table of docs/recipes.md
    python scripts/recipe_plans.py --write    the same into docs/recipes.md, and a line of it into each recipe

A recipe NAME-8gb is planned for the profile of an 8 GB card (keyhole/plan/seconds.py) within its own gpu_memory. The
models' shapes stand here, as their publishers' config.json files have them, so that nothing is fetched.
tests/test_recipes.py compares recipes and page with today's planner.
"""

import json
import re
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from keyhole.config.loader import load_config
from keyhole.config.recipes import recipes
from keyhole.machine.sizes import GIB
from keyhole.plan.table import Row, rows
from keyhole.training.plan_request import check_plan
from keyhole.training.planning import ask

ROOT = Path(__file__).parents[1]
MACHINES = {8: "laptop", 12: "3060", 16: "4080", 24: "4090"}
PLANNED = "# Planned"
Shape = tuple[int, int, int, int, int, int]  # width, blocks, heads, key and value heads, width of the MLP, vocabulary
LLAMA: dict[str, Shape] = {
    "meta-llama/Llama-3.2-1B": (2048, 16, 32, 8, 8192, 128256),
    "meta-llama/Llama-3.2-3B": (3072, 28, 24, 8, 8192, 128256),
    "meta-llama/Llama-3.1-8B": (4096, 32, 32, 8, 14336, 128256),
}
QWEN2: dict[str, Shape] = {
    "Qwen/Qwen2.5-1.5B": (1536, 28, 12, 2, 8960, 151936),
    "Qwen/Qwen2.5-3B": (2048, 36, 16, 2, 11008, 151936),
    "Qwen/Qwen2.5-7B": (3584, 28, 28, 4, 18944, 152064),
    "Qwen/Qwen2.5-14B": (5120, 48, 40, 8, 13824, 152064),
    "Qwen/Qwen2.5-32B": (5120, 64, 40, 8, 27648, 152064),
}
GEMMA2: dict[str, Shape] = {
    "google/gemma-2-2b": (2304, 26, 8, 4, 9216, 256000),
    "google/gemma-2-9b": (3584, 42, 16, 8, 14336, 256000),
}
OPT = {"facebook/opt-13b": (5120, 40, 40)}  # width, blocks, heads
TIED = {"meta-llama/Llama-3.2-1B", "meta-llama/Llama-3.2-3B", "Qwen/Qwen2.5-1.5B", "Qwen/Qwen2.5-3B", *GEMMA2}
KEYS = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size")


def config_of(model: str) -> dict[str, Any]:
    """config.json of a published model, as far as shapes go."""
    if model in OPT:
        width, blocks, heads = OPT[model]
        return {
            "model_type": "opt",
            "architectures": ["OPTForCausalLM"],
            "hidden_size": width,
            "word_embed_proj_dim": width,
            "ffn_dim": 4 * width,
            "num_hidden_layers": blocks,
            "num_attention_heads": heads,
            "vocab_size": 50272,
            "max_position_embeddings": 2048,
        }
    kinds = {"llama": (LLAMA, "LlamaForCausalLM"), "qwen2": (QWEN2, "Qwen2ForCausalLM")}
    kinds["gemma2"] = (GEMMA2, "Gemma2ForCausalLM")
    kind, (shapes, cls) = next((kind, found) for kind, found in kinds.items() if model in found[0])
    shape = shapes[model]
    about = dict(zip((*KEYS, "vocab_size"), shape, strict=True))
    about |= {"head_dim": 256} if kind == "gemma2" else {}
    about |= {"tie_word_embeddings": model in TIED, "max_position_embeddings": 8192}
    return {"model_type": kind, "architectures": [cls], **about}


def for_cards() -> dict[str, int]:
    """Recipes for a card, with its GB."""
    sizes = {name: re.search(r"-(\d+)gb$", name) for name in recipes()}
    return {name: int(match[1]) for name, match in sizes.items() if match}


def plan_of(name: str) -> Row:
    """The planner's row for a recipe on the machine that has its card."""
    config, _ = load_config(recipes()[name])
    with tempfile.TemporaryDirectory() as place:
        (Path(place) / "config.json").write_text(json.dumps(config_of(config.model)))
        machine = MACHINES[for_cards()[name]]
        question, _ = ask(check_plan(str(recipes()[name]), [f"model={place}"], machine=machine))
    table = rows(replace(question, methods=(config.method,)))
    wanted = (config.method, config.placement, config.wire)
    same = [row for row in table if (row.method, row.placement, row.wire) == wanted]
    resident = [row for row in table if (row.method, row.placement, row.wire) == (wanted[0], "resident", wanted[2])]
    (row,) = same or [row for row in resident if row.fits]  # auto has no row where everything fits
    return row


def line_of(name: str, row: Row) -> str:
    """The line in the head of a recipe."""
    return (
        f"{PLANNED} (keyhole plan --machine {MACHINES[for_cards()[name]]}; an estimate): GPU {row.gpu_bytes / GIB:.1f} "
        f"GiB, host {row.host_bytes / GIB:.0f} GiB, {row.step_seconds:.2g} s per step ({row.bound_by})."
    )


def table_row(name: str, row: Row) -> str:
    config, _ = load_config(recipes()[name])
    tokens = f"{config.gradient_accumulation_steps * config.batch_size} x {config.max_length}"
    cells = [f"`{name}`", config.model, f"`{config.method}`", tokens, f"{row.gpu_bytes / GIB:.1f}"]
    cells += [f"{row.host_bytes / GIB:.0f}", f"{row.step_seconds:.2g}", f"{row.tokens_per_second:,.0f}", row.bound_by]
    return f"| {' | '.join(cells)} |"


HEAD = [
    "| recipe | model | method | samples x tokens per step | GPU GiB | host GiB | s per step | tokens/s | bound by |",
    "|---|---|---|---|---|---|---|---|---|",
]


def main() -> None:
    plans = {name: plan_of(name) for name in sorted(for_cards(), key=lambda name: (for_cards()[name], name))}
    table = "\n".join([*HEAD, *(table_row(name, row) for name, row in plans.items())])
    print(table)
    for name, row in plans.items():
        if not row.fits:
            print(f"{name}: lacks {row.missing}", file=sys.stderr)
    if "--write" not in sys.argv:
        return
    page = ROOT / "docs" / "recipes.md"
    page.write_text(re.sub(r"\| recipe \|(.*\n)*?(?=\n)", lambda _: table + "\n", page.read_text(), count=1))
    for name, row in plans.items():
        path = recipes()[name]
        path.write_text(re.sub(rf"^{PLANNED}.*$", line_of(name, row), path.read_text(), flags=re.MULTILINE))


if __name__ == "__main__":
    main()
