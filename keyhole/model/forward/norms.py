"""A test on a module itself: which norm does it compute?

A pass that carries several looks (low_rank.py) computes a norm for all of them in one kernel (ops/lowrank/norm.py), if
it knows what the module computes. Neither the class nor its name tells: Hugging Face has dozens of RMS norms, by three
formulas, and code from elsewhere may do what it likes. So the module runs once on random rows x, with random vectors w
and b of the test's own in place of its parameters, and what comes out is compared with each formula:

    layer norm     (x - mean(x)) rsqrt(var(x) + eps) w + b          the bias only if the module has one
    RMS norm       x rsqrt(mean(x^2) + eps) w                       w before or after rounding, or 1 + w (Gemma)

    |found - formula| < LIMIT eps(dtype) max |formula|              (in every row)

of which the nearest counts. eps is one of the module's own numbers, and is read from it at every call. The rows have
several sizes, for some of which eps matters, a mean that is not 0, and four dimensions as well as two.

A module is none of these if it fits no formula, cannot run on such rows, or has anything that the test does not
replace: submodules, buffers, other parameters than a weight and a bias, a forward that is not its class's. It then runs
look by look. Hooks do not matter: they are called around all looks in both cases.

The test calls the class's forward on a copy of the module with parameters of its own: those of the module may be empty
at that time (packed, streamed), and are not touched. What a few rows cannot show: code that depends on the size of x.
Cost: some 60 small kernels per module; none for nn.LayerNorm, which is known.
"""

import copy
import math
from dataclasses import dataclass

import torch
from torch import nn

from keyhole.ops.lowrank.norm import Norm, norm_reference

KINDS = (Norm(False), Norm(False, early=True), Norm(False, plus_one=True), Norm(True))
LIMIT = 4
SIZES = (1e-4, 1e-2, 1.0, 20.0)  # of the numbers in a row


@dataclass(frozen=True)
class Known:
    """What a module computes. eps: the name of its number."""

    kind: Norm
    eps: str


def find_norm(
    module: nn.Module, shapes: dict[str, torch.Size], device: torch.device, dtype: torch.dtype
) -> Known | None:
    """What the module computes, if it is one of these norms. shapes: of its parameters."""
    one = len({tuple(shape) for shape in shapes.values()}) == 1 and len(shapes.get("weight", ())) == 1
    if not one or not shapes.keys() <= {"weight", "bias"} or "forward" in module.__dict__:
        return None
    if any(module.children()) or any(True for _ in module.buffers()):
        return None
    if type(module) is nn.LayerNorm:
        return Known(Norm(True), "eps") if module.normalized_shape == tuple(shapes["weight"]) else None
    try:
        return _nearest(module, shapes, device, dtype)
    except Exception:  # it cannot run on such rows
        return None


@torch.no_grad()
def _nearest(
    module: nn.Module, shapes: dict[str, torch.Size], device: torch.device, dtype: torch.dtype
) -> Known | None:
    (width,), draw = shapes["weight"], torch.Generator().manual_seed(0)
    vectors = {name: torch.randn(width, generator=draw).to(device, dtype) for name in shapes}
    x_MD = torch.randn(3 * len(SIZES), width, generator=draw) + torch.randn(3 * len(SIZES), 1, generator=draw)
    x_MD = (x_MD * torch.tensor(SIZES).repeat(3)[:, None]).to(device, dtype)
    outputs = [_run(module, vectors, x_MD.view(shape)) for shape in ((-1, width), (2, 3, -1, width))]
    if any(y.dtype != dtype for y in outputs) or outputs[1].shape != (2, 3, len(SIZES) // 2, width):
        return None
    w_1D, b_1D = vectors["weight"][None], vectors["bias"][None] if "bias" in vectors else None
    found, least = None, LIMIT * torch.finfo(dtype).eps
    for name, eps in vars(module).items():
        for kind in KINDS if type(eps) is float else ():
            expected = norm_reference(x_MD, w_1D, b_1D, eps, kind)
            error = max(_error(y.reshape(x_MD.shape), expected) for y in outputs)
            if error < least:
                found, least = Known(kind, name), error
    return found


def _run(module: nn.Module, vectors: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """The class's forward, with these vectors in place of the parameters."""
    twin = copy.copy(module)
    twin.__dict__["_parameters"] = {name: None for name in module._parameters} | {
        name: nn.Parameter(vector, requires_grad=False) for name, vector in vectors.items()
    }
    return type(module).forward(twin, x.clone())


def _error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference in a row, relative to its largest number; inf if one of them is not a number."""
    found, expected = found.double(), expected.double()
    error = float(((found - expected).abs().amax(-1) / expected.abs().amax(-1)).max())
    return error if math.isfinite(error) else math.inf
