"""The ledger counts what the allocator counts, and knows what it was for; `keyhole bench memory` on tiny shapes: the
formulas hold exactly, and checkpointing and LOMO do what they are for."""

import json
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from keyhole.bench.memory import ACTIVATIONS, GRADIENTS, PARTS, STATE, WEIGHTS, Ledger
from keyhole.cli import main
from keyhole.loading.homes import ALIGN_BYTES

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
    ledger.mark(WEIGHTS, *net.parameters())
    ledger.mark(STATE, *(v for state in optimizer.state.values() for v in state.values()))
    hooks = [p.register_post_accumulate_grad_hook(lambda p: ledger.mark(GRADIENTS, p.grad)) for p in net.parameters()]
    with ledger:
        step()
    for hook in hooks:
        hook.remove()
    (own, at_peak), numel = ledger.peaks(), LAYERS * (WIDTH + 1) * WIDTH
    assert (own[WEIGHTS], own[GRADIENTS]) == (4 * numel, 4 * numel)
    assert own[STATE] == 8 * numel + 4 * 2 * LAYERS  # a count per tensor
    assert sum(at_peak.values()) - at_peak[WEIGHTS] - at_peak[STATE] == allocator_peak(step)


def test_views_count_once_and_what_is_freed_is_gone() -> None:
    """Two buffers of 400 bytes one after the other: a peak of 400, whatever is done to them in place."""
    ledger = Ledger(torch.device("cpu"))
    with ledger:
        for _ in range(2):
            a = torch.ones(100)
            a.view(10, 10).t().mul_(2.0)
            a[:50].zero_()
            del a
    own, at_peak = ledger.peaks()
    assert own[ACTIVATIONS] == sum(at_peak.values()) == 400


def test_memory_of_before_counts_from_the_beginning() -> None:
    """A buffer that is claimed late was there all the time."""
    buffer, ledger = torch.zeros(100), Ledger(torch.device("cpu"))
    with ledger:
        torch.ones(50).sum()
        ledger.mark(GRADIENTS, buffer[:10])
    assert ledger.peaks()[1] == {WEIGHTS: 0, STATE: 0, GRADIENTS: 400, ACTIVATIONS: 204}


def run(out: Path, only: str) -> tuple[dict[str, dict[str, Any]], str]:
    """Records by name, and the page; no trial fails."""
    assert main(["bench", "memory", "--quick", f"--only={only}", f"--output-dir={out}"]) == 0
    records = json.loads(next(out.glob("*.json")).read_text())["records"]
    assert all(r["status"] == "ok" for r in records), records
    return {r["name"]: r for r in records}, next(out.glob("*.md")).read_text()


def test_torch_s_optimizers_hold_what_the_formulas_say(tmp_path: Path) -> None:
    """Gradients and state to the byte; weights with the padding between units."""
    found, page = run(tmp_path, "7B native")
    assert len(found) == 8 and "vs floor" in page and all(f"{part} MiB" in page for part in PARTS)
    for name, record in found.items():
        own, floor = record["own"], record["floor"]
        assert own["gradients"] == floor["gradients"], name
        assert own["state"] == floor["state"], name
        assert 0 <= own["weights"] - floor["weights"] < 64 * ALIGN_BYTES, name
        assert sum(record["at_peak"].values()) <= sum(own.values())
        if "checkpointing" in name:
            without = found[name.removesuffix(" checkpointing")]["own"]
            assert floor["activations"] < own["activations"] < 0.5 * without["activations"]
    states = [found[f"7B native {name}"]["own"]["state"] for name in ("sgd", "sgd master", "adamw", "adamw master")]
    assert states == sorted(states) and states[0] == 0


def test_a_fused_update_keeps_no_gradients(tmp_path: Path) -> None:
    """At least the largest matrix, far less than all, and no state."""
    found, _ = run(tmp_path, "7B lomo")
    for record in found.values():
        own, floor = record["own"], record["floor"]
        assert floor["gradients"] <= own["gradients"] < 0.2 * own["weights"] and own["state"] == 0
    all_kept, inputs_kept = (found[f"7B lomo{name}"]["own"]["activations"] for name in ("", " checkpointing"))
    assert inputs_kept < 0.6 * all_kept
