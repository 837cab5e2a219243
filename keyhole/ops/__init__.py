"""Numerical kernels. Each op is a PyTorch reference and a Triton kernel that give the same bits (sums over a tensor
agree up to rounding, and repeat bit for bit). A name that ends in _ writes in place.

    noise/      z of an element as a function of (seed, step, direction, index): draw_noise
    rounding/   random bits, rounding, and how a new weight is stored: the end of every update
    zo/         zeroth-order update and perturbation: zo_flat_, zo_packed_ (8 bits), zo_rows (of an embedding table)
    sgd.py      LOMO: SGD of one tensor from its gradient, sgd_update_; the gradient's sum of squares, sum_squares_
    adalomo.py  AdaLOMO: the same with a factored second moment, adalomo_update_
    lowrank/    x (A V^T)^T without computing A V^T: narrow, widen; W + A V^T: fold_
    lsp/        LSP: sparse projectors, compress (X P), decompress_add_ (W + alpha P delta Q^T)
    adam.py     AdamW on host memory by torch's kernel, and on the device with the same bits
    fp8.py      weights in 8 bits: fp8_encode_, fp8_decode;  lowbit.py: frozen weights in 8 or 4 bits
    loss.py     cross entropy over chunks of the vocabulary
    norm.py     norms of tensors
    gather.py   rows of a table that may be in page-locked host memory
    autocast.py disables a caller's autocast
    backend.py  which implementation runs, and why; loads and stores with a mask only where needed
    arguments.py  checks of tensors and numbers
"""

from keyhole.ops.adalomo import adalomo_state, adalomo_update_
from keyhole.ops.backend import describe, use_kernel
from keyhole.ops.fp8 import fp8_decode, fp8_encode_
from keyhole.ops.gather import gather_rows
from keyhole.ops.lowrank.fold import fold_
from keyhole.ops.lowrank.product import narrow, widen
from keyhole.ops.lsp.compress import compress
from keyhole.ops.lsp.decompress import decompress_add_
from keyhole.ops.lsp.projector import Projector, identity_projector, random_projector
from keyhole.ops.noise.tiles import draw_noise
from keyhole.ops.norm import norm, norms
from keyhole.ops.sgd import sgd_update_, sum_squares_
from keyhole.ops.zo.element import ZOStep
from keyhole.ops.zo.flat import zo_flat_
from keyhole.ops.zo.packed import zo_packed_
from keyhole.ops.zo.rows import zo_rows

__all__ = [
    "Projector",
    "ZOStep",
    "adalomo_state",
    "adalomo_update_",
    "compress",
    "decompress_add_",
    "describe",
    "draw_noise",
    "fold_",
    "fp8_decode",
    "fp8_encode_",
    "gather_rows",
    "identity_projector",
    "narrow",
    "norm",
    "norms",
    "random_projector",
    "sgd_update_",
    "sum_squares_",
    "use_kernel",
    "widen",
    "zo_flat_",
    "zo_packed_",
    "zo_rows",
]
