"""`keyhole bench lomo | lsp` runs, every case of it, and says nothing that it did not measure."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from keyhole.bench.cases import TABLES, Case
from keyhole.bench.floors import own_products_s, product_flop
from keyhole.bench.shapes import LLAMA, llama_config
from keyhole.bench.step_tables import Line
from keyhole.cli import main
from tests.traced import IN_PLACE

LLAMA_7B = {"model": "Llama-7B", "system": "resident"}


def run(verb: str, table: Path, out: Path) -> tuple[dict[str, dict[str, Any]], str]:
    """Records by name, and the page; no case fails."""
    assert main(["bench", verb, "--quick", "--steps=1", "--warm-up=1", f"--table={table}", f"--out={out}"]) == 0
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
    names = ["7B native sgd", "7B lomo compiled", "7B lomo compiled streamed 4GiB"]
    found, page = run("lomo", shortened("lomo", tmp_path, names, compile=IN_PLACE), tmp_path)
    streamed = found[names[2]]
    assert streamed["losses"] == found[names[1]]["losses"]
    assert streamed["streamed_bytes"] == streamed["bytes_down"] > 0
    assert found[names[0]]["own_products_s"] > 0 and found[names[1]]["own_products_s"] > 0
    assert streamed["own_products_s"] is None and "vs own" in page and "mean nothing" in page and "vs SGD" in page


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
    assert "updates, CPU" in page and "vs AdamW" in page


@pytest.mark.slow
def test_a_table_of_the_user_s_own(tmp_path: Path) -> None:
    """Any method with any of its options; torch's optimizers by their names."""
    path = tmp_path / "mine.yaml"
    rows = "{title: torch, model: Llama-7B, system: native, options: {optimizer: Adagrad}}, "
    rows += "{title: ours, model: Llama-7B, system: resident, method: lomo, options: {rounding: nearest}}"
    path.write_text(f"mine: {{each: {{dtype: fp32}}, cases: [{rows}]}}")
    records, page = run("lomo", path, tmp_path)
    assert list(records) == ["torch", "ours"] and "vs Adagrad" in page


def test_products_are_counted_from_the_shapes() -> None:
    """8 per parameter and token, less the product that is left out, and the head; only what a case computes."""
    width, blocks, _, mlp = LLAMA["7B"]
    config = llama_config("7B")
    assert (config.hidden_size, config.num_hidden_layers, config.intermediate_size) == (width, blocks, mlp)
    block, head = 4 * width**2 + 3 * width * mlp, 32000 * width

    def flop(method: str, **options: Any) -> float:
        system = (
            {"system": "native", "method": "zo"} if method == "native" else {"system": "resident", "method": method}
        )
        return product_flop(Case("Llama-7B", options=options, **system), 1)

    whole = 32 * (8 * block - 2 * width * mlp) + 8 * head
    assert flop("native", optimizer="SGD") == flop("lomo") == flop("lomo", activations="host") == whole
    assert flop("lomo", activations="none") == flop("native", optimizer="SGD", checkpointing=False)
    assert flop("lomo", activations="none") == flop("adam-offload", activations="auto") == 32 * 6 * block + 8 * head
    assert flop("lora", activations="block") == 32 * (6 * block - 2 * width * mlp) + 6 * head  # no weight's gradient
    assert flop("lora") < flop("lsp", d=256) < flop("lsp", d=2048) < flop("lsp", d=mlp) == whole


def test_the_link_s_floor_is_the_time_of_the_bytes_that_crossed() -> None:
    """Twice as many up as down: the half that nothing meets goes at the rate of that way alone."""
    case = Case("Llama-7B", "streamed", "lomo", compare="7B lomo")
    moved = {"bytes_up": 20 * 10**9, "bytes_down": 10 * 10**9, "link": {"up": 50.0, "down": 50.0, "duplex": 40.0}}
    line = Line(case, {"step_s": 0.5, "tokens": 1} | moved, {"7B lomo": {"step_s": 0.3}})
    assert line.floor == (0.4, "link")  # 20 GB at 50 GB/s; 10 GB both ways take 0.25 s


@pytest.mark.parametrize("activations", ["none", "block"])
def test_own_products_have_the_operations_of_the_floor(activations: str) -> None:
    case, tokens = Case("Llama-7B", "resident", "lomo", options={"activations": activations}), 64
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(llama_config("7B"), dtype=torch.bfloat16)
    with FlopCounterMode(display=False) as counter:
        assert own_products_s(case, module, tokens, warm_up=0, rounds=1) > 0
    assert counter.get_total_flops() == product_flop(case, tokens)
