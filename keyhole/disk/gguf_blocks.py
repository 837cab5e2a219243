"""Blocks of quantised weights in GGUF files, as numbers.

    F32 F16 BF16   plain
    Q4_0           32 weights in 18 bytes      w = d (q - 8)         d float16; byte j has element j low, j + 16 high
    Q4_1           32 weights in 20 bytes      w = d q + m           d and m float16
    Q5_0, Q5_1     32 weights in 22, 24        w = d (q - 16), d q + m    as above, the fifth bits in a word of 32
    Q8_0           32 weights in 34 bytes      w = d q               q int8
    Q4_K, Q5_K     256 weights in 144, 176     w = d s q - e m       s, m of 6 bits per 32 weights; d, e float16
    Q6_K           256 weights in 210 bytes    w = d s q             s int8 per 16, q of 6 bits less 32

Blocks run along a row. Files are named after the type of most of their matrices: those of Q4_K_M have some in Q6_K, and
where a row is no multiple of 256, in Q5_0 or Q8_0; heads are in Q6_K in nearly all. All arithmetic is in float32.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

FORMS = {0: ("F32", 1, 4), 1: ("F16", 1, 2), 30: ("BF16", 1, 2), 2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20)}
FORMS |= {6: ("Q5_0", 32, 22), 7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34)}
FORMS |= {12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176), 14: ("Q6_K", 256, 210)}  # type: (name, weights, bytes)


def unpacked(raw: "torch.Tensor", form: str) -> "torch.Tensor":
    """float32 weights of blocks."""
    _, _, size = next(each for each in FORMS.values() if each[0] == form)
    blocks = raw.view(-1, size)
    if form == "Q6_K":
        return _q6_k(blocks)
    if form in ("Q4_K", "Q5_K"):
        return _q45_k(blocks)
    return _of_32(blocks, form)


def _halves(blocks: "torch.Tensor", begin: int) -> "torch.Tensor":
    """A float16 number of each block, as float32 [blocks, 1]."""
    import torch

    return blocks[:, begin : begin + 2].contiguous().view(torch.float16).float()


def _of_32(blocks: "torch.Tensor", form: str) -> "torch.Tensor":
    import torch

    if form == "Q8_0":
        return (blocks[:, 2:].contiguous().view(torch.int8).float() * _halves(blocks, 0)).view(-1)
    codes = blocks[:, -16:]
    q = torch.cat([codes & 15, codes >> 4], dim=1)
    if form in ("Q5_0", "Q5_1"):
        word = blocks[:, -20:-16].contiguous().view(torch.int32)
        q = q | (((word >> torch.arange(32, dtype=torch.int32)) & 1) << 4).to(torch.uint8)
    if form in ("Q4_0", "Q5_0"):
        return ((q.float() - (8 if form == "Q4_0" else 16)) * _halves(blocks, 0)).view(-1)
    return (q.float() * _halves(blocks, 0) + _halves(blocks, 2)).view(-1)


def _q45_k(blocks: "torch.Tensor") -> "torch.Tensor":
    """Eight runs of 32 weights, each with a scale and a minimum of 6 bits. Those of the first four runs are in the low
    six bits of eight bytes; the four bytes after them have the low halves of the others, whose high two bits are the
    high bits of the eight. Runs 2 i and 2 i + 1 are the low and high halves of 32 bytes; in Q5_K, bit j of byte l is
    the fifth bit of element l of run j."""
    import torch

    b = blocks[:, 4:16]
    scales = torch.cat([b[:, :4] & 63, (b[:, 8:] & 15) | ((b[:, :4] >> 6) << 4)], dim=1)
    mins = torch.cat([b[:, 4:8] & 63, (b[:, 8:] >> 4) | ((b[:, 4:8] >> 6) << 4)], dim=1)
    codes = blocks[:, -128:].view(-1, 4, 32)
    q = torch.stack([codes & 15, codes >> 4], dim=2).view(-1, 8, 32)
    if blocks.shape[1] == 176:
        fifth = blocks[:, 16:48].unsqueeze(1) >> torch.arange(8, dtype=torch.uint8).view(1, 8, 1)
        q = q | ((fifth & 1) << 4)
    slopes, offsets = _halves(blocks, 0) * scales.float(), _halves(blocks, 2) * mins.float()
    return (slopes.unsqueeze(2) * q.float() - offsets.unsqueeze(2)).view(-1)


def _q6_k(blocks: "torch.Tensor") -> "torch.Tensor":
    import torch

    low, high, scales = blocks[:, :128], blocks[:, 128:192], blocks[:, 192:208].contiguous().view(torch.int8).float()
    out = torch.empty(len(blocks), 256)
    for half in range(2):
        a, b = low[:, 64 * half : 64 * half + 32], low[:, 64 * half + 32 : 64 * half + 64]
        top = high[:, 32 * half : 32 * half + 32]
        for part, four in enumerate((a & 15, b & 15, a >> 4, b >> 4)):
            q = (four | (((top >> (2 * part)) & 3) << 4)).float() - 32
            of_16 = scales[:, 8 * half + 2 * part : 8 * half + 2 * part + 2].repeat_interleave(16, dim=1)
            out[:, 128 * half + 32 * part : 128 * half + 32 * part + 32] = (_halves(blocks, 208) * of_16) * q
    return out.view(-1)
