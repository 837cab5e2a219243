"""Where the time of a step went, for methods that update on the CPU and measure their parts."""

import time

from keyhole.methods.adam_offload.method import AdamOffload
from keyhole.methods.adam_offload.state import AdamStep
from keyhole.methods.base import Method
from keyhole.methods.lsp.method import LSP


def step_parts(method: Method) -> dict[str, float]:
    """Seconds of the last step by part, if the method measures them; call it after synchronising the device."""
    found = {key: float(value) for key, value in method.metrics().items()}
    if isinstance(method, AdamOffload):
        found["update_s"] = method.updates.host_s
    if isinstance(method, LSP) and method.updates.host is not None:
        found["update_s"] = method.updates.host.update_s
    return found


def updates_alone_s(method: Method) -> float | None:
    """The floor of offloaded Adam: seconds of all updates of a step, on CPU and GPU, with nothing else running.
    (With a learning rate of 0 and arbitrary contents of the staging buffers: the model is not trained afterwards.)"""
    if not isinstance(method, AdamOffload):
        return None
    method.flush()
    numbers = method.exchange.down.numbers(len(method.slots) + 2)
    step = AdamStep(0.0, numbers, numbers, method.slots, waits_for_norm=False)
    tensors: dict[int, list[int]] = {}
    for start, trained in sorted(method.state.trained.items()):
        tensors.setdefault(trained.unit.index, []).append(start)
    begin_s = time.perf_counter()
    for unit in method.state.units:
        method.updates.submit(step, unit, tensors[unit.index], None)
    method.exchange.drain()
    return time.perf_counter() - begin_s
