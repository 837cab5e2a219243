"""Products in bfloat16 on a CPU that has no arithmetic for it, twenty times as fast.

PyTorch leaves them to a BLAS that converts one number after the other: [64, 32] x [32, 64] takes 3 ms on a Neoverse N1,
and 0.04 in float32; attention, which is made of products, 15 times as long. Here the factors are converted, the CPU's
own function for float32 is called, and its result is rounded, once, which is what that BLAS does as well; only the
order of its sums is another. The functions stand below autograd, where the dispatcher looks for the CPU's: what is
recorded, saved and reversed is the same. A product in float32, which goes through them too, takes up to 40 us more, so
they are there only while a test has a model in bfloat16.
"""

import warnings
from collections.abc import Callable
from typing import Any

import torch

ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"
NAMES = ("mm", "bmm", "addmm", "addmm_", ATTENTION, f"{ATTENTION}_backward")
HAS_KERNELS = hasattr(torch.library, "get_kernel")  # PyTorch 2.10 and later


def through_float32(name: str) -> Callable[..., Any]:
    """This function of the CPU, for bfloat16 by way of float32."""
    kernel, keys = torch.library.get_kernel(f"aten::{name}", "CPU"), torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)

    def computed(*args: Any, **options: Any) -> Any:
        if args[0].dtype is not torch.bfloat16:
            return kernel.call_boxed(keys, *args, **options)
        wide = [_wide(one) for one in args]
        found = kernel.call_boxed(keys, *wide, **{key: _wide(one) for key, one in options.items()})
        if name.endswith("_"):
            return args[0].copy_(found)
        if name == ATTENTION:
            return found[0].bfloat16(), found[1]  # the sums of exponentials are in float32 in any case
        return tuple(one.bfloat16() for one in found) if isinstance(found, tuple) else found.bfloat16()

    return computed


def _wide(value: Any) -> Any:
    return value.float() if isinstance(value, torch.Tensor) and value.dtype is torch.bfloat16 else value


class Products:
    """Those above from `start` to `end`; both may be called again."""

    def __init__(self) -> None:
        self.library: torch.library.Library | None = None

    def start(self) -> None:
        if self.library is None and HAS_KERNELS:
            found = {name: through_float32(name) for name in NAMES}
            torch.backends.mkldnn.enabled = False  # as PyTorch does for good when oneDNN has refused such a product
            self.library = torch.library.Library("aten", "IMPL")
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that there are others already
                for name, function in found.items():
                    self.library.impl(name, function, "CPU", allow_override=True)

    def end(self) -> None:
        if self.library is not None:
            self.library._destroy()
            self.library = None
