"""LoRA by peft: the model stays frozen, what is saved is an ordinary model, and resume is exact."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

import keyhole
from keyhole.errors import UserError
from keyhole.methods.lora.method import LoRA
from tests.model.decoders import LAYERS, batch, config, load

peft = pytest.importorskip("peft")


@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen2", "mixtral"])
def test_equals_peft_in_a_plain_loop(name: str) -> None:
    """Three steps give the adapters and the outputs of peft's own model trained by hand."""
    ours, theirs = load(name), load(name).module
    method = LoRA(ours, lr=1e-2, r=4, alpha=8, seed=3, weight_decay=0.1, max_grad_norm=0.5)
    torch.manual_seed(3)
    targets = sorted({key.rsplit(".lora_", 1)[0] for key in method.params})
    wrapped = peft.get_peft_model(theirs, peft.LoraConfig(r=4, lora_alpha=8, target_modules=targets))
    by_name = {key.removeprefix("base_model.model."): p for key, p in wrapped.named_parameters() if p.requires_grad}
    for key, param in by_name.items():
        param.data.copy_(method.params[key])
    optimizer = torch.optim.AdamW(by_name.values(), lr=1e-2, weight_decay=0.1)
    for t in range(3):
        one = batch(seed=t)
        loss = wrapped(**one, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(by_name.values(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        assert method.step(one).item() == pytest.approx(loss.item(), rel=1e-4)
    for key, param in by_name.items():
        torch.testing.assert_close(method.params[key].data, param.data, rtol=1e-3, atol=1e-5)


def test_the_base_is_known_by_its_bits_on_any_number_of_threads() -> None:
    """The state of one machine is that of another: a sum of floats depends on how many threads add it up."""
    states, before = [], torch.get_num_threads()
    for threads in (1, 3):
        torch.set_num_threads(threads)
        states.append(LoRA(load(), r=4).state_dict()["base"])
    torch.set_num_threads(before)
    assert states[0] == states[1] and isinstance(states[0], str)
    other = load()
    home = other.home(other.layout.tensors[0]).view(torch.int32).flatten()
    home[0] ^= 1  # the last bit of one weight, in a tensor without an adapter
    method = LoRA(other, r=4)
    with pytest.raises(UserError, match="not the weights that the adapters were trained on"):
        method.load_state_dict(method.state_dict() | {"base": states[0]})


def test_the_saved_model_is_the_trained_one_and_the_base_is_untouched(tmp_path: Path) -> None:
    """Transformers reads what was saved and gets the same losses; weights in memory are those that were loaded."""
    model = load()
    before = {t.name: model.home(t).clone() for t in model.layout.tensors}
    method = LoRA(model, lr=1e-2, r=4)
    for t in range(5):
        method.step(batch(seed=t))
    assert all(torch.equal(model.home(t), before[t.name]) for t in model.layout.tensors)
    model.save_pretrained(tmp_path / "out")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    nll_B, count_B = model.nll(batch(seed=9))
    expected = loaded(**batch(seed=9)).loss * count_B.sum()
    torch.testing.assert_close(nll_B.sum(), expected, rtol=1e-4, atol=1e-4)
    assert not (tmp_path / "out" / "adapter").exists()


def test_unmerged_adapters_are_read_by_peft(tmp_path: Path) -> None:
    """merge=False saves the model as it was and the adapters beside it; peft puts them together."""
    model = load()
    method = LoRA(model, lr=1e-2, r=4, merge=False)
    for t in range(3):
        method.step(batch(seed=t))
    model.save_pretrained(tmp_path / "out")
    loaded = peft.PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(tmp_path / "out"), tmp_path / "out" / "adapter"
    )
    nll_B, count_B = model.nll(batch(seed=9))
    expected = loaded(**batch(seed=9)).loss * count_B.sum()
    torch.testing.assert_close(nll_B.sum(), expected, rtol=1e-4, atol=1e-4)


def test_an_adapter_of_rounded_weights_names_no_base(tiny_model: Path, tmp_path: Path) -> None:
    """It belongs to the unpacked weights beside it; by the name of the original peft would load other weights."""
    model = keyhole.load(tiny_model, device="cpu", wire="int4", workload=keyhole.Workload("lora", tokens=64))
    LoRA(model, lr=1e-2, r=4, merge=False).step(batch())
    model.save_pretrained(tmp_path / "out")
    assert (
        json.loads((tmp_path / "out" / "adapter" / "adapter_config.json").read_text())["base_model_name_or_path"]
        is None
    )
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    loaded = peft.PeftModel.from_pretrained(base, tmp_path / "out" / "adapter")
    nll_B, count_B = model.nll(batch(seed=9))
    torch.testing.assert_close(nll_B.sum(), loaded(**batch(seed=9)).loss * count_B.sum(), rtol=1e-4, atol=1e-4)


def test_the_adapter_of_a_classifier_is_read_by_peft(tiny_model: Path, tmp_path: Path) -> None:
    """Its new head is adapted like the blocks; it is no decoder, and its base is in no other directory."""
    model = keyhole.load(tiny_model, device="cpu", head="classification", num_labels=2)
    method = LoRA(model, lr=1e-2, r=4, merge=False)
    rows = {key: value for key, value in batch().items() if key != "labels"}
    method.step(rows | {"labels": torch.arange(len(rows["input_ids"])) % 2})
    model.save_pretrained(tmp_path / "out")
    about = json.loads((tmp_path / "out" / "adapter" / "adapter_config.json").read_text())
    assert about["base_model_name_or_path"] is None and about["task_type"] is None
    base = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out")
    loaded = peft.PeftModel.from_pretrained(base, tmp_path / "out" / "adapter").eval()
    again = keyhole.load(tmp_path / "out", device="cpu")
    torch.testing.assert_close(loaded(**rows).logits, again.module(**rows).logits, rtol=1e-4, atol=1e-5)
    with loaded.disable_adapter():
        assert not torch.equal(loaded(**rows).logits, again.module(**rows).logits)


def test_a_state_on_top_of_merged_weights_is_refused(tmp_path: Path) -> None:
    """Adapters would be added twice: the error says which model to load."""
    model = load()
    method = LoRA(model, lr=1e-2, r=4)
    method.step(batch())
    model.save_pretrained(tmp_path / "out")
    again = LoRA(keyhole.load(tmp_path / "out", device="cpu"), lr=1e-2, r=4)
    with pytest.raises(UserError, match="original model"):
        again.load_state_dict(method.state_dict())


def test_target_modules_are_checked_and_counted() -> None:
    """A name that no layer has is refused with those there are; the start block says what is trained."""
    with pytest.raises(UserError, match="^target_modules: .*q_porj.*known: .*q_proj"):
        LoRA(load(), target_modules=["q_porj"])
    method = LoRA(load(), r=4, target_modules=["q_proj", "v_proj"])
    assert f"{2 * LAYERS} adapters of rank 4" in method.describe()[0]


def test_without_peft_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error is the command that installs it."""
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(UserError, match=r"pip install peft"):
        LoRA(load())


@pytest.mark.parametrize("wire", [None, "int4"])
def test_a_rank_beyond_every_matrix_is_refused(wire: str | None) -> None:
    """The largest that a change can have is taken; one more is refused, before anything is added to the module."""
    work = keyhole.Workload("lora", tokens=64)
    shape = config("llama", num_key_value_heads=2)
    model = keyhole.load(shape, init="random", device="cpu", wire=wire, workload=work)
    before = [name for name, _ in model.module.named_modules()]
    with pytest.raises(UserError, match="r: 33 is more than a change .* is 32, and adapters .* Set r to 32 at most"):
        LoRA(model, r=33)
    with pytest.raises(UserError, match="Set r to 16 at most"):
        LoRA(model, r=32, target_modules="k_proj")
    assert [name for name, _ in model.module.named_modules()] == before
    assert LoRA(model, r=32).adapters.config.r == 32


@pytest.mark.parametrize("first", [keyhole.LoRA, keyhole.LOMOLoRA])
def test_a_second_method_on_a_model_with_adapters_is_refused(first: Any) -> None:
    """It replaced them by new ones, in silence. What was learned stays, and the first method goes on."""
    model, alone = load(), load()
    method, same = first(model, lr=1e-2), first(alone, lr=1e-2)
    for each in (method, same):
        each.step(batch())
    for second in (keyhole.LoRA, keyhole.LOMOLoRA, keyhole.LOMO, keyhole.AdamW, keyhole.ZO):
        says = f"it has adapters already, .* and {second.row.name} would .*opt.lr = .*load the"
        with pytest.raises(UserError, match=says):
            second(model, lr=1e-3)
    method.lr = same.lr = 1e-3
    assert [float(method.step(batch(seed=step))) for step in (1, 2)] == [
        float(same.step(batch(seed=step))) for step in (1, 2)
    ]
    assert torch.equal(model.nll(batch())[0], alone.nll(batch())[0])


@pytest.mark.parametrize("cls", [keyhole.LoRA, keyhole.LOMOLoRA])
@pytest.mark.parametrize("placement", ["resident", "stream"])
def test_a_method_that_cannot_be_made_leaves_no_adapters(cls: Any, placement: str) -> None:
    """The next attempt is as the first one would have been."""
    model = load(placement=placement)
    before = [(name, param.requires_grad) for name, param in model.module.named_parameters()]
    with pytest.raises(UserError, match="no learning rate"):
        cls(model, lr=-1.0)
    assert [(name, param.requires_grad) for name, param in model.module.named_parameters()] == before
    found = [cls(each, lr=1e-2) for each in (model, load(placement=placement))]
    losses = [[float(method.step(batch(seed=step))) for step in (0, 1)] for method in found]
    assert losses[0] == losses[1]
