"""AdamW and SGD: torch's own steps on the same loss, for every decoder, and through save and load."""

from functools import partial
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

import keyhole
from keyhole.errors import UserError
from keyhole.methods import METHODS
from keyhole.model.structure.find import find_blocks
from tests.matrix import in_every_run
from tests.model.decoders import NAMES, UNLIKE, batch, load


def plain_loss(module: torch.nn.Module, batches: list) -> torch.Tensor:
    """The mean NLL over all trained tokens of all batches, from the full logits of a plain HF model."""
    sums, count = [], 0
    for one in batches:
        logits = module(input_ids=one["input_ids"], use_cache=False).logits[:, :-1].flatten(0, 1).float()
        labels = one["labels"][:, 1:].flatten()
        sums.append(F.cross_entropy(logits, labels, ignore_index=-100, reduction="sum"))
        count += int((labels != -100).sum())
    return torch.stack(sums).sum() / count


@pytest.mark.parametrize(
    "make, options",
    [(torch.optim.AdamW, {"weight_decay": 0.1}), (torch.optim.SGD, {"momentum": 0.9, "weight_decay": 0.01})],
)
def test_equals_a_plain_torch_loop(make: type, options: dict[str, float]) -> None:
    """Five steps with micro-batches and clipping give the weights of the loop anyone would write."""
    ours, theirs = load(), load().module
    own = METHODS["adamw" if make is torch.optim.AdamW else "sgd"].load()
    method = own(ours, lr=1e-2, max_grad_norm=0.5, weight_decay_on="all", **options)
    optimizer = make(theirs.parameters(), lr=1e-2, **options)
    for t in range(5):
        batches = [batch(seed=2 * t), batch(seed=2 * t + 1, length=7)]
        loss = plain_loss(theirs, batches)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(theirs.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        assert method.step(batches).item() == pytest.approx(loss.item(), rel=1e-5)
        assert float(method.metrics()["grad_norm"]) == pytest.approx(float(norm), rel=1e-4)
    expected = dict(theirs.named_parameters())
    for name, tensor in ours.named_tensors():
        torch.testing.assert_close(tensor, expected[name].data, rtol=1e-4, atol=1e-5)


FOUR = ("opt", "llama", "qwen2", "mixtral")  # zo and lomo have tests of their own on every decoder
PAIRS = [(name, method) for method in METHODS for name in (NAMES if method == "adamw" else FOUR)]


# lomo trains these in `make test` (lomo/test_streamed.py), and they are saved and loaded back (model/test_decoders.py)
ELSEWHERE = [*UNLIKE, "bloom", "gpt2", "gpt_neox"]


@in_every_run(
    lambda name, method: (
        name not in ELSEWHERE if method == "adamw" else name == ("mixtral" if method == "sgd" else "qwen2")
    )
)
@pytest.mark.parametrize(("name", "method"), PAIRS)
def test_every_decoder_trains_a_step_with_every_method(name: str, method: str, tmp_path: Path) -> None:
    """It loads, moves, saves, and Transformers loads it back to the bit."""
    model = load(name)
    before = {key: tensor.clone() for key, tensor in model.named_tensors()}
    opt = METHODS[method].load()(model, lr=1e-2)
    assert torch.isfinite(opt.step(batch()))
    opt.flush()
    after = dict(model.named_tensors())
    assert any(not torch.equal(after[key], before[key]) for key in after)
    model.save_pretrained(tmp_path / "out")
    loaded = dict(AutoModelForCausalLM.from_pretrained(tmp_path / "out").named_parameters())
    assert all(torch.equal(loaded[key], after[key]) for key in after)


def test_streamed_weights_are_refused_with_the_way_out() -> None:
    """A baseline that needs everything on the device says so, and what to use instead."""
    with pytest.raises(UserError, match="placement=resident"):
        keyhole.AdamW(load(placement="stream"))


def test_a_second_run_leaves_blocks_as_they_were() -> None:
    """Another method's wrapper of a block (graphs, compiled code) is back afterwards."""
    model = load()
    blocks = find_blocks(model.module)
    blocks[0].forward = wrapper = partial(blocks[0].forward)
    METHODS["galore"].load()(model, 1e-3, activations="block").step(batch())
    assert blocks[0].forward is wrapper and "forward" not in vars(blocks[1])
