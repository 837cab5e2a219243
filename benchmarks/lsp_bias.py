"""How much of a gradient projectors lose, on the gradients they were fitted to and on others.

    python benchmarks/lsp_bias.py [--quick] [--out benchmarks]          on a CPU, minutes

    bias = ||P P^T G Q Q^T - G|| / ||G||        GaLore: ||G P P^T - G|| / ||G||, P the leading singular vectors

Gradients of the embedded model on its own task: CALIBRATION batches to fit on, HELD_OUT others to be measured on, means
over all matrices. GaLore gets the memory of the projectors it is compared with, as the paper counts it (Table 2): m n +
(m + n) r for LSP, m n + (m + 3 n) rank for GaLore (projector, Adam's state of the compressed gradient), in numbers.

In lsp_bias.md fitted projectors of every kind lose less than GaLore at r = 1 and 4, on what they have seen and on what
they have not. At r = 16 only the kind `blocks` does; `free` and `runs` lose more than GaLore.
"""

import argparse
import json
from datetime import datetime
from pathlib import Path
from typing import Any

import torch

from keyhole.bench.report import commit, grid
from keyhole.disk.files import write_text
from keyhole.methods.baselines.galore import project, project_back, projector
from keyhole.methods.lsp.fit import bias, fit
from keyhole.ops.lsp.projector import KINDS, random_projector

CALIBRATION, HELD_OUT, BATCH = 4, 8, 16
SIZES = [(d, r) for d in (16, 32, 48) for r in (1, 4, 16)]
HEADER = "d|r|kind|random start|fitted, seen|fitted, held out|GaLore rank|GaLore, seen|GaLore, held out".split("|")
Grads = dict[str, list[torch.Tensor]]


def gradients(counts: tuple[int, ...], seed: int = 0, every: int = 1) -> list[Grads]:
    """Gradients of the embedded model's matrices, by name: one list for each count of batches, no batch twice."""
    import keyhole
    from keyhole import assets
    from keyhole.data.loader import Loader
    from keyhole.data.prepare import prepare
    from keyhole.model.batch import as_list, to_device

    model = keyhole.load(assets.MODEL, dtype="float32", device="cpu")
    dataset = prepare(str(assets.TRAIN), model.tokenizer, max_length=128)
    loader = Loader(dataset, BATCH, seed=seed, pad_to_multiple_of=1)
    matrices = [t for t in model.layout.tensors if t.block is not None and len(t.shape) == 2][::every]
    found: list[Grads] = [{t.name: [] for t in matrices} for _ in counts]
    for grads, count in zip(found, counts, strict=True):
        for _ in range(count):
            (batch,) = (to_device(b, model.device) for b in as_list(loader.next_step()))
            (model.head.loss_sum(model.hidden(batch), batch.target_N) / batch.token_count).backward()
            for t in matrices:
                grads[t.name].append(t.param.grad)
            model.module.zero_grad()
    return found


def equal_rank(shape: torch.Size, r: int) -> int:
    """The rank at which GaLore takes the memory of a (d, r)-sparse pair; at least 1."""
    short, long = sorted(shape)
    return max(1, (short + long) * r // (short + 3 * long))


def galore_bias(seen: list[torch.Tensor], others: list[torch.Tensor], rank: int) -> float:
    """Mean over `others`, with the subspace of the sum of `seen`."""
    p = projector(torch.stack(seen).sum(0), rank)
    errors = [(project_back(project(g, p), p, g.shape) - g).norm() / g.norm() for g in others]
    return float(torch.stack(errors).mean())


def mean_bias(grads: list[torch.Tensor], p: Any, q: Any) -> float:
    return float(torch.stack([bias(grad, p, q) for grad in grads]).mean())


def one_line(kind: str, d: int, r: int, seen: Grads, held: Grads) -> dict[str, Any]:
    """Means over the matrices of both sets."""
    rows = []
    for i, (name, grads) in enumerate(seen.items()):
        shape, others = grads[0].shape, held[name]
        start = [random_projector(kind, rows, d, r, seed=2 * i + side) for side, rows in enumerate(shape)]
        pair, rank = fit(grads, *start), equal_rank(shape, r)
        galore = [galore_bias(grads, some, rank) for some in (grads, others)]
        rows.append([mean_bias(others, *start), mean_bias(grads, *pair), mean_bias(others, *pair), rank, *galore])
    means = [sum(column) / len(rows) for column in zip(*rows, strict=True)]
    keys = ("random", "seen", "held_out", "rank", "galore_seen", "galore_held_out")
    return {"d": d, "r": r, "kind": kind, **dict(zip(keys, means, strict=True))}


def bench_bias(*, out: Path, quick: bool = False, say: Any = print) -> str:
    """Runs all, writes JSON and Markdown, returns the latter."""
    seen, held = gradients((1, 1) if quick else (CALIBRATION, HELD_OUT), every=7 if quick else 1)
    lines = []
    for d, r in SIZES[1:2] if quick else SIZES:
        for kind in KINDS:
            lines.append(one_line(kind, d, r, seen, held))
            say(json.dumps(lines[-1]))
    about = {"commit": commit(), "date": datetime.now().isoformat(timespec="seconds")}
    stem = "lsp_bias" + ("_quick" if quick else "")
    out.mkdir(parents=True, exist_ok=True)
    write_text(out / f"{stem}.json", json.dumps({**about, "lines": lines}, indent=1) + "\n")
    write_text(out / f"{stem}.md", text := _markdown(lines, about))
    return text


def _markdown(lines: list[dict[str, Any]], about: dict[str, str]) -> str:
    rows = [[f"{value:.3f}" if isinstance(value, float) else str(value) for value in line.values()] for line in lines]
    note = (
        "Relative bias of compressed gradients of the embedded model (matrices of 64 x 64 and 192 x 64); 0 is perfect."
    )
    head = [f"- {key}: {value}" for key, value in about.items()] + ["- reproduce: `python benchmarks/lsp_bias.py`"]
    return "\n\n".join(["# Bias of projectors", "\n".join(head), note, grid(HEADER, rows)]) + "\n"


if __name__ == "__main__":
    ask = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    ask.add_argument("--quick", action="store_true", help="one size, few matrices")
    ask.add_argument("--out", type=Path, default=Path("benchmarks"))
    args = ask.parse_args()
    print("\n" + bench_bias(out=args.out, quick=args.quick))
