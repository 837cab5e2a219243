"""Projectors on gradients of a model: what learning gains, and GaLore at equal rank and memory."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import keyhole
from keyhole import assets
from keyhole.bench.bias import Bias, Sampling, equal_rank, sample
from keyhole.cli import main
from keyhole.errors import UserError
from keyhole.ops.lsp.projector import KINDS


@pytest.fixture(scope="module")
def table() -> Bias:
    """Every fifth matrix."""
    seen, held = sample(Sampling(calibration=2, held_out=3, matrices=0))
    names = list(seen)[::5]
    return Bias({name: seen[name] for name in names}, {name: held[name] for name in names})


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_learned_holds_better_than_its_start_and_galore(table: Bias, kind: str) -> None:
    """r = 4, on gradients of batches it was not fitted to; only blocks are better than GaLore in the same memory;
    nothing beats the floor."""
    found = table.line(kind, 16, 4)
    assert found["held_out"] < 0.5 * found["random"] and len(found["matrices"]) == len(table.seen)
    assert found["seen"] < found["held_out"] < (0.95 * found["equal_held_out"] if kind == "blocks" else 1)
    assert all(row["floor"] < row["held_out"] for row in found["matrices"].values())


def test_the_floor_is_that_of_the_best_matrix_of_its_rank() -> None:
    """Against Eckart and Young, element by element."""
    grad = torch.randn(12, 8, generator=torch.Generator().manual_seed(0))
    u, s, vh = torch.linalg.svd(grad, full_matrices=False)
    best = u[:, :3] @ torch.diag(s[:3]) @ vh[:3]
    found = Bias({"w": [grad]}, {"w": [grad]}).floor("w", 3)
    assert abs(found - float((best - grad).norm() / grad.norm())) < 1e-6


def test_memory_is_counted_as_in_the_paper() -> None:
    """(m + n) r numbers of projectors pay for (m + 3 n) rank of GaLore, whose projector is on the shorter side."""
    assert equal_rank(torch.Size((64, 64)), 4) == 2
    assert equal_rank(torch.Size((192, 64)), 16) == 256 * 16 // (64 + 3 * 192)


def test_gradients_are_those_of_the_model() -> None:
    """Of the chosen matrices alone, each from rows of its own."""
    seen, held = sample(Sampling(calibration=2, held_out=1, matrices=3, batch=4))
    model = keyhole.load(assets.MODEL, dtype="float32", device="cpu")
    shapes = {t.name: t.shape for t in model.layout.tensors if t.block is not None}
    model.close()
    assert seen.keys() == held.keys() and len(seen) == 3
    for name, grads in seen.items():
        assert all(grad.shape == shapes[name] and grad.norm() > 0 for grad in (*grads, *held[name]))
        assert not torch.equal(*grads)


def test_any_model_and_data(tmp_path: Path, capsys: Any) -> None:
    """By their paths, from the command line; the table has every kind, and the command can be repeated."""
    data = tmp_path / "mine.jsonl"
    data.write_text("".join(json.dumps({"text": f"Line {i} says that {i} is even."}) + "\n" for i in range(12)))
    args = ["--model", str(assets.MODEL), "--data", str(data), "--d", "8", "--r", "2", "--device", "cpu"]
    assert main(["bench", "lsp-bias", "--quick", "--output-dir", str(tmp_path / "out"), *args]) == 0
    page = next((tmp_path / "out").glob("*.md")).read_text()
    assert all(f"| {kind} " in page for kind in KINDS) and str(data) in page and "| 8 | 2 |" in page
    records = json.loads(next((tmp_path / "out").glob("*.json")).read_text())["records"]
    assert [r["kind"] for r in records] == ["gradients", "line", "line"]


@pytest.mark.parametrize("args", [("--d=x",), ("--kinds=dense",)])
def test_user_mistakes(args: tuple[str, ...], tmp_path: Path, capsys: Any) -> None:
    assert main(["bench", "lsp-bias", f"--output-dir={tmp_path}", "--device=cpu", *args]) == 2
    assert f"\nkeyhole: {args[-1].partition('=')[0]}: " in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_too_little_data_is_refused() -> None:
    with pytest.raises(UserError, match="none of them twice"):
        sample(Sampling(batch=1000))
