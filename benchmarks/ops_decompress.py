"""Times decompressing (ops/lsp/blocks.py) for the seven matrices of a Llama-3-8B block, for several shapes of its tile.

    python benchmarks/ops_decompress.py [--before FILE]                     needs a GPU, 20 seconds

bfloat16, r = 4, stochastic rounding. A variant is COLUMNS/NUM_WARPS/UNROLL/STAGES/REGISTERS of blocks.py. All variants
are timed with d = 2048 and the step on the device; the first and the fastest also with d = 512, the first with the step
as a number too. The rate counts 2 bytes read and 2 written per weight, and is compared with that of a plain copy. A
CUDA graph holds the seven launches, so that the host is not measured.

Checked before: the count of changes of the first variant; no weight is further from the reference than the next value
of the grid; all variants give the same weights to the bit. --before: an older decompress.py, which is timed and
compared too.
"""

import argparse
import importlib.util
import multiprocessing
from functools import cache
from types import ModuleType

import torch

from keyhole.bench.measure import replayed_ms
from keyhole.ops.backend import force
from keyhole.ops.lsp import blocks, decompress
from keyhole.ops.lsp.projector import Projector, random_projector

SHAPES = ((4096, 4096), (1024, 4096), (1024, 4096), (4096, 4096), (14336, 4096), (14336, 4096), (4096, 14336))
DIFFERENT, R, BLOCKS = tuple(sorted(set(SHAPES))), 4, 32
ALPHA, KEEP, STEP = 3e-5, 0.999, 7
Variant = tuple[int | None, ...]
NAMES = ("COLUMNS", "NUM_WARPS", "UNROLL", "STAGES", "REGISTERS")
VARIANTS: list[Variant] = [
    (32, 2, 4, 3, None), (32, 2, 4, 3, 128), (32, 2, 2, 3, None), (32, 2, 2, 3, 128), (32, 2, 2, 2, 128),
    (32, 2, 1, 3, None), (32, 2, 1, 4, None), (32, 2, 8, 1, None), (32, 1, 2, 3, None), (32, 1, 4, 3, 168),
    (64, 4, 4, 3, 128), (64, 4, 2, 3, 128), (64, 4, 1, 3, None), (64, 2, 2, 3, None), (16, 1, 4, 3, 128),
]  # fmt: skip
Weight = tuple[torch.Tensor, torch.Tensor, Projector, Projector]  # w, delta, P, Q


def use(variant: Variant) -> None:
    """Sets the constants of the kernel's file."""
    for name, value in zip(NAMES, variant, strict=True):
        setattr(blocks, name, value)


def written(variant: Variant) -> str:
    return "/".join("-" if value is None else str(value) for value in variant)


@cache
def weights(shapes: tuple[tuple[int, int], ...], d: int) -> list[Weight]:
    """Random weights with projectors of blocks and a step."""
    made = []
    for i, shape in enumerate(shapes):
        p, q = (random_projector("blocks", side, d, R, seed=2 * i + k, device="cuda") for k, side in enumerate(shape))
        generator = torch.Generator("cuda").manual_seed(i)
        w = torch.randn(shape, generator=generator, device="cuda").mul_(0.02).bfloat16()
        made.append((w, torch.randn(p.d, q.d, generator=generator, device="cuda"), p, q))
    return made


@cache
def numbers() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """alpha, keep and step on the device."""
    step = torch.tensor(STEP, dtype=torch.int32, device="cuda")
    return torch.tensor(ALPHA, device="cuda"), torch.tensor(KEEP, device="cuda"), step


def update(module: ModuleType, weight: Weight, on_device: bool, changed: torch.Tensor | None = None) -> None:
    """One call as training makes it."""
    alpha, keep, step = numbers() if on_device else (ALPHA, KEEP, STEP)
    how = {"rounding": "stochastic", "offset": 12_345_678, "seed": 99, "step": step, "changed": changed}
    module.decompress_add_(*weight, alpha, keep=keep, **how)


def compile_one(job: tuple[Variant | None, int, bool, str | None]) -> str:
    """Fills Triton's cache, in a process of its own; returns what went wrong. No variant: the older file."""
    variant, d, on_device, before = job
    torch.set_num_threads(1)
    try:
        use(variant or VARIANTS[0])
        module = decompress if variant else load(before)
        for weight in weights(DIFFERENT, d):
            update(module, weight, on_device)
            if variant in (None, VARIANTS[0]):
                update(module, weight, on_device, torch.zeros((), dtype=torch.int64, device="cuda"))
        torch.cuda.synchronize()
    except Exception as error:
        return f"{job}: {type(error).__name__}: {error}"
    return ""


def order(w: torch.Tensor) -> torch.Tensor:
    """The place of each value on the grid of bfloat16."""
    pattern = w.view(torch.int16).int()
    return torch.where(pattern < 0, -(pattern & 0x7FFF), pattern)


def results(module: ModuleType, start: list[Weight], count: bool = False) -> list[torch.Tensor]:
    """The updated weights. count: how many changed is counted too, and checked."""
    found = []
    for w, *rest in start:
        new, changed = w.clone(), torch.zeros((), dtype=torch.int64, device="cuda") if count else None
        update(module, (new, *rest), True, changed)
        assert changed is None or int(changed) == int((new != w).sum()), "the count of changes is wrong"
        found.append(new)
    return found


def check_reference(start: list[Weight], found: list[torch.Tensor]) -> None:
    """Prints how often the weights differ from the reference, and asserts that they are neighbours then."""
    for (w, *rest), new in zip(start, found, strict=True):
        expected = w.clone()
        with force("reference"):
            update(decompress, (expected, *rest), True)
        apart = (order(new) - order(expected)).abs()
        assert int(apart.max()) <= 1, f"{tuple(w.shape)}: {int(apart.max())} values of the grid apart"
        print(f"{tuple(w.shape)}: {int(apart.sum())} of {w.numel()} weights are one value from the reference's")


def same(some: list[torch.Tensor], other: list[torch.Tensor]) -> str:
    pairs = zip(some, other, strict=True)
    return "same" if all(torch.equal(a.view(torch.int16), b.view(torch.int16)) for a, b in pairs) else "DIFFERENT"


def load(path: str) -> ModuleType:
    """A module from a file of any name."""
    spec = importlib.util.spec_from_file_location("decompress_before", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--before", help="an older decompress.py")
    before = parser.parse_args().before
    jobs: list[tuple[Variant | None, int, bool, str | None]] = [(variant, 2048, True, None) for variant in VARIANTS]
    jobs += [(VARIANTS[0], 512, True, None), (VARIANTS[0], 2048, False, None)]
    jobs += [(None, 2048, True, before), (None, 512, True, before)] if before else []
    with multiprocessing.get_context("fork").Pool(min(len(jobs), 14)) as pool:  # before CUDA starts in this process
        errors = pool.map(compile_one, jobs, chunksize=1)
    print(*filter(None, errors), sep="\n")
    variants = [variant for variant, error in zip(VARIANTS, errors, strict=False) if not error] or VARIANTS
    numel, rows = sum(m * n for m, n in SHAPES), []
    flat = torch.empty(2, numel, dtype=torch.bfloat16, device="cuda").normal_()
    copy = replayed_ms(lambda: flat[0].copy_(flat[1]))

    def measure(name: str, module: ModuleType, d: int, on_device: bool, bits: str) -> float:
        all_weights = weights(SHAPES, d)
        ms = replayed_ms(lambda: [update(module, weight, on_device) for weight in all_weights])
        where = "device" if on_device else "number"
        rate, part = 4e-6 * numel / ms, copy / ms
        rows.append(f"{name:20} {d:5} {where} {ms:8.3f} {ms * BLOCKS:8.2f} {rate:8.0f} {part:8.1%}  {bits}")
        return ms

    start, times = weights(DIFFERENT, 2048), {}
    use(variants[0])
    first = results(decompress, start, count=True)
    check_reference(start, first)
    if before:
        old = load(before)
        measure("before", old, 2048, True, same(results(old, start), first))
        measure("before", old, 512, True, "")
    for variant in variants:
        use(variant)
        times[variant] = measure(written(variant), decompress, 2048, True, same(results(decompress, start), first))
    for variant in dict.fromkeys((variants[0], min(times, key=times.get))):
        use(variant)
        measure(written(variant), decompress, 512, True, "")
        if variant == variants[0]:
            measure(written(variant), decompress, 2048, False, "")
    print(f"{torch.cuda.get_device_name()}; a plain copy: {copy:.3f} ms, {4e-6 * numel / copy:.0f} GB/s")
    print(f"{'/'.join(name.lower() for name in NAMES)}\n{'variant':20} {'d':>5} step   {'ms':>8} {'x 32':>8} "
          f"{'GB/s':>8} {'of copy':>8}  bits")  # fmt: skip
    print(*rows, sep="\n")


if __name__ == "__main__":
    with torch.no_grad():
        main()
