"""Models that were published in 4 or 8 bits: the format in which their weights are kept at home.

    wire = null (or 16 bits)    unpacked tensor by tensor while they are read, and rounded once to the dtype of compute
    wire = fp8                  unpacked, and rounded once to fp8; no frozen format, so they can be trained
    wire = int4 | int8 | nf4    copied bit for bit, if all matrices of the blocks are on such a grid; else refused,
                                because rounding them to another grid would add its error to the one that they have

Grids that are copied (disk/gguf.py, disk/quantized.py): GGUF's Q4_0 and Q4_1 as int4 and Q8_0 as int8, with a scale per
32; GPTQ and AWQ in 4 bits as int4; bitsandbytes' nf4 with its float32 scales. Where the published grid has an offset
per group, so has the copy. Sizes must be multiples of 64.
"""

from pathlib import Path
from typing import Any

import torch
from torch import nn

from keyhole.disk.weight_files import Stored, has_weights, stored_tensors
from keyhole.errors import UserError, listed
from keyhole.model.structure.config_files import setting
from keyhole.model.structure.layout import ALIGN, FlatTensor, find_layout
from keyhole.model.weights.fit import check_gguf_config, match_names
from keyhole.model.weights.format import FROZEN, Wire
from keyhole.model.weights.frozen import is_matrix
from keyhole.ops.lowbit import Grid

READ = ("gptq", "awq", "bitsandbytes")  # quant_method in config.json


def forms_in(directory: Path | None) -> dict[str, Stored]:
    """The quantised weights in a directory, by name."""
    if directory is None or not has_weights(directory):
        return {}
    return {name: stored for name, stored in stored_tensors(directory).items() if stored.form}


def choose_format(
    module: nn.Module, directory: Path | None, dtype: torch.dtype, wire: str | None
) -> tuple[Wire, list[str]]:
    """The formats of a model's homes, and lines for the start block."""
    forms = forms_in(directory)
    if not forms or directory is None:
        return Wire(dtype, wire), []
    check_gguf_config(module.config, directory)
    kinds = ", ".join(sorted({stored.form for stored in forms.values()}))
    if wire not in FROZEN:
        to = str(dtype).removeprefix("torch.") if wire is None else wire
        return Wire(dtype, wire), [f"weights: published as {kinds}; unpacked, and rounded once to {to}"]
    layout = find_layout(module)
    names = match_names(module, layout, directory) or {}  # it refuses where there are none: these are quantised
    inside = [t for u in layout.of_kind("block") for t in u.tensors if is_matrix(t.shape)]
    grids = {_grid(forms.get(names.get(t.name, "")), t.shape) for t in inside}
    found = grids.pop() if len(grids) == 1 else None
    if found is None or found.name != wire:
        held = f"; {found.name} holds them exactly" if found is not None else f": {_why(forms, names, inside)}"
        raise UserError(
            f"wire: {wire} would round the weights again, which were published as {kinds}{held}. Set "
            f"wire={found.name if found is not None else 'null'}" + ("" if found else " (16 bits)")
        )
    about = f"{found.name} with {found.per_group} in {found.scales}"
    return Wire(dtype, wire, found), [f"weights: published as {kinds}; blocks are taken over bit for bit, as {about}"]


def _why(forms: dict[str, Stored], names: dict[str, str], inside: list[FlatTensor]) -> str:
    """Why there is no one grid for all matrices of the blocks: the first reason, and where it is found."""
    if not inside:
        return "this model has no list of repeated blocks, whose matrices a packed wire keeps"
    plain = [t.name for t in inside if names.get(t.name) not in forms]
    if plain:
        return f"{len(plain)} of {len(inside)} matrices of the blocks are not quantised ({listed(plain, 1)})"
    for tensor in inside:
        stored = forms[names[tensor.name]]
        if stored.grid is None:
            why = stored.of.why if stored.of is not None else f"{stored.form} is no format of a wire"
            return f"{tensor.name}: {why}"
        if tensor.shape.numel() % ALIGN:
            return f"the {tensor.shape.numel()} weights of {tensor.name} are no multiple of {ALIGN}"
    kinds = sorted({str(forms[names[tensor.name]].form) for tensor in inside})
    return f"the matrices of the blocks are of several types ({listed(kinds)}), and a wire has one"


def _grid(stored: Stored | None, shape: torch.Size) -> Grid | None:
    fits = stored is not None and stored.grid is not None and shape.numel() % ALIGN == 0
    return Grid(*stored.grid) if fits else None  # type: ignore[union-attr, misc]


def forget_what_is_read(config: Any, directory: Path | None = None) -> None:
    """Calls forget_quantization if keyhole reads weights of this kind: as the files in a directory are, or, if there
    are none, by what the config says."""
    said = setting(config, "quantization_config") or {}
    method = said.get("quant_method") if isinstance(said, dict) else setting(said, "quant_method")
    known = str(setting(method, "value", method)).lower() in READ
    if (known and (directory is None or not has_weights(directory))) or forms_in(directory):
        forget_quantization(config)


def forget_quantization(config: Any) -> None:
    """Removes the quantization from a config, because the saved model has 16 bits."""
    for part in {id(c): c for c in (config, config.get_text_config())}.values():
        if hasattr(part, "quantization_config"):
            del part.quantization_config
