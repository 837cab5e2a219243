"""Frozen weights in 8 or 4 bits: codes, and a float16 scale for every group of 64 (or 32) elements.

    int8    w = s q          q in -127 .. 127     s = amax / 127                       1.031 bytes per element
    int4    w = s q          q in -8 .. 7         s = -m / 8, m the element of largest magnitude, with its sign
    nf4     w = s NF4[q]     q in 0 .. 15         s = amax                             both 0.531 bytes per element

NF4 is the 16 quantiles of a normal distribution, scaled to [-1, 1] (QLoRA, Dettmers et al. 2023). The scale is first
rounded to float16, and codes are computed from w / s with the stored s: the nearest integer, ties to even; for NF4, the
nearer of two neighbours, on a tie the lower one. int4 gives its 16th level to the sign of the largest element: its step
is an eighth of the largest magnitude instead of a seventh; values beyond the other end are clipped by at most one step.
A group whose scale rounds to zero is zero. Decoding multiplies in float32, exactly except for NF4, and rounds once to
the dtype of the result.

    codes    uint8 [n] for int8, two's complement; else uint8 [n / 2]: byte j of a group of G elements holds
             element j in its low half and element j + G / 2 in its high half (for int4, q + 8)
    scales   float16 [n / G]

With G = 32, int4 and int8 are the grids of GGUF's Q4_0 and Q8_0, bit for bit (disk/gguf.py); with float32 scales, nf4
is that of bitsandbytes (disk/quantized.py). int4 has a form with an offset m per group, for weights that were published
so (GGUF's Q4_1, AWQ, asymmetric GPTQ); nothing is rounded to it here:

    int4    w = s q + m      q in 0 .. 15         0.625 bytes per element: float16, G = 32, or float32, G = 64

    scales   [n / G, 2], flat: s and m of each group
"""

from dataclasses import dataclass
from typing import Any

import torch

from keyhole.ops.backend import jit, on_device, tl, use_kernel
from keyhole.ops.rounding.round import round_nearest

GROUP = 64  # elements per scale, by default
NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
LARGEST_SCALE = 65504.0
CHUNK = 1 << 22  # elements that the reference processes at a time
GROUPS_AT_ONCE, WARPS = 32, 4  # per program
INTEGERS = 12582912.0  # 1.5 * 2^23: float32 numbers near it are integers, so adding it rounds
_LARGEST_SCALE, _INTEGERS = tl.constexpr(LARGEST_SCALE), tl.constexpr(INTEGERS)
INT8, INT4, NORMAL4 = 0, 1, 2
_INT8, _INT4 = tl.constexpr(INT8), tl.constexpr(INT4)
KINDS = {"int8": INT8, "int4": INT4, "nf4": NORMAL4}
_tables: dict[torch.device, torch.Tensor] = {}


@dataclass(frozen=True)
class Grid:
    """A format: its name, the elements of a group, the dtype of its scales, and whether each has an offset."""

    name: str
    group: int = GROUP
    scales: str = "float16"
    offset: bool = False

    @property
    def kind(self) -> int:
        return KINDS[self.name]

    def code_bytes(self, n: int) -> int:
        """Bytes of the codes of n elements, whole groups."""
        assert n % self.group == 0, n
        return n if self.kind == INT8 else n // 2

    def scale_count(self, n: int) -> int:
        """Of the scales, and offsets, of n elements."""
        return n // self.group * (2 if self.offset else 1)

    @property
    def per_group(self) -> str:
        """What a group has, in words."""
        return f"a {'scale and an offset' if self.offset else 'scale'} per {self.group}"

    @property
    def scale_dtype(self) -> torch.dtype:
        return torch.float16 if self.scales == "float16" else torch.float32

    def scale_bytes(self, n: int) -> int:
        return self.scale_count(n) * self.scale_dtype.itemsize

    @property
    def bytes_per_element(self) -> float:
        return (1.0 if self.kind == INT8 else 0.5) + self.scale_bytes(self.group) / self.group


def table(device: torch.device) -> torch.Tensor:
    """float32 [31] on a device: NF4, and the 15 numbers halfway between its neighbours."""
    if device not in _tables:
        levels = torch.tensor(NF4, dtype=torch.float32)
        _tables[device] = torch.cat([levels, (levels[1:] + levels[:-1]) / 2]).to(device)
    return _tables[device]


def scales_reference(w_GE: torch.Tensor, grid: Grid) -> torch.Tensor:
    """[G], in their dtype."""
    low_G, high_G = w_GE.amin(1), w_GE.amax(1)
    if grid.kind == INT4:
        scale_G = torch.where(-low_G >= high_G, low_G, high_G) * -0.125
    else:
        scale_G = torch.maximum(-low_G, high_G)
        scale_G = scale_G / 127.0 if grid.kind == INT8 else scale_G
    scale_G = torch.where(scale_G == 0, 0.0, scale_G)  # no negative zero
    return scale_G.clamp(-LARGEST_SCALE, LARGEST_SCALE).to(grid.scale_dtype)


def lowbit_encode_reference_(w: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, grid: Grid) -> None:
    for begin in range(0, w.numel(), CHUNK):
        w_GE = w[begin : begin + CHUNK].view(-1, grid.group)
        n, first = w_GE.numel(), begin // grid.group
        stored_G = scales_reference(w_GE, grid)
        scales[first : first + len(w_GE)] = stored_G
        scale_G1 = stored_G.float().unsqueeze(1)
        x_GE = torch.where(scale_G1 == 0, 0.0, w_GE / scale_G1)
        if grid.kind == NORMAL4:
            mids = table(w.device)[16:]
            q_GE = torch.bucketize(x_GE, mids).to(torch.uint8)
        else:
            least, most = (-127.0, 127.0) if grid.kind == INT8 else (-8.0, 7.0)
            q_GE = torch.round(x_GE).clamp(least, most).to(torch.int8).view(torch.uint8)
            q_GE = q_GE if grid.kind == INT8 else q_GE + 8  # modulo 256
        if grid.kind == INT8:
            codes[begin : begin + n] = q_GE.view(-1)
        else:
            low, high = q_GE.split(grid.group // 2, dim=1)
            codes[begin // 2 : (begin + n) // 2] = (low | (high << 4)).reshape(-1)


def lowbit_decode_reference(codes: torch.Tensor, scales: torch.Tensor, out: torch.Tensor, grid: Grid) -> None:
    for begin in range(0, out.numel(), CHUNK):
        part = out[begin : begin + CHUNK]
        n = part.numel()
        stored = scales[grid.scale_count(begin) : grid.scale_count(begin + n)].float()
        scale_G1, offset_G1 = stored.view(-1, 2).split(1, dim=1) if grid.offset else (stored.unsqueeze(1), None)
        if grid.kind == INT8:
            w_GE = codes[begin : begin + n].view(torch.int8).float().view(-1, grid.group)
        else:
            byte_GH = codes[begin // 2 : (begin + n) // 2].view(-1, grid.group // 2)
            q_GE = torch.cat([byte_GH & 15, byte_GH >> 4], dim=1)
            zero = 0 if grid.offset else 8
            w_GE = q_GE.float() - zero if grid.kind == INT4 else table(out.device)[q_GE.int()]
        w_GE = w_GE * scale_G1
        part.copy_((w_GE if offset_G1 is None else w_GE + offset_G1).view(-1))


@jit()
def _nearest_integer(x):
    return ((x + _INTEGERS) - _INTEGERS).to(tl.int32)


@jit()
def _code(w, scale, table_ptr, KIND: tl.constexpr):
    """Codes (int32) of float32 values by the scales of their groups."""
    zero = scale == 0
    x = tl.where(zero, 0.0, tl.div_rn(w, tl.where(zero, 1.0, scale)))
    if KIND == _INT8:
        code = _nearest_integer(tl.minimum(tl.maximum(x, -127.0), 127.0)) & 0xFF
    elif KIND == _INT4:
        code = _nearest_integer(tl.minimum(tl.maximum(x, -8.0), 7.0)) + 8
    else:
        code = (x > tl.load(table_ptr + 16)).to(tl.int32)
        for k in tl.static_range(17, 31):
            code += (x > tl.load(table_ptr + k)).to(tl.int32)
    return code


@jit()
def _value(code, scale, table_ptr, KIND: tl.constexpr):
    """float32 values of codes (int32)."""
    if KIND == _INT8:
        level = ((code << 24) >> 24).to(tl.float32)
    elif KIND == _INT4:
        level = (code - 8).to(tl.float32)
    else:
        level = tl.load(table_ptr + code)
    return level * scale


@jit(do_not_specialize=["groups"])
def _encode_kernel(
    w_ptr, codes_ptr, scales_ptr, table_ptr, groups, KIND: tl.constexpr, GROUP: tl.constexpr, AT_ONCE: tl.constexpr
):
    """One program: AT_ONCE groups, each in two halves."""
    HALF: tl.constexpr = GROUP // 2
    group = tl.program_id(0).to(tl.int64) * AT_ONCE + tl.arange(0, AT_ONCE)
    exists = group < groups
    at = group[:, None] * GROUP + tl.arange(0, HALF)[None, :]
    first = tl.load(w_ptr + at, exists[:, None], 0.0)
    second = tl.load(w_ptr + at + HALF, exists[:, None], 0.0)
    low = tl.minimum(tl.min(first, 1), tl.min(second, 1))
    high = tl.maximum(tl.max(first, 1), tl.max(second, 1))
    if KIND == _INT4:
        scale = tl.where(-low >= high, low, high) * -0.125
    else:
        scale = tl.maximum(-low, high)
        if KIND == _INT8:
            scale = tl.div_rn(scale, tl.full((AT_ONCE,), 127.0, tl.float32))
    scale = tl.where(scale == 0, 0.0, scale)
    stored = tl.minimum(tl.maximum(scale, -_LARGEST_SCALE), _LARGEST_SCALE).to(scales_ptr.dtype.element_ty)
    tl.store(scales_ptr + group, stored, exists)
    scale = stored.to(tl.float32)[:, None]
    a, b = _code(first, scale, table_ptr, KIND), _code(second, scale, table_ptr, KIND)
    if KIND == _INT8:
        tl.store(codes_ptr + at, a.to(tl.uint8), exists[:, None])
        tl.store(codes_ptr + at + HALF, b.to(tl.uint8), exists[:, None])
    else:
        where = group[:, None] * HALF + tl.arange(0, HALF)[None, :]
        tl.store(codes_ptr + where, (a | (b << 4)).to(tl.uint8), exists[:, None])


@jit(do_not_specialize=["groups"])
def _decode_kernel(
    codes_ptr,
    scales_ptr,
    out_ptr,
    table_ptr,
    groups,
    KIND: tl.constexpr,
    OFFSET: tl.constexpr,
    GROUP: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """One program: AT_ONCE groups, each in two halves."""
    HALF: tl.constexpr = GROUP // 2
    group = tl.program_id(0).to(tl.int64) * AT_ONCE + tl.arange(0, AT_ONCE)
    exists = group < groups
    at = group[:, None] * GROUP + tl.arange(0, HALF)[None, :]
    if OFFSET:
        scale = tl.load(scales_ptr + 2 * group, exists, 0.0).to(tl.float32)[:, None]
        offset = tl.load(scales_ptr + 2 * group + 1, exists, 0.0).to(tl.float32)[:, None]
    else:
        scale = tl.load(scales_ptr + group, exists, 0.0).to(tl.float32)[:, None]
    if KIND == _INT8:
        a = tl.load(codes_ptr + at, exists[:, None], 0).to(tl.int32)
        b = tl.load(codes_ptr + at + HALF, exists[:, None], 0).to(tl.int32)
    else:
        where = group[:, None] * HALF + tl.arange(0, HALF)[None, :]
        byte = tl.load(codes_ptr + where, exists[:, None], 0).to(tl.int32)
        a, b = byte & 15, byte >> 4
    out_type = out_ptr.dtype.element_ty
    if OFFSET:
        first, second = a.to(tl.float32) * scale + offset, b.to(tl.float32) * scale + offset
    else:
        first, second = _value(a, scale, table_ptr, KIND), _value(b, scale, table_ptr, KIND)
    tl.store(out_ptr + at, round_nearest(first, out_type), exists[:, None])
    tl.store(out_ptr + at + HALF, round_nearest(second, out_type), exists[:, None])


def _check(codes: torch.Tensor, scales: torch.Tensor, flat: torch.Tensor, grid: Grid) -> None:
    """Asserts that these are a packed and an unpacked form of the same number of weights."""
    assert flat.dim() == 1 and all(t.is_contiguous() for t in (codes, scales, flat)), (flat.shape, codes.shape)
    assert codes.dtype == torch.uint8 and codes.shape == (grid.code_bytes(flat.numel()),), codes.shape
    assert scales.dtype == grid.scale_dtype and scales.shape == (grid.scale_count(flat.numel()),), scales.shape


def lowbit_encode_(w: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, grid: Grid) -> None:
    """codes, scales <- w, flat float32 [n], finite. No grid with offsets."""
    _check(codes, scales, w, grid)
    assert w.dtype == torch.float32 and not grid.offset, (w.dtype, grid)
    if not use_kernel(w.device) or w.numel() == 0:
        return lowbit_encode_reference_(w, codes, scales, grid)
    _launch(_encode_kernel, (w, codes, scales), w, grid, {})


def lowbit_decode(codes: torch.Tensor, scales: torch.Tensor, out: torch.Tensor, grid: Grid) -> None:
    """out <- the weights. out: flat [n], float32, bfloat16 or float16 (one rounding, to nearest)."""
    _check(codes, scales, out, grid)
    if not use_kernel(out.device) or out.numel() == 0:
        return lowbit_decode_reference(codes, scales, out, grid)
    _launch(_decode_kernel, (codes, scales, out), out, grid, {"OFFSET": grid.offset})


def _launch(
    kernel: Any, tensors: tuple[torch.Tensor, ...], flat: torch.Tensor, grid: Grid, flags: dict[str, bool]
) -> None:
    groups = flat.numel() // grid.group
    how = flags | {"KIND": grid.kind, "GROUP": grid.group, "AT_ONCE": GROUPS_AT_ONCE, "num_warps": WARPS}
    with on_device(flat):
        kernel[(-(-groups // GROUPS_AT_ONCE),)](*tensors, table(flat.device), groups, **how, enable_fp_fusion=False)
