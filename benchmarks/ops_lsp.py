"""Times the parts of LSP for the seven matrices of a Llama-7B layer (needs a GPU, half a minute).

    python benchmarks/ops_lsp.py [d ...]        microseconds, median of 20; 4096 tokens, bfloat16, r = 4
    python benchmarks/ops_lsp.py --host         only Adam's step on the CPU, d = 2048; all cores but one

For comparison: weight gradients by matrix products, and torch's fused AdamW with fp32 states; on the CPU, the same step
through a scratch buffer, in fp32 and from and to bfloat16.
"""

import sys
import time
from collections.abc import Callable

import torch

from keyhole import ops
from keyhole.methods.lsp.adam import adam_delta_
from keyhole.offload.workers import default_threads

WIDTH, MLP, TOKENS, R = 4096, 11008, 4096, 4
SHAPES = [(WIDTH, WIDTH)] * 4 + [(MLP, WIDTH)] * 2 + [(WIDTH, MLP)]


def time_us(run: Callable[[], None]) -> float:
    """Median, warmed up."""
    times = []
    for i in range(25):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        end.synchronize()
        times += [begin.elapsed_time(end) * 1e3] if i >= 5 else []
    return sorted(times)[len(times) // 2]


def show(name: str, run: Callable[[], None]) -> None:
    print(f"{name:50} {time_us(run):8.0f} us", flush=True)


def layer(kind: str, d: int) -> None:
    """All parts of one layer."""
    pairs = [
        [ops.random_projector(kind, side, d, R, seed=i, device="cuda") for side in s] for i, s in enumerate(SHAPES)
    ]
    sides = [[torch.randn(TOKENS, side, device="cuda").bfloat16() for side in shape] for shape in SHAPES]
    low = [[ops.compress(x, p) for x, p in zip(*both, strict=True)] for both in zip(sides, pairs, strict=True)]
    weights = [torch.randn(shape, device="cuda").bfloat16() for shape in SHAPES]
    state = [[torch.zeros(p.d, q.d, device="cuda") for p, q in pairs] for _ in range(4)]
    steps = [torch.ones((), device="cuda") for _ in SHAPES]
    how = {"lr": 1.0, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.0, "amsgrad": False}
    how |= {"maximize": False, "grad_scale": None, "found_inf": torch.zeros((), device="cuda")}

    def decompress(rounding: str) -> None:
        for w, delta, (p, q) in zip(weights, state[0], pairs, strict=True):
            ops.decompress_add_(w, delta, p, q, 1e-4, rounding=rounding, step=1)

    name = f"{kind} d={d}"
    show(f"{name}: compress dY", lambda: [ops.compress(x[0], p[0]) for x, p in zip(sides, pairs, strict=True)])
    show(f"{name}: compress X", lambda: [ops.compress(x[1], p[1]) for x, p in zip(sides, pairs, strict=True)])
    products = list(zip(low, state[1], strict=True))
    show(f"{name}: product", lambda: [torch.mm(a.t(), b, out_dtype=torch.float32, out=s) for (a, b), s in products])
    show(f"{name}: adam", lambda: torch._fused_adamw_(*state, [], steps, **how))
    for rounding in ("nearest", "stochastic"):
        show(f"{name}: decompress {rounding}", lambda r=rounding: decompress(r))


def native() -> None:
    """What the other way costs."""
    sides = [[torch.randn(TOKENS, side, device="cuda").bfloat16() for side in shape] for shape in SHAPES]
    params = [torch.randn(shape, device="cuda").bfloat16().requires_grad_() for shape in SHAPES]
    for p in params:
        p.grad = torch.randn_like(p)
    adamw = torch.optim.AdamW(params, fused=True)
    show("native: weight gradients", lambda: [dy.t() @ x for dy, x in sides])
    show("native: fused AdamW, bf16 states", adamw.step)


def host() -> None:
    """Adam's step of one layer on the CPU: in place, as it is done, and as it could be."""
    torch.set_num_threads(default_threads())
    numel, steps, rule = len(SHAPES) * 2048**2, [torch.tensor(3.0)], {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8}
    grad, m, v = torch.randn(numel) * 1e-3, torch.randn(numel) * 1e-4, torch.rand(numel) * 1e-6
    half, scratch = grad.bfloat16(), torch.empty(2**17 * torch.get_num_threads())

    def by_scratch(source: torch.Tensor) -> None:
        for g, *moments in zip(*(flat.split(scratch.numel()) for flat in (source, m, v)), strict=True):
            chunk = scratch[: g.numel()].copy_(g)
            adam_delta_([chunk], *([x] for x in moments), steps, rule)
            g.copy_(chunk)

    trials = {"in place": lambda: adam_delta_([grad], [m], [v], steps, rule)}
    trials |= {"scratch, fp32": lambda: by_scratch(grad), "scratch, bf16": lambda: by_scratch(half)}
    for name, run in trials.items():
        times = []
        for _ in range(10):
            begin_s = time.perf_counter()
            run()
            times.append(time.perf_counter() - begin_s)
        median_s = sorted(times)[len(times) // 2]
        rate = numel / median_s / 1e9
        print(f"host, {torch.get_num_threads()} threads: {name:20} {median_s * 1e6:8.0f} us, {rate:.2f} G/s")


if __name__ == "__main__":
    with torch.no_grad():
        host()
        if "--host" in sys.argv:
            sys.exit()
        native()
        for d in [int(word) for word in sys.argv[1:]] or [2048, 512]:
            for kind in ("blocks", "runs"):
                layer(kind, d)
