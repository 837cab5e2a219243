"""Decodes weights that were published in 4 or 8 bits in safetensors: bitsandbytes, GPTQ and AWQ.

A linear layer is then stored as several tensors, named after its weight:

    bitsandbytes   weight [n / 2, 1] uint8, weight.absmax, weight.quant_map [16], weight.quant_state.bitsandbytes__nf4
                   w_i = quant_map[q_i] absmax[i / 64]; element 2 j is in the high half of byte j. absmax may be
                   quantised itself: nested_quant_map[absmax] nested_absmax[. / 256] + nested_offset. The bytes may be
                   stored as numbers of another dtype (bnb_4bit_quant_storage), and the last block may be short
    GPTQ           qweight [I bits / 32, O], qzeros [G, O bits / 32], scales [G, O] float16, g_idx [I], along inputs
                   w_oi = scales[g, o] (q_io - z_go), g = g_idx[i]; z is stored as z - 1 modulo 2^bits, in gptq_v2 as z
    AWQ            qweight [I, O / 8], qzeros [G, O / 8], scales [G, O]; eight columns of an int32 in the order 0 2 4 6
                   1 3 5 7;  w_oi = scales[g, o] (q_io - z_go), g = i / group

Three of them equal a grid of ops/lowbit.py exactly: nf4 with float32 scales per 64 (bitsandbytes), int4 (symmetric GPTQ
in 4 bits), and int4 with offsets m = -s z in float32 (AWQ, asymmetric GPTQ in 4 bits); the latter two in groups of a
multiple of 64, without reordered inputs. s has at most 11 bits and q and z at most 4, so s q, s z and their difference
are exact in float32. The others are unpacked to float32, and rounded once.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from keyhole.disk.json_text import Json
from keyhole.errors import NonFinite

if TYPE_CHECKING:
    import torch

    Get = Callable[[str], torch.Tensor]  # the tensor of this name in the files

BNB = ".quant_state.bitsandbytes__"
OF_BNB = ("absmax", "quant_map", "nested_absmax", "nested_quant_map")
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
GROUP = 64  # group size of the grids
NESTED = ("nested_blocksize", "nested_offset")  # in the state, if absmax is quantised itself
LARGEST_STATE = 4096  # bytes
# What config.json may say of the layout of the integers; others (gemv, marlin) have the same names and other bits
LAYOUTS: dict[str, dict[str, tuple[str, ...]]] = {
    "gptq": {"checkpoint_format": ("gptq", "gptq_v2")},
    "awq": {"version": ("gemm", "exllama", "ipex")},
}
# Codes, whatever dtype the file calls them: as numbers they mean nothing, and may be NaN (bnb_4bit_quant_storage)
CODES = ("weight", "qweight", "qzeros")


@dataclass(frozen=True)
class Form:
    """How the weight of a layer is stored. grid: (name, group, dtype of scales, with an offset) of a grid with exactly
    the same numbers, if there is one; parts: names of its tensors by their role, which `get` reads; why: the reason if
    there is no grid, else ""."""

    kind: str
    shape: tuple[int, int]
    parts: Mapping[str, str]
    about: Json
    get: "Get"
    grid: tuple[str, int, str, bool] | None = None
    why: str = ""

    def __getitem__(self, role: str) -> "torch.Tensor":
        found = self.get(self.parts[role])
        if role not in CODES:
            check_finite(self.parts[role], found)
        return found

    def read(self) -> "torch.Tensor":
        """The weights, float32 [O, I]."""
        if self.kind == "bitsandbytes":
            q, absmax = _bnb(self)
            w = self["quant_map"].float()[q.int()] * absmax.unsqueeze(1)
            return w.view(-1)[: self.shape[0] * self.shape[1]].view(self.shape)
        q, zeros, groups = _ints(self)
        return (self["scales"].float()[groups] * (q - zeros[groups]).float()).t().contiguous()

    def codes(self) -> "tuple[torch.Tensor, torch.Tensor]":
        """Codes and scales (with offsets in pairs) on the grid. ValueError if the numbers are not on it."""
        import torch

        if self.kind == "bitsandbytes":
            rows, scales = _bnb(self)
        else:
            offset, (q, zeros, groups) = self.grid is not None and self.grid[-1], _ints(self)
            expected = torch.arange(self.shape[1]) // self.about["group"]
            if (not offset and not bool((zeros == 8).all())) or not torch.equal(groups, expected):
                raise ValueError(
                    f"{self.parts['qweight']} is not symmetric, though config.json says so, or its inputs are "
                    "reordered; set wire=null, and it is unpacked"
                )
            given = self["scales"]
            half = given.to(torch.float16)
            if not torch.equal(half.to(given.dtype), given):
                raise ValueError(f"{self.parts['scales']} has scales that float16 cannot hold; set wire=null")
            stored = torch.stack([half.float(), -half.float() * zeros], dim=-1) if offset else half
            scales = stored.transpose(0, 1).repeat_interleave(self.about["group"] // GROUP, dim=1).reshape(-1)
            rows = q.t().to(torch.uint8).reshape(-1, GROUP)
        low, high = rows.split(rows.shape[1] // 2, dim=1)
        return (low | (high << 4)).reshape(-1), scales


def check_finite(what: str, found: "torch.Tensor") -> None:
    """NonFinite if there is a NaN or an infinity in numbers that were read: nobody publishes such."""
    import torch

    if found.numel() and found.is_floating_point():
        low, high = torch.aminmax(found)  # either is NaN if any element is
        if not (torch.isfinite(low) and torch.isfinite(high)):
            bad = int((~torch.isfinite(found)).sum())
            raise NonFinite(f"NaN or infinity in {what} ({bad:,} of {found.numel():,} numbers)")


def find_forms(shapes: Mapping[str, tuple[int, ...]], said: Json, get: "Get") -> dict[str, Form]:
    """Name of a weight -> its form, for all weights in the files. said: quantization_config of config.json. ValueError
    for unsupported formats."""
    method = str(said.get("quant_method", "")).lower()
    found = {}
    for name in shapes:
        if BNB in name:
            found[name.partition(BNB)[0]] = _bnb_form(name, shapes, get)
        elif name.endswith(".qweight"):
            stem = name.removesuffix(".qweight")
            if method not in ("gptq", "awq"):
                raise ValueError(f"{name} is quantised by {method or 'an unknown method'}; gptq and awq are read")
            found[f"{stem}.weight"] = _ints_form(stem, shapes, method, said, get)
        elif name.endswith((".SCB", ".weight_format")):
            raise ValueError(f"{name} is of bitsandbytes' 8 bits, which is not read; 4 bits are")
    return found


def _bnb_form(name: str, shapes: Mapping[str, tuple[int, ...]], get: "Get") -> Form:
    weight = name.partition(BNB)[0]
    if shapes[name][0] > LARGEST_STATE:
        raise ValueError(f"{name} is no description of a quantised weight")
    try:
        about = json.loads(bytes(get(name).tolist()))
        rows, columns = (int(side) for side in about["shape"])
        block, nested = int(about["blocksize"]), int(about.get("nested_blocksize", 1))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{name} cannot be read: {error!r:.80}") from None
    parts = {role: f"{weight}.{role}" for role in OF_BNB if f"{weight}.{role}" in shapes} | {"weight": weight}
    numel, held = rows * columns, shapes.get(weight, (0,))[0]  # numbers of 1, 2 or 4 bytes, with two codes per byte
    fine = min(rows, columns, block, nested) > 0 and -(-numel // 2) in (held, 2 * held, 4 * held)
    if not fine or "quant_map" not in parts or shapes.get(f"{weight}.absmax") != (-(-numel // block),):
        raise ValueError(f"{name} does not fit the tensors of {weight}")
    lacks = [key for key in NESTED if key not in about]
    lacks += [f"{weight}.{role}" for role in OF_BNB if role.startswith("nested_") and role not in parts]
    if 0 < len(lacks) < 4:
        raise ValueError(f"the scales of {weight} are quantised themselves, and {lacks[0]} is missing")
    why = ""
    if about.get("quant_type") != "nf4":
        why = f"bitsandbytes' {about.get('quant_type')!s:.20} is no format of a wire"
    elif block != GROUP:
        why = f"its blocks are of {block} weights, {GROUP} are needed"
    elif numel % block:
        why = f"its {numel} weights are no multiple of {GROUP}"
    return Form(
        "bitsandbytes", (rows, columns), parts, about, get, None if why else ("nf4", GROUP, "float32", False), why
    )


def _ints_form(stem: str, shapes: Mapping[str, tuple[int, ...]], method: str, said: Json, get: "Get") -> Form:
    parts = {role: f"{stem}.{role}" for role in ("qweight", "qzeros", "scales", "g_idx") if f"{stem}.{role}" in shapes}
    bits, group = said.get("bits", said.get("w_bit", 4)), said.get("group_size", said.get("q_group_size", 128))
    if type(bits) is not int or bits not in ((4, 8) if method == "gptq" else (4,)) or type(group) is not int:
        raise ValueError(f"{stem} has {bits!r:.20} bits in groups of {group!r:.20}; 4 and 8 bits are read (awq: 4)")
    for key, known in LAYOUTS[method].items():
        if str(said.get(key) or known[0]).lower() not in known:
            raise ValueError(f"{key} of config.json is {said[key]!r:.40}; {', '.join(known)} are read")
    reordered = method == "gptq" and bool(said.get("desc_act"))
    lacks = [role for role in ("qweight", "qzeros", "scales", *["g_idx"] * reordered) if role not in parts]
    if lacks:
        why = ", though config.json says desc_act: the groups of its inputs are not known" * (lacks[0] == "g_idx")
        raise ValueError(f"{stem} lacks {lacks[0]}{why}")
    (rows, columns), per = shapes[parts["qweight"]], 32 // bits
    inputs, outputs = (rows * per, columns) if method == "gptq" else (rows, columns * per)
    group = inputs if group < 1 else group
    count = shapes[parts["scales"]][0]
    for role, shape in {"scales": (count, outputs), "qzeros": (count, outputs // per), "g_idx": (inputs,)}.items():
        if role in parts and tuple(shapes[parts[role]]) != shape:
            raise ValueError(f"{stem}: its {role} has another shape than its qweight of {bits} bits needs")
    if (groups := -(-inputs // group)) != count:
        raise ValueError(
            f"{stem} has scales of {count} groups, but group_size {group} of config.json makes {groups} of its "
            f"{inputs} inputs"
        )
    why = ""
    if bits != 4:
        why = f"{method.upper()} in {bits} bits is no format of a wire, in 4 bits it is"
    elif reordered:
        why = "its inputs are reordered (desc_act, act-order)"
    elif group % GROUP or inputs % group:
        why = f"its groups are of {group} weights, a multiple of {GROUP} that divides {inputs} inputs is needed"
    symmetric = method == "gptq" and said.get("sym") is True
    grid = None if why else ("int4", GROUP, "float16" if symmetric else "float32", not symmetric)
    about = {"bits": bits, "group": group, "v2": said.get("checkpoint_format") == "gptq_v2"}
    return Form(method.upper(), (outputs, inputs), parts, about, get, grid, why)


def _bnb(form: Form) -> "tuple[torch.Tensor, torch.Tensor]":
    """(codes in blocks, of which the last one is filled up, and their scales)."""
    import torch

    absmax, block, nested = form["absmax"], int(form.about["blocksize"]), "nested_absmax" in form.parts
    if absmax.is_floating_point() == nested:
        kind, how = str(absmax.dtype).removeprefix("torch."), "with" if nested else "without"
        raise ValueError(f"{form.parts['absmax']} is {kind} {how} a nested_absmax; codes have one, numbers have none")
    if nested:
        outer = form["nested_absmax"].float().repeat_interleave(int(form.about["nested_blocksize"]))
        inner = form["nested_quant_map"].float()[absmax.long()]
        absmax = inner * outer[: absmax.numel()] + float(form.about["nested_offset"])
    packed, numel = form["weight"].contiguous().view(-1).view(torch.uint8), form.shape[0] * form.shape[1]
    if len(packed) != -(-numel // 2):
        raise ValueError(f"{form.parts['weight']} has {len(packed)} bytes for {numel} codes of 4 bits")
    q = torch.stack([packed >> 4, packed & 15], dim=1).view(-1)[:numel]
    return torch.nn.functional.pad(q, (0, -numel % block)).view(-1, block), absmax.float()


def _ints(form: Form) -> "tuple[torch.Tensor, torch.Tensor, torch.Tensor]":
    """(codes [I, O], zeros [G, O], group of each input)."""
    import torch

    bits = form.about["bits"]
    if form.kind == "AWQ":
        q, zeros = (_unpack(form[role], 4, 1, AWQ_ORDER) for role in ("qweight", "qzeros"))
    else:
        q, zeros = _unpack(form["qweight"], bits, 0), _unpack(form["qzeros"], bits, 1)
        zeros = zeros if form.about["v2"] else (zeros + 1) & (2**bits - 1)
    in_order = torch.arange(form.shape[1]) // form.about["group"]
    groups = form["g_idx"].long() if "g_idx" in form.parts else in_order
    if bool((groups < 0).any()) or int(groups.max()) >= len(zeros):
        raise ValueError(f"{form.parts['qweight']}: its g_idx names a group that is not there")
    return q, zeros, groups


def _unpack(packed: "torch.Tensor", bits: int, dim: int, order: tuple[int, ...] | None = None) -> "torch.Tensor":
    """Unpacks int32 numbers with 32 / bits codes each along a dimension into codes (int32), in order."""
    import torch

    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    shape = [1] * (packed.dim() + 1)
    shape[dim + 1] = len(shifts)
    codes: torch.Tensor = (packed.unsqueeze(dim + 1) >> shifts.view(shape)) & (2**bits - 1)
    if order is not None:
        codes = codes.index_select(dim + 1, torch.argsort(torch.tensor(order)))
    return codes.flatten(dim, dim + 1)
