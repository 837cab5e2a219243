"""Our kernels beside the speed of memory: a row each, with its floor and, where there is one, what torch does instead.

    python benchmarks/kernels.py [--only zo,lsp]      needs a GPU, a minute
    python benchmarks/kernels.py --quick              tiny shapes on a CPU, to see that everything runs

Times on a GPU are those of a CUDA graph of the calls, so that launches take none. The floor is the bytes that a kernel
must read and write, at the rate of a large copy of the same run. Shapes: 2^28 weights for `zo` and formats, the seven
matrices of a Llama-3-8B block for `lomo` and `lsp` (4096 tokens), an OPT-13B block and two passes of 1024 tokens for
`low rank`. `adam` is the update in host memory, on the CPU in any case.
"""

import argparse
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch

from keyhole import ops
from keyhole.bench.measure import copy_rate
from keyhole.ops.adam import host_adamw_
from keyhole.ops.lowbit import Grid, lowbit_decode
from keyhole.ops.noise.words import DISTRIBUTIONS
from keyhole.ops.zo.element import ZOStep
from keyhole.plan.measure import wait

BLOCK = [(4096, 4096)] * 2 + [(1024, 4096)] * 2 + [(14336, 4096)] * 2 + [(4096, 14336)]
ROUNDINGS, QUICK_SHRINK = ("nearest", "stochastic"), 64
PASSES, RANK, R = 2, 2, 4


@dataclass(frozen=True)
class Row:
    """A kernel: what runs, the bytes that it must move, and what torch does instead."""

    name: str
    run: Callable[[], object]
    bytes: int
    instead: Callable[[], object] | None = None
    on_cpu: bool = False


@dataclass(frozen=True)
class Place:
    """Where the rows run, and how much smaller their shapes are."""

    device: torch.device
    shrink: int

    def drawn(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.randn(shape, device=self.device).mul_(0.02).to(dtype)

    @property
    def block(self) -> list[tuple[int, int]]:
        return [(rows // self.shrink, columns // self.shrink) for rows, columns in BLOCK]


def zo(place: Place) -> Iterator[Row]:
    """Update, perturbed copies, and both in one pass; torch draws and adds as often as MeZO's loop does."""
    for dtype in (torch.bfloat16, torch.float32):
        w, plus, minus, z = (place.drawn((1 << 28) // place.shrink**2, dtype=dtype) for _ in range(4))
        coef = torch.tensor([1e-6, 0.5], device=place.device)
        changed = torch.zeros((), dtype=torch.int64, device=place.device)

        def textbook(times: int, w: torch.Tensor = w, z: torch.Tensor = z) -> None:
            for _ in range(times):
                w.add_(z.normal_(), alpha=1e-9)

        for kind in DISTRIBUTIONS:
            perturb = ZOStep(1 << 33, 1, kind, eps=1e-3, step=2)
            both = replace(perturb, coef=coef, update_step=1, changed=changed)
            name, copies = f"zo {kind} {str(dtype)[6:]}", (w, plus, minus)
            yield Row(f"{name}, update", lambda w=w, how=both: ops.zo_flat_(w, None, None, how), 2 * w.nbytes)
            yield Row(f"{name}, perturb", lambda all=copies, how=perturb: ops.zo_flat_(*all, how), 3 * w.nbytes)
            run = lambda all=copies, how=both: ops.zo_flat_(*all, how)  # noqa: E731
            yield Row(f"{name}, both", run, 4 * w.nbytes, lambda: textbook(4))


def lomo(place: Place) -> Iterator[Row]:
    """The update of a block by its gradients, with the sums that a step keeps and without."""
    weights, grads = ([place.drawn(*shape) for shape in place.block] for _ in range(2))
    count = torch.zeros((), dtype=torch.int64, device=place.device)
    sums = {"sum_squares": torch.zeros((), device=place.device), "bad": count.int(), "changed": count}
    for rounding in ROUNDINGS:
        for what, more in (("with sums", sums), ("alone", {})):

            def update(more: dict = more, rounding: str = rounding) -> None:
                for i, (w, grad) in enumerate(zip(weights, grads, strict=True)):
                    ops.sgd_update_(w, grad, lr=1e-4, step=1, offset=i << 30, rounding=rounding, **more)

            yield Row(f"lomo {rounding}, {what}", update, 6 * sum(w.numel() for w in weights))


def lsp(place: Place) -> Iterator[Row]:
    """Both sides of a gradient compressed, and the update of the weights. Torch: the gradients, and fused AdamW."""
    weights = [place.drawn(*shape) for shape in place.block]
    sides = [[place.drawn(4096 // place.shrink, side) for side in shape] for shape in place.block]
    params = [w.clone().requires_grad_() for w in weights]
    for p in params:
        p.grad = torch.randn_like(p)
    adamw = torch.optim.AdamW(params, fused=True, capturable=place.device.type == "cuda")
    side_bytes, numel = sum(x.nbytes for pair in sides for x in pair), sum(w.numel() for w in weights)
    for kind in ("blocks", "free"):
        for d in (2048 // place.shrink, 512 // place.shrink):
            pairs = [
                [ops.random_projector(kind, side, d, R, seed=i, device=place.device) for side in shape]
                for i, shape in enumerate(place.block)
            ]
            deltas = [place.drawn(p.d, q.d, dtype=torch.float32) for p, q in pairs]

            def compress(pairs: list = pairs) -> None:
                for both in zip(sides, pairs, strict=True):
                    for x, p in zip(*both, strict=True):
                        ops.compress(x, p)

            name = f"lsp {kind} d={d}"
            yield Row(f"{name}, compress", compress, side_bytes, lambda: [y.t() @ x for y, x in sides])
            for rounding in ROUNDINGS:

                def decompress(pairs: list = pairs, deltas: list = deltas, rounding: str = rounding) -> None:
                    for w, delta, (p, q) in zip(weights, deltas, pairs, strict=True):
                        ops.decompress_add_(w, delta, p, q, 1e-4, rounding=rounding, step=1)

                yield Row(f"{name}, decompress {rounding}", decompress, 4 * numel, adamw.step)


def low_rank(place: Place) -> Iterator[Row]:
    """What an OPT-13B block runs beside its products; buffers that do not fit the L2 cache together."""
    rows, width, full = 1024 // place.shrink, 5120 // place.shrink, torch.float32
    p_LMr, a_pass = place.drawn(PASSES, rows, RANK, dtype=full), 2 * PASSES * rows * width
    added = [(place.drawn(PASSES, RANK, width, dtype=full), place.drawn(PASSES, width)) for _ in range(3)]
    inputs, v_kI = [place.drawn(PASSES * rows, width) for _ in range(4)], place.drawn(4 * RANK, width)
    yield Row("low rank widen", lambda: [ops.widen(p_LMr, *each, torch.bfloat16) for each in added], 3 * a_pass)
    narrow, products = (lambda: [ops.narrow(x, v_kI) for x in inputs]), (lambda: [x @ v_kI.t() for x in inputs])
    yield Row("low rank narrow", narrow, 4 * a_pass, products)
    w, a_rO, v_rI = place.drawn(width, width), place.drawn(RANK, width, dtype=full), place.drawn(RANK, width)
    yield Row("low rank fold", lambda: ops.fold_(w, a_rO, v_rI, rounding="stochastic"), 2 * w.nbytes)


def formats(place: Place) -> Iterator[Row]:
    """Frozen weights from 4 and 8 bits to bfloat16."""
    n = (1 << 28) // place.shrink**2
    out = torch.empty(n, dtype=torch.bfloat16, device=place.device)
    for grid in (Grid("int4"), Grid("nf4"), Grid("int8")):
        codes = torch.randint(0, 256, (grid.code_bytes(n),), dtype=torch.uint8, device=place.device)
        scales = torch.rand(grid.scale_count(n), device=place.device).half()
        decode = lambda codes=codes, scales=scales, grid=grid: lowbit_decode(codes, scales, out, grid)  # noqa: E731
        yield Row(f"formats, from {grid.name}", decode, codes.nbytes + scales.nbytes + out.nbytes)


def adam(place: Place) -> Iterator[Row]:
    """28 bytes per parameter in host memory, from a 16-bit gradient to a 16-bit weight; torch's kernel, all in fp32."""
    numel = 400_000_000 // place.shrink**2
    state, grad = [torch.zeros(numel) for _ in range(3)], torch.full((numel,), 1e-3, dtype=torch.bfloat16)
    full, rule = grad.float(), {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "weight_decay": 0.0, "eps": 1e-8}
    kinds, count = {"amsgrad": False, "maximize": False}, [torch.tensor(1.0)]
    w, m, v = ([each] for each in state)
    native = lambda: torch._fused_adamw_(w, [full], m, v, [], count, **rule, **kinds)  # noqa: E731
    for per_thread in (32, 128, 256):
        scratch = torch.empty(per_thread * 1024 * torch.get_num_threads())
        run = lambda s=scratch: host_adamw_(*state, grad, grad, step=1, lr=1e-3, scratch=s)  # noqa: E731
        yield Row(f"adam on the host, {per_thread} Ki a thread", run, 28 * numel, native, on_cpu=True)


KINDS = {"zo": zo, "lomo": lomo, "lsp": lsp, "low rank": low_rank, "formats": formats, "adam": adam}


def milliseconds(run: Callable[[], object], graph: bool) -> float:
    """The fastest of a few runs; on a GPU of a CUDA graph that is replayed ten times each."""
    run()
    wait(torch.device("cuda" if graph else "cpu"))
    replayed, times = run, []
    if graph:
        recorded = torch.cuda.CUDAGraph()
        with torch.cuda.graph(recorded):
            run()
        replayed = recorded.replay
    for _ in range(3):
        begin_s = time.perf_counter()
        for _ in range(10 if graph else 1):
            replayed()
        wait(torch.device("cuda" if graph else "cpu"))
        times.append(1e3 * (time.perf_counter() - begin_s) / (10 if graph else 1))
    return min(times)


@torch.no_grad()
def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(KINDS))
    parser.add_argument("--quick", action="store_true")
    asked = parser.parse_args(argv)
    place = Place(torch.device("cpu" if asked.quick else "cuda"), QUICK_SHRINK if asked.quick else 1)
    rates = {on_cpu: copy_rate(torch.device("cpu") if on_cpu else place.device) for on_cpu in (False, True)}
    print(f"copies of {rates[False] / 1e9:.0f} GB/s, on the host {rates[True] / 1e9:.0f}; {ops.describe()}")
    print(f"{'kernel':40} {'ms':>9} {'floor':>9} {'x floor':>8} {'torch ms':>9}", flush=True)
    for kind in asked.only.split(","):
        for row in KINDS[kind](place):
            graph = place.device.type == "cuda" and not row.on_cpu
            ms, floor_ms = milliseconds(row.run, graph), 1e3 * row.bytes / rates[row.on_cpu]
            instead = f"{milliseconds(row.instead, graph):9.3f}" if row.instead else ""
            print(f"{row.name:40} {ms:9.3f} {floor_ms:9.3f} {ms / floor_ms:8.2f} {instead}", flush=True)


if __name__ == "__main__":
    main()
