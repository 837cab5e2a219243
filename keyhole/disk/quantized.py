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

if TYPE_CHECKING:
    import torch

    Get = Callable[[str], torch.Tensor]
"""(name of a tensor in the files) -> the tensor."""

BNB = ".quant_state.bitsandbytes__"
OF_BNB = ("absmax", "quant_map", "nested_absmax", "nested_quant_map")
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
GROUP = 64  # group size of the grids
NESTED = ("nested_blocksize", "nested_offset")  # in the state, if absmax is quantised itself
LARGEST_STATE = 4096  # bytes
LAYOUTS: dict[str, dict[str, tuple[str, ...]]] = {
    "gptq": {"checkpoint_format": ("gptq", "gptq_v2")},
    "awq": {"version": ("gemm", "exllama", "ipex")},
}
"""What config.json may say of the layout of the integers; others (gemv, marlin) have the same names and other bits."""


@dataclass(frozen=True)
class Form:
    """How the weight of a layer is stored. grid: (name, group, dtype of scales, with an offset) of a grid with exactly
    the same numbers, if there is one; parts: names of its tensors by their role; why: the reason if there is no grid,
    else ""."""

    kind: str
    shape: tuple[int, int]
    parts: Mapping[str, str]
    about: Json
    grid: tuple[str, int, str, bool] | None = None
    why: str = ""

    @property
    def codes_in(self) -> set[str]:
        """Names of tensors whose bytes are codes, whatever dtype the file calls them: as numbers they mean nothing, and
        may be NaN (bnb_4bit_quant_storage)."""
        return {self.parts[role] for role in ("weight", "qweight", "qzeros") if role in self.parts}

    def read(self, get: "Get") -> "torch.Tensor":
        """The weights, float32 [O, I]."""
        return (_bnb if self.kind == "bitsandbytes" else _packed_ints)(self, get)[0]

    def levels(self, get: "Get") -> "torch.Tensor | None":
        """The file's own table of the numbers that codes stand for; None: it has none."""
        return get(self.parts["quant_map"]) if "quant_map" in self.parts else None

    def codes(self, get: "Get") -> "tuple[torch.Tensor, torch.Tensor]":
        """Codes and scales on the grid. ValueError if the numbers are not on it."""
        if self.kind == "bitsandbytes":
            return _bnb(self, get)[1]
        return _int4_codes(self, get, self.grid is not None and self.grid[-1])


def find_forms(names: "Mapping[str, tuple[int, ...]]", said: Json, get: "Get") -> dict[str, Form]:
    """Name of a weight -> its form, for all weights in the files. said: quantization_config of config.json. ValueError
    for unsupported formats."""
    method = str(said.get("quant_method", "")).lower()
    found = {}
    for name in names:
        if BNB in name:
            found[name.partition(BNB)[0]] = _bnb_form(name, names, get)
        elif name.endswith(".qweight"):
            stem = name.removesuffix(".qweight")
            if method not in ("gptq", "awq"):
                raise ValueError(f"{name} is quantised by {method or 'an unknown method'}; gptq and awq are read")
            found[f"{stem}.weight"] = _ints_form(stem, names, method, said)
        elif name.endswith((".SCB", ".weight_format")):
            raise ValueError(f"{name} is of bitsandbytes' 8 bits, which is not read; 4 bits are")
    return found


def _bnb_form(name: str, names: Mapping[str, tuple[int, ...]], get: "Get") -> Form:
    weight = name.partition(BNB)[0]
    if names[name][0] > LARGEST_STATE:
        raise ValueError(f"{name} is no description of a quantised weight")
    try:
        about = json.loads(bytes(get(name).tolist()))
        rows, columns = (int(side) for side in about["shape"])
        block, nested = int(about["blocksize"]), int(about.get("nested_blocksize", 1))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{name} cannot be read: {error!r:.80}") from None
    parts = {role: f"{weight}.{role}" for role in OF_BNB if f"{weight}.{role}" in names} | {"weight": weight}
    numel, held = rows * columns, names.get(weight, (0,))[0]  # numbers of 1, 2 or 4 bytes, with two codes per byte
    fine = min(rows, columns, block, nested) > 0 and -(-numel // 2) in (held, 2 * held, 4 * held)
    if not fine or "quant_map" not in parts or names.get(f"{weight}.absmax") != (-(-numel // block),):
        raise ValueError(f"{name} does not fit the tensors of {weight}")
    lacks = [key for key in NESTED if key not in about]
    lacks += [f"{weight}.{role}" for role in OF_BNB if role.startswith("nested_") and role not in parts]
    if 0 < len(lacks) < 4:
        raise ValueError(f"the scales of {weight} are quantised themselves, and {lacks[0]} is missing")
    why = f"its {numel} weights are no multiple of {GROUP}" if numel % block else ""
    why = f"its blocks are of {block} weights, {GROUP} are needed" if block != GROUP else why
    kind = about.get("quant_type")
    why = why if kind == "nf4" else f"bitsandbytes' {kind!s:.20} is no format of a wire"
    grid = None if why else ("nf4", GROUP, "float32", False)
    return Form("bitsandbytes", (rows, columns), parts, about, grid, why)


def _ints_form(stem: str, names: Mapping[str, tuple[int, ...]], method: str, said: Json) -> Form:
    parts = {role: f"{stem}.{role}" for role in ("qweight", "qzeros", "scales", "g_idx") if f"{stem}.{role}" in names}
    bits, group = said.get("bits", said.get("w_bit", 4)), said.get("group_size", said.get("q_group_size", 128))
    sizes = (4, 8) if method == "gptq" else (4,)
    if type(bits) is not int or bits not in sizes or type(group) is not int:
        raise ValueError(f"{stem} has {bits!r:.20} bits in groups of {group!r:.20}; 4 and 8 bits are read (awq: 4)")
    for key, known in LAYOUTS[method].items():
        if str(said.get(key) or known[0]).lower() not in known:
            raise ValueError(f"{key} of config.json is {said[key]!r:.40}; {', '.join(known)} are read")
    reordered = method == "gptq" and bool(said.get("desc_act"))
    lacks = [role for role in ("qweight", "qzeros", "scales", *["g_idx"] * reordered) if role not in parts]
    if lacks:
        why = ", though config.json says desc_act: the groups of its inputs are not known" * (lacks[0] == "g_idx")
        raise ValueError(f"{stem} lacks {lacks[0]}{why}")
    (rows, columns), per = names[parts["qweight"]], 32 // bits
    inputs, outputs = (rows * per, columns) if method == "gptq" else (rows, columns * per)
    group = inputs if group < 1 else group
    count = names[parts["scales"]][0]
    shapes = {"scales": (count, outputs), "qzeros": (count, outputs // per), "g_idx": (inputs,)}
    for role, shape in shapes.items():
        if role in parts and tuple(names[parts[role]]) != shape:
            raise ValueError(f"{stem}: its {role} has another shape than its qweight of {bits} bits needs")
    if (groups := -(-inputs // group)) != count:
        raise ValueError(
            f"{stem} has scales of {count} groups, but group_size {group} of config.json makes {groups} of its "
            f"{inputs} inputs"
        )
    why = "its inputs are reordered (desc_act, act-order)" if reordered else ""
    if not why and (group % GROUP or inputs % group):
        why = f"its groups are of {group} weights, a multiple of {GROUP} that divides {inputs} inputs is needed"
    why = why if bits == 4 else f"{method.upper()} in {bits} bits is no format of a wire, in 4 bits it is"
    symmetric = method == "gptq" and said.get("sym") is True
    grid = None if why else ("int4", GROUP, "float16" if symmetric else "float32", not symmetric)
    about = {"bits": bits, "group": group, "method": method, "v2": said.get("checkpoint_format") == "gptq_v2"}
    return Form(method.upper(), (outputs, inputs), parts, about, grid, why)


def _bnb(form: Form, get: "Get") -> "tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]":
    """(weights, (codes, scales))."""
    import torch

    part = {role: get(name) for role, name in form.parts.items()}
    absmax, block = part["absmax"], int(form.about["blocksize"])
    if absmax.is_floating_point() == ("nested_absmax" in part):
        kind = str(absmax.dtype).removeprefix("torch.")
        how = "with" if "nested_absmax" in part else "without"
        raise ValueError(f"{form.parts['absmax']} is {kind} {how} a nested_absmax; codes have one, numbers have none")
    if "nested_absmax" in part:
        nested = int(form.about["nested_blocksize"])
        outer = part["nested_absmax"].float().repeat_interleave(nested)[: absmax.numel()]
        absmax = part["nested_quant_map"].float()[absmax.long()] * outer + float(form.about["nested_offset"])
    absmax = absmax.float()
    packed, numel = part["weight"].contiguous().view(-1).view(torch.uint8), form.shape[0] * form.shape[1]
    if len(packed) != -(-numel // 2):
        raise ValueError(f"{form.parts['weight']} has {len(packed)} bytes for {numel} codes of 4 bits")
    q = torch.stack([packed >> 4, packed & 15], dim=1).view(-1)[:numel]
    q = torch.nn.functional.pad(q, (0, -numel % block)).view(-1, block)
    w = part["quant_map"].float()[q.int()] * absmax.unsqueeze(1)
    if form.grid is None:
        return w.view(-1)[:numel].view(form.shape), (packed, absmax)
    low, high = q.split(block // 2, dim=1)
    return w.view(form.shape), ((low | (high << 4)).reshape(-1), absmax)


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


def _packed_ints(form: Form, get: "Get") -> "tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]":
    """(weights [O, I], codes [I, O], zeros [G, O], group of each input)."""
    import torch

    part, bits = {role: get(name) for role, name in form.parts.items()}, form.about["bits"]
    if form.about["method"] == "awq":
        q = _unpack(part["qweight"], 4, 1, AWQ_ORDER)
        zeros = _unpack(part["qzeros"], 4, 1, AWQ_ORDER)
    else:
        q = _unpack(part["qweight"], bits, 0)
        zeros = _unpack(part["qzeros"], bits, 1)
        zeros = zeros if form.about["v2"] else (zeros + 1) & (2**bits - 1)
    groups = part.get("g_idx")
    groups = torch.arange(form.shape[1]) // form.about["group"] if groups is None else groups.long()
    if bool((groups < 0).any()) or int(groups.max()) >= len(zeros):
        raise ValueError(f"{form.parts['qweight']}: its g_idx names a group that is not there")
    w = part["scales"].float()[groups] * (q - zeros[groups]).float()
    return w.t().contiguous(), q, zeros, groups


def _int4_codes(form: Form, get: "Get", offset: bool) -> "tuple[torch.Tensor, torch.Tensor]":
    """Codes and scales; offset: scales and offsets, in pairs."""
    import torch

    _, q, zeros, groups = _packed_ints(form, get)
    expected = torch.arange(form.shape[1]) // form.about["group"]
    if (not offset and not bool((zeros == 8).all())) or not torch.equal(groups, expected):
        raise ValueError(
            f"{form.parts['qweight']} is not symmetric, though config.json says so, or its inputs are reordered; set "
            "wire=null, and it is unpacked"
        )
    given = get(form.parts["scales"])
    half = given.to(torch.float16)
    if not torch.equal(half.to(given.dtype), given):  # NaN too
        raise ValueError(f"{form.parts['scales']} has scales that float16 cannot hold; set wire=null")
    stored = torch.stack([half.float(), -half.float() * zeros], dim=-1) if offset else half
    scales = stored.transpose(0, 1).repeat_interleave(form.about["group"] // GROUP, dim=1)
    rows = q.t().to(torch.uint8).reshape(-1, GROUP)
    low, high = rows.split(GROUP // 2, dim=1)
    return (low | (high << 4)).reshape(-1), scales.reshape(-1)


def hidden(forms: Mapping[str, Form]) -> set[str]:
    """Names of tensors that are parts of weights."""
    return {name for form in forms.values() for name in form.parts.values()}
