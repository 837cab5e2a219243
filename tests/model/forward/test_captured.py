"""A captured step: masks are left out exactly where the eager pass had none, and each unit waits for the streams of the
one before."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import keyhole
from keyhole.model.forward.captured import Branches, is_plain, left_out, noted
from tests.model.decoders import batch, config, load

ROWS, LENGTH = 2, 10
VISIBLE = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril().expand(ROWS, 1, LENGTH, LENGTH)


@pytest.fixture
def masks(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The masks that attention was given, call by call; on a GPU, those of calls during a capture."""
    given, attention = [], F.scaled_dot_product_attention

    def seen(*args: Any, attn_mask: Any = None, **options: Any) -> torch.Tensor:
        if not torch.cuda.is_available() or torch.cuda.is_current_stream_capturing():
            given.append(attn_mask)
        return attention(*args, attn_mask=attn_mask, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", seen)
    return given


def run(model: Any, ids: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
    with torch.no_grad():
        return model.module(input_ids=ids, attention_mask=mask, use_cache=False).logits


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.parametrize("family", ["mistral", "llama"])
def test_a_mask_is_removed_where_there_was_none(no_gpu: None, masks: list[Any], family: str) -> None:
    model = load(family)
    ids = batch(ROWS, LENGTH)["input_ids"]
    with noted(model.blocks) as without:
        eager = run(model, ids)
    assert masks and all(mask is None for mask in masks) and len(without) == len(model.blocks)
    masks.clear()
    with left_out(model.blocks, without):
        captured = run(model, ids, VISIBLE)
    assert masks and all(mask is None for mask in masks) and torch.equal(eager, captured)
    masks.clear()
    run(model, ids, VISIBLE)
    assert masks and not any(mask is None for mask in masks)


def test_other_calls_keep_their_masks(no_gpu: None, masks: list[Any]) -> None:
    model = load("llama")
    ids = batch(ROWS, LENGTH)["input_ids"]
    with noted(model.blocks) as shorter:
        run(model, ids[:, : LENGTH - 1])
    with noted(model.blocks) as both:
        run(model, ids)
        run(model, ids, VISIBLE)
    assert shorter and not both
    for without in (shorter, both, set()):
        masks.clear()
        with left_out(model.blocks, without):
            run(model, ids, VISIBLE)
        assert masks and not any(mask is None for mask in masks)


def test_only_batches_of_token_ids_are_plain() -> None:
    model = load("llama")
    one = batch(ROWS, LENGTH)
    hidden = torch.ones_like(one["input_ids"])
    all_ones, positions = one | {"attention_mask": hidden.clone()}, torch.arange(LENGTH).expand(ROWS, LENGTH)
    hidden[0, -2:] = 0
    one["labels"][0, -2:] = -100
    padded, placed = one | {"attention_mask": hidden}, one | {"position_ids": positions}
    assert is_plain(model.send([one, all_ones]))
    assert not is_plain(model.send([one, padded])) and not is_plain(model.send([one, placed]))


def padded(seed: int) -> dict[str, torch.Tensor]:
    one = batch(4, 12, seed)
    one["attention_mask"] = torch.ones_like(one["input_ids"])
    one["attention_mask"][0, -3:] = 0
    one["labels"][0, -3:] = -100
    return one


@pytest.mark.parametrize(("rows", "causal"), [(lambda seed: batch(4, 12, seed), True), (padded, False)])
@pytest.mark.parametrize("how", [{}, {"rank": 2, "refresh": 50}], ids=["dense", "rank 2"])
@pytest.mark.parametrize("family", ["opt", "llama", "mistral"])
@pytest.mark.gpu
def test_recorded_steps_attend_like_eager_ones(
    masks: list[Any], family: str, how: dict, rows: Callable[[int], dict], causal: bool
) -> None:
    """In the capture too: without masks where no token is hidden, with masks where some are; and later batches of the
    same shape give the bits of eager steps."""
    losses = {}
    for graphs in (True, False):
        model = keyhole.load(config(family), init="random", seed=1, device="cuda", dtype="bfloat16", graphs=graphs)
        method = keyhole.ZO(model, 1e-3, **how)
        losses[graphs] = [float(method.step(rows(seed))) for seed in range(8)]
        assert method.recorded.replays >= 4 or not graphs, method.recorded.recorder.why
        method.flush()
    assert masks and all((mask is None) == causal for mask in masks)
    assert losses[True] == losses[False]


@pytest.mark.gpu
def test_a_captured_fork_reads_what_came_before_and_is_waited_for() -> None:
    """A chain in which every link needs both branches of the link before; slow kernels would show a missing edge."""
    device, branches = torch.device("cuda"), Branches(torch.device("cuda"))
    x, halves = torch.randn(2048, 2048, device=device), torch.empty(2, 2048, 2048, device=device)

    def run() -> torch.Tensor:
        y = x.clone()
        for _ in range(12):
            for side, stream in enumerate(branches.streams):
                branches.fork(side)
                with torch.cuda.stream(stream):
                    torch.mm(y, y, out=halves[side]).mul_((side + 1) / 64)
            branches.join()
            y = torch.sin(x + halves[0] + halves[1])
        return y

    expected, graph = run(), torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        made = run()
    for _ in range(5):
        made.zero_()
        halves.fill_(torch.nan)
        graph.replay()
        assert torch.equal(made, expected) and torch.isfinite(made).all()
    assert branches.of_passes([[range(2), range(2, 4)]]) == dict(
        enumerate([branches.streams[i // 2] for i in range(4)])
    )
