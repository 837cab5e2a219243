"""Tables of several chunks of rows: each is a matrix of its own to AdaLOMO, wherever it lies."""

import math
from functools import partial
from typing import Any

import pytest
import torch

import keyhole
from keyhole.errors import UserError
from keyhole.methods.lomo.adalomo import AdaLOMO, AdaLOMOUpdate
from keyhole.model.structure import layout
from tests.methods.baselines.test_first_order import plain_loss
from tests.methods.lomo.loops import close, weights
from tests.methods.lomo.test_adalomo import adalomo_by_the_book
from tests.model.decoders import batch, config
from tests.model.streaming import assert_trained_alike, streamed, under_random_delays

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


@pytest.mark.parametrize("tied", [False, True])
def test_adalomo_has_factors_per_chunk(tied: bool) -> None:
    """Three steps by the published rule from torch's gradients, each chunk a matrix of its own."""
    model, module, states = load(tied), load(tied).module, {}
    opt = AdaLOMO(model, lr=0.01, weight_decay=0.1, weight_decay_on="all")
    for t in range(3):
        plain_loss(module, batches(t)).backward()
        params = dict(module.named_parameters())
        norm = torch.nn.utils.clip_grad_norm_(params.values(), math.inf)
        for name, p in params.items():
            pieces = [slice(0, ROWS), slice(ROWS, None)] if p.shape[0] == VOCABULARY else [slice(None)]
            for piece in pieces:
                part = torch.nn.Parameter(p.data[piece])
                part.grad = p.grad[piece]
                book = states.setdefault(f"{name}{piece}", {})
                adalomo_by_the_book(part.data, part.grad, book, t + 1, lr=0.01, weight_decay=0.1)
            p.grad = None
        opt.step(batches(t))
        assert float(opt.metrics()["grad_norm"]) == pytest.approx(float(norm), rel=1e-4)
    assert opt.update.kept[f"model.embed_tokens.weight[0:{ROWS}]"]["row"].shape == (ROWS,)
    assert all(close(tensor, params[name].data, 1e-4) for name, tensor in weights(model).items())


@pytest.mark.parametrize("tied, dtype", [(False, "bfloat16"), (True, "float32")])
def test_streamed_equals_resident(tied: bool, dtype: str) -> None:
    """To the bit, also where each chunk is brought in by itself."""
    models = load(tied, dtype=dtype), streamed(load(tied, dtype=dtype), slot_count=2)
    assert_trained_alike(models, lambda model: AdaLOMO(model, lr=0.01), [batches(t) for t in range(3)])


def test_a_gradient_that_is_not_finite_leaves_a_chunk_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its weights and moments, and the run stops."""
    model = load(tied=False)
    opt, before, rule = AdaLOMO(model, lr=0.01), weights(model), AdaLOMOUpdate.rule

    def spoiled(self: AdaLOMOUpdate, tensor: Any, w: torch.Tensor, grad: torch.Tensor, *how: Any) -> None:
        rule(self, tensor, w, grad.index_fill_(0, torch.tensor([3]), math.inf) if "[0:" in tensor.name else grad, *how)

    monkeypatch.setattr(AdaLOMOUpdate, "rule", spoiled)
    with pytest.raises(UserError, match="not finite"):
        opt.step(batches(0))
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        home = next(model.home(t) for t in model.layout.tensors if t.name == name)
        assert torch.equal(home[:ROWS], before[name][:ROWS]) and not torch.equal(home[ROWS:], before[name][ROWS:])
        assert not any(moment.any() for moment in opt.update.kept[f"{name}[0:{ROWS}]"].values())
    with pytest.raises(UserError, match="not finite"):
        opt.step(batches(1))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_streamed_equals_resident_on_a_gpu(dtype: str) -> None:
    models = under_random_delays(partial(load, False, dtype=dtype, device="cuda"))
    assert_trained_alike(models, lambda model: AdaLOMO(model, lr=0.01), [batches(t) for t in range(3)])
