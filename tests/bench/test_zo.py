"""`keyhole bench zo` on tiny shapes, with failures on the way."""

import gc
import json
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

import keyhole
from keyhole.bench.baselines import take_weights
from keyhole.bench.cases import Case
from keyhole.bench.process import Job, run_here
from keyhole.bench.steps import load, measure_steps
from keyhole.cli import main

CASES = ",".join(
    "6.7B-bf16-" + case for case in ("b1-resident", "b1-textbook", "b1-streamed*", "b4-resident", "b4-streamed")
)


def quick(tmp_path: Path, *args: str) -> tuple[dict[str, Any], str]:
    """Runs the command; returns its JSON and Markdown."""
    assert (
        main(["bench", "zo", "--quick", "--steps=1", "--warm-up=1", f"--output-dir={tmp_path}", "--device=cpu", *args])
        == 0
    )
    (json_path,), (markdown_path,) = tmp_path.glob("*.json"), tmp_path.glob("*.md")
    return json.loads(json_path.read_text()), markdown_path.read_text()


@pytest.mark.slow
def test_quick_run_end_to_end(tmp_path: Path, capsys: Any) -> None:
    """Every case has a record, switching parts off changes no loss, and both files say what ran."""
    found, markdown = quick(tmp_path, f"--cases={CASES}")
    records = {r["name"]: r for r in found["records"]}
    assert all(r["status"] == "ok" and r["step_s"] > 0 and len(r["losses"]) == 2 for r in records.values())
    for batch, count in ((1, 6), (4, 1)):
        start = f"6.7B-bf16-b{batch}-"
        streamed = [r for n, r in records.items() if n.startswith(f"{start}streamed") and "wire" not in n]
        assert len(streamed) == count
        assert all(r["losses"] == records[f"{start}resident"]["losses"] for r in streamed)
    assert records["6.7B-bf16-b1-streamed"]["bytes_down"] > 0  # up: so few blocks never leave their slots
    assert found["commit"] and found["quick"] and found["machine"]["versions"]["torch"]
    gpus = ", ".join(gpu["name"] for gpu in found["machine"]["gpus"]) or "none"
    assert f"GPU: {gpus}; driver" in markdown and f"torch {torch.__version__}" in markdown
    assert "reproduce: `keyhole bench zo --quick" in markdown
    assert markdown.count("| equal ") >= 2 + 2 + 6 and "DIFFER" not in markdown
    assert {n for n in records if "wire" in n} >= {f"6.7B-bf16-b1-streamed-wire_{f}" for f in ("fp32", "bf16", "fp8")}
    assert "6.7B-bf16-b4-streamed" in capsys.readouterr().out


def test_a_failing_case_costs_only_itself(tmp_path: Path, monkeypatch: Any) -> None:
    found_of = keyhole.load

    def fails_when_streamed(*args: Any, **kwargs: Any) -> Any:
        if kwargs["placement"] == "stream" and kwargs["overlap"]:
            raise MemoryError("no such luck")
        return found_of(*args, **kwargs | {"overlap": True})

    monkeypatch.setattr(keyhole, "load", fails_when_streamed)
    path = tmp_path / "mine.yaml"
    path.write_text("mine: {cases: [{model: 2.7B, system: streamed, load: [{overlap: true}, {overlap: false}]}]}")
    found, markdown = quick(tmp_path, "--cases=mine", f"--table={path}")
    assert [r["status"] for r in found["records"]] == ["error", "ok"] and "no such luck" in markdown


@pytest.mark.parametrize(
    "args", [("--cases=nothing",), ("--device=cpu",), ("--device=tpu", "--quick"), ("--quick", "--table=no.yaml")]
)
def test_user_mistakes(args: tuple[str, ...], tmp_path: Path, capsys: Any) -> None:
    assert main(["bench", "zo", f"--output-dir={tmp_path}", *args]) == 2
    assert capsys.readouterr().err.startswith("keyhole: ")
    assert not list(tmp_path.iterdir())


def test_a_model_is_gone_before_the_next_is_loaded(monkeypatch: Any) -> None:
    """Two models of tens of GiB would not fit side by side."""
    found_of, alive = keyhole.load, []

    def watched(*args: Any, **kwargs: Any) -> Any:
        assert not any(ref() for ref in alive), "an earlier model is still in memory"
        model = found_of(*args, **kwargs)
        alive.append(weakref.ref(model))
        return model

    monkeypatch.setattr(keyhole, "load", watched)
    got: list[dict[str, Any]] = []
    cases = [Case("13B", system, dtype="fp32") for system in ("resident", "textbook", "streamed")]
    run_here(measure_steps, cases, Job("cpu", quick=True, warm_up=1, timed=1, deadline_s=4e9), got.append)
    gc.collect()
    assert [r["status"] for r in got if r["kind"] == "case"] == ["ok"] * 3
    assert len(alive) == 3 and not any(ref() for ref in alive)


def test_the_textbook_loop_has_no_weights_but_its_own() -> None:
    """What keyhole held them in is given back; the loop has the same ones."""
    model = load(Case("13B", "textbook", dtype="fp32"), "cpu", quick=True)
    before = [p.clone() for p in model.module.parameters()]
    module = take_weights(model)
    assert sum(home.untyped_storage().nbytes() for home in model.engine.homes) == 0
    assert all(torch.equal(a, b) for a, b in zip(before, module.parameters(), strict=True))
    model.close()


@pytest.mark.parametrize("verb", ["zo", "lsp-bias"])
def test_the_directory_is_checked_first(verb: str, tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    """Before anything is measured, and whichever its name on the command line; without one it is said, too."""
    (tmp_path / "file").touch()
    assert main(["bench", verb, f"--out={tmp_path}/file/inside"]) == 2
    said = capsys.readouterr().err
    assert "--out is --output-dir now" in said and "cannot write to" in said
    monkeypatch.chdir(tmp_path)
    assert main(["bench", verb, "--device=none", "--quick"]) == 2
    assert "results go to bench-out/" in capsys.readouterr().err and not (tmp_path / "bench-out").exists()
