"""The first-order benchmark runs, every trial of it, and says nothing that it did not measure."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from keyhole.bench import process
from keyhole.bench.gradient.own_products import own_products_s
from keyhole.bench.gradient.report import GradientReport, product_flop
from keyhole.bench.gradient.run import bench_gradient
from keyhole.bench.gradient.trials import Trial, read_trials
from keyhole.bench.gradient.worker import GradientWorker
from keyhole.bench.process import run_cases
from keyhole.bench.rows import TABLES
from keyhole.bench.shapes import LLAMA, llama_config
from keyhole.errors import UserError
from keyhole.methods.baselines import galore

QUICK = {"quick": True, "steps": 1, "warm_up": 1, "command": "test", "say": lambda line: None}


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker process would only import everything again; tests/bench/test_process.py has workers."""
    monkeypatch.setattr(galore, "projector", galore.projector)  # a trial may change it for the rest of its process
    worker = lambda module, receive, job, cases, say: run_cases(GradientWorker, receive, job, cases)  # noqa: E731
    monkeypatch.setattr("keyhole.bench.gradient.run.run_apart", worker)


def run(table: Path, out: Path, only: str = "") -> tuple[dict[str, dict[str, Any]], str]:
    """Records by name, and the page; no trial fails."""
    bench_gradient(table, out=out, only=only, **QUICK)
    records = json.loads(next(out.glob("*.json")).read_text())["records"]
    trials = read_trials(table, only, quick=True)
    assert [(r["name"], r.get("error")) for r in records] == [(trial.name, None) for trial in trials]
    return {r["name"]: r for r in records}, next(out.glob("*.md")).read_text()


def shortened(table: str, directory: Path, names: list[str] | None = None, **quick: Any) -> Path:
    """A shipped table with these trials alone, and other changes for a quick run."""
    found = yaml.safe_load((TABLES / table).read_text())
    found["trials"] = [trial for trial in found["trials"] if names is None or trial["name"] in names]
    path = directory / table
    path.write_text(yaml.safe_dump(found | {"quick": found["quick"] | quick}))
    return path


@pytest.mark.slow
def test_lomo_s_trials_run_on_tiny_shapes(tmp_path: Path) -> None:
    """Streamed losses are the resident ones."""
    records, page = run(
        shortened("lomo.yaml", tmp_path, ["7B lomo compiled", "7B lomo compiled streamed 4GiB"]), tmp_path
    )
    compared = [r for r in records.values() if r["case"]["compare"]]
    assert len(compared) == 1
    for record in compared:
        assert record["losses"] == records[record["case"]["compare"]]["losses"]
        assert record["streamed_bytes"] == record["bytes_down"] > 0
    assert "mean nothing" in page


@pytest.mark.matrix
def test_lsp_s_trials_run_on_tiny_shapes(tmp_path: Path) -> None:
    """The first ones are those that matter, and the host's part of a step is in the record. Blocks are not compiled
    here: LOMO's trials are."""
    records, page = run(shortened("lsp.yaml", tmp_path, compile=False), tmp_path, "7B")
    assert next(iter(records)) == "7B native adamw"
    on_host = records["7B lsp d=2048 cpu compiled"]
    assert all(on_host["parts"][part] > 0 for part in ("update_s", "host_wait_s"))
    assert on_host["bytes_up"] > 0 and on_host["bytes_down"] > 0
    assert records["7B lsp d=2048 compiled"]["bytes_up"] == 0
    mixed = records["7B lsp d=2048 17GB compiled"]
    assert 0 < mixed["bytes_down"] < on_host["bytes_down"]
    offloaded = records["7B adam-offload layerwise"]
    assert offloaded["updates_alone_s"] > 0 and offloaded["parts"]["update_s"] > 0
    assert "updates, CPU" in page and "vs AdamW" in page


@pytest.mark.slow
def test_a_table_of_the_user_s_own(tmp_path: Path) -> None:
    """Any method with any of its options; torch's optimizers by their names."""
    path = tmp_path / "mine.yaml"
    rows = "{name: torch, shape: 7B, system: native, options: {optimizer: Adagrad}}, "
    rows += "{name: ours, shape: 7B, system: lomo, options: {rounding: nearest}}"
    path.write_text(f"trials: [{rows}]")
    records, page = run(path, tmp_path)
    assert list(records) == ["torch", "ours"] and "vs Adagrad" in page and "bench mine" in page


def test_names_that_are_not_there_are_said(tmp_path: Path) -> None:
    """A trial, a method."""
    with pytest.raises(UserError, match="--only"):
        bench_gradient(TABLES / "lomo.yaml", out=tmp_path, only="70B", **QUICK)
    path = tmp_path / "mine.yaml"
    path.write_text("trials: [{name: a, shape: 7B, system: lomm}]")
    with pytest.raises(UserError, match="trial 1: system: 'lomm' is not one of native, "):
        bench_gradient(path, out=tmp_path, **QUICK)


@pytest.mark.parametrize("table", ["lomo.yaml", "lsp.yaml"])
def test_trials_compare_with_trials_of_their_table(table: str) -> None:
    """The resident step that a streamed one is held against runs before it, and names are unique."""
    names: list[str] = []
    for trial in read_trials(TABLES / table, "", quick=False):
        assert trial.name not in names and (trial.compare is None or trial.compare in names)
        names.append(trial.name)


def test_quick_runs_change_only_options_that_a_trial_has(tmp_path: Path) -> None:
    """And its budget."""
    path = tmp_path / "mine.yaml"
    path.write_text(
        "quick: {d: 16, r: 2}\ntrials: [{name: a, shape: 7B, system: lsp, gpu_memory: 8GiB, options: {d: 512}}]"
    )
    assert read_trials(path, "", quick=True) == [Trial("a", "7B", "lsp", options={"d": 16})]
    assert read_trials(path, "", quick=False)[0].options == {"d": 512}


def test_products_are_counted_from_the_shapes() -> None:
    """8 per parameter and token, less the product that is left out, and the head; only what a trial computes."""
    width, blocks, _, mlp = LLAMA["7B"]
    config = llama_config("7B")
    assert (config.hidden_size, config.num_hidden_layers, config.intermediate_size) == (width, blocks, mlp)
    block, head = 4 * width**2 + 3 * width * mlp, 32000 * width

    def flop(system: str, **options: Any) -> float:
        return product_flop(asdict(Trial("a", "7B", system, options=options)), 1)

    whole = 32 * (8 * block - 2 * width * mlp) + 8 * head
    assert flop("native", optimizer="SGD") == flop("lomo") == flop("lomo", activations="host") == whole
    assert flop("lomo", activations="none") == flop("native", optimizer="SGD", checkpointing=False)
    assert flop("lomo", activations="none") == flop("adam-offload", activations="auto") == 32 * 6 * block + 8 * head
    assert flop("lora", activations="block") == 32 * (6 * block - 2 * width * mlp) + 6 * head  # no weight's gradient
    assert flop("lora") < flop("lsp", d=256) < flop("lsp", d=2048) < flop("lsp", d=mlp) == whole


def test_the_link_s_floor_is_the_time_of_the_bytes_that_crossed(tmp_path: Path) -> None:
    """Twice as many up as down: the half that nothing meets goes at the rate of that way alone."""
    trials = [Trial("7B lomo", "7B", "lomo"), Trial("7B streamed", "7B", "lomo", streamed=True, compare="7B lomo")]
    report = GradientReport("lomo", tmp_path, trials, "test", quick=True)
    link = {"up": 50.0, "down": 50.0, "duplex": 40.0}
    moved = {"bytes_up": 20 * 10**9, "bytes_down": 10 * 10**9, "streamed_bytes": 11 * 10**9, "link": link}
    resident, streamed = (process.record(trial, "ok", tokens=1, updates_alone_s=None, step_s=0.3) for trial in trials)
    report.records = [resident, streamed | moved]
    assert report.floor(report.records[1]) == (0.4, "link")  # 20 GB at 50 GB/s; 10 GB both ways take 0.25 s


@pytest.mark.parametrize("activations", ["none", "block"])
def test_own_products_have_the_operations_of_the_floor(activations: str) -> None:
    trial, tokens = asdict(Trial("one", shape="7B", system="lomo", options={"activations": activations})), 64
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(llama_config("7B", quick=False), dtype=torch.bfloat16)
    with FlopCounterMode(display=False) as counter:
        assert own_products_s(trial, module, tokens, warm_up=0, rounds=1) > 0
    assert counter.get_total_flops() == product_flop(trial, tokens)


def test_own_products_are_timed_where_all_weights_are_on_the_device(tmp_path: Path) -> None:
    names = ["7B native sgd", "7B lomo", "7B lomo streamed 4GiB"]
    records, page = run(shortened("lomo.yaml", tmp_path, names), tmp_path)
    found = {name: record["own_products_s"] for name, record in records.items()}
    assert found["7B native sgd"] > 0 and found["7B lomo"] > 0 and found["7B lomo streamed 4GiB"] is None
    assert "vs own" in page
