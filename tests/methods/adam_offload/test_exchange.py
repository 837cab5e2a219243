"""Gradients out, weights back: staging, the gate, and an engine that never reads a page too early."""

import random
import threading
from typing import Any

import pytest
import torch

from keyhole.methods.adam_offload.exchange import Exchange
from keyhole.offload.engine import Engine
from keyhole.offload.workers import Workers

COUNT, NUMEL, WAIT_S = 5, 32, 20
CPU = torch.device("cpu")
DEVICES = [CPU, pytest.param(torch.device("cuda", 0), marks=pytest.mark.gpu)]


def make(streamed: set[int], device: torch.device = CPU, **options: Any) -> tuple[Engine, Exchange]:
    """Page i holds i everywhere; the worker's job makes it the gradient plus 1."""
    homes = [torch.full((NUMEL,), float(i), device="cpu" if i in streamed else device) for i in range(COUNT)]
    if device.type == "cuda":
        homes = [home.pin_memory() if home.device.type == "cpu" else home for home in homes]
    engine = Engine(homes, streamed, device, **options)
    return engine, Exchange(engine, list(range(COUNT)), Workers(threads=1))


def send_and_submit(exchange: Exchange, page: int, value: torch.Tensor) -> None:
    exchange.put(page, 0, value)
    exchange.submit(page, lambda: exchange.staging[page].add_(1), exchange.sent(), (0, NUMEL))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("streamed", [set(), {1, 2, 3, 4}, {2, 4}])
def test_every_sweep_sees_what_the_host_made_of_the_last(streamed: set[int], device: torch.device) -> None:
    """Ten sweeps there and back, delays and poison included: each page is its last gradient plus 1."""
    engine, exchange = make(streamed, device, chaos=random.Random(0))
    order = list(range(COUNT))
    seen = []
    for _ in range(10):
        with engine.sweep("there and back", order + order[::-1]):
            for page in order:
                seen.append(engine.acquire(page).clone())
                engine.release(page)
            for page in reversed(order):
                grad = engine.acquire(page) * 2
                send_and_submit(exchange, page, grad)
                engine.release(page)
    exchange.drain()
    values = [float(page) for page in order]
    for sweep in range(10):
        for page in order:
            assert seen[COUNT * sweep + page].eq(values[page]).all(), (sweep, page)
        values = [2 * value + 1 for value in values]
    assert all(engine.homes[page].eq(values[page]).all() for page in order)
    exchange.pool.close()


def test_prefetch_stops_at_a_page_that_is_not_ready_and_acquire_waits() -> None:
    """The launching thread goes on until it needs that very page."""
    engine, exchange = make({1, 2, 3, 4}, slot_count=4)
    gate = threading.Event()
    exchange.put(2, 0, torch.ones(NUMEL))
    assert not exchange.ready(2)
    exchange.submit(2, lambda: gate.wait(WAIT_S) and exchange.staging[2].add_(1), None, (0, NUMEL))
    with engine.sweep("forward", [1, 2, 3, 4]):
        assert [slot.page for slot in engine.ahead] == [1] and not exchange.ready(2)
        assert engine.acquire(1).eq(1).all()
        engine.release(1)
        threading.Timer(0.05, gate.set).start()
        assert engine.acquire(2).eq(2).all() and exchange.wait_s > 0
        assert [slot.page for slot in engine.ahead][:2] == [3, 4]
        engine.release(2)
    exchange.pool.close()


def test_staging_of_a_streamed_page_is_its_home() -> None:
    """No memory beside the homes; resident pages have one piece of their own."""
    engine, exchange = make({1, 3})
    assert exchange.staging[1] is engine.homes[1] and exchange.staging[3] is engine.homes[3]
    assert exchange.staging[0].data_ptr() != engine.homes[0].data_ptr()
    assert exchange.staging[0].untyped_storage().nbytes() == 3 * 256
    exchange.pool.close()
