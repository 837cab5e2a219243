"""Every shipped recipe: reads, is in order, and starts with its manual."""

import pytest

from keyhole.config import load_config, resolve
from keyhole.config.recipes import recipes


@pytest.mark.parametrize("name", recipes())
def test_recipe_reads_without_a_warning(name: str) -> None:
    """A recipe is an example: no faults, no warnings, and a fixed point of resolve."""
    config, warnings = load_config(recipes()[name])
    assert warnings == []
    assert resolve(config) == (config, [])


@pytest.mark.parametrize("name", recipes())
def test_recipe_starts_with_its_manual(name: str) -> None:
    """The head says what it trains, how to launch it, and shows an override that works."""
    lines = recipes()[name].read_text(encoding="ascii").splitlines()
    head = [line for line in lines if line.startswith("#")]
    assert len(head) >= 4 and lines[0].startswith("# ") and lines[0].endswith(".") and len(lines[0]) < 110
    launches = [line.split() for line in head if f"keyhole train {name}" in line]
    assert ["#", "keyhole", "train", name] in launches
    examples = [words[4:] for words in launches if len(words) > 4]
    assert examples
    for overrides in examples:
        assert load_config(recipes()[name], [word for word in overrides if "=" in word])
