"""How far the passes of a zeroth-order step are from memory bandwidth, and what would bring them closer.

    python benchmarks/ops_noise.py                         the table below, on this GPU (about 20 s)
    python benchmarks/ops_noise.py --normal fast           the hardware's log, sqrt, sin, cos instead of exact ones
    python benchmarks/ops_noise.py --warps 4 --rounds 10   other launch shapes, more rounds of Philox
    python benchmarks/ops_noise.py --sweep                 one line per variant, each in a separate process
    python benchmarks/ops_noise.py --device cpu            the reference on one core

Per op, dtype and size: the time, the floor (bytes it must move / measured copy speed), their ratio, and the same
work in the textbook form (`normal_` and `add_` per pass). Variants other than the default change the random numbers of
a run: they only show the cost of exactness, and are not for use.
"""

import argparse
import math
import statistics
import subprocess
import sys
import time
from dataclasses import replace

import torch

from keyhole import ops
from keyhole.ops import backend
from keyhole.ops.arguments import DTYPES
from keyhole.ops.backend import jit, tl
from keyhole.ops.noise import index, philox, tiles
from keyhole.ops.noise.gaussian import SCALE, turn
from keyhole.ops.zo import flat as zo
from keyhole.ops.zo.element import ZOStep

VARIANTS = [
    "",
    "--warps 4",
    "--warps 16",
    "--registers 128",
    "--registers 64",
    "--rounds 10",
    "--fma",
    "--normal mixed --fma",
    "--normal fast",
    "--normal fast --fma",
]
SIZES = {torch.bfloat16: (1 << 22, 1 << 26, 1 << 29), torch.float32: (1 << 28,)}


_SCALE = tl.constexpr(SCALE)
_LOG2, _SQRT = tl.constexpr("lg2.approx.ftz.f32 $0, $1;"), tl.constexpr("sqrt.approx.ftz.f32 $0, $1;")
_SIN, _COS = tl.constexpr("sin.approx.ftz.f32 $0, $1;"), tl.constexpr("cos.approx.ftz.f32 $0, $1;")


@jit()
def _special(x, ASM: tl.constexpr):
    """One instruction of the special function unit."""
    return tl.inline_asm_elementwise(ASM, "=f,f", [x], tl.float32, is_pure=True, pack=1)


@jit()
def _fast_radius(a):
    """r by the special function unit; near u1 = 1, where its log is not accurate, by series."""
    v = (0xFFFFFF - (a >> 8)).to(tl.float32) * 5.9604644775390625e-08  # 1 - u1, exact
    series = v * (2.0 + v * (1.0 + v * (0.6666667 + v * 0.5)))
    return _special(tl.where(v < 0.0625, series, _special(1.0 - v, _LOG2) * -1.3862943611198906), _SQRT)


@jit()
def mixed_gaussian_pair(a, b):
    """Box-Muller with the radius by the special function unit and the package's sine and cosine."""
    r = _fast_radius(a) * _SCALE
    r = (r.to(tl.uint32, bitcast=True) ^ (b & 0x80000000)).to(tl.float32, bitcast=True)
    even, odd = turn(b)
    return even * r, odd * r


@jit()
def fast_gaussian_pair(a, b):
    """Box-Muller by the special function unit alone; its sine and cosine are off by up to 5e-7."""
    r = _fast_radius(a)
    angle = (b.to(tl.int32, bitcast=True) >> 8).to(tl.float32) * 3.7450702829239286e-07
    return r * _special(angle, _COS), r * _special(angle, _SIN)


class Tuned:
    """A kernel launched with other compiler options than the package's."""

    def __init__(self, kernel, **options) -> None:
        self.kernel, self.options = kernel, options

    def __getitem__(self, grid):
        return lambda *args, **kwargs: self.kernel[grid](*args, **kwargs | self.options)


def apply_variant(args: argparse.Namespace) -> None:
    """Replace the constants and functions that the kernels will look up when they are compiled."""
    options = {"num_warps": args.warps, "enable_fp_fusion": args.fma}
    if args.registers:
        options["maxnreg"] = args.registers
    zo._zo_kernel = Tuned(zo._zo_kernel, **options)
    tiles._noise_kernel = Tuned(tiles._noise_kernel, **options)
    index._ROWS = tl.constexpr(index.WIDTH // (32 * args.warps))
    philox._ROUNDS = tl.constexpr(args.rounds)
    pairs = {"exact": tiles.gaussian_pair, "mixed": mixed_gaussian_pair, "fast": fast_gaussian_pair}
    tiles.gaussian_pair = pairs[args.normal]


def seconds(run, repeats: int = 9) -> float:
    """Median time of one call on the GPU, after two that do not count."""
    run(), run()
    times = []
    for _ in range(repeats):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) * 1e-3)
    return statistics.median(times)


def copy_bytes_per_s() -> float:
    """Device copy, bytes read plus bytes written."""
    source = torch.empty(1 << 30, dtype=torch.int32, device="cuda").random_()
    target = torch.empty_like(source)
    return 2 * source.nbytes / seconds(lambda: target.copy_(source))


def passes(n: int, dtype: torch.dtype, distribution: str) -> dict[str, tuple]:
    """Op -> (call, bytes it must move, the same the textbook way)."""
    w = (torch.randn(n, device="cuda") * 0.02).to(dtype)
    plus, minus, z = torch.empty_like(w), torch.empty_like(w), torch.empty_like(w)
    coef = torch.tensor([1e-6, 0.5], device="cuda")
    changed = torch.zeros((), dtype=torch.int64, device="cuda")
    perturb = ZOStep(1 << 33, 1, distribution, eps=1e-3, step=2)
    both = replace(perturb, coef=coef, update_step=1, changed=changed)

    def textbook_pass() -> None:
        z.normal_()
        w.add_(z, alpha=1e-9)

    def textbook_step() -> None:
        for _ in range(4):
            textbook_pass()

    return {
        "update": (lambda: ops.zo_flat_(w, None, None, both), 2 * w.nbytes, textbook_pass),
        "perturb": (lambda: ops.zo_flat_(w, plus, minus, perturb), 3 * w.nbytes, textbook_pass),
        "fused": (lambda: ops.zo_flat_(w, plus, minus, both), 4 * w.nbytes, textbook_step),
    }


def table(bytes_per_s: float) -> None:
    """One line per op, dtype, distribution and size."""
    print(
        f"{'op':8} {'dtype':9} {'noise':11} {'elements':>12} {'ms':>9} {'floor ms':>9} {'x floor':>8} "
        f"{'textbook ms':>12}"
    )
    for dtype, sizes in SIZES.items():
        for n in sizes:
            for distribution in index.DISTRIBUTIONS:
                for name, (run, must_move, textbook) in passes(n, dtype, distribution).items():
                    if n < max(sizes) and (name != "fused" or distribution != "gaussian"):
                        continue
                    took, floor, book = seconds(run), must_move / bytes_per_s, seconds(textbook, 5)
                    print(
                        f"{name:8} {str(dtype)[6:]:9} {distribution:11} {n:12,} {took * 1e3:9.3f} "
                        f"{floor * 1e3:9.3f} {took / floor:8.2f} {book * 1e3:12.3f}",
                        flush=True,
                    )


def accuracy(n: int = 1 << 22) -> None:
    """The GPU's gaussians against float64 Box-Muller of the same words, and against the CPU reference."""
    draw = dict(seed=3, step=4, direction=0)
    made = ops.draw_noise(n, offset=0, device="cuda", **draw)
    worst, total = 0.0, 0.0
    for start in range(0, n, index.CHUNK):
        words = index.words_reference(start, index.CHUNK, tiles.TILE, seed=3, step=4, stream=0, device=made.device)
        words_4TW = words.view(4, -1, index.WIDTH)
        u1_2TW = (((words_4TW[0::2].long() & 0xFFFFFFFF) >> 9).double() + 0.5) * 2**-23
        r_2TW = (-2 * u1_2TW.log()).sqrt() * torch.where(words_4TW[1::2] < 0, -1, 1)
        angle_2TW = math.pi * (words_4TW[1::2] & 0x7FFFFF).double() * 2**-23
        exact_22TW = torch.stack([r_2TW * angle_2TW.cos(), r_2TW * angle_2TW.sin()], dim=1)
        exact = exact_22TW.flatten(0, 1).transpose(0, 1).reshape(-1)
        error = (made[start : start + index.CHUNK].double() - exact).abs()
        worst, total = max(worst, error.max().item()), total + error.sum().item()
    equal = torch.equal(made.cpu(), ops.draw_noise(n, offset=0, **draw))
    print(
        f"gaussian on the GPU against float64: largest error {worst:.2e}, mean {total / n:.2e}; "
        f"bit for bit the CPU's: {'yes' if equal else 'no'}"
    )


def cpu() -> None:
    """The reference on one core, milliseconds for 2^20 elements."""
    torch.set_num_threads(1)
    n, coef = 1 << 20, torch.tensor([1e-3, 0.5])
    runs = {
        f"noise {d}": lambda d=d: ops.draw_noise(n, offset=0, seed=1, step=2, distribution=d)
        for d in index.DISTRIBUTIONS
    }
    for dtype in DTYPES:
        w = (torch.randn(n) * 0.02).to(dtype)
        plus, minus = torch.empty_like(w), torch.empty_like(w)
        how = ZOStep(0, 1, coef=coef, update_step=1, eps=1e-3, step=2)
        runs[f"fused {str(dtype)[6:]}"] = lambda w=w, plus=plus, minus=minus, how=how: ops.zo_flat_(w, plus, minus, how)
    for name, run in runs.items():
        times = []
        for _ in range(5):
            start = time.thread_time()
            run()
            times.append(time.thread_time() - start)
        print(f"{name:18} {min(times) * 1e3:7.1f} ms of one core per 2^20 elements")


def one_line(bytes_per_s: float, label: str) -> None:
    """The fused pass over 2^28 bfloat16 weights, gaussian."""
    run, must_move, _ = passes(1 << 28, torch.bfloat16, "gaussian")["fused"]
    took = seconds(run)
    print(f"{label or 'default':28} {took * 1e3:8.3f} ms, {took * bytes_per_s / must_move:5.2f} x floor")


def sweep() -> None:
    """Every variant in its own process, because a compiled kernel keeps the constants it saw."""
    for variant in VARIANTS:
        command = [sys.executable, __file__, "--line", *variant.split()]
        done = subprocess.run(command, capture_output=True, text=True)
        print(done.stdout.strip() or f"{variant}: failed\n{done.stderr[-800:]}", flush=True)


def main() -> None:
    plain = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=plain)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--warps", type=int, choices=[4, 8, 16], default=index.NUM_WARPS)
    parser.add_argument("--rounds", type=int, default=philox.ROUNDS)
    parser.add_argument("--registers", type=int, default=0, help="limit a thread; 0: as the package does")
    parser.add_argument("--normal", choices=["exact", "mixed", "fast"], default="exact")
    parser.add_argument("--fma", action="store_true", help="let the compiler fuse multiply and add")
    parser.add_argument("--line", action="store_true", help="only the fused pass, on one line")
    parser.add_argument("--sweep", action="store_true", help="one line for each of several variants")
    args = parser.parse_args()
    if args.device == "cpu":
        return cpu()
    if not torch.cuda.is_available() or backend.TRITON_MISSING or backend.INTERPRETED:
        sys.exit(f"needs a CUDA device and compiled Triton kernels, or --device cpu. {ops.describe()}")
    if args.sweep:
        return sweep()
    apply_variant(args)
    bytes_per_s = copy_bytes_per_s()
    if args.line:
        return one_line(bytes_per_s, " ".join(sys.argv[1:]).replace("--line", "").strip())
    print(f"{torch.cuda.get_device_name()}; {ops.describe()}; copy {bytes_per_s * 1e-12:.2f} TB/s")
    accuracy()
    table(bytes_per_s)


if __name__ == "__main__":
    main()
