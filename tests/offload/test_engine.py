"""The engine against a model of it: homes as plain arrays. Whatever is visited, in whatever order, values are right.

On a CPU device the same logic runs with plain copies and freed slots are filled with NaN; on a GPU streams are
delayed at random on top, so that any missing event shows as a wrong value.
"""

import gc
import random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from keyhole.errors import UserError
from keyhole.offload.engine import Engine

CPU = torch.device("cpu")
SIZES = [5, 64, 17, 40, 64, 3]
DTYPES = [torch.float32] * 3 + [torch.bfloat16, torch.float32, torch.float16]
BYTES = [size * dtype.itemsize for size, dtype in zip(SIZES, DTYPES, strict=True)]
STREAMED = {1, 2, 3, 4, 5}


def make(device: torch.device = CPU, streamed: set[int] = STREAMED, **options: object) -> Engine:
    """Six pages of their own length and dtype; page i is filled with 10 i, 10 i + 1, ..."""
    homes = []
    for i, (size, dtype) in enumerate(zip(SIZES, DTYPES, strict=True)):
        home = (torch.arange(size) + 10 * i).to(dtype)
        if device.type == "cuda":
            home = home.pin_memory() if i in streamed else home.to(device)
        homes.append(home)
    return Engine(homes, streamed, device, **options)


visits = st.lists(st.tuples(st.integers(0, 5), st.sampled_from(["read", "change", "spoil"])), max_size=14)
sweeps = st.lists(st.tuples(st.sampled_from("ab"), st.permutations(range(6)), visits), max_size=5)


def run_and_compare(engine: Engine, plan: list) -> None:
    """Runs sweeps on the engine and on plain arrays; looks at the values at the end, so as not to wait in between."""
    truth, seen = [home.cpu().clone() for home in engine.homes], []
    for name, order, steps in plan:
        with engine.sweep(name, list(order)):
            for page, action in steps:
                w = engine.acquire(page)
                seen.append((name, page, w.clone(), truth[page]))
                if action == "change":
                    w.mul_(0.5).add_(page)
                    truth[page] = truth[page] * 0.5 + page
                    engine.commit(page)
                elif action == "spoil" and page in engine.streamed:
                    w.fill_(-1.0)  # not committed: must not be seen again
                engine.release(page)
        assert not engine.held and len(engine.free) + len(engine.ahead) == engine.slot_count
    for name, page, found, expected in seen:
        assert torch.equal(found.cpu(), expected), f"page {page} in sweep {name}"
    engine.wait_for_homes()
    for page, home in enumerate(engine.homes):
        assert torch.equal(home.cpu(), truth[page])


@given(sweeps, st.integers(1, 6), st.sets(st.integers(1, 5), min_size=1), st.booleans(), st.booleans())
def test_any_visits_see_the_right_values(plan: list, slots: int, away: set, overlap: bool, reuse: bool) -> None:
    options = {"slot_count": slots, "overlap": overlap, "reuse_slots": reuse}
    run_and_compare(make(streamed=away, chaos=random.Random(0), **options), plan)


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(50))
def test_any_visits_see_the_right_values_on_a_gpu(seed: int) -> None:
    rng = random.Random(seed)
    plan = []
    for _ in range(4):
        steps = [(rng.randrange(6), rng.choice(["read", "change", "spoil"])) for _ in range(10)]
        plan.append((rng.choice("ab"), rng.sample(range(6), 6), steps))
    options = {"slot_count": rng.randint(1, 5), "overlap": rng.random() < 0.8, "reuse_slots": rng.random() < 0.8}
    run_and_compare(make(torch.device("cuda", 0), chaos=random.Random(seed), **options), plan)


@pytest.mark.gpu
def test_uploads_of_a_dropped_engine_write_into_no_other_memory() -> None:
    """Prefetched pages are still on their way when the engine goes; what is allocated next keeps its values."""
    cuda = torch.device("cuda", 0)
    engine = make(cuda, slot_count=5, chaos=random.Random(0))
    size = engine.slot_bytes
    engine._delay = lambda: torch.cuda._sleep(200_000_000)
    with engine.sweep("a", [1, 2, 3, 4, 5]):
        pass
    assert len(engine.ahead) == 5
    del engine
    gc.collect()
    others = [torch.zeros(size, dtype=torch.uint8, device=cuda) for _ in range(8)]
    torch.cuda.synchronize()
    assert not any(int(other.max()) for other in others)


@pytest.mark.gpu
def test_uploads_wait_for_kernels_of_whoever_had_the_memory_before() -> None:
    """Slots get memory that a queued kernel has yet to write: pages come after that."""
    cuda, pages = torch.device("cuda", 0), set(range(6))
    first = make(cuda, pages, slot_count=5)
    homes, size = first.homes, first.slot_bytes
    del first
    others = [torch.zeros(size, dtype=torch.uint8, device=cuda) for _ in range(16)]
    torch.cuda.synchronize()
    torch.cuda._sleep(200_000_000)
    for other in others:
        other.fill_(7)
    del other, others
    engine, found = Engine(homes, pages, cuda, slot_count=5), []
    with engine.sweep("a", sorted(pages)):
        for page in pages:
            found.append(engine.acquire(page).clone())
            engine.release(page)
    assert all(torch.equal(x.cpu(), home) for x, home in zip(found, homes, strict=True))


def test_a_page_crosses_once_a_sweep() -> None:
    engine, order = make(slot_count=3), [1, 2, 3, 4, 5]
    weights = sum(BYTES[page] for page in order)
    for sweep in range(1, 4):
        with engine.sweep("train", order):
            for page in order:
                engine.acquire(page).add_(1)
                engine.commit(page)
                engine.release(page)
        ahead = sum(BYTES[slot.page] for slot in engine.ahead)
        assert engine.bytes_up == sweep * weights + ahead and len(engine.ahead) == 3
        assert engine.bytes_down == sweep * weights


@given(st.integers(1, 6), st.booleans())
def test_what_has_not_left_does_not_cross_again(slots: int, changes: bool) -> None:
    engine, there = make(slot_count=slots), [1, 2, 3, 4, 5]
    for _ in range(3):
        before = engine.bytes_up
        with engine.sweep("train", there + there[::-1]):
            for page in there:
                engine.acquire(page, changes=False)
                engine.release(page)
            for page in there[::-1]:
                engine.acquire(page).add_(1)
                if changes:
                    engine.commit(page)
                engine.release(page)
    kept = min(slots, 5)
    turn, start = sum(BYTES[page] for page in there[5 - kept :]), sum(BYTES[page] for page in there[:kept])
    expected = 2 * sum(BYTES[1:]) - turn - start if changes else 2 * sum(BYTES[1:]) - turn
    assert engine.bytes_up - before == expected


@given(st.integers(1, 6), st.integers(0, 2), st.integers(1, 2))
def test_what_a_gate_rewrites_is_never_taken_for_intact(slots: int, before: int, during: int) -> None:
    engine, order = make(slot_count=slots), [1, 2, 3]

    class Rewriting:
        left: set[int] = set()  # pages that will be rewritten when somebody waits for them

        def ready(self, page: int) -> bool:
            return page not in self.left

        def wait(self, page: int) -> None:
            if page in self.left:
                engine.homes[page].add_(1)
                self.left.discard(page)

    def read(gate: Rewriting | None) -> None:
        engine.gate = gate
        with engine.sweep("read", order):
            for page in order:
                assert torch.equal(engine.acquire(page, changes=False), engine.homes[page]), page
                if gate is not None:
                    gate.left.add(page)
                engine.release(page)

    for _ in range(before):
        read(None)
    gate = Rewriting()
    for _ in range(during):
        read(gate)
    for page in order:
        gate.wait(page)
    read(None)
    read(None)


def test_prefetch_runs_ahead_in_order() -> None:
    engine = make(slot_count=3)
    with engine.sweep("train", [0, 1, 2, 3, 4, 5]):
        assert [slot.page for slot in engine.ahead] == [1, 2, 3]
        engine.acquire(1)
        assert [slot.page for slot in engine.ahead] == [2, 3]
        engine.release(1)
        assert [slot.page for slot in engine.ahead] == [2, 3, 4]
        for page in (2, 3, 4, 5):
            engine.acquire(page)
            engine.release(page)
    assert [slot.page for slot in engine.ahead] == [1, 2, 3]


def test_nothing_is_uploaded_after_an_error() -> None:
    """Where ranks upload together, the others do something else at that moment: the rank that failed must not wait for
    them, but say why."""
    engine = make(slot_count=2)
    with pytest.raises(ZeroDivisionError), engine.sweep("train", sorted(STREAMED)):
        engine.acquire(min(STREAMED))
        before = engine.bytes_up
        raise ZeroDivisionError
    assert engine.bytes_up == before and not engine.held


def test_homes_written_by_others_are_seen_after_invalidate() -> None:
    engine = make(slot_count=3)
    with engine.sweep("train", [1, 2, 3]):
        pass
    engine.homes[1].fill_(7.0)
    engine.invalidate()
    with engine.sweep("train", [1, 2, 3]):
        assert torch.equal(engine.acquire(1), torch.full((64,), 7.0))
        engine.release(1)


class Watch:
    """Notes what it is told, and the value at home at that moment."""

    def __init__(self, homes: list[torch.Tensor]) -> None:
        self.homes, self.told = homes, []

    def before_change(self, page: int) -> None:
        self.told.append(("before", page, float(self.homes[page][0])))

    def changed(self, page: int, stream: object) -> None:
        self.told.append(("after", page, float(self.homes[page][0])))


def test_a_watch_is_told_around_every_change_of_a_home() -> None:
    homes = [torch.zeros(4), torch.zeros(4)]
    engine = Engine(homes, {1}, CPU)
    engine.watch = watch = Watch(homes)
    with engine.sweep("read", [1]):
        for page in (0, 1):
            engine.acquire(page, changes=False)
            engine.release(page)
    assert watch.told == []
    with engine.sweep("write", [1]):
        for page in (0, 1):
            engine.acquire(page).fill_(5.0)
            engine.commit(page)
            engine.release(page)
    assert watch.told == [("before", 0, 0.0), ("after", 0, 5.0), ("before", 1, 0.0), ("after", 1, 5.0)]


def test_a_write_back_that_breaks_off_leaves_no_page_to_be_taken_for_the_one_at_home() -> None:
    """Interrupted while a watch holds it up, a changed page has not come home: it is uploaded anew."""
    homes = [torch.zeros(4)]
    engine = Engine(homes, {0}, torch.device("cpu"), slot_count=2)

    class Interrupted:
        def before_change(self, page: int) -> None:
            raise KeyboardInterrupt

    engine.watch = Interrupted()
    with pytest.raises(KeyboardInterrupt), engine.sweep("write", [0]):
        engine.acquire(0).fill_(5.0)
        engine.commit(0)
    engine.watch = None
    with engine.sweep("write", [0]):
        assert engine.acquire(0).tolist() == [0.0] * 4
        engine.release(0)
    assert engine.bytes_down == 0


@pytest.mark.parametrize("slots", [1, 3])
@pytest.mark.parametrize("broken", range(5))
def test_an_upload_that_breaks_off_leaves_no_slot_to_be_taken_for_the_page(broken: int, slots: int) -> None:
    engine, uploads = make(slot_count=slots), []
    copy_up = engine._copy_up

    def breaks(page: int, slot: Any) -> None:
        uploads.append(page)
        if len(uploads) == broken + 1:
            raise MemoryError
        copy_up(page, slot)

    engine._copy_up = breaks
    plan = [("a", sorted(STREAMED), [(page, "change") for page in sorted(STREAMED)])]
    with pytest.raises(MemoryError), engine.sweep("a", sorted(STREAMED)):
        for page in sorted(STREAMED):
            engine.acquire(page, changes=False)
            engine.release(page)
    assert not engine.held and len(engine.free) + len(engine.ahead) == engine.slot_count
    run_and_compare(engine, plan * 2)


def test_too_few_slots_are_the_users_error() -> None:
    engine = make(slot_count=2)
    with pytest.raises(UserError, match=r"slot_count: 2 is too few: at least 3 pages.*slot_count=3"):
        with engine.sweep("train", [1, 2, 3]):
            for page in (1, 2, 3):
                engine.acquire(page)
    assert not engine.held
    run_and_compare(engine, [("train", [1, 2], [(1, "change"), (2, "read")])])
    with pytest.raises(UserError, match="slot_count: 0 is too few: at least 1"):
        make(slot_count=0).acquire(1)


@pytest.mark.parametrize("streamed", [set(), {0}])
def test_an_update_on_arrival_is_announced_before_it_is_applied(streamed: set[int]) -> None:
    """Also where the page was asked for to be read: a resident home would change under the watch."""
    homes = [torch.zeros(4)]
    engine, watch = Engine(homes, streamed, CPU), Watch(homes)

    def arrival(page: int, w: torch.Tensor) -> bool:
        w.fill_(5.0)
        return True

    engine.watch, engine.arrival = watch, arrival
    with engine.sweep("read", [0]):
        assert engine.acquire(0, changes=False).eq(5).all()
        engine.release(0)
    assert watch.told == [("before", 0, 0.0), ("after", 0, 5.0)]
