"""A step whose rows are split into passes: the same step, however it is cut."""

from functools import partial
from typing import Any

import pytest
import torch

import keyhole
from keyhole.methods import METHODS
from keyhole.model.batch import split
from tests.matrix import in_every_run
from tests.methods.test_objective import OWN, STREAMED, load, make, trained
from tests.model.candidates import candidate_batch
from tests.model.decoders import batch
from tests.model.streaming import assert_trained_alike, streamed

RANDOM = {
    "zo": 1e-4,
    "lsp": 1e-3,
    "galore": 1e-3,
    "muon": 1e-3,
}  # what rounding becomes


def rows(t: int, kind: str = "text") -> dict[str, torch.Tensor]:
    if kind == "candidates":
        return candidate_batch([2, 3, 2], seed=t)
    one = batch(rows=5, length=12, seed=t)
    if kind == "packed":
        one["position_ids"] = torch.arange(12).remainder(6).repeat(5, 1)
    if kind == "padded":
        one["attention_mask"] = (torch.arange(12) < torch.tensor([[12], [3], [7], [12], [5]])).long()
        one["labels"] = torch.where(one["attention_mask"] == 1, one["labels"], -100)
    return one


def after(name: str, batches: Any, size: int | str, steps: int = 2, **how: Any) -> tuple[list[float], torch.Tensor]:
    """Losses, and all weights, after steps with passes of at most so many rows."""
    model = how.pop("model", None) or load(**how.pop("load", {}))
    own = {"learn": False} if name == "lsp" else {}  # projectors are learned from the first pass
    opt = make(name, model, micro_batch_size=size, **own, **how)
    losses = [float(opt.step(batches(t))) for t in range(steps)]
    opt.flush()
    return losses, torch.cat([w.flatten() for w in trained(model).values()])


@in_every_run(lambda name, kind: kind == "text" or name in ("lomo", "zo", "lora"))
@pytest.mark.parametrize("kind", ["text", "candidates", "packed", "padded"])
@pytest.mark.parametrize("name", METHODS)
def test_the_split_changes_rounding_alone(name: str, kind: str) -> None:
    """Weighted by trained tokens, or by questions, clipped by the norm of the whole step."""
    whole, expected = after(name, partial(rows, kind=kind), "auto")
    for size in (1, 3):
        losses, weights = after(name, partial(rows, kind=kind), size)
        limit = RANDOM.get(name, 1e-5)
        assert losses == pytest.approx(whole, rel=limit) and torch.allclose(weights, expected, rtol=limit, atol=limit)
        assert size == 3 or not torch.equal(weights, expected) or kind == "candidates"


@pytest.mark.parametrize("name", METHODS)
def test_passes_are_the_micro_batches_that_a_caller_would_make(name: str) -> None:
    """To the bit."""
    losses, weights = after(name, rows, 2)
    by_hand, expected = after(name, lambda t: split(rows(t), 2), "auto")
    assert losses == by_hand and torch.equal(weights, expected)


@pytest.mark.parametrize("name", STREAMED)
def test_streamed_equals_resident_at_an_equal_split(name: str) -> None:
    """To the bit, a block's weights moved once for all passes."""
    resident = load()
    models = resident, streamed(resident, slot_count=3)
    own = {"d": 16} if name == "lsp" else {}
    made = partial(METHODS[name].load(), lr=1e-3, **OWN.get(name, {}) | own | {"micro_batch_size": 2})
    assert_trained_alike(models, made, [rows(t) for t in range(3)])


def test_a_budget_splits_what_is_longer_than_planned() -> None:
    """By tokens: two rows of 12 where 24 tokens were planned, four of 6, one of 40. Nobody has said how."""
    work = keyhole.Workload("lomo", tokens=24, passes=1, length=12)
    model = load(placement="stream", gpu_memory="64MiB", workload=work)
    sizes = []
    send, model.send = (
        model.send,
        lambda batches, **how: sizes.append([len(b["labels"]) for b in batches]) or send(batches),
    )
    opt = make("lomo", model)
    for count, length in ((5, 12), (8, 6), (3, 40), (2, 12)):
        opt.step(batch(rows=count, length=length))
    assert sizes == [[2, 2, 1], [4, 4], [1, 1, 1], [2]]


def test_what_is_asked_is_planned() -> None:
    """micro_batch_size as a number: the plan is for passes of so many rows, with less memory."""
    how: dict[str, Any] = {"placement": "stream", "gpu_memory": "64MiB"}
    work = keyhole.Workload("lomo", tokens=96, passes=2, length=12)
    peaks = {}
    for size in ("auto", 4, 1):
        own = keyhole.LOMO.row.settings(micro_batch_size=size)
        placed = load(**how, workload=keyhole.Workload(**vars(work) | {"settings": own})).placed
        assert placed is not None
        peaks[size] = placed.device_bytes.total, placed.work.passes, placed.pass_tokens
    assert peaks["auto"][1:] == (2, 96) and peaks[4][1:] == (4, 48) and peaks[1][1:] == (16, 12)
    assert peaks["auto"][0] > peaks[4][0] > peaks[1][0]


def test_evaluation_is_split_too() -> None:
    """Rows come back in order."""
    work = keyhole.Workload("lomo", tokens=24, passes=1, length=12)
    model, whole = load(placement="stream", gpu_memory="64MiB", workload=work), load()
    for mine, theirs in zip(
        model.nll([rows(0), rows(1, "padded")]), whole.nll([rows(0), rows(1, "padded")]), strict=True
    ):
        assert torch.allclose(mine[0], theirs[0], rtol=1e-5) and torch.equal(mine[1], theirs[1])
