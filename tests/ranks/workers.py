"""What ranks compute in the tests: many properties in one start of processes, results in files."""

import random
from pathlib import Path
from typing import Any

import torch

import keyhole
from keyhole.data.dataset import Sample
from keyhole.data.tasks.question import Question
from keyhole.eval.generate import generate_answers
from keyhole.eval.rows import score_rows
from keyhole.methods.zo import update
from keyhole.model.structure import find
from keyhole.model.structure.find import STACK_NUMEL
from keyhole.ranks import Ranks
from keyhole.ranks.join import joined
from keyhole.training.validation import evaluate
from tests.model.decoders import batch, config
from tests.model.streaming import streamed

STEPS, LR = 2, 1e-3


def micro_batches(step: int, count: int = 3) -> list[dict[str, torch.Tensor]]:
    """Of different sizes, so that a mean of means would be wrong."""
    return [batch(rows=1 + i % 2, length=8 + i, seed=10 * step + i) for i in range(count)]


def zo_results(ranks: Ranks, name: str, **settings: Any) -> dict[str, torch.Tensor]:
    """Losses and weights after two steps of zo: resident in one process, streamed on several ranks, in single matrices
    through a poisoned slot, with write-backs every second step."""
    model = keyhole.load(config(name), init="random", device="cpu", dtype="float32")
    if ranks.several:
        model = streamed(model, max_unit_numel=1, slot_count=1, chaos=random.Random(ranks.rank))
        model.ranks = ranks
    method = keyhole.ZO(model, LR, **settings, write_back_every=2 if ranks.several else None)
    losses = [method.step(micro_batches(step, count=5)) for step in range(STEPS)]
    method.flush()
    found = {"losses": torch.stack(losses), **{n: t.clone() for n, t in model.named_tensors()}}
    model.close()
    return found


SHARED: dict[str, dict[str, Any]] = {"dense": {}, "low rank": {"rank": 2, "refresh": 2}, "packed": {}, "experts": {}}
SHARED |= {"guided": {"rank": 1, "refresh": 3, "guide": 64}}


def shared_results(directory: Path, device: str = "cpu") -> int:
    """Five steps of a streamed model whose blocks two ranks share: losses, weights, `changed`; and the memory of the
    shared mapping, as the kernel divides it among those who map it."""
    torch.set_num_threads(1)
    with joined() as ranks:
        found = {case: run_shared(ranks, device, case) for case in SHARED}
        torch.save(found, directory / f"{ranks.rank}.pt")
    return 0


def run_shared(ranks: Ranks, device: str = "cpu", case: str = "dense") -> dict[str, Any]:
    """With flushes, evaluations of which every rank makes another number, and a step with work for one rank only."""
    how: dict[str, Any] = {"init": "random", "device": device, "dtype": "bfloat16", "placement": "stream"}
    how |= {"workload": keyhole.Workload("zo", tokens=64), "wire": "fp8" if case == "packed" else None}
    find.STACK_NUMEL = 0 if case == "experts" else STACK_NUMEL
    shape = config("mixtral", num_local_experts=8) if case == "experts" else config("llama", intermediate_size=256)
    model = keyhole.load(shape, seed=3, ranks=ranks, chaos=random.Random(ranks.rank), **how)
    method = keyhole.ZO(model, 1e-2, distribution="rademacher", **SHARED[case])
    update.SHARED_EVERY = 2
    losses, changed, scores = [], [], []
    for step in range(5):
        losses.append(method.step(micro_batches(step, count=1 if step == 2 else 3)))
        changed.append(method.update.changed.clone())
        if step == 1:
            scores = [model.nll(batch())[0] for _ in range(1 + ranks.rank)]
        if step == 3:
            method.flush()
            changed.append(method.update.changed.clone())
    method.flush()
    found = {"losses": torch.stack(losses).cpu(), "changed": torch.stack([*changed, method.update.changed]).cpu()}
    found["score"] = scores[0].cpu()
    found |= {name: tensor.cpu().clone() for name, tensor in model.named_tensors()}
    homes = model.engine.homes
    blocks = [u.index for u in model.layout.of_kind("block")]
    found["shared"], found["block_bytes"] = sorted(model.engine.shared), sum(homes[i].nbytes for i in blocks)
    found["pss_bytes"] = mapped_bytes("memfd:keyhole")
    ranks.barrier()
    model.close()
    return found


def mapped_bytes(name: str) -> int:
    """Of this process's mappings with this name: its share of the memory behind them."""
    total, ours = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split()[0]:
            ours = name in line
        elif ours and line.startswith("Pss:"):
            total += 1024 * int(line.split()[1])
    return total


def evaluation_results(ranks: Ranks, directory: str) -> dict[str, Any]:
    """Scores and answers of a model, streamed, whole on every rank and in parts: rows of many lengths, held-out batches
    (more and fewer than ranks), and questions."""
    found: dict[str, Any] = {}
    rows = [Sample(list(range(5, 7 + n)), [-100, *range(6, 7 + n)]) for n in range(1, 12)]
    questions = [Question(text, ("x",), 0) for text in ("The soup", "A", "Bread was warm and", "Stamp:", "1 + 1 =")]
    for method in ("zo", "lomo"):
        how = {"device": "cpu", "placement": "stream", "workload": keyhole.Workload(method, tokens=64)}
        model = keyhole.load(directory, ranks=ranks, **how)
        nll_R, count_R = score_rows(model, rows, batch_tokens=20, passes=2)
        answers = generate_answers(model, questions, max_new_tokens=4, batch_tokens=20)
        held_out = [evaluate(model, micro_batches(0, count)) for count in (1, 5, 11)]
        found[method] = {"nll": nll_R, "count": count_R, "answers": answers, "held out": held_out}
        model.close()
    return found
