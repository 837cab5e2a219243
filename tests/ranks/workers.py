"""What ranks compute in the tests: many properties in one start of processes, results in files."""

import random
from pathlib import Path
from typing import Any

import torch

import keyhole
from keyhole.ranks import Ranks
from keyhole.ranks.join import joined
from tests.model.decoders import TWELVE, batch, config
from tests.model.streaming import streamed

STEPS, LR = 2, 1e-3


def micro_batches(step: int, count: int = 3) -> list[dict[str, torch.Tensor]]:
    """Of different sizes, so that a mean of means would be wrong."""
    return [batch(rows=1 + i % 2, length=8 + i, seed=10 * step + i) for i in range(count)]


def zo_results(ranks: Ranks) -> dict[str, Any]:
    """Losses and weights after two steps of zo, of every family: resident in one process, streamed on several ranks, in
    single matrices through a poisoned slot, with write-backs every second step."""
    found: dict[str, Any] = {}
    for name in TWELVE:
        model = keyhole.load(config(name), init="random", device="cpu", dtype="float32")
        if ranks.several:
            model = streamed(model, max_unit_numel=1, slot_count=1, chaos=random.Random(ranks.rank))
            model.ranks = ranks
        method = keyhole.ZO(model, LR, write_back_every=2 if ranks.several else None)
        losses = [method.step(micro_batches(step)) for step in range(STEPS)]
        method.flush()
        found[name] = {"losses": torch.stack(losses), **{n: t.clone() for n, t in model.named_tensors()}}
        model.close()
    return found


def write_zo_results(directory: Path) -> int:
    """A rank's part of zo_results, in a file of its own."""
    torch.set_num_threads(1)
    with joined() as ranks:
        torch.save(zo_results(ranks), directory / f"{ranks.rank}.pt")
    return 0
