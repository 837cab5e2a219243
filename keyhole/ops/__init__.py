"""Numerical kernels: each op is a PyTorch reference and a Triton kernel of one signature, equal bit for bit
(sums over a tensor: equal to rounding, and repeatable bit for bit).

    noise                 z of a range of elements
    zo_update_            the update of a zeroth-order step, in place
    zo_perturb            w + eps z and w - eps z
    zo_update_perturb_    both, in one pass over memory
    zo_packed_            the same, for weights in 8 bits
    zo_rows               both, for gathered rows of an embedding table
    gather_rows           rows of a table on the device or in page-locked host memory
    fp8_decode            an 8-bit page to fp32 or 16 bit
    fp8_encode_           fp32 to an 8-bit page
    sgd_update_           LOMO: the SGD update of a tensor from its gradient, in place
    sum_squares_          the sum of squares of a gradient alone
    adalomo_update_       AdaLOMO: the same with a factored second moment (adalomo_state)
    compress              X P for a sparse projector (random_projector, identity_projector: ops/lsp/projector.py)
    decompress_add_       W + alpha P delta Q^T, in place
    describe              which implementation runs, and why

Not here, but in files of their own: the loss over chunks of the vocabulary (loss.py), AdamW on host memory
(ops/adam/host.py, torch's own kernel) and in the same bits on the device (ops/adam/device.py). What the ops share: noise (ops/noise/tiles.py,
ops/noise/philox.py, ops/noise/gaussian.py), rounding (ops/rounding/round.py, ops/rounding/bits2d.py, ops/rounding/store.py), checks of arguments (arguments.py), the choice of
implementation (backend.py).
"""

from keyhole.ops.adalomo.matrix import adalomo_state, adalomo_update_
from keyhole.ops.backend import describe, use_kernel
from keyhole.ops.fp8 import fp8_decode, fp8_encode_
from keyhole.ops.gather import gather_rows
from keyhole.ops.lsp.compress import compress
from keyhole.ops.lsp.decompress import decompress_add_
from keyhole.ops.lsp.projector import Projector, identity_projector, random_projector
from keyhole.ops.noise.tiles import noise
from keyhole.ops.sgd import sgd_update_, sum_squares_
from keyhole.ops.zo.flat import zo_perturb, zo_update_, zo_update_perturb_
from keyhole.ops.zo.packed import zo_packed_
from keyhole.ops.zo.rows import zo_rows

__all__ = [
    "Projector",
    "adalomo_state",
    "adalomo_update_",
    "compress",
    "decompress_add_",
    "describe",
    "fp8_decode",
    "fp8_encode_",
    "gather_rows",
    "identity_projector",
    "noise",
    "random_projector",
    "sgd_update_",
    "sum_squares_",
    "use_kernel",
    "zo_packed_",
    "zo_perturb",
    "zo_rows",
    "zo_update_",
    "zo_update_perturb_",
]
