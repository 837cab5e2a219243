"""The ledger counts what the allocator counts, and knows what it was for."""

import torch
from torch.profiler import ProfilerActivity, profile

from keyhole.bench.ledger import ACTIVATIONS, GRADIENTS, STATE, WEIGHTS, Ledger

WIDTH, LAYERS, ROWS = 32, 4, 64


def allocator_peak(step: object) -> int:
    """The most that PyTorch's allocator handed out on top of what there was, by its own count."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        step()
    now = peak = 0
    for event in found.profiler.kineto_results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            peak = max(peak, now)
    return peak


def test_a_step_to_the_byte() -> None:
    """Weights, gradients and moments by their formulas, and the peak by the allocator's own count."""
    net = torch.nn.Sequential(*[torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)])
    optimizer, x = torch.optim.AdamW(net.parameters(), fused=True), torch.randn(ROWS, WIDTH)

    def step() -> None:
        net(x).tanh().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    step()
    ledger = Ledger(torch.device("cpu"))
    ledger.hold(WEIGHTS, net.parameters())
    ledger.hold(STATE, [v for state in optimizer.state.values() for v in state.values()])
    hooks = [p.register_post_accumulate_grad_hook(lambda p: ledger.mark(GRADIENTS, p.grad)) for p in net.parameters()]
    with ledger:
        step()
    for hook in hooks:
        hook.remove()
    peaks, numel = ledger.peaks(), LAYERS * (WIDTH + 1) * WIDTH
    assert (peaks.own[WEIGHTS], peaks.own[GRADIENTS]) == (4 * numel, 4 * numel)
    assert peaks.own[STATE] == 8 * numel + 4 * 2 * LAYERS  # a count per tensor
    assert peaks.total - peaks.at_peak[WEIGHTS] - peaks.at_peak[STATE] == allocator_peak(step)


def test_views_count_once_and_what_is_freed_is_gone() -> None:
    """Two buffers of 400 bytes one after the other: a peak of 400, whatever is done to them in place."""
    ledger = Ledger(torch.device("cpu"))
    with ledger:
        for _ in range(2):
            a = torch.ones(100)
            a.view(10, 10).t().mul_(2.0)
            a[:50].zero_()
            del a
    assert ledger.peaks().own[ACTIVATIONS] == ledger.peaks().total == 400


def test_memory_of_before_counts_from_the_beginning() -> None:
    """A buffer that is claimed late was there all the time."""
    buffer, ledger = torch.zeros(100), Ledger(torch.device("cpu"))
    with ledger:
        torch.ones(50).sum()
        ledger.mark(GRADIENTS, buffer[:10])
    assert ledger.peaks().at_peak == {WEIGHTS: 0, STATE: 0, GRADIENTS: 400, ACTIVATIONS: 204}
