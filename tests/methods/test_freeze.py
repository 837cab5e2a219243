"""`freeze`: what it describes stays as it was, to the bit, with every method and placement; the rest is trained."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import keyhole
from keyhole.cli import main
from keyhole.errors import UserError
from keyhole.methods import METHODS
from tests.matrix import in_every_run
from tests.model.decoders import batch, config

OWN: dict[str, dict[str, Any]] = {"lsp": {"d": 16, "r": 2, "learn": False}, "galore": {"rank": 4}}
CASES = {name: (name, OWN.get(name, {})) for name in METHODS if not METHODS[name].keeps_base}
CASES["zo of low rank"] = ("zo", {"rank": 2, "refresh": 2})
CASES["zo with factors"] = ("zo", {"rank": 2, "refresh": 2, "fold": False})
STREAMED = [name for name, (method, _) in CASES.items() if METHODS[method].streams]


def trained(
    case: str, placement: str, described: list[str], device: str = "cpu", steps: int = 3
) -> dict[str, torch.Tensor]:
    """The weights after three steps, or on a GPU after six: the last ones are recorded."""
    name, own = CASES[case]
    where = {"device": device, "placement": placement}
    model = keyhole.load(config("qwen2"), init="random", freeze=described, **where)
    method = METHODS[name].load()(model, 1e-2, **own)
    for step in range(steps if device == "cpu" else 6):
        method.step(batch(seed=step))
    method.flush()
    return {name: tensor.cpu().clone() for name, tensor in model.named_tensors()}


@pytest.mark.parametrize("case", CASES)
def test_what_is_frozen_stays_and_the_rest_is_trained(case: str) -> None:
    model = keyhole.load(config("qwen2"), init="random", device="cpu")
    before = {name: tensor.cpu().clone() for name, tensor in model.named_tensors()}
    after = trained(case, "resident", ["embeddings", "*.mlp.*", "model.layers.0", "*.k_proj.bias"])
    same = {name for name, tensor in after.items() if name in before and torch.equal(tensor, before[name])}
    still = ("embed", "lm_head", ".mlp.", "layers.0.", "k_proj.bias")
    assert same == {name for name in before if any(part in name for part in still)}
    assert set(before) - same


@in_every_run(lambda case: case in ("lomo", "lsp", "adam-offload", "zo", "zo with factors"))
@pytest.mark.parametrize("case", STREAMED)
def test_streamed_equals_resident_with_frozen_parameters(case: str) -> None:
    found = [trained(case, placement, ["embeddings", "*.k_proj.*"]) for placement in ("resident", "stream")]
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


def test_biases_below_frozen_weights_are_trained_beside_adapters() -> None:
    """lomo-lora: the first step is LOMO's, since adapters begin at zero."""
    found = []
    for cls, placement in ((keyhole.LOMO, "resident"), (keyhole.LOMOLoRA, "resident"), (keyhole.LOMOLoRA, "stream")):
        model = keyhole.load(config("qwen2"), init="random", device="cpu", placement=placement)
        for name, param in model.module.named_parameters():
            param.requires_grad_(not name.endswith("weight"))
        cls(model, 1e-2).step(batch())
        found.append({name: tensor for name, tensor in model.named_tensors() if name.endswith("_proj.bias")})
    plain = found[0]
    assert len(plain) == 6 and all(torch.equal(each[name], plain[name]) for each in found for name in plain)


@pytest.mark.parametrize("placement", ["resident", "stream"])
@pytest.mark.parametrize("cls", [keyhole.LoRA, keyhole.LOMOLoRA])
def test_a_frozen_layer_gets_no_adapters(cls: Any, placement: str) -> None:
    """What it computes stays, too. A module that the caller has frozen by hand, as before peft, is adapted whole."""
    how = {"init": "random", "device": "cpu", "placement": placement}
    method = cls(keyhole.load(config("qwen2"), freeze=["model.layers.0", "*.k_proj.weight", "embeddings"], **how), 1e-2)
    assert method.addon.layers and {name.split(".")[2] for name in method.addon.layers} == {"1"}
    assert not any("k_proj" in name for name in method.addon.layers)
    losses = [float(method.step(batch())) for _ in range(5)]
    assert losses[-1] < losses[0]
    by_hand = keyhole.load(config("qwen2"), **how)
    by_hand.module.model.layers.requires_grad_(False)
    whole = cls(by_hand, 1e-2)
    assert {name.split(".")[2] for name in whole.addon.layers} == {"0", "1"}
    for one, other in ((method, whole), (whole, method)):
        with pytest.raises(UserError, match="adapter model.layers.0.* target_modules and freeze must be as they were"):
            one.load_state_dict(other.state_dict())
    with pytest.raises(UserError, match="freeze: it describes the weights of all 14 layers"):
        cls(keyhole.load(config("qwen2"), freeze="model.layers", **how))
    with pytest.raises(UserError, match="freeze: it describes the weights of all 2 layers"):
        cls(keyhole.load(config("qwen2"), freeze="*.k_proj.*", **how), target_modules="k_proj")


@pytest.mark.gpu
@pytest.mark.parametrize("case", STREAMED)
def test_streamed_equals_resident_with_frozen_parameters_on_a_gpu(case: str) -> None:
    found = [trained(case, placement, ["embeddings", "*.k_proj.*"], "cuda") for placement in ("resident", "stream")]
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


@pytest.mark.parametrize("placement", ["resident", "stream"])
def test_a_head_alone_is_trained_on_a_model_made_from_a_config(placement: str) -> None:
    """A linear probe: of three labels, drawn by the seed, over frozen blocks."""
    how = {"init": "random", "device": "cpu", "placement": placement, "freeze": "model"}
    model = keyhole.load(config("qwen2"), head="classification", num_labels=3, **how)
    before = {name: tensor.clone() for name, tensor in model.named_tensors()}
    labels = {"labels": torch.tensor([0, 2]), "attention_mask": torch.ones(2, 10, dtype=torch.long)}
    keyhole.LOMO(model, 1e-2).step(batch() | labels)
    assert [n for n, tensor in model.named_tensors() if not torch.equal(tensor, before[n])] == ["score.weight"]


def test_a_run_resumes_and_replays_with_frozen_embeddings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """N + M steps are those of one run, and the journal leads to the same weights; the setting may not change."""
    words = ["train", "demo-zo", "eval_steps=null", "save_steps=2", "lr_scheduler_type=constant", "freeze=embeddings"]
    words += ["eval_data=null", "batch_size=4"]
    whole, cut, again = (tmp_path / name for name in ("whole", "cut", "again"))
    assert main([*words, "max_steps=4", f"output_dir={whole}"]) == 0
    assert "frozen     1 x model.embed_tokens.weight" in capsys.readouterr().out
    assert main([*words, "max_steps=2", f"output_dir={cut}"]) == 0
    assert main([*words, "max_steps=4", "freeze=null", f"output_dir={cut}", "--resume"]) == 2
    assert "freeze: the run has embeddings, the config now says null" in capsys.readouterr().err
    assert main([*words, "max_steps=4", f"output_dir={cut}", "--resume"]) == 0
    assert main(["replay", "demo", str(cut), str(again)]) == 0
    saved = [dict(keyhole.load(str(path), device="cpu").named_tensors()) for path in (whole, cut, again)]
    first = dict(keyhole.load("demo", device="cpu").named_tensors())
    for name, tensor in saved[0].items():
        assert all(torch.equal(tensor, other[name]) for other in saved[1:])
        assert torch.equal(tensor, first[name]) == ("embed" in name or "lm_head" in name)


@pytest.mark.parametrize("method", ["lora", "lomo-lora"])
def test_a_run_and_its_dry_run_leave_out_the_adapters_of_what_is_frozen(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, method: str
) -> None:
    words = ["train", "demo-lora", f"method={method}", "learning_rate=1e-3", "max_steps=2", "eval_steps=null"]
    words += ["lora.merge=false", "eval_data=null", "batch_size=4", f"output_dir={tmp_path / 'out'}"]
    said = []
    for more in (["--dry-run"], ["freeze=model.layers.0", "--dry-run"], ["freeze=model.layers.0"]):
        assert main([*words, *more]) == 0
        out, err = capsys.readouterr()
        assert "freeze: has no effect" not in err
        said.append(next(line for line in out.splitlines() if "parameters: " in line))
    assert said[0] != said[1] == said[2]
    saved = load_file(tmp_path / "out" / "adapter" / "adapter_model.safetensors")
    assert saved and not any("layers.0." in name for name in saved)
    words = ["train", "demo-lora", f"method={method}", "freeze=model.layers", f"output_dir={tmp_path / 'b'}"]
    assert main([*words, "--dry-run"]) == 2
    assert "there is nothing to adapt" in capsys.readouterr().err
