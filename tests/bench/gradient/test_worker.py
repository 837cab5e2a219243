"""The first-order benchmark runs, every trial of it, and says nothing that it did not measure."""

import json
from pathlib import Path

import pytest

from keyhole.bench.gradient import bench_gradient
from keyhole.bench.gradient_trials import LOMO, SHAPES, config_of, product_flop
from keyhole.errors import UserError


def test_every_trial_runs_on_tiny_shapes(tmp_path: Path) -> None:
    """No trial fails, and streamed losses are the resident ones."""
    how = {"quick": True, "steps": 1, "warm_up": 1, "say": lambda line: None}
    bench_gradient("lomo", out=tmp_path, command="test", only="lomo compiled", **how)
    found = json.loads(next(tmp_path.glob("*.json")).read_text())
    records = {r["trial"]["name"]: r for r in found["records"]}
    chosen = [trial for trial in LOMO if "lomo compiled" in trial.name]
    assert [r.get("error") for r in records.values()] == [None] * len(chosen)
    for trial in chosen:
        if trial.compare:
            assert records[trial.name]["losses"] == records[trial.compare]["losses"]
            assert records[trial.name]["streamed_bytes"] == records[trial.name]["bytes_down"] > 0
    assert "mean nothing" in next(tmp_path.glob("*.md")).read_text()


def test_a_name_that_is_not_there_is_said(tmp_path: Path) -> None:
    """Instead of an empty table."""
    with pytest.raises(UserError, match="--only"):
        bench_gradient("lomo", out=tmp_path, command="test", only="70B")


def test_products_are_counted_from_the_shapes() -> None:
    """8 a weight and token, less the product that is left out, and the head."""
    width, blocks, _, mlp = SHAPES["7B"]
    config = config_of("7B")
    assert (config.hidden_size, config.num_hidden_layers, config.intermediate_size) == (width, blocks, mlp)
    block = 4 * width**2 + 3 * width * mlp
    assert product_flop("7B", 1) == 32 * (8 * block - 2 * width * mlp) + 8 * 32000 * width
