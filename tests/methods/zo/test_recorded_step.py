"""Steps that are recorded as one graph: the same bits as steps that are launched kernel by kernel.

On a CPU a graph is imitated by running the passes again, on the static tensors and with nothing that Python noted kept.
"""

from collections.abc import Callable
from functools import partial
from multiprocessing import get_context
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import keyhole
from keyhole.methods.zo.estimators import Looks
from keyhole.methods.zo.recorded_step import RecordedSteps, is_short, restore
from keyhole.methods.zo.traits import ZOConfig
from keyhole.model.forward.captured import Branches
from keyhole.model.structure.reach import freeze
from tests.matrix import in_every_run
from tests.model.candidates import ragged
from tests.model.decoders import batch, config

METHODS: dict[str, dict[str, Any]] = {
    "mezo": {"weight_decay": 0.1},
    "two directions": {"directions": 2},
    "fzoo": {"estimator": "fzoo", "directions": 3},
    "low rank": {"rank": 2, "refresh": 4, "directions": 2},
    "kept": {"rank": 2, "refresh": 2, "fold": False},
    "frozen start": {"rank": 2, "refresh": 4, "freeze": ["embeddings", "model.layers.0"]},
}


class Imitated(RecordedSteps):
    """Recordings without a GPU: a replay makes the passes again."""

    def __init__(self, method: Any, breaks: bool = False) -> None:
        super().__init__(method.directions, deferred_update=True)
        self.possible, self.breaks = True, breaks

    def _has_room(self, homes: Any, looks: Any) -> bool:
        return True

    def _capture(self, looks: Looks, state: list[torch.Tensor]) -> Any:
        def passes() -> list[torch.Tensor]:
            with self.directions.captured(self.now.step, Branches()):
                return self.directions.run(looks)

        def replay() -> Any:
            with self.update.trial(self.coef, self.before.step):
                made.result = [passes(), state]
            return made.result

        before = [x.clone() for x in state]
        passes()  # for what Python notes; computed again by replay
        restore(state, before)
        made = SimpleNamespace(replay=replay)
        return None if self.breaks else made


def trained(
    make: Callable[[Any], Any] | None, how: dict[str, Any], rows: Callable[[int], list[dict]], **load: Any
) -> tuple[list[float], list[torch.Tensor], Any]:
    """Losses, weights and the method after steps with a rate that changes."""
    model = keyhole.load(config("llama"), init="random", seed=3, **load)
    freeze(model.module, how.get("freeze"))
    own = {name: value for name, value in how.items() if name != "freeze"}
    method, losses = keyhole.ZO(model, 1e-3, **own), []
    if make is not None:
        method.recorded = make(method)
    for step in range(12):
        method.lr = 1e-3 * (12 - step) / 12
        losses.append(float(method.step(rows(step))))
        if step == 7:
            method.flush()  # as before an evaluation: the next step has nothing to apply
    method.flush()
    counted = [float(method.metrics()["changed"])]
    return losses + counted, [model.home(tensor).float().cpu() for tensor in model.layout.tensors], method


def assert_same(recorded: tuple, plain: tuple) -> None:
    assert recorded[0] == plain[0] and all(map(torch.equal, recorded[1], plain[1]))


def two_lengths(step: int) -> list[dict]:
    return [batch(rows=4, length=(6, 9)[step % 2], seed=10 * step + i) for i in range(1 + step % 2)]


@in_every_run(lambda name: name in ("mezo", "low rank", "kept", "frozen start"))
@pytest.mark.parametrize("name", ["mezo", "fzoo", "low rank", "kept", "frozen start"])
def test_replays_give_the_same_bits(name: str) -> None:
    """Losses, weights and counts, over two shapes, a changing rate and a flush in between."""
    recorded = trained(Imitated, METHODS[name], two_lengths, device="cpu", dtype="float32")
    assert_same(recorded, trained(None, METHODS[name], two_lengths, device="cpu", dtype="float32"))
    assert recorded[2].recorded.replays >= 2 and all(recorded[2].recorded.recorder.recordings.values())


def test_recordings_end_with_the_memory_of_kept_factors() -> None:
    """Periods that fill a room each: after six steps the recording is dropped, and made anew for the new rooms."""
    how = {"rank": 16, "refresh": 6, "fold": False}
    recorded = trained(Imitated, how, lambda step: [batch(seed=step)], device="cpu", dtype="float32")
    assert_same(recorded, trained(None, how, lambda step: [batch(seed=step)], device="cpu", dtype="float32"))
    assert recorded[2].recorded.replays == 4 and len(recorded[2].recorded.recorder.recordings) == 1


def test_a_step_that_cannot_be_recorded_is_made_in_the_ordinary_way() -> None:
    """Once per shape it is tried, and nothing is lost."""
    recorded = trained(lambda method: Imitated(method, breaks=True), {}, two_lengths, device="cpu", dtype="float32")
    assert_same(recorded, trained(None, {}, two_lengths, device="cpu", dtype="float32"))
    assert recorded[2].recorded.replays == 0 and list(recorded[2].recorded.recorder.recordings.values()) == [None, None]


def test_other_bits_are_noticed() -> None:
    """A recording that reads a number of its own step only is not used."""

    class Stuck(Imitated):
        def _stage(self, key: Any, looks: Looks) -> Looks:
            static = super()._stage(key, looks)
            self.now.step.fill_(0)
            return static

    recorded = trained(Stuck, {}, two_lengths, device="cpu", dtype="float32")
    assert_same(recorded, trained(None, {}, two_lengths, device="cpu", dtype="float32"))
    assert recorded[2].recorded.recorder.why == "a recording gave other bits"


def within(how: dict[str, Any], budget: int | None) -> tuple[list[float], int, int, int]:
    """Losses, replays, the bytes of the planned step, and the largest number of bytes reserved."""
    work = keyhole.Workload("zo", 4 * 9, 2, ZOConfig(**how))
    options: dict[str, Any] = {"device": "cuda", "dtype": "float32", "placement": "resident", "workload": work}
    losses, _, method = trained(None, how, lambda step: [batch(4, 9, step)], **options, gpu_memory=budget)
    replays, planned = method.recorded.replays, method.model.placed.device_bytes.total
    reserved = torch.cuda.max_memory_reserved()
    method.model.close()
    return losses, replays, planned, reserved


def within_each(how: dict[str, Any], budgets: list[int]) -> list[tuple[list[float], int, int, int]]:
    """In a process of its own, because a budget counts all that the process holds; the tightest first, because the
    largest number of bytes is that since the process began."""
    return [within(how, budget) for budget in budgets]


@pytest.mark.parametrize("how", [{}, {"rank": 2, "refresh": 50}], ids=["dense", "rank 2"])
@pytest.mark.gpu
def test_a_budget_with_room_records_and_one_without_does_not(how: dict) -> None:
    """On a GPU: the same bits in both, and as without a budget; both keep their budget."""
    expected, replays, planned, _ = within(how, None)
    with get_context("spawn").Pool(1) as pool:
        (tight, eager, _, of_tight), (roomy, recorded, _, of_roomy) = pool.apply(within_each, (how, [planned, 2**30]))
    assert recorded == replays >= 2 and eager == 0
    assert expected == roomy == tight
    assert of_roomy <= 2**30 and of_tight <= planned


def choices(step: int, shared: bool) -> list[dict]:
    """Two questions with two candidates of one token; shared: behind the same prompt, so that they have one row."""
    one = batch(rows=4, length=6, seed=step)
    if shared:
        one["input_ids"][1::2, :-1] = one["input_ids"][::2, :-1]
    labels = torch.full_like(one["labels"], -100)
    labels[:, -1] = one["input_ids"][:, -1]
    question, answer = torch.tensor([0, 0, 1, 1]), torch.tensor([1, 0, 0, 1] if step % 3 else [0, 1, 0, 1])
    return [one | {"labels": labels, "question": question, "answer": answer}]


@pytest.mark.parametrize("shared", [False, True], ids=["separate rows", "shared rows"])
def test_candidates_are_static_too(shared: bool) -> None:
    """Of a batch trained by the choice between candidates, everything that the passes read is copied."""
    rows = partial(choices, shared=shared)
    recorded = trained(Imitated, {}, rows, device="cpu", dtype="float32")
    assert_same(recorded, trained(None, {}, rows, device="cpu", dtype="float32"))
    assert recorded[2].recorded.replays >= 6


@pytest.mark.gpu
def test_graphs_over_a_frozen_base_give_the_same_bits() -> None:
    """On a GPU, weights of 4 bits with kept factors beside them, across two sets of rooms."""
    how = {"rank": 16, "refresh": 6, "fold": False}
    options = {"device": "cuda", "dtype": "bfloat16", "wire": "int4"}
    recorded = trained(None, how, lambda step: [batch(seed=step)], **options)
    assert_same(recorded, trained(None, how, lambda step: [batch(seed=step)], **options, graphs=False))
    assert recorded[2].recorded.replays == 4, recorded[2].recorded.recorder.why


ROWS = {"lengths": two_lengths, "shared": partial(choices, shared=True), "joined": lambda step: [ragged(seed=step)]}
ON_A_GPU = [("lengths", how, dtype) for how in METHODS.values() for dtype in ("float32", "bfloat16")]
ON_A_GPU += [(rows, how, "bfloat16") for rows in ("shared", "joined") for how in ({}, {"rank": 2, "refresh": 4})]


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "how", "dtype"), ON_A_GPU)
def test_graphs_give_the_same_bits(rows: str, how: dict[str, Any], dtype: str) -> None:
    """On a GPU, against steps without any graph, and recordings were used."""
    recorded = trained(None, how, ROWS[rows], device="cuda", dtype=dtype)
    assert_same(recorded, trained(None, how, ROWS[rows], device="cuda", dtype=dtype, graphs=False))
    assert rows != "joined" or recorded[2].model.send(ROWS[rows](0), shares=True, joins=True)[0].packed
    assert recorded[2].recorded.replays >= 2, recorded[2].recorded.recorder.why


def test_passes_that_carry_all_looks_are_recorded_at_more_tokens() -> None:
    """By FLOPs per block: 4e11 of a dense pass, 2e12 of one with factors, which carries all looks."""
    layout = keyhole.load(config("llama"), init="random", device="cpu").layout
    numel = max(unit.numel for unit in layout.of_kind("block"))
    tokens = int(4e11 / (2 * numel))
    assert is_short(layout, tokens, 2, False) and not is_short(layout, tokens + 1, 2, False)
    assert is_short(layout, 2 * tokens, 2, True) and not is_short(layout, 3 * tokens, 2, True)
    assert is_short(layout, tokens, 9, True)


def test_a_step_with_a_hook_of_the_user_s_is_not_replayed() -> None:
    """It would not be called; after it is removed, the recording is used again."""
    model = keyhole.load(config("llama"), init="random", seed=3, device="cpu")
    method = keyhole.ZO(model, 1e-3)
    method.recorded = Imitated(method)
    for step in range(6):
        method.step(batch(seed=step))
    replays = method.recorded.replays
    handle = model.module.model.norm.register_forward_hook(lambda *_: None)
    method.step(batch())
    assert method.recorded.replays == replays > 0
    handle.remove()
    method.step(batch())
    assert method.recorded.replays == replays + 1
