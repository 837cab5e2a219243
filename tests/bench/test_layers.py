"""One block's forward, backward and update: the right block, the right counts, and tables of both."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import keyhole
from keyhole.bench.layers import PARTS, all_blocks_s, first_block, floors, forward, kept_bytes, parts_of
from keyhole.bench.measure import random_batch
from keyhole.bench.shapes import known, model_config
from keyhole.cli import main
from keyhole.errors import UserError
from keyhole.model.structure.skeleton import build

MODELS = ["Llama-7B", "GPT2-1.3B", "13B", "BLOOM-176B"]


def test_a_quick_run(tmp_path: Path, capsys: Any) -> None:
    """Every part of every model has a time and a floor, and parameters are counted as the module counts them."""
    how = ["--quick", "--device=cpu", "--steps=1", "--warm-up=1", f"--models={','.join(MODELS)}"]
    assert main(["bench", "layers", f"--output-dir={tmp_path}", *how]) == 0
    found = json.loads(next(tmp_path.glob("*.json")).read_text())
    records = found["records"]
    assert "--models=Llama-7B," in found["command"] and found["quick"]
    assert [(r["case"]["model"], r["status"]) for r in records] == [(model, "ok") for model in MODELS]
    for r in records:
        assert set(r["parts"]) == set(r["floors"]) == set(PARTS)
        assert all(r["parts"][part]["s"] > 0 and r["floors"][part] > 0 for part in PARTS)
        whole = build(model_config(r["case"]["model"], quick=True), torch.float32)
        assert r["parameters"] == sum(p.numel() for p in whole.parameters())
        assert all_blocks_s(r) > r["layers"] * r["parts"]["BWD"]["s"] and r["kept_bytes"] > 0
    page = next(tmp_path.glob("*.md")).read_text()
    assert all(f"{part} ms" in page for part in PARTS) and "optimizer state GiB" in page
    said = capsys.readouterr().out
    assert all(re.search(rf"{model} \| CPU, ", said) for model in MODELS)


@pytest.mark.parametrize("name", MODELS)
def test_the_block_is_called_as_the_model_calls_it(name: str) -> None:
    """Its output, called alone, is the next block's input; its parts leave gradients of all weights."""
    model = keyhole.load(model_config(name, blocks=2, quick=True), init="random", device="cpu", dtype="float32")
    batch = random_batch(2, 8, 128)
    block, call = first_block(model, batch)
    seen: list[torch.Tensor] = []
    hook = block.register_forward_hook(lambda module, args, out: seen.append(out[0] if isinstance(out, tuple) else out))
    with torch.no_grad():
        model.module(input_ids=batch["input_ids"], use_cache=False)
    hook.remove()
    assert torch.equal(forward(block, call).detach(), seen[0])
    parts = parts_of(block, call, torch.device("cpu"))
    for part in PARTS[:2]:
        parts[part]()
    assert all(p.grad is not None for p in block.parameters()) and call[0].grad is not None
    assert kept_bytes(block, call) >= 4 * seen[0].numel()
    model.close()


def test_floors_follow_from_the_shapes() -> None:
    """2 P M and half of attention's products, twice as many back, 28 bytes per parameter."""
    block = torch.nn.Linear(8, 4)
    found = floors(block, tokens=6, length=3, width=8, rates={"product": 2.0, "copy": 7.0})
    assert found["FWD"] == (2 * 32 * 6 + 2 * 6 * 3 * 8) / 2 and found["BWD"] == 2 * found["FWD"]
    assert found["UPD"] == found["UPD torch"] == 28 * 36 / 7


def test_a_model_that_is_not_there() -> None:
    """Its name is told, with those that are; OPT may be said before its sizes."""
    assert known("OPT-13B") == "13B"
    with pytest.raises(UserError, match="Llama-9B.*Llama-7B"):
        known("Llama-9B")
