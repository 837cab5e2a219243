"""Rates from times: a clock and a run that take known seconds."""

import time
from itertools import accumulate, chain

import pytest
import torch

from keyhole.machine.host import HostMemory
from keyhole.machine.sizes import GIB, MIB
from keyhole.plan import measure

CPU = torch.device("cpu")


@pytest.mark.parametrize("repeat", [1, 4])
def test_the_best_of_a_few_rounds(repeat: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first warms up and counts as well; a run is never free."""
    ran = []
    for seconds, best in (([9.0, 6.0, 3.0, 7.0], 3.0), ([1.0, 6.0, 3.0, 7.0], 1.0), ([0.0] * 4, 1e-9 * repeat)):
        clock = iter(accumulate(chain.from_iterable(zip([5.0] * 4, seconds, strict=True))))
        monkeypatch.setattr(time, "perf_counter", lambda clock=clock: next(clock))
        ran.clear()
        assert measure.best_s(lambda: ran.append(1), CPU, 3, repeat) == pytest.approx(best / repeat)
        assert len(ran) == 4 * repeat and next(clock, None) is None


def test_rates_are_amounts_over_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every run takes half a second. The limit of the group counts where it is less than what the machine has."""
    ran = []
    monkeypatch.setattr(measure, "best_s", lambda run, device, rounds=4, repeat=1: ran.append(run) or 0.5)
    memory = HostMemory(8 * GIB, 5 * GIB, 6 * GIB)
    monkeypatch.setattr(measure, "host_memory", lambda: memory)
    monkeypatch.setattr(measure.torch, "randn", lambda *shape, **how: torch.zeros(shape, **how))
    found = measure.measure(CPU)
    assert found.products == {rows: 2 * rows * 512 * 1024 / 0.5 for rows in (64, 512)}
    assert found.products_fp32 == 2 * 512 * 512 * 1024 / 0.5 and found.adam == 32 * MIB / 0.5
    assert found.device_memory == 2 * 256 * MIB / 0.5 == 2 * found.up == 2 * found.down == 2 * found.both
    assert found.host_memory == max(found.device_memory, measure.ADAM_BYTES * found.adam)
    assert (found.gpu_bytes, found.host_bytes, found.measured, len(ran)) == (None, 6 * GIB, True, 5)
    assert found.name.endswith(" cores") and found.workspace_bytes == measure.workspace_bytes(CPU)
    assert measure._device_memory(CPU) == 6 * 64 * MIB / 0.5
