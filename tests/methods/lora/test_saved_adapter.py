"""Adapters in a model's directory: loaded, used and kept, or refused."""

import io
import json
import shutil
from pathlib import Path

import pytest
import torch

import keyhole
from keyhole.cli import main
from keyhole.errors import UserError
from keyhole.report.entries import read_metrics

pytest.importorskip("peft")
RUNS = {"lomo-lora": ["lomo_lora.adapter_lr=0.1"], "lora": ["lora.merge=false", "learning_rate=0.1"]}


@pytest.fixture(scope="module", params=RUNS)
def trained(
    request: pytest.FixtureRequest, tiny_model: Path, tiny_data: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The output of a run whose adapters are not in the weights. Do not change it."""
    out = tmp_path_factory.mktemp("adapter") / "out"
    words = [f"model={tiny_model}", f"train_data={tiny_data}", f"eval_data={tiny_data}", f"output_dir={out}"]
    words += [f"method={request.param}", "max_steps=6", "max_length=64", "device=cpu", "eval_steps=null"]
    config = out.parent / "config.yaml"
    config.write_text("".join(f"{key}: {value}\n" for key, value in (word.split("=") for word in words)))
    assert main(["train", str(config), *RUNS[request.param]]) == 0
    return out


@pytest.mark.parametrize("placement", ["resident", "stream"])
def test_eval_of_the_output_is_the_eval_of_its_training(
    trained: Path, tiny_data: Path, tmp_path: Path, placement: str
) -> None:
    """Without its adapters a model is another: 0.189 where training said 0.105."""
    command = ["eval", str(trained), "--tasks", str(tiny_data), "device=cpu", f"placement={placement}"]
    assert main([*command, "--json", str(tmp_path / "scores.json")]) == 0
    loss = json.loads((tmp_path / "scores.json").read_text())["results"][0]["loss"]
    reported = read_metrics(trained / "run" / "metrics.jsonl")[-1]["eval_loss"]
    without = keyhole.load(trained, device="cpu", adapter=False)
    assert loss == pytest.approx(reported, rel=1e-5)
    ids = torch.arange(40)[None] % 200
    batch = {"input_ids": ids, "labels": ids}
    with_adapters = keyhole.load(trained, device="cpu")
    assert abs(float(with_adapters.nll(batch)[0] - without.nll(batch)[0])) > 0.1  # they do matter


def test_chat_says_that_there_are_adapters(
    trained: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """What was decided is said, and an answer comes."""
    monkeypatch.setattr("sys.stdin", io.StringIO("1 + 1 = \n"))
    assert main(["chat", str(trained), "device=cpu", "--max-new-tokens", "3"]) == 0
    assert f"adapters: 14 of rank 8, from {trained / 'adapter'}" in capsys.readouterr().err


def test_they_are_saved_again_and_a_method_below_them_is_refused(trained: Path, tmp_path: Path) -> None:
    """A copy is worth the same; training the weights below fixed adapters is not what anybody asked for."""
    model, ids = keyhole.load(trained, device="cpu"), torch.arange(40)[None] % 200
    model.save_pretrained(tmp_path / "copy")
    again = keyhole.load(tmp_path / "copy", device="cpu")
    batch = {"input_ids": ids, "labels": ids}
    assert torch.equal(model.nll(batch)[0], again.nll(batch)[0])
    with pytest.raises(UserError, match="holds adapters on top of these weights, and zo would train below them"):
        keyhole.ZO(model)
    with pytest.raises(UserError, match="and lora would train below them"):
        keyhole.LoRA(model)
    assert torch.equal(model.nll(batch)[0], again.nll(batch)[0])
    keyhole.ZO(keyhole.load(trained, device="cpu", adapter=False))


def kind(path: Path) -> None:
    file = path / "adapter" / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"peft_type": "IA3"}))


def rank(path: Path) -> None:
    file = path / "adapter" / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"r": 3}))


BREAKS = {
    "no config": (lambda p: (p / "adapter" / "adapter_config.json").unlink(), "adapter_config.json cannot be read"),
    "another type": (kind, "adapters of type 'IA3'; LORA is"),
    "no weights": (
        lambda p: (p / "adapter" / "adapter_model.safetensors").unlink(),
        "adapter_model.safetensors cannot",
    ),
    "another rank": (rank, "with shape .*; its config says"),
}


@pytest.mark.parametrize("name", BREAKS)
def test_adapters_that_cannot_be_used_are_refused(trained: Path, tmp_path: Path, name: str) -> None:
    """Never left out in silence."""
    broken = shutil.copytree(trained, tmp_path / "broken")
    damage, says = BREAKS[name]
    damage(broken)
    with pytest.raises(UserError, match=says):
        keyhole.load(broken, device="cpu")
