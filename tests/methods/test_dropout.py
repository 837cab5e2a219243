"""The model's own dropout in first-order training: Hugging Face's, reproducible, and the same wherever the model is."""

from functools import partial
from typing import Any

import pytest
import torch

import keyhole
from keyhole.errors import UserError
from keyhole.methods import METHODS
from keyhole.methods.dropout import PASSES, dropout_rates
from tests.matrix import in_every_run
from tests.methods.baselines.test_first_order import plain_loss
from tests.methods.lomo.loops import micro_batches
from tests.model.decoders import config
from tests.model.streaming import assert_trained_alike, streamed, trained, under_random_delays

SHAPES = {
    "opt": {"dropout": 0.2, "attention_dropout": 0.1},
    "gpt2": {"resid_pdrop": 0.2, "embd_pdrop": 0.1, "attn_pdrop": 0.1},
    "mixtral": {"router_jitter_noise": 0.3},  # no dropout
}
OWN = {"lsp": {"d": 16, "check_freq": 2}, "galore": {"rank": 4}}
FIRST_ORDER = [name for name, row in METHODS.items() if row.sweep != "forward"]


def load(name: str = "opt", **options: Any) -> keyhole.Model:
    shape = config(name, **SHAPES.get(name, {}), attn_implementation="eager")
    return keyhole.load(shape, init="random", device="cpu", **options)


def make(method: str, model: keyhole.Model, **options: Any) -> Any:
    return METHODS[method].load()(model, lr=1e-2, **OWN.get(method, {}), **options)


def train(opt: Any, first: int, last: int) -> list[float]:
    losses = [float(opt.step(micro_batches(t, 2))) for t in range(first, last)]
    opt.flush()
    return losses


class Broken(Exception):
    """Whatever ends a step."""


def step_that_breaks(opt: Any, at: int) -> None:
    """Step 1, which ends in an error when attention runs for the at-th time, in a forward pass or its recomputation."""
    calls = []

    def count(*about: Any) -> None:
        calls.append(about)
        if len(calls) == at:
            raise Broken

    parts = [part for name, part in opt.model.module.named_modules() if name.endswith("self_attn")]
    hooks = [part.register_forward_pre_hook(count) for part in parts]
    with pytest.raises(Broken):
        opt.step(micro_batches(1, 2))
    for hook in hooks:
        hook.remove()


# The others take the steps of lomo and of adamw
@in_every_run(
    lambda method, clips: (
        clips == (method == "lomo-lora") and method not in ("adalomo", "apollo-mini", "galore", "sgd", "lora")
    )
)
@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("method", FIRST_ORDER)
def test_a_step_that_is_tried_again_is_the_same_step(method: str, clips: bool) -> None:
    """After an error in the second micro-batch, or as late as nothing was updated yet: masks, counts, and no gradient
    left over from the first attempt; so losses and weights are those of a run without the error, to the bit."""
    more = {"max_grad_norm": 0.5} if clips else {}
    whole = make(method, load(), **more)
    expected = train(whole, 0, 3)
    reverses = METHODS[method].sweep != "torch"  # blocks run again there
    for at in (3, 6 if reverses else 4):
        opt = make(method, load(), **more)
        train(opt, 0, 1)
        step_that_breaks(opt, at)
        assert train(opt, 1, 3) == expected[1:]
        assert all(torch.equal(tensor, trained(opt)[name]) for name, tensor in trained(whole).items())
        counts = [{k: v for k, v in each.state_dict().items() if isinstance(v, int)} for each in (opt, whole)]
        assert counts[0] == counts[1]


@pytest.mark.parametrize("name", SHAPES)
def test_it_is_what_a_module_in_training_mode_does(name: str) -> None:
    """The loss of a plain Hugging Face module in training mode, from the same seed."""
    module = load(name).module.train()
    losses = []
    for index, one in enumerate(micro_batches(0, 2)):
        torch.manual_seed(1 * PASSES + index)
        losses.append(plain_loss(module, [one]).item() * int((one["labels"] != -100).sum()))
    count = sum(int((one["labels"] != -100).sum()) for one in micro_batches(0, 2))
    for method in ("adamw", "lomo"):
        model = load(name)
        found = float(make(method, model, seed=0).step(micro_batches(0, 2)))
        assert found == pytest.approx(sum(losses) / count, rel=1e-5)
        assert found != pytest.approx(float(make(method, load(name), model_dropout=False).step(micro_batches(0, 2))))
        assert not any(part.training for part in model.module.modules())


@in_every_run(lambda name, method: (name == "opt" and method not in ("adalomo", "apollo-mini")) or method == "lomo")
@pytest.mark.parametrize("method", [name for name in FIRST_ORDER if METHODS[name].streams and name != "lomo-lora"])
@pytest.mark.parametrize("name", SHAPES)
def test_streamed_equals_resident(name: str, method: str) -> None:
    """In whole blocks and in units smaller than a block, with two micro-batches and the exact norm, to the bit."""
    cuts = {"slot_count": 2}, {"max_unit_numel": 1, "slot_count": 12}
    models = [load(name), *(streamed(load(name), **how) for how in cuts)]
    assert_trained_alike(models, partial(make, method, max_grad_norm=0.7), [micro_batches(t, 2) for t in range(2)])


def test_a_second_run_of_a_block_sees_the_masks_of_the_first() -> None:
    """Graphs that are kept, and blocks that are run again, for one reverse and for two."""
    for clip in (None, 0.5):
        found = []
        for keep in ("none", "block"):
            opt = make("lomo", load(), activations=keep, fused=False, max_grad_norm=clip)
            train(opt, 0, 3)
            found.append(trained(opt))
        assert all(torch.equal(found[0][key], found[1][key]) for key in found[0])


@pytest.mark.parametrize("method", ["adamw", "lomo", "lsp", "adam-offload"])
def test_a_run_from_before_goes_on_without_dropout(method: str) -> None:
    """Its state does not know dropout: the setting to change is named, and then it is loaded."""
    old = make(method, load(), model_dropout=False)
    old.step(micro_batches(0, 1))
    with pytest.raises(UserError, match="made without dropout; set model_dropout=false"):
        make(method, load()).load_state_dict(old.state_dict())
    make(method, load(), model_dropout=False).load_state_dict(old.state_dict())


def test_what_is_done_is_said() -> None:
    """In the start block, with the rates; a model without dropout has no line, and no key in its state."""
    assert any(
        "OPTDecoderLayer.dropout 0.2" in line and "(seed, step" in line for line in make("lomo", load()).describe()
    )
    assert any("model_dropout=false" in line for line in make("adamw", load(), model_dropout=False).describe())
    assert any("off, since zo" in line for line in make("zo", load()).describe())
    plain = make("lomo", load("llama"))
    assert not dropout_rates(plain.model.module) and "dropout" not in str(plain.describe() + list(plain.state_dict()))


def test_layerdrop_is_refused() -> None:
    """With what to change."""
    model = keyhole.load(config("opt", layerdrop=0.5), init="random", device="cpu")
    with pytest.raises(UserError, match="OPTDecoder.layerdrop=0.5.*model_dropout=false"):
        make("lomo", model)
    make("lomo", model, model_dropout=False)


@pytest.mark.parametrize("rate", [2**31, 1.5, float("nan")])
def test_a_rate_that_is_no_share_is_refused(rate: float) -> None:
    """Before the first step, with what to change."""
    model = keyhole.load(config("opt"), init="random", device="cpu")
    model.module.model.decoder.layers[0].dropout = rate
    with pytest.raises(UserError, match="OPTDecoderLayer.dropout is .*; a share from 0 to 1.*model_dropout=false"):
        make("lomo", model)
    make("lomo", model, model_dropout=False)


@pytest.mark.gpu
@pytest.mark.parametrize("method", ["lomo", "adalomo", "lsp", "adam-offload"])
def test_streamed_equals_resident_on_a_gpu(method: str) -> None:
    """The generator of the device belongs to a pass too."""
    shape = config("opt", **SHAPES["opt"])
    models = under_random_delays(partial(keyhole.load, shape, init="random", device="cuda", dtype="bfloat16"))
    assert_trained_alike(models, partial(make, method, max_grad_norm=0.7), [micro_batches(t, 2) for t in range(3)])
