"""The demo from end to end, with few steps; and what it promises with all of them."""

import json
from functools import partial
from pathlib import Path

import pytest
import torch

from keyhole import assets
from keyhole.demo.report import Squeezed
from keyhole.demo.run import run_demo
from keyhole.errors import UserError
from keyhole.eval.evaluate import read_task
from keyhole.methods import METHODS
from tests.matrix import in_every_run


@pytest.fixture(autouse=True)
def no_deeper_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """The run in a budget has tests of its own (test_budget.py)."""
    found = {"weights_bytes": 2**20, "budget_bytes": 2**19, "losses": [1.0], "same_losses": True, "same_weights": True}
    monkeypatch.setattr("keyhole.demo.run.squeeze", lambda name, *how: Squeezed(name, **found))


@pytest.fixture
def few_questions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twenty held-out notes will do where the score does not matter."""
    monkeypatch.setattr("keyhole.demo.run.read_task", partial(read_task, limit=20))


@pytest.mark.usefixtures("few_questions")
def test_every_method_from_end_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All methods run; table, page, numbers and loadable models are there; a second run may write there again."""
    from transformers import AutoModelForCausalLM

    threads = torch.get_num_threads()
    results = run_demo(tmp_path / "out", steps=2, device="cpu")
    assert [result.method for result in results] == list(METHODS)
    assert all(len(r.losses) == len(r.times_s) == 2 and not r.skipped for r in results)
    printed, page = capsys.readouterr().out, (tmp_path / "out/report.html").read_text()
    for name in METHODS:
        assert name in printed and name in page
        AutoModelForCausalLM.from_pretrained(tmp_path / "out" / name)
    saved = json.loads((tmp_path / "out/results.json").read_text())
    assert [entry["losses"] for entry in saved] == [result.losses for result in results]
    assert torch.get_num_threads() == threads
    assert all(0 < r.host_bytes < 2**30 and r.gpu_bytes == 0 for r in results)
    assert "zo in 0.5 MiB, a model of 1.0 MiB: losses and weights are the same bits" in printed
    assert [entry["method"] for entry in json.loads((tmp_path / "out/budget.json").read_text())] == ["zo", "lomo"]
    assert "In a budget smaller than the model" in page
    run_demo(tmp_path / "out", methods=["sgd"], steps=1, device="cpu")


@pytest.mark.usefixtures("few_questions")
def test_a_method_that_cannot_run_is_named_with_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One method's UserError does not stop the others."""

    def refuse(*args: object, **options: object) -> None:
        raise UserError("needs a GPU")

    monkeypatch.setattr("keyhole.methods.baselines.first_order.AdamW", refuse)
    monkeypatch.setitem(METHODS, "picky", METHODS["adamw"])
    results = run_demo(tmp_path, methods=["picky", "sgd"], steps=1, device="cpu")
    assert [bool(result.skipped) for result in results] == [True, False]
    assert "picky: skipped: needs a GPU" in capsys.readouterr().out
    assert "needs a GPU" in (tmp_path / "report.html").read_text()


@pytest.mark.usefixtures("few_questions")
def test_the_seed_decides_everything(tmp_path: Path) -> None:
    """The same seed gives the same losses, another seed others."""
    runs = [run_demo(tmp_path, methods=["zo"], seed=seed, steps=3, device="cpu")[0].losses for seed in (0, 0, 1)]
    assert runs[0] == runs[1] != runs[2]


def test_foreign_directories_are_refused(tmp_path: Path) -> None:
    """Files that are not ours are neither touched nor joined."""
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(UserError, match=r"thesis\.txt"):
        run_demo(tmp_path, steps=1)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]
    with pytest.raises(UserError, match="is a file"):
        run_demo(tmp_path / "thesis.txt", steps=1)


def test_a_run_is_not_written_over(tmp_path: Path) -> None:
    """A directory that holds a run of somebody's stays as it is."""
    (tmp_path / "run").mkdir()
    for name in ("run/keyhole.json", "model.safetensors"):
        (tmp_path / name).write_text("{}")
    with pytest.raises(UserError, match="holds a run already .* choose another output_dir"):
        run_demo(tmp_path, steps=1)
    assert {path.name for path in tmp_path.rglob("*")} == {"run", "keyhole.json", "model.safetensors"}


def test_unknown_methods_are_refused(tmp_path: Path) -> None:
    """A misspelt method names the ones there are, before anything is written."""
    with pytest.raises(UserError, match="'adamm' is not one of zo"):
        run_demo(tmp_path / "out", methods=["adamm"])
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@in_every_run(lambda method, steps: method == "zo" and steps < 100)
@pytest.mark.parametrize(
    "method, steps, at_least, falls_to",
    [
        ("adamw", 25, 0.95, 0.7),
        ("lsp", 25, 0.95, 0.5),
        ("sgd", 30, 0.95, 0.5),
        ("zo", 50, 0.45, 0.9),
        ("zo", 150, 0.75, 0.9),
    ],
)
def test_methods_learn_the_task(method: str, steps: int, at_least: float, falls_to: float, tmp_path: Path) -> None:
    """From chance to where the README says, on held-out notes, in a third of the demo's steps; zo is on its way."""
    result = run_demo(tmp_path, methods=[method], steps=steps, device="cpu")[0]
    assert 0.45 <= result.accuracy_before <= 0.55
    assert result.accuracy_after >= at_least
    assert result.loss_after < falls_to * result.loss_before
    assert (assets.MODEL / "model.safetensors").read_bytes() != (tmp_path / method / "model.safetensors").read_bytes()
