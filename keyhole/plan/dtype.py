"""Which dtype a model is computed in, and why.

An explicit dtype is used as given. If it is null in the config, the dtype that the model's config.json names is used
(the start block says so if its files hold more bits), or, if it names none, that of the first weight; except where that
would silently fail:

    float16, for a method without loss scaling    small gradients are rounded to 0 and sums overflow: bfloat16
    bfloat16, on a CPU without bf16 arithmetic    each product is emulated, a hundred times slower: float32

A GPU or CPU without bf16 arithmetic uses float32 in both cases. The start block prints the decision.
"""

import warnings
from dataclasses import dataclass

import torch
from transformers import PretrainedConfig

from keyhole.errors import UserError
from keyhole.limits import SPELLINGS
from keyhole.machine.gpu import ACCELERATOR, accelerator
from keyhole.machine.host import cpu_has_bf16
from keyhole.methods import METHODS

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
AUTO = "auto"
SLOW = "this CPU has no arithmetic for bfloat16"


@dataclass(frozen=True)
class DtypeChoice:
    """The compute dtype, and the reason for it."""

    dtype: torch.dtype
    reason: str

    def __str__(self) -> str:
        return f"dtype: {NAMES[self.dtype]}, {self.reason}"


def choose_dtype(
    asked: str | torch.dtype | None,
    config: PretrainedConfig | None,
    device: torch.device | None = None,
    method: str | None = None,
    in_files: torch.dtype | None = None,
) -> DtypeChoice:
    """asked: a dtype, None for the one of the model's files, or "auto" for one that the method and device can use.
    in_files: of the weights, if that is known."""
    if asked is not None and asked != AUTO:
        dtype = _known(DTYPES.get(asked, asked) if isinstance(asked, str) else asked)
        slow = f"; warning: {SLOW}, and float32 is much faster here" if _is_slow(dtype, device) else ""
        return DtypeChoice(dtype, f"as asked{slow}")
    named = getattr(config, "dtype", None)
    stored = in_files if named is None else named
    if stored is None:
        return DtypeChoice(torch.float32, "since the model's config names none")
    stored = _known(stored, " (of the checkpoint, by its config.json)")
    if asked == AUTO and _underflows(stored, method):
        on_gpu = device is not None and device.type == ACCELERATOR
        has_bf16 = accelerator.is_bf16_supported(including_emulation=False) if on_gpu else cpu_has_bf16()
        wide = torch.bfloat16 if has_bf16 else torch.float32
        return DtypeChoice(wide, f"since the model's files hold float16 and {method} has no loss scaling for it")
    if asked == AUTO and _is_slow(stored, device):
        return DtypeChoice(torch.float32, f"since {SLOW}, in which the model's files are")
    return DtypeChoice(stored, "as the model's files are" if named is None else "as the model's config.json says")


def check_trainable(dtype: torch.dtype, method: str) -> None:
    """UserError if a method is created on a model in a dtype that it cannot train in."""
    if _underflows(dtype, method):
        safe = ", ".join(row.name for row in METHODS.values() if row.underflow_safe)
        raise UserError(
            f"dtype: {method} has no loss scaling, and gradients in float16 underflow without; load the model with "
            f'dtype="bfloat16" or "float32", or use {safe}'
        )


def warn_if_slow(choice: DtypeChoice, device: torch.device) -> None:
    """A warning for loops of one's own, which have no start block: a step can take minutes instead of a second."""
    if _is_slow(choice.dtype, device):
        warnings.warn(
            f"dtype: {SLOW}: a product takes a hundred times as long as in float32; load with float32", stacklevel=3
        )


def _underflows(dtype: torch.dtype, method: str | None) -> bool:
    return dtype == torch.float16 and method in METHODS and not METHODS[method].underflow_safe


def _is_slow(dtype: torch.dtype, device: torch.device | None) -> bool:
    return dtype == torch.bfloat16 and device is not None and device.type == "cpu" and not cpu_has_bf16()


def _known(dtype: str | torch.dtype, whose: str = "") -> torch.dtype:
    if isinstance(dtype, torch.dtype) and dtype in NAMES:
        return dtype
    name = str(dtype).removeprefix("torch.")
    other = SPELLINGS.get(name.lower(), "float32")
    raise UserError(f"dtype: {name}{whose} is not one of {', '.join(DTYPES)}; set dtype={other}")
