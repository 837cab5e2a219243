"""A caller's autocast: it changes no number of ours, and is still on afterwards."""

import pytest
import torch

import keyhole
from keyhole.methods import METHODS
from keyhole.ops.autocast import without_autocast
from tests.matrix import in_every_run
from tests.model.decoders import batch, config


def test_it_is_off_inside_and_on_again_afterwards() -> None:
    """Also after an error."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with pytest.raises(KeyError), without_autocast():
            assert not torch.is_autocast_enabled("cpu")
            raise KeyError
        assert torch.is_autocast_enabled("cpu")


@in_every_run(lambda name: name in ("zo", "lomo", "lsp", "adam-offload", "adamw", "lora"))
@pytest.mark.parametrize("name", METHODS)
def test_steps_evaluation_and_generation_are_the_same(name: str) -> None:
    if "lora" in name:
        pytest.importorskip("peft")
    found = []
    for enabled in (False, True):
        model = keyhole.load(config("llama"), init="random", device="cpu", workload=keyhole.Workload(method=name))
        method = METHODS[name].load()(model, lr=1e-3)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            losses = [method.step(batch(seed=step)) for step in range(2)]
            method.flush()
            tokens = model.generate(batch()["input_ids"], max_new_tokens=3, do_sample=False)
            nll_B, _ = model.nll([batch(seed=5), batch(seed=6)])[0]
            assert torch.is_autocast_enabled("cpu") == enabled
        found.append([*losses, nll_B, tokens, *(w.clone() for _, w in model.named_tensors())])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
