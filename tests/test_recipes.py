"""Recipes for real models and cards: the planner says that they fit, and the page and their heads say what it says."""

import re
from pathlib import Path

import pytest

from keyhole.config.loader import load_config
from keyhole.config.recipes import recipes
from keyhole.machine.sizes import GIB
from scripts.recipe_plans import PLANNED, for_cards, plan_of

ROOT = Path(__file__).parents[1]
LINE = re.compile(r"GPU ([\d.]+) GiB, host (\d+) GiB, ([\d.e+]+) s per step \((\w+)\)")
QUICK = ("adalomo-llama-3.2-3b-8gb", "adam-offload-llama-3.2-1b-12gb", "lora-qwen2.5-1.5b-8gb")


def test_there_is_a_recipe_for_each_card_method_and_family() -> None:
    configs = {name: load_config(recipes()[name])[0] for name in for_cards()}
    assert set(for_cards().values()) == {8, 12, 16, 24}
    assert {"zo", "lomo", "adalomo", "lsp", "adam-offload", "lora"} <= {config.method for config in configs.values()}
    for family in ("Llama", "Qwen", "gemma", "opt"):
        assert any(family in config.model for config in configs.values()), family
    for name, config in configs.items():
        assert config.gpu_memory <= (for_cards()[name] - 1) * GIB, name


@pytest.mark.parametrize("name", for_cards())
def test_the_page_has_what_the_recipe_says(name: str) -> None:
    """The line in its head and its row in docs/recipes.md are of the same plan."""
    (head,) = [line for line in recipes()[name].read_text().splitlines() if line.startswith(PLANNED)]
    (row,) = [line for line in (ROOT / "docs" / "recipes.md").read_text().splitlines() if f"| `{name}` |" in line]
    found = LINE.search(head)
    assert found is not None, head
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert [cells[4], cells[5], cells[6], cells[8]] == list(found.groups())


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.plans) for name in for_cards()]
)
def test_the_planner_says_that_it_fits(name: str) -> None:
    """Within gpu_memory and the machine's RAM, and the numbers in its head are today's (`python scripts/recipe_plans.py
    --write` renews them): memory within 5 %, pace within 15 %."""
    row = plan_of(name)
    config, _ = load_config(recipes()[name])
    assert row.fits and row.gpu_bytes <= config.gpu_memory * 1.001, row.missing
    found = LINE.search(recipes()[name].read_text())
    assert found is not None
    gpu, host, seconds = (float(number) for number in found.groups()[:3])
    assert row.gpu_bytes / GIB == pytest.approx(gpu, rel=0.05, abs=0.06)
    assert row.host_bytes / GIB == pytest.approx(host, rel=0.05, abs=0.6)
    assert row.step_seconds == pytest.approx(seconds, rel=0.15)
