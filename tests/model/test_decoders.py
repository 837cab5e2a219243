"""Every decoder family through the whole core: equal to Hugging Face, and to itself wherever its weights live."""

import random
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import keyhole
from keyhole.errors import UserError
from keyhole.model.structure.skeleton import saved_buffers
from tests.matrix import in_every_run
from tests.model.decoders import NAMES, batch, config, hf_nll, load
from tests.model.streaming import streamed

ODD = ["gemma2", "falcon_alibi", "gpt_oss", "llama4", "deepseek_v3", "qwen3_next", "recurrent_gemma", "mamba"]
KINDS = ["opt", "bloom", "gpt2", "gpt_neox", "llama", "qwen2", "falcon", "mixtral", *ODD]  # in `make test`
SAVED = ["bloom", "gpt2", "qwen2", "falcon", "mixtral", *ODD[::2]]  # of these: tied, with buffers, with experts
pytestmark = pytest.mark.parametrize("name", NAMES)


def test_nll_is_cross_entropy_of_the_full_logits(name: str) -> None:
    model, one = load(name), batch()
    nll_B, count_B = model.nll(one)
    torch.testing.assert_close(nll_B, hf_nll(model.module, one), rtol=1e-5, atol=1e-4)
    assert count_B.tolist() == [7, 7]


@in_every_run(lambda name: name in KINDS)
def test_streamed_equals_resident(name: str) -> None:
    resident, one = load(name), batch()
    nll_B, (tokens, scores) = resident.nll(one)[0], greedy(resident, one["input_ids"])
    cut = streamed(resident, max_unit_numel=1, slot_count=1, chaos=random.Random(0))
    for other in (load(name, placement="stream"), cut):
        assert torch.equal(other.nll(one)[0], nll_B)
        other_tokens, other_scores = greedy(other, one["input_ids"])
        assert torch.equal(other_tokens, tokens) and torch.equal(other_scores, scores)
        assert torch.equal(other.nll(one)[0], nll_B)  # generating left nothing behind
    visited = set(cut.engine.visited)
    assert visited == {unit.index for unit in cut.layout.of_kind("block") + cut.layout.head_units}


def greedy(model: keyhole.Model, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Four tokens a row, and the logits they were chosen from."""
    options = {"return_dict_in_generate": True, "output_scores": True}
    made = model.generate(ids, max_new_tokens=4, min_new_tokens=4, do_sample=False, **options)
    return made.sequences, torch.stack(made.scores)


@in_every_run(lambda name: name in SAVED)
def test_save_and_load_back(name: str, tmp_path: Path) -> None:
    model = load(name, placement="stream", seed=3)
    for buffer in saved_buffers(model.module).values():
        buffer.uniform_(-0.1, 0.1)
    model.save_pretrained(tmp_path / "saved")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "saved").state_dict()
    for key, tensor in model.module.state_dict().items():
        assert torch.equal(theirs[key], tensor), key
    for placement in ("resident", "stream"):
        back = keyhole.load(tmp_path / "saved", placement=placement, device="cpu")
        assert torch.equal(back.nll(batch())[0], model.nll(batch())[0])


@in_every_run(lambda name: name in KINDS)
def test_packing_is_right_or_refused(name: str) -> None:
    model = keyhole.load(config(name, initializer_range=0.1), init="random", device="cpu")
    first, second = batch(1, 6, seed=1), batch(1, 5, seed=2)
    packed = {key: torch.cat([first[key], second[key]], dim=1) for key in first}
    packed["position_ids"] = torch.tensor([[0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 4]])
    apart, together = model.nll(first)[0] + model.nll(second)[0], hf_nll(model.module, packed)
    if torch.allclose(apart, together, rtol=1e-5):
        torch.testing.assert_close(model.nll(packed)[0], together, rtol=1e-5, atol=1e-5)
    else:
        with pytest.raises(UserError, match="packing=false"):
            model.nll(packed)
