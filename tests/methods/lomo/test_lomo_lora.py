"""LoRA + LOMO: both parts move as they would alone, streamed == resident, resume, and what is on disk."""

from pathlib import Path
from typing import Any

import pytest
import torch

import keyhole
from keyhole.errors import UserError
from keyhole.methods.lomo.lomo_lora import LOMOLoRA
from tests.methods.baselines.test_first_order import plain_loss
from tests.methods.lomo.loops import load, micro_batches, weights

pytest.importorskip("peft")


def step(opt: LOMOLoRA, first: int, steps: int, micro: int = 2) -> list[float]:
    return [float(opt.step(micro_batches(t, micro))) for t in range(first, first + steps)]


@pytest.mark.parametrize("options", [{}, {"max_grad_norm": 0.3}, {"clip_value": 1e-3}, {"weight_decay": 0.5}], ids=str)
def test_equals_two_torch_optimizers(options: dict[str, float]) -> None:
    """SGD on the base and AdamW on the adapters of an ordinary peft model; clipping and decay hold for both."""
    from peft import LoraConfig, inject_adapter_in_model

    model, other = load(), load()
    how = {"weight_decay_on": "all", **options}
    opt = LOMOLoRA(model, lr=0.05, adapter_lr=1e-2, r=4, target_modules=["q_proj", "up_proj"], **how)
    module = inject_adapter_in_model(
        LoraConfig(r=4, lora_alpha=16.0, target_modules=["q_proj", "up_proj"]), other.module
    )
    theirs = dict(module.named_parameters())
    adapters = {n: p for n, p in theirs.items() if "lora_" in n}
    for name, param in adapters.items():
        param.data.copy_(opt.adapters[name].data)
    for param in theirs.values():
        param.requires_grad_(True)
    base = [p for n, p in theirs.items() if n not in adapters]
    decay = {"weight_decay": options.get("weight_decay", 0.0)}
    sgd, adamw = torch.optim.SGD(base, lr=0.05, **decay), torch.optim.AdamW(adapters.values(), lr=1e-2, **decay)
    for t in range(4):
        plain_loss(module, micro_batches(t, 2)).backward()
        if "max_grad_norm" in options:
            torch.nn.utils.clip_grad_norm_(theirs.values(), 0.3)
        if "clip_value" in options:
            torch.nn.utils.clip_grad_value_(theirs.values(), 1e-3)
        for optimizer in (sgd, adamw):
            optimizer.step()
            optimizer.zero_grad()
    step(opt, 0, 4)
    for name, param in adapters.items():
        torch.testing.assert_close(opt.adapters[name].data, param.data, rtol=1e-4, atol=1e-6)
    for tensor in model.layout.tensors:
        name = next(n for n, p in model.module.named_parameters() if p is tensor.param)
        torch.testing.assert_close(model.home(tensor), theirs[name].data, rtol=1e-4, atol=1e-6)


def test_streamed_equals_resident_and_resumes(tmp_path: Path) -> None:
    """Losses, base and adapters to the bit; stopped after two steps of four it ends the same."""
    found = []
    for where in ({}, {"placement": "stream"}):
        model = load(**where)
        opt = LOMOLoRA(model, lr=0.05, adapter_lr=1e-2, r=4)
        found.append((step(opt, 0, 4), weights(model), {n: p.detach().clone() for n, p in opt.adapters.items()}))
    model = load()
    first = LOMOLoRA(model, lr=0.05, adapter_lr=1e-2, r=4)
    losses = step(first, 0, 2)
    state = {
        key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in first.state_dict().items()
    }
    model.save_pretrained(tmp_path / "half")
    again = keyhole.load(tmp_path / "half", device="cpu", adapter=False)  # those are in the state
    second = LOMOLoRA(again, lr=0.05, adapter_lr=1e-2, r=4)
    second.load_state_dict(state)
    losses += step(second, 2, 2)
    found.append((losses, weights(again), second.adapters))
    for losses, base, adapters in found[1:]:
        assert losses == found[0][0]
        assert all(torch.equal(base[key], found[0][1][key]) for key in base)
        assert all(torch.equal(adapters[key], found[0][2][key]) for key in adapters)


def test_what_is_saved_is_a_model_and_a_peft_adapter(tmp_path: Path) -> None:
    """Put together by peft it computes what the trained module does."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model = load()
    opt = LOMOLoRA(model, lr=0.05, adapter_lr=1e-2, r=4)
    step(opt, 0, 3)
    model.save_pretrained(tmp_path / "out")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    both = PeftModel.from_pretrained(base, tmp_path / "out" / "adapter")
    batches = micro_batches(9, 1)
    with torch.no_grad():
        expected = plain_loss(model.module, batches)
        assert float(plain_loss(both, batches)) == pytest.approx(float(expected), rel=1e-5)


def test_a_rate_of_zero_trains_the_adapters_alone() -> None:
    """The model stays as it is, and nothing is divided by its rate."""
    model = load()
    before = weights(model)
    opt = LOMOLoRA(model, lr=0.0, adapter_lr=1e-2, r=4)
    start = {name: p.detach().clone() for name, p in opt.adapters.items()}
    step(opt, 0, 2)
    assert all(torch.equal(tensor, before[key]) for key, tensor in weights(model).items())
    assert any(not torch.equal(p, start[name]) for name, p in opt.adapters.items())


@pytest.mark.parametrize(
    "options, says", [({"compile": True}, "compile"), ({"target_modules": ["nose"]}, "^target_modules: .*nose")]
)
def test_bad_settings_are_refused(options: dict[str, Any], says: str) -> None:
    """With what to change."""
    with pytest.raises(UserError, match=says):
        LOMOLoRA(load(), **options)


def test_adapters_warm_up_by_themselves() -> None:
    """With a warm-up of their own the adapters' rate is that of a schedule with that warm-up, whatever LOMO's is."""
    from dataclasses import replace

    from keyhole.training.schedule import Schedule

    schedule, found = Schedule("linear", 0.05, 10, 0.2), {}
    for warmup in (None, 0.5):
        opt = LOMOLoRA(load(), lr=schedule.peak, adapter_lr=1e-2, adapter_warmup_ratio=warmup, r=4)
        found[warmup] = []
        for done in range(10):
            opt.lr = schedule.rate(done)
            opt.follow(lambda ratio, done=done: replace(schedule, warmup_ratio=ratio).factor(done))
            found[warmup].append(opt.adapter_rate)
        step(opt, 0, 1)
        assert opt.optimizer.param_groups[0]["lr"] == opt.adapter_rate
    assert found[None] == pytest.approx([0.2 * schedule.rate(done) for done in range(10)])
    assert found[0.5] == [Schedule("linear", 1e-2, 10, 0.5).rate(done) for done in range(10)]
