"""What ranks that gather their uploads compute in the tests, many properties in one start of processes."""

import os
import random
import signal
from pathlib import Path
from typing import Any

import torch

import keyhole
from keyhole.methods.zo import update
from keyhole.model.structure import find
from keyhole.model.structure.find import STACK_NUMEL
from keyhole.offload import arena
from keyhole.offload.transports import GatheringEngine
from keyhole.ranks import Ranks
from keyhole.ranks.join import joined
from tests.model.decoders import batch, config
from tests.ranks.launch import train
from tests.ranks.workers import micro_batches

SETTINGS: dict[str, dict[str, Any]] = {"dense": {}, "low rank": {"rank": 2, "refresh": 2}, "packed": {}, "experts": {}}
SETTINGS |= {"guided": {"rank": 1, "refresh": 3, "guide": 64}}
CASES = ["dense, auto", *(f"{name}, always" for name in SETTINGS)]


def gathered_results(directory: Path, cases: list[str], machines: list[int], device: str = "cpu") -> int:
    """Of this rank, in a file: cases, each as one line `name, way`, and the engine by itself. machines: how many ranks
    are on each, as if there were several."""
    torch.set_num_threads(1)
    places = [(str(place), str(count), str(i)) for i, count in enumerate(machines) for place in range(count)]
    place = zip(("LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK"), places[int(os.environ["RANK"])], strict=True)
    os.environ |= dict(place)
    with joined() as ranks:
        received = random_sweeps(ranks, device)
        found: dict[str, Any] = {case: run(ranks, *case.split(", "), device) for case in cases}
        torch.save(found | {"received": received}, directory / f"{ranks.size} {ranks.rank}.pt")
    return 0


def run(ranks: Ranks, case: str, gather: str, device: str = "cpu") -> dict[str, Any]:
    """Five steps of a streamed zo, with flushes, evaluations of which every rank makes another number, and a step that
    has work for one rank only: losses, weights, how many changed, what was said; and bytes over the link, of the last
    step."""
    how: dict[str, Any] = {"init": "random", "device": device, "dtype": "bfloat16", "placement": "stream", "seed": 3}
    how |= {"workload": keyhole.Workload("zo", tokens=64), "wire": "fp8" if case == "packed" else None}
    if ranks.several:
        how |= {"gather": gather, "chaos": random.Random(ranks.rank), "ranks": ranks}
    find.STACK_NUMEL = 0 if case == "experts" else STACK_NUMEL
    shape = config("mixtral", num_local_experts=8) if case == "experts" else config("llama", intermediate_size=200)
    model = keyhole.load(shape, **how)
    method = keyhole.ZO(model, 1e-2, distribution="rademacher", **SETTINGS[case])
    update.SHARED_EVERY, losses, scores, before = 3, [], [], 0
    for step in range(5):
        before = model.engine.bytes_up
        losses.append(method.step(micro_batches(step, count=1 if step == 2 else 4)))
        if step == 1:
            scores = [model.nll(batch())[0] for _ in range(1 + ranks.rank)]
    up = model.engine.bytes_up - before
    method.flush()
    changed = method.update.changed.cpu().clone()
    bits = {"losses": torch.stack(losses).cpu(), "score": scores[0].cpu(), "changed": changed}
    bits |= {name: tensor.cpu().clone() for name, tensor in model.named_tensors()}
    shared = sum(model.engine.homes[page].nbytes for page in model.engine.shared)
    own = sum(model.engine.homes[page].nbytes for page in model.engine.streamed - model.engine.shared)
    gathers = getattr(model.engine, "gathers", False)
    said = [line for line in model.describe() if line.startswith("uploads")]
    ranks.barrier()
    model.close()
    return {"bits": bits, "up": up, "shared": shared, "own": own, "gathers": gathers, "said": said}


def random_sweeps(ranks: Ranks, device: str, seed: int = 7) -> int:
    """Pages of odd sizes, in sweeps of all ranks (in which some stray from the order, or visit nothing), sweeps of each
    by itself, and rewrites by one writer: what arrives is what is at home. Returns the bytes that were gathered."""
    alike, own = random.Random(seed), random.Random(100 * seed + ranks.rank)
    numels = [alike.randrange(1, 4000) for _ in range(9)]
    flat = arena.shared_memory(4 * sum(numels[:8]), ranks).view(torch.float32)
    homes = [*flat.split(numels[:8]), torch.full((numels[8],), float(ranks.rank))]
    if ranks.local_rank == 0:
        flat.copy_(torch.arange(flat.numel()))
    ranks.barrier()
    options = {"slot_count": alike.randint(1, 4), "chaos": own, "shared": frozenset(range(8))}
    engine = GatheringEngine(homes, set(range(9)), torch.device(device), ranks, **options)
    assert "offload.gather=always" in engine.decide("always")

    def visit(page: int, spoils: bool) -> None:
        w = engine.acquire(page, changes=spoils)
        assert torch.equal(w.cpu(), homes[page]), page
        if spoils:
            w.zero_()
        engine.release(page)

    for _ in range(25):
        strays = own.choice([0.0, 0.0, 0.3, 1.0])
        with engine.sweep("train", list(range(9)), of_all=True):
            for page in [*range(9), own.randrange(9)]:
                if own.random() >= strays:
                    visit(page, own.random() < 0.5)
        for _ in range(own.randrange(3)):
            with engine.sweep(own.choice(["train", "evaluate"]), list(range(9))):
                for page in own.sample(range(9), own.randrange(10)):
                    visit(page, own.random() < 0.5)
        if own.random() < 0.2:
            engine.invalidate()
        if alike.random() < 0.3:
            engine.invalidate()
            ranks.barrier()
            for page in range(ranks.local_rank, 8, ranks.local_size):
                homes[page] += 1
            ranks.barrier()
            engine.invalidate()
    return ranks.bytes_received


def dying_train(words: list[str]) -> int:
    """`keyhole train` in which rank 1 is killed within the third sweep that gathers."""
    real, decide, sweeps = GatheringEngine.acquire, GatheringEngine.decide, []

    def acquire(self: GatheringEngine, page: int, changes: bool = True) -> torch.Tensor:
        if self.places and len(self.visited) == 1:
            sweeps.append(page)
        if len(sweeps) == 3 and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        return real(self, page, changes)

    GatheringEngine.acquire, GatheringEngine.decide = acquire, lambda self, way: decide(self, "always")
    return train(words)
