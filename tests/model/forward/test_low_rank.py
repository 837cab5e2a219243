"""What a pass that carries several looks does at once: the numbers of what it does one by one; and blocks before the
first trained weight, which run once for all looks."""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import keyhole
from keyhole.methods.zo.low_rank import layers
from keyhole.model.forward.low_rank import Added, Share, _alike
from keyhole.model.forward.low_rank import product as layer_product
from keyhole.model.structure.reach import freeze
from keyhole.ops.backend import TRITON_MISSING
from keyhole.ops.lowrank import product
from tests.matrix import in_every_run
from tests.methods.zo.loops import equal, train, weights
from tests.model.decoders import LAYERS, PROMPT, batch, load
from tests.model.streaming import streamed
from tests.ops.interpreted import replaced_once  # noqa: F401

LOW = {"rank": 2, "refresh": 3}


def all_rows(factors: object, ordinary: Callable, *args: object, **kwargs: object) -> object:
    """The forward of a block that runs with the rows of all looks."""
    return ordinary(*args, **kwargs)


def test_row_tiles_are_the_product() -> None:
    """Of a layer whose rows are computed a few at a time; also beside factors that all looks share, and stored as
    [I, O]."""
    w, x, numbers = torch.randn(7, 5), torch.randn(4, 3, 5), torch.Generator().manual_seed(0)
    v, b, bias = torch.randn(2, 5, generator=numbers), torch.randn(2, 2, 7, generator=numbers), torch.randn(2, 7)
    a, earlier = torch.randn(3, 7, generator=numbers), torch.randn(3, 5, generator=numbers)
    added = Added(v, b, bias, (a, earlier))
    x_LMI = x.view(2, -1, 5)
    expected = x_LMI @ w.t() + (x_LMI @ v.t()) @ b + bias[:, None] + (x_LMI @ earlier.t()) @ a
    tiles: Any = SimpleNamespace(rows=[(0, 3), (3, 7)], weight=lambda i: w[:3] if i == 0 else w[3:])
    stored = SimpleNamespace(weight=w.t().contiguous())
    found = [layer_product(x, SimpleNamespace(weight=w), added), layer_product(x, None, added, tiles)]
    for y in (*found, layer_product(x, stored, replace(added, transposed=True))):
        torch.testing.assert_close(y, expected.view(4, 3, 7))


ALIBI = ("bloom",)  # an argument by row and head


@in_every_run(lambda name, dtype: name in ("opt", "qwen3") and (dtype == "bfloat16") == (name == "qwen3"))
@pytest.mark.parametrize("name", ["opt", "llama", "qwen3", "gemma3", "cohere", "olmo2"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_one_pass_for_all_looks_equals_a_pass_each(name: str, dtype: str) -> None:
    model, plain = load(name, dtype=dtype), load(name, dtype=dtype)
    found = train(model, 3, lr=1e-2, directions=2, **LOW)
    opt = keyhole.ZO(plain, lr=1e-2, directions=2, eps=1e-2, seed=7, **LOW)
    opt.directions.layers.together = False
    expected = []
    for t in range(3):
        opt.lr = 1e-2 * (1 - t / 40)
        expected.append(opt.step([batch(seed=t)]).item())
    assert found == pytest.approx(expected, rel=1e-2 if dtype == "bfloat16" else 1e-5)


@pytest.mark.skipif(bool(TRITON_MISSING), reason="needs Triton")
@pytest.mark.skipif(torch.cuda.is_available(), reason="the GPU tests of low rank run the kernels")
@in_every_run(lambda name: name == "opt")
@pytest.mark.parametrize("name", ["opt", "llama"])
def test_kernels_streamed_equal_resident(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    small = [batch(rows=2, length=PROMPT + 1)]
    resident, cut = load(name), streamed(load(name), max_unit_numel=1, slot_count=2, chaos=random.Random(1))
    expected = train(load(name), 2, small, **LOW)
    monkeypatch.setattr(product, "use_kernel", lambda device: True)
    found = train(resident, 2, small, **LOW)
    assert train(cut, 2, small, **LOW) == found and equal(weights(resident), weights(cut))
    assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("where", ["blocks", "mlp"])
def test_regions_of_autocast(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the model's own code: layers take what is there, return the dtype of the region, and learn what they learn
    elsewhere, up to rounding."""

    def losses(autocast: bool) -> list[float]:
        model = load("llama")
        for module in model.blocks if where == "blocks" else [block.mlp for block in model.blocks]:
            around = torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast)
            monkeypatch.setattr(module, "forward", around(module.forward))
        return train(model, 4, lr=1e-2, **LOW)

    found, expected = losses(True), losses(False)
    assert found != expected and found == pytest.approx(expected, rel=1e-3)


# -- blocks before the first trained weight ----------------------------------------------------------------------------


def lower(model: keyhole.Model) -> keyhole.Model:
    """The model with its first block frozen, and everything before it."""
    model.blocks[0].requires_grad_(False)
    freeze(model.module, "embeddings")
    inside = {id(p) for block in model.blocks for p in block.parameters()}
    for name, p in model.module.named_parameters():
        if id(p) not in inside and ("embed" in name or "wpe" in name or "word_embeddings" in name):
            p.requires_grad_(False)
    return model


@contextmanager
def rows_seen(model: keyhole.Model) -> Iterator[list[list[int]]]:
    """The number of rows that each block was called with."""
    seen: list[list[int]] = [[] for _ in model.blocks]
    handles = []
    for block, found in zip(model.blocks, seen, strict=True):
        layer = next(m for m in block.modules() if isinstance(m, torch.nn.Linear) or type(m).__name__ == "Conv1D")
        handles.append(layer.register_forward_pre_hook(lambda m, args, found=found: found.append(len(args[0]))))
    yield seen
    for handle in handles:
        handle.remove()


@in_every_run(lambda name, dtype: name in ("llama", "opt") and (dtype == "bfloat16") == (name == "opt"))
@pytest.mark.parametrize(
    "name", ["llama", "opt", "gpt2", "qwen3", "gemma3", "cohere", "olmo2", "bloom", "phi", "falcon"]
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_frozen_start_equals_all_rows(name: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, plain = lower(load(name, dtype=dtype)), lower(load(name, dtype=dtype))
    with rows_seen(model) as seen:
        found = train(model, 4, directions=2, lr=1e-2, **LOW)
    assert max(seen[0]) * (1 if name in ALIBI else 4) == max(seen[-1]), seen
    monkeypatch.setattr(layers, "once", lambda *args: all_rows)
    with rows_seen(plain) as seen:
        expected = train(plain, 4, directions=2, lr=1e-2, **LOW)
    assert seen[0] == seen[-1]
    close = {"rel": 2e-2 if dtype == "bfloat16" else 1e-5}
    assert found == pytest.approx(expected, **close)


TRAINED = [("llama", "embed_tokens"), ("llama", "layers.0.input_layernorm"), ("llama", "layers.0.")]
TRAINED += [("opt", "embed_positions"), ("gpt2", "wpe")]  # unlike the final norm, which is trained in all of them


@pytest.mark.parametrize("name, part", TRAINED)
def test_looks_part_where_something_is_trained(name: str, part: str) -> None:
    """Every block has all rows: those behind it, frozen or not, too."""
    model = lower(load(name))
    for parameter_name, p in model.module.named_parameters():
        if part in parameter_name:
            p.requires_grad_(True)
    assert LAYERS >= 2
    if part == "layers.0.":
        model.blocks[-1].requires_grad_(False)
    with rows_seen(model) as seen:
        train(model, 2, lr=1e-2, **LOW)
    assert seen[0] == seen[-1]


def test_a_later_method_that_trains_the_first_blocks() -> None:
    model, plain = lower(load()), load()
    train(model, 0, lr=1e-2, **LOW)
    for p in model.module.parameters():
        p.requires_grad_(True)
    assert train(model, 3, lr=1e-2, **LOW) == train(plain, 3, lr=1e-2, **LOW)
    assert equal(weights(model), weights(plain))


@pytest.mark.parametrize("name", ["llama", "opt"])
def test_streamed_equals_resident(name: str) -> None:
    batches = [batch(seed=1), batch(seed=2, length=6)]
    model = lower(load(name))
    cut = lower(streamed(load(name), max_unit_numel=1, slot_count=2, chaos=random.Random(1)))
    assert train(model, 4, batches, lr=1e-2, **LOW) == train(cut, 4, batches, lr=1e-2, **LOW)
    assert equal(weights(model), weights(cut))


@pytest.mark.parametrize("name", ["llama", "gpt2", "falcon"])
def test_as_many_rows_as_positions(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, plain, rows = lower(load(name)), lower(load(name)), batch(rows=5, length=10, seed=1)
    found = train(model, 2, [rows], lr=1e-2, **LOW)
    monkeypatch.setattr(layers, "once", lambda *args: all_rows)
    assert found == pytest.approx(train(plain, 2, [rows], lr=1e-2, **LOW), rel=1e-5)


def test_what_is_not_cut() -> None:
    """Arguments whose first dimension is not that of rows: a table by position, entries by row and head; and arguments
    that a block may write into."""
    share, x = Share(0, 2, rows=6, tokens=36), torch.ones(6, 6, 4)
    assert _alike((x, torch.zeros(6, 2), (torch.ones(1, 6), None), True), share, {})
    assert not _alike((x, torch.arange(6)), share, {})
    assert not _alike((x, torch.zeros(12, 1, 6)), share, {})
    assert not _alike((torch.arange(6.0)[:, None, None].expand(6, 6, 4),), share, {})
    assert (
        not _alike((x, {}), share, {}) and not _alike((x, ([x],)), share, {}) and not _alike((x, object()), share, {})
    )
    assert not _alike((torch.ones(3, 6),), share, {})
