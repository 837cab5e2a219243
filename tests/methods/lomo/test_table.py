"""Tables of several chunks of rows: clipping, AdaLOMO's factors and its norms are over the tensor, as published."""

import math
import random
from typing import Any

import pytest
import torch

import keyhole
from keyhole.errors import UserError
from keyhole.methods.lomo.adalomo import AdaLOMO
from keyhole.methods.lomo.method import LOMO
from keyhole.model.structure import layout
from tests.matrix import in_every_run
from tests.methods.baselines.test_first_order import plain_loss
from tests.methods.lomo.loops import close, weights
from tests.methods.lomo.test_adalomo import adalomo_by_the_book
from tests.model.decoders import batch, config
from tests.model.streaming import streamed

ROWS, VOCABULARY = 64, 99


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two chunks of a vocabulary that costs nothing; 8192 rows are a chunk otherwise."""
    monkeypatch.setattr(layout, "CHUNK_ROWS", ROWS)


def load(tied: bool, device: str = "cpu", **options: Any) -> keyhole.Model:
    shape = config("llama", vocab_size=VOCABULARY, tie_word_embeddings=tied)
    return keyhole.load(shape, init="random", device=device, **options)


def batches(t: int) -> list[dict[str, torch.Tensor]]:
    """Two micro-batches with tokens from both chunks."""
    return [batch(seed=10 * t + k, vocab=VOCABULARY) for k in range(2)]


@in_every_run(lambda options, tied: tied == bool(options))
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    "options", [{}, {"clip_value": 1e-3}, {"clip_group_norm": 0.02}, {"max_grad_norm": 0.1}], ids=str
)
def test_adalomo_has_one_set_of_factors_per_table(options: dict[str, float], tied: bool) -> None:
    """Three steps by the published rule from torch's gradients, clipped in each way; the log has the norm unclipped."""
    model, module, states = load(tied), load(tied).module, {}
    opt = AdaLOMO(model, lr=0.01, weight_decay=0.1, weight_decay_on="all", **options)
    for t in range(3):
        plain_loss(module, batches(t)).backward()
        params = dict(module.named_parameters())
        norm = torch.nn.utils.clip_grad_norm_(params.values(), options.get("max_grad_norm", math.inf))
        for name, p in params.items():
            if "clip_value" in options:
                p.grad.clamp_(-1e-3, 1e-3)
            if "clip_group_norm" in options:
                torch.nn.utils.clip_grad_norm_(p, 0.02)
            adalomo_by_the_book(p, states.setdefault(name, {}), t + 1, lr=0.01, weight_decay=0.1)
            p.grad = None
        opt.step(batches(t))
        assert float(opt.metrics()["grad_norm"]) == pytest.approx(float(norm), rel=1e-4)
    assert opt.moments["model.embed_tokens.weight"]["row"].shape == (VOCABULARY,)
    assert all(close(tensor, params[name].data, 1e-4) for name, tensor in weights(model).items())


@pytest.mark.parametrize("tied", [False, True])
def test_clip_group_norm_is_of_the_tensor(tied: bool) -> None:
    """Each tensor moves by what torch's clip_grad_norm_ on it alone leaves of its gradient."""
    model, module = load(tied), load(tied).module
    before = weights(model)
    opt = LOMO(model, lr=1.0, clip_group_norm=0.02)
    opt.step(batches(0))
    plain_loss(module, batches(0)).backward()
    for name, p in module.named_parameters():
        torch.nn.utils.clip_grad_norm_(p, 0.02)
        torch.testing.assert_close(before[name] - weights(model)[name], p.grad, rtol=1e-3, atol=1e-6)


@in_every_run(lambda method, options, tied: tied == (method is AdaLOMO and bool(options)))
@pytest.mark.parametrize("tied, dtype", [(False, "bfloat16"), (True, "float32")])
@pytest.mark.parametrize(
    "method, options", [(AdaLOMO, {}), (AdaLOMO, {"clip_group_norm": 0.02}), (LOMO, {"clip_group_norm": 0.02})]
)
def test_streamed_equals_resident(method: type, options: dict[str, float], tied: bool, dtype: str) -> None:
    """To the bit, and each chunk is brought in as often as it is shown."""
    resident = load(tied, dtype=dtype)
    found = []
    for model in (resident, streamed(load(tied, dtype=dtype), slot_count=2)):
        opt = method(model, lr=0.01, **options)
        losses = [float(opt.step(batches(t))) for t in range(3)]
        found.append((losses, weights(model)))
    assert found[0][0] == found[1][0]
    assert all(torch.equal(found[0][1][key], found[1][1][key]) for key in found[0][1])


def test_a_gradient_that_is_not_finite_leaves_a_table_alone() -> None:
    """Weights and moments of all its chunks, and the run stops."""
    model = load(tied=False)
    opt, before = AdaLOMO(model, lr=0.01), weights(model)
    survey, rule = opt.survey, opt._rule
    spoil = lambda grad: grad.index_fill_(0, torch.tensor([3]), math.inf)  # noqa: E731
    opt.survey = lambda tensor, w, grad, turn: survey(tensor, w, spoil(grad) if "[0:" in tensor.name else grad, turn)
    opt._rule = lambda tensor, w, grad, *how: rule(tensor, w, spoil(grad) if "[0:" in tensor.name else grad, *how)
    opt.step(batches(0))
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        assert torch.equal(home(model, name), before[name])
        assert not opt.moments[name]["row"].any() and not opt.moments[name]["col"].any()
    with pytest.raises(UserError, match="not finite"):
        opt.step(batches(1))


def home(model: keyhole.Model, name: str) -> torch.Tensor:
    return next(model.home(t) for t in model.layout.tensors if t.name == name)


def test_moments_of_chunks_from_an_earlier_version_become_those_of_the_table() -> None:
    """Row by row, and the weighted mean of columns: what the table would have had."""
    opt = AdaLOMO(load(tied=False), lr=0.01)
    square = torch.rand(VOCABULARY, 32)
    parts = {f"[{a}:{b}]": square[a:b] for a, b in ((0, ROWS), (ROWS, VOCABULARY))}
    state = {"step_count": 1, "seed": 0}
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        state |= {f"{name}{at}/row": part.mean(1) for at, part in parts.items()}
        state |= {f"{name}{at}/col": part.mean(0) for at, part in parts.items()}
    opt.load_state_dict(state)
    assert opt.moments.keys() == {"model.embed_tokens.weight", "lm_head.weight"}
    for moments in opt.moments.values():
        torch.testing.assert_close(moments, {"row": square.mean(1), "col": square.mean(0)})


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_streamed_equals_resident_on_a_gpu(dtype: str) -> None:
    """Chunks that come three times, streams delayed at random, freed slots poisoned."""
    found = []
    for seed in range(3):
        engine = {"placement": "stream", "chaos": random.Random(seed), "slot_count": 2 + seed % 2} if seed else {}
        model = load(False, dtype=dtype, device="cuda", **engine)
        opt = AdaLOMO(model, lr=0.01)
        losses = [float(opt.step(batches(t))) for t in range(3)]
        found.append((losses, {key: tensor.cpu() for key, tensor in weights(model).items()}))
        model.close()
    for losses, other in found[1:]:
        assert losses == found[0][0] and all(torch.equal(other[key], found[0][1][key]) for key in other)
