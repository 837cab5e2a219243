"""LoRA over weights in 8 and 4 bits: what it is over the unpacked weights, in any placement, and on disk."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import keyhole
from keyhole.methods.lora.method import LoRA
from tests.matrix import in_every_run
from tests.methods.lora.test_streamed import assert_same, trained
from tests.model.decoders import batch, config

peft = pytest.importorskip("peft")
WIRES = ("int8", "int4", "nf4")


@in_every_run(lambda wire: wire == "nf4")  # zo's test of the same property has all of them
@pytest.mark.parametrize("wire", WIRES)
def test_equals_lora_over_the_unpacked_weights(wire: str, tmp_path: Path) -> None:
    """Resident, streamed, and on the unpacked weights in a plain model: losses and adapters to the bit."""
    packed = keyhole.load(config("llama"), init="random", device="cpu", wire=wire)
    packed.save_pretrained(tmp_path / "unpacked")
    plain = keyhole.load(tmp_path / "unpacked", device="cpu")
    found = trained(load={"wire": wire}), trained(load={"wire": wire, "placement": "stream"})
    assert_same(*found)
    method = LoRA(plain, lr=1e-2, r=4, seed=3, max_grad_norm=0.5, weight_decay=0.1)
    losses = [float(method.step([batch(seed=2 * t), batch(seed=2 * t + 1)])) for t in range(3)]
    assert losses == found[0][0]
    assert all(torch.equal(method.params[key], value) for key, value in found[0][1].items())


@in_every_run(lambda kept: kept != "block")
@pytest.mark.parametrize("kept", ["none", "block", "host"])
def test_what_is_kept_changes_no_bit(kept: str) -> None:
    """A kept graph needs the unpacked weights of its block again, which lie where the next block's lay before."""
    assert_same(trained(load={"wire": "int4"}, activations=kept), trained(load={"wire": "int4", "placement": "stream"}))


@pytest.mark.parametrize("merge", [True, False])
def test_transformers_computes_what_we_evaluate(merge: bool, tmp_path: Path) -> None:
    """Merged into one directory, or a peft adapter beside the unpacked base: the logits of our own evaluation."""
    *_, model = trained(load={"wire": "int4", "placement": "stream"}, merge=merge)
    model.save_pretrained(tmp_path / "out")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    if not merge:
        loaded = peft.PeftModel.from_pretrained(loaded, tmp_path / "out" / "adapter")
    nll_B, count_B = model.nll(batch(seed=9))
    expected = loaded(**batch(seed=9)).loss * count_B.sum()
    torch.testing.assert_close(nll_B.sum(), expected, rtol=1e-5, atol=1e-5)
    again = keyhole.load(tmp_path / "out", device="cpu")
    torch.testing.assert_close(again.nll(batch(seed=9))[0], nll_B, rtol=1e-5, atol=1e-5)
    if not merge:  # the adapter would be added to the weights of a new model in its place; files of the user stay
        (tmp_path / "out" / "adapter" / "notes.txt").write_text("mine")
        keyhole.load(config("llama"), init="random", device="cpu").save_pretrained(tmp_path / "out")
        assert [path.name for path in (tmp_path / "out" / "adapter").iterdir()] == ["notes.txt"]


def test_a_state_belongs_to_its_wire(tmp_path: Path) -> None:
    """Adapters that were trained over int4 weights are not loaded over others."""
    from keyhole.errors import UserError

    state = LoRA(keyhole.load(config("llama"), init="random", device="cpu", wire="int4"), r=4).state_dict()
    LoRA(keyhole.load(config("llama"), init="random", device="cpu", wire="int4"), r=4).load_state_dict(state)
    other = LoRA(keyhole.load(config("llama"), init="random", device="cpu", wire="nf4"), r=4)
    with pytest.raises(UserError, match="not the weights that the adapters were trained on"):
        other.load_state_dict(state)


@pytest.mark.gpu
@pytest.mark.parametrize("wire", [None, *WIRES])
@pytest.mark.parametrize("name", ["llama", "opt", "mixtral"])
def test_on_the_gpu_streamed_equals_resident_under_random_delays(name: str, wire: str | None) -> None:
    """10 random schedules with delayed streams and poisoned slots, in bf16, give the bits of the resident run."""
    import random

    how = {"device": "cuda", "dtype": "bfloat16", "wire": wire}
    expected = trained(name=name, load=how)
    for schedule in range(10):
        found = trained(name=name, load=how | {"placement": "stream", "chaos": random.Random(schedule)})
        assert_same(found, expected)
        found[3].close()


@pytest.mark.gpu
@pytest.mark.parametrize("wire", WIRES)
def test_a_gpu_packs_the_bytes_that_a_cpu_packs(wire: str, tmp_path: Path) -> None:
    """Homes of the same files are equal, wherever they were packed."""
    keyhole.load(config("llama"), init="random", device="cpu").save_pretrained(tmp_path / "in")
    models = [keyhole.load(tmp_path / "in", device=device, dtype="bfloat16", wire=wire) for device in ("cpu", "cuda")]
    for ours, theirs in zip(*(model.engine.homes for model in models), strict=True):
        assert torch.equal(ours.cpu(), theirs.cpu())
