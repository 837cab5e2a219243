"""`keyhole bench lomo | lsp` runs, every case of it, and says nothing that it did not measure."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from keyhole.bench.cases import NATIVE, TABLES, Case, read_tables
from keyhole.bench.shapes import LLAMA, llama_config
from keyhole.bench.step_tables import Line
from keyhole.bench.steps import own_products_s
from keyhole.cli import main
from tests.traced import IN_PLACE

LLAMA_7B = {"model": "Llama-7B", "system": "resident"}


def run(verb: str, table: Path, out: Path) -> tuple[dict[str, dict[str, Any]], str]:
    """Records by name, and the page; no case fails."""
    assert main(["bench", verb, "--quick", "--steps=1", "--warm-up=1", f"--table={table}", f"--output-dir={out}"]) == 0
    records = json.loads(next(out.glob("*.json")).read_text())["records"]
    assert [r.get("error") for r in records] == [None] * len(records) and records
    return {r["name"]: r for r in records}, next(out.glob("*.md")).read_text()


def shortened(verb: str, directory: Path, names: list[str], **quick: Any) -> Path:
    """A shipped table with these cases alone (empty: those of 7B), and other changes for a quick run."""
    found = yaml.safe_load((TABLES / f"{verb}.yaml").read_text())
    cases = [c for c in found[verb]["cases"] if c["title"] in names or (not names and "Llama-7B" in c["model"])]
    usual = found[verb]["quick"]
    found[verb] |= {"cases": cases, "quick": usual | {"options": usual["options"] | quick}}
    path = directory / "mine.yaml"
    path.write_text(yaml.safe_dump(found))
    return path


@pytest.mark.slow
def test_lomo_s_cases_run_on_tiny_shapes(tmp_path: Path) -> None:
    """Streamed losses are the resident ones; own products are timed where all weights are on the device."""
    names = ["7B native sgd", "7B lomo compiled", "7B lomo compiled streamed 4GiB", "7B native hook compiled"]
    found, page = run("lomo", shortened("lomo", tmp_path, names, compile=IN_PLACE), tmp_path)
    streamed = found[names[2]]
    assert streamed["losses"] == found[names[1]]["losses"]
    assert streamed["streamed_bytes"] == streamed["bytes_down"] > 0
    assert found[names[0]]["own_products_s"] > 0 and found[names[1]]["own_products_s"] > 0
    assert streamed["own_products_s"] is None and "vs floor" in page and "mean nothing" in page
    assert f"{names[3]}, 0.0 GiB" in page or f"{names[0]}, 0.0 GiB" in page


@pytest.mark.matrix
def test_lsp_s_cases_run_on_tiny_shapes(tmp_path: Path) -> None:
    """The host's part of a step is in the record."""
    records, page = run("lsp", shortened("lsp", tmp_path, []), tmp_path)
    assert next(iter(records)) == "7B native adamw"
    on_host = records["7B lsp d=2048 cpu compiled"]
    assert all(on_host["parts"][part] > 0 for part in ("update_s", "host_wait_s"))
    assert on_host["bytes_up"] > 0 and on_host["bytes_down"] > 0
    assert records["7B lsp d=2048 compiled"]["bytes_up"] == 0
    mixed = records["7B lsp d=2048 17GB compiled"]
    assert 0 < mixed["bytes_down"] < on_host["bytes_down"]
    assert records["7B adam-offload layerwise"]["parts"]["update_s"] > 0
    assert "updates s" in page and "vs best native" in page


@pytest.mark.slow
def test_a_table_of_the_user_s_own(tmp_path: Path) -> None:
    """Any method with any of its options; torch's optimizers by their names."""
    path = tmp_path / "mine.yaml"
    rows = "{title: torch, model: Llama-7B, system: native, options: {optimizer: Adagrad}}, "
    rows += "{title: ours, model: Llama-7B, system: resident, method: lomo, options: {rounding: nearest}}"
    path.write_text(f"mine: {{each: {{dtype: fp32}}, cases: [{rows}]}}")
    records, page = run("lomo", path, tmp_path)
    assert list(records) == ["torch", "ours"] and "| torch, 0.0 GiB" in page


@pytest.mark.parametrize(("activations", "each"), [("none", 6), ("block", 8)])
def test_own_products_have_the_operations_of_a_step(activations: str, each: int) -> None:
    """6 per parameter of a block and token, 8 where it runs again, less the product that is left out; 8 of the head."""
    case, tokens = Case("Llama-7B", "resident", "lomo", options={"activations": activations}), 64
    width, blocks, _, _, mlp, _ = LLAMA["7B"]
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(llama_config("7B"), dtype=torch.bfloat16)
    with FlopCounterMode(display=False) as counter:
        assert own_products_s(case, module, tokens, warm_up=0, rounds=1) > 0
    block = each * (4 * width**2 + 3 * width * mlp) - (2 * width * mlp if each == 8 else 0)
    assert counter.get_total_flops() == tokens * (blocks * block + 8 * 32000 * width)
    for method in ("lsp", "lora"):
        assert own_products_s(Case("Llama-7B", "resident", method), module, tokens, 0, 1) is None


def test_the_ratio_is_against_the_fastest_loop_of_the_same_work() -> None:
    """Eager or compiled, in hooks or not; of the same rule, clipping and batches alone."""
    cases = {case.name: case for case in read_tables(TABLES / "lomo.yaml")["lomo"].cases}
    seconds = {"7B native sgd": 0.47, "7B native hook compiled": 0.38, "7B native adamw": 0.2, "7B lomo compiled": 0.39}
    seconds |= {"7B native sgd clipped": 0.5, "7B native adalomo hook": 0.3}
    found = {n: {"name": n, "case": asdict(cases[n]), "step_s": s, "tokens": 4096} for n, s in seconds.items()}
    lines = {name: Line(case, found.get(name, {}), found) for name, case in cases.items()}
    best = {name: line.best_native and line.best_native["name"] for name, line in lines.items()}
    assert best["7B lomo compiled"] == best["7B native sgd"] == "7B native hook compiled"
    assert best["7B lomo compiled clipped"] == "7B native sgd clipped" and best["7B lomo compiled 8x512"] is None
    assert best["7B adalomo compiled"] == "7B native adalomo hook"
    assert lines["7B lomo compiled"].against("7B native hook compiled") == pytest.approx(0.38 / 0.39)


@pytest.mark.parametrize("verb", ["lomo", "lsp", "zo"])
def test_every_loop_stands_in_the_tables_eager_and_compiled(verb: str) -> None:
    for table in read_tables(TABLES / f"{verb}.yaml").values():
        loops = [case for case in table.cases if case.system == NATIVE or "in_place" in case.options]
        there = [(case.work, case.options) for case in loops]
        assert all((case.work, case.options | {"compile": True}) in there for case in loops)
