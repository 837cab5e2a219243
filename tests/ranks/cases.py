"""Short runs of every method with gradients, in one process and on several ranks: what the tests compare."""

import gc
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile, record_function

import keyhole
from keyhole.offload import arena
from keyhole.plan import fit
from keyhole.ranks import Ranks, group, join
from keyhole.ranks.join import joined
from tests.model.decoders import batch, config
from tests.ranks.workers import micro_batches

STEPS_WATCHED = 8  # for memory: the least of their peaks counts, because gloo frees what it sent at its own time
KEYS = ("grad_norm", "changed")
STREAM = {"placement": "stream"}
WIDE = {"eps": 1e-3}  # Adam divides by |g| + eps: with a small one, what is rounded differently in |g| is seen
SUBSPACE = WIDE | {"d": 16, "r": 2, "alpha": 0.01, "check_freq": 2, "check_share": 1.0}
ON_HOST = SUBSPACE | {"optimizer_on": "cpu", "threads": 1}
ADAM = WIDE | {"threads": 1}


@dataclass(frozen=True)
class Case:
    """method: its class; how: the model is loaded; size: ranks; cut: blocks are several units; again: a second run must
    have the same bits."""

    family: str
    method: type
    lr: float
    settings: dict[str, Any] = field(default_factory=dict)
    how: dict[str, Any] = field(default_factory=dict)
    size: int = 2
    cut: bool = False
    again: bool = False


LOMO, ADALOMO, OFFLOAD, LSP = keyhole.LOMO, keyhole.AdaLOMO, keyhole.AdamOffload, keyhole.LSP
SHARDS = {
    "lomo": Case("llama", LOMO, 0.1),
    "lomo, clipped": Case("llama", LOMO, 0.1, {"max_grad_norm": 0.5}, STREAM, size=4, cut=True),
    "lomo, tied, decay": Case("qwen2", LOMO, 0.1, {"weight_decay": 0.1}, STREAM, again=True),
    "lomo, learned positions": Case("gpt2", LOMO, 0.1, {"activations": "host", "clip_value": 1e-3}),
    "lomo, experts, decay": Case("mixtral", LOMO, 0.1, {"weight_decay": 0.1, "weight_decay_on": "all"}),
    "lomo, bf16 at home": Case("llama", LOMO, 0.1, {}, STREAM | {"wire": "bf16"}),
    "adalomo": Case("llama", ADALOMO, 1e-3, {"weight_decay": 0.01}, STREAM, size=4),
    "adalomo, tied": Case("qwen2", ADALOMO, 1e-3, {"max_grad_norm": 1.0}),
    "adalomo, experts": Case("mixtral", ADALOMO, 1e-3, {"weight_decay": 0.1}, STREAM, cut=True),
    "lomo-lora, clipped": Case("llama", keyhole.LOMOLoRA, 0.05, {"r": 4, "max_grad_norm": 0.5}),
    "apollo-mini": Case("mistral", keyhole.APOLLOMini, 1e-4, {}, STREAM),
    "muon, clipped": Case("mistral", keyhole.Muon, 1e-4, {"moments": "float32", "max_grad_norm": 0.5}, STREAM),
    "adam-offload": Case("llama", OFFLOAD, 1e-3, ADAM | {"weight_decay": 0.1}),
    "adam-offload, tied, clipped": Case(
        "qwen2", OFFLOAD, 1e-3, ADAM | {"max_grad_norm": 0.5}, STREAM, size=4, cut=True
    ),
    "adam-offload, experts, two workers": Case(
        "mixtral", OFFLOAD, 1e-3, ADAM | {"gpu_updates": True}, STREAM, again=True
    ),
    "lsp": Case("llama", LSP, 1e-3, SUBSPACE | {"optimizer_on": "gpu"}, STREAM),
    "lsp, on the host, clipped": Case("qwen2", LSP, 1e-3, ON_HOST | {"max_grad_norm": 0.5}, size=4),
    "lsp, experts, free": Case(
        "mixtral", LSP, 1e-3, ON_HOST | {"kind": "free", "fit_steps": 5}, STREAM, cut=True, again=True
    ),
    "lsp, clipped on the device, decay": Case(
        "gpt2", LSP, 1e-3, SUBSPACE | {"optimizer_on": "gpu", "max_grad_norm": 0.5, "weight_decay": 0.1}
    ),
}
REPLICAS = {
    "adamw, clipped": Case("llama", keyhole.AdamW, 1e-3, WIDE | {"max_grad_norm": 0.5, "weight_decay": 0.1}, size=4),
    "sgd, tied": Case("qwen2", keyhole.SGD, 0.1, {"momentum": 0.9}),
    "lora": Case("llama", keyhole.LoRA, 1e-3, {"r": 4}),
    "lora, int4, dropout": Case("llama", keyhole.LoRA, 1e-3, {"r": 4, "dropout": 0.3}, STREAM | {"wire": "int4"}),
    "galore": Case("llama", keyhole.GaLore, 1e-3, WIDE | {"rank": 4, "update_proj_gap": 2}),
}
CASES = SHARDS | REPLICAS
BY_PROCESSES = (  # the others are run by threads alone (tests/test_methods.py)
    "lomo", "lomo, clipped", "lomo, experts, decay", "adam-offload", "adam-offload, experts, two workers", "sgd, tied",
    "lsp, on the host, clipped", "adamw, clipped",
)  # fmt: skip


def results(case: Case, ranks: Ranks, device: str = "cpu") -> dict[str, Any]:
    """Losses, norms and this rank's parts of the weights after three steps; the last has one micro-batch, which leaves
    ranks without work."""
    fit.UNIT_BYTES, usual = 4096 if case.cut else fit.UNIT_BYTES, fit.UNIT_BYTES
    work = keyhole.Workload(case.method.row.name)
    where = {"init": "random", "device": device, "dtype": "float32", "workload": work} | case.how
    model = keyhole.load(config(case.family), ranks=ranks, seed=1, **where)
    fit.UNIT_BYTES = usual
    assert model.layout.has_cut_blocks == case.cut
    method = case.method(model, case.lr, **case.settings)
    numbers, before = [], getattr(ranks, "bytes_received", 0)
    for step in range(3):
        loss = method.step(micro_batches(step, count=4 if step < 2 else 1))
        told = method.metrics()
        numbers += [torch.as_tensor(one).double().cpu() for one in (loss, *(told.get(key, 0.0) for key in KEYS))]
    method.flush()
    parts = [(name, begin, part.cpu().clone()) for name, begin, part in model.own_tensors()]
    if model.methods.addon is not None and ranks.is_leader:
        parts += [(name, 0, param.detach().cpu().clone()) for name, param in model.methods.addon.params.items()]
    found = {"numbers": torch.stack(numbers), "parts": parts}
    found["bytes"] = sum(flat.nbytes for _, flat in model.engine.parts().values())
    cut = [unit.index for unit in model.layout.units if unit.kind in ("block", "head")]
    found["received_bytes"] = getattr(ranks, "bytes_received", 0) - before
    found["all_bytes"] = sum(t.shape.numel() for t in model.layout.tensors) * 4
    found["cut_bytes"] = sum(model.engine.homes[page].nbytes for page in cut)
    model.close()
    return found


def same_bits(one: dict[str, Any], two: dict[str, Any]) -> bool:
    pairs = zip(one["parts"], two["parts"], strict=True)
    return torch.equal(one["numbers"], two["numbers"]) and all(torch.equal(a[2], b[2]) for a, b in pairs)


class OfOne(group.Group):
    """One rank that does all that several do: units are shards, tensors go through the collectives."""

    several = True


@contextmanager
def alone() -> Iterator[Ranks]:
    group.Group = OfOne
    ranks = join._join()
    ranks.meet()
    yield ranks
    ranks.close()


def write_results(directory: Path, size: int, names: Iterable[str], device: str = "cpu") -> int:
    """Of these cases, as far as they are for so many ranks, in a file per rank; and the host memory of Adam's state."""
    torch.set_num_threads(1)
    with alone() if size == 1 else joined() as ranks:
        found = {"nccl": getattr(ranks, "nccl", None) is not None}
        for name in names:
            case = CASES[name]
            if case.size == size or device != "cpu":
                found[name] = results(case, ranks, device)
                found[name]["same"] = not case.again or same_bits(found[name], results(case, ranks, device))
        if device == "cpu" and "adam-offload" in names:
            found["memory"] = memory(OFFLOAD, ranks)
        torch.save(found, directory / f"{size} {ranks.rank}.pt")
    return 0


def write_memory(directory: Path, method: type) -> int:
    """Of a method, in a file of the leader."""
    torch.set_num_threads(1)
    with joined() as ranks:
        found = memory(method, ranks, STEPS_WATCHED)
        if ranks.is_leader:
            torch.save(found, directory / f"memory {ranks.size}.pt")
    return 0


def memory(method: type, ranks: Ranks, steps_watched: int = 0) -> dict[str, int]:
    """Of a resident model and a step of the method, one micro-batch per rank: bytes that were mapped for host memory,
    and bytes of what ranks share out. Of steps that are watched, the peak of PyTorch's allocator on the CPU, which is
    the device here, by its own count, the lowest of them (gloo lets go of what was sent when its threads get to it).
    The leader's: a profile takes more time than what it watches."""
    gc.collect()
    real, mapped = arena.host_memory, []
    arena.host_memory = lambda size_bytes: mapped.append(size_bytes) or real(size_bytes)
    watches = bool(steps_watched) and ranks.is_leader
    watched = profile(activities=[ProfilerActivity.CPU], profile_memory=True) if watches else nullcontext()
    try:
        with watched as profiler:
            shape = {"num_hidden_layers": 24 if steps_watched else 6, "num_attention_heads": 4}
            shape |= {"hidden_size": 64, "intermediate_size": 256}
            made = {"init": "random", "device": "cpu", "dtype": "float32"}
            made["workload"] = keyhole.Workload(method.row.name)
            model = keyhole.load(config("llama", **shape), ranks=ranks, **made)
            made_of_it = method(model, 1e-3, **({"threads": 1} if method is OFFLOAD else {}))
            for step in range(steps_watched or 1):
                with record_function(f"step {step}"):
                    made_of_it.step([batch() for _ in range(ranks.size)])
                ranks.barrier()
    finally:
        arena.host_memory = real
    cut = sum(unit.numel * 4 for unit in model.layout.units if unit.kind in ("block", "head"))
    model.close()
    found = {"host_bytes": sum(mapped), "cut_bytes": cut}
    if not watches:
        return found
    roots = sorted(profiler.profiler.kineto_results.experimental_event_tree(), key=lambda root: root.start_time_ns)
    first = min(next(counts for root in roots if (counts := _counts([root]))))
    peaks = [max(total for _, total, _ in _counts([root])) for root in roots if root.name.startswith("step ")]
    assert len(peaks) == steps_watched
    return found | {"device_bytes": min(peaks) - first[1] + first[2]}


def _counts(events: list[Any]) -> list[tuple[int, int, int]]:
    """(when, bytes allocated then, by how much that changed) of all allocations among these events and below."""
    found, events = [], list(events)
    while events:
        event = events.pop()
        events += event.children
        if event.tag == _EventType.Allocation:
            found.append((event.start_time_ns, event.extra_fields.total_allocated, event.extra_fields.alloc_size))
    return found
