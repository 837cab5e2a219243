"""What passes compute with: homes in other formats, scratch memory, and where copies are made at all."""

from pathlib import Path

import pytest
import torch

import keyhole
from tests.matrix import in_every_run
from tests.model.decoders import batch, load


@pytest.mark.parametrize("wire", ["fp32", "bf16"])
def test_weights_are_copied_only_into_another_dtype(wire: str) -> None:
    """In the dtype of compute a unit is used where it lies; otherwise units of one place take turns in one buffer, and
    those of another place, and the common unit, have their own."""
    model = load(wire=wire, dtype="bfloat16")
    (first, second), common = model.layout.of_kind("block")[:2], model.layout.common
    a, b, c = (model.engine.homes[unit.index] for unit in (first, second, common))
    here, beside = (
        model.device_weights.in_compute_dtype(first, a),
        model.device_weights.in_compute_dtype(first, a, place=1),
    )
    own = model.device_weights.in_compute_dtype(common, c)
    assert all(map(torch.equal, (here, beside, own), (a.bfloat16(), a.bfloat16(), c.bfloat16())))
    after = model.device_weights.in_compute_dtype(second, b)
    assert torch.equal(after, b.bfloat16()) and torch.equal(beside, a.bfloat16())
    if wire == "bf16":
        assert here is a and beside is a and after is b and own is c
    else:
        assert after.data_ptr() == here.data_ptr()
        assert len({x.data_ptr() for x in (here, beside, own)}) == 3


def test_a_module_works_by_itself_where_its_weights_lie_as_it_computes() -> None:
    """Resident, in the dtype of compute, and not replaced for a while."""
    model = load(dtype="bfloat16")
    assert model.device_weights.is_plain is True
    model.device_weights.replacement = object()
    assert not model.device_weights.is_plain
    assert not load(dtype="bfloat16", placement="stream").device_weights.is_plain
    assert not load(dtype="bfloat16", wire="fp32").device_weights.is_plain


@in_every_run(lambda wire, dtype: dtype == "bfloat16" or wire == "bf16")
@pytest.mark.parametrize("wire", ["fp32", "bf16", "fp16", "fp8"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_wire_format_of_its_own(wire: str, dtype: str, tmp_path: Path) -> None:
    one, options = batch(), {"wire": wire, "dtype": dtype}
    resident, other = load(**options), load(placement="stream", **options)
    nll_B = resident.nll(one)[0]
    assert torch.equal(other.nll(one)[0], nll_B)
    tokens = [m.generate(one["input_ids"], max_new_tokens=4, do_sample=False) for m in (resident, other)]
    assert torch.equal(*tokens)
    other.save_pretrained(tmp_path / "saved")
    back = keyhole.load(tmp_path / "saved", device="cpu", dtype=dtype)
    assert torch.equal(back.nll(one)[0], nll_B)
    assert torch.equal(back.generate(one["input_ids"], max_new_tokens=4, do_sample=False), tokens[0])


def test_a_step_after_an_evaluation_in_inference_mode() -> None:
    """Memory that an evaluation is the first to need may be written outside of torch.inference_mode too."""
    losses = []
    for mode in (torch.inference_mode, torch.no_grad):
        model = load(wire="fp32", dtype="bfloat16")
        with mode():
            model.nll(batch())
        losses.append(float(keyhole.LOMO(model, 1e-2).step(batch())))
    assert losses[0] == losses[1]
