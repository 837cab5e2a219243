"""Models that hold more or less than blocks between an embedding and a head."""

import pytest
import torch

import keyhole
from keyhole.errors import UserError
from keyhole.model.structure.find import stacks_outside
from tests.families.tiny import tiny_config
from tests.model.decoders import batch


def load(model_type: str, dtype: str = "float32", **changes: object) -> keyhole.Model:
    return keyhole.load(tiny_config(model_type, **changes), init="random", device="cpu", dtype=dtype)


def changed(model: keyhole.Model, steps: int = 2) -> set[str]:
    """Names of the parameters that a few steps of zo change."""
    before = {name: tensor.clone() for name, tensor in model.named_tensors()}
    method = keyhole.ZO(model, 1e-2)
    for seed in range(steps):
        method.step(batch(seed=seed))
    return {name for name, tensor in model.named_tensors() if not torch.equal(tensor, before[name])}


@pytest.mark.parametrize(
    ("model_type", "parts"),
    [
        ("gemma3", ("model.vision_tower", "model.multi_modal_projector")),
        ("phi4_multimodal", ("model.embed_tokens_extend",)),  # inside of the decoder
        ("git", ("git.image_encoder", "git.visual_projection")),  # larger than the text model
        ("bart", ("encoder_attn",)),  # inside of every block
    ],
)
def test_zo_leaves_alone_what_tokens_never_reach(model_type: str, parts: tuple[str, ...]) -> None:
    model = load(model_type)
    moved, names = changed(model), {tensor.name for tensor in model.layout.tensors}
    outside = {name for name in names if any(part in name for part in parts)}
    assert outside and not moved & outside and len(moved) > 0.9 * len(names - outside)
    share = sum(t.shape.numel() for t in model.layout.tensors if t.name in outside)
    said = "\n".join(model.describe())
    assert f"frozen: {share:,} parameters" in said and all(part in said for part in parts)


def test_experts_that_no_token_chose_are_trained() -> None:
    """What is chosen by data may be chosen by the next batch, so zo perturbs it like everything else."""
    model = load("jetmoe")
    assert changed(model) == {tensor.name for tensor in model.layout.tensors}


def test_stacks_outside_of_the_blocks_are_reported_with_their_share() -> None:
    model = load("hrm_text")
    said = next(line for line in model.describe() if line.startswith("outside of the blocks"))
    (outside,) = stacks_outside(model.module, model.layout.parts.blocks).items()
    total = sum(t.shape.numel() for t in model.layout.tensors)
    assert f"{outside[0]}, 4 x HrmTextDecoderLayer, {outside[1][1] / total:.1%} of the parameters" in said


@pytest.mark.parametrize(
    ("model_type", "changes", "key"),
    [
        ("mixtral", {"output_router_logits": True}, "router_aux_loss_coef"),
        ("dbrx", {"output_router_logits": True}, "moe_loss_weight"),
        ("bamba", {"z_loss_coefficient": 0.1}, "z_loss_coefficient"),
    ],
)
def test_a_loss_that_is_not_computed_is_refused(model_type: str, changes: dict[str, object], key: str) -> None:
    """A config that asks for a loss on routers or logits is trained once it says that this loss is off."""
    model = load(model_type, **changes)
    model.nll(batch())  # without training there is no loss to miss
    with pytest.raises(UserError, match=key) as refusal:
        keyhole.ZO(model)
    assert "config.json" in str(refusal.value)
    for name, value in changes.items():
        setattr(model.config, name, type(value)(0))
    keyhole.ZO(model)


@pytest.mark.parametrize(
    ("model_type", "dtype", "other"),
    [("ernie4_5_moe", "bfloat16", "float32"), ("gpt_oss", "float16", "bfloat16"), ("zamba", "bfloat16", "float32")],
)
def test_parameters_that_stay_in_fp32_are_not_cast(model_type: str, dtype: str, other: str) -> None:
    with pytest.raises(UserError, match=f"dtype={other}"):
        load(model_type, dtype)
    assert load(model_type, other).dtype == getattr(torch, other)


def test_a_forward_that_changes_weights_is_refused() -> None:
    """RWKV rescales its weights in evaluation, once per pass: refused until its config says otherwise."""
    with pytest.raises(UserError, match="rescale_every"):
        load("rwkv", rescale_every=2)
