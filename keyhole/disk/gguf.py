"""Reads GGUF files, llama.cpp's model format: the header, and every tensor. The package gguf knows its types: their
sizes, and what their blocks mean as numbers.

    file     "GGUF", version, counts, key-value pairs, (name, sides, type, offset) of every tensor, padding, data

Q4_0, Q4_1 and Q8_0 equal the grids int4, int4 with offsets, and int8 of ops/lowbit.py with groups of 32, bit for bit,
so such weights can be used unchanged; the others are unpacked.

Tensors have the names that Transformers uses, for the architectures in NAMED. Files of `llama` have the rows of queries
and keys in another order (halves of a head interleaved): this is undone here, row by row, so that blocks stay whole.
The config.json of the original model must be beside the file.

A large model is cut into parts, NAME-00001-of-00003.gguf and so on. Each has a header of its own, for the tensors in
it; what is said of the model (its architecture, its heads) is in the first part alone, so that is read first.

The file is mapped and untrusted: whatever is read takes some of its bytes, so a header cannot claim more than there is.
(The package's own reader takes a minute and 0.7 GB for Llama 3's vocabulary.) A header takes a fraction of a second: it
is parsed once for a file and kept, as long as the file is the same by its inode, size and times.
"""

import math
import mmap
import os
import re
import struct
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from keyhole.disk.json_text import Json
from keyhole.errors import UserError

if TYPE_CHECKING:
    import numpy as np
    import torch

SUFFIX = ".gguf"
SPLIT = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")
GRIDS = {  # equal (grid, group, dtype of scales, with an offset)
    "Q4_0": ("int4", 32, "float16", False),
    "Q4_1": ("int4", 32, "float16", True),
    "Q8_0": ("int8", 32, "float16", False),
}
PLAIN = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
NAMED = ("llama", "qwen2", "qwen3")
TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
INSIDE = {
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm", "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip
UNUSED = ("rope_freqs.weight",)  # Transformers computes it from the config


@dataclass(frozen=True)
class Entry:
    """One tensor: its type, its shape in Transformers, its bytes in the file, and the number of heads whose rows are in
    another order (0: none)."""

    form: str
    shape: tuple[int, ...]
    begin: int
    end: int
    heads: int = 0


@dataclass(frozen=True, eq=False)
class Header:
    """What a GGUF file says of itself: its metadata (None for arrays), and its tensors."""

    about: Json
    architecture: str
    entries: dict[str, Entry] = field(default_factory=dict)


def _package() -> Any:
    """The package gguf. It is imported when there is a file for it."""
    try:
        import gguf
    except ImportError as error:
        raise UserError("model: GGUF files are read by the package gguf: pip install gguf") from error
    return gguf


class _Reader:
    """Reads values from a mapped file, one after the other. ValueError if the file ends too early."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data, self.at = data, 0

    def take(self, count: int) -> bytes:
        if count > len(self.data) - self.at:
            raise ValueError("it ends in the middle of its header")
        self.at += count
        return self.data[self.at - count : self.at]

    def number(self, kind: str) -> Any:
        return struct.unpack(f"<{kind}", self.take(struct.calcsize(f"<{kind}")))[0]

    def string(self) -> str:
        return self.take(self.number("Q")).decode("utf-8", "replace")

    def value(self, kind: int) -> Any:
        """A metadata value; arrays are skipped, and None is returned."""
        if kind in NUMBERS:
            return self.number(NUMBERS[kind])
        if kind == STRING:
            return self.string()
        inner, count = (self.number("I"), self.number("Q")) if kind == ARRAY else (None, 0)
        if inner in NUMBERS:
            self.take(count * struct.calcsize(f"<{NUMBERS[inner]}"))
        elif inner == STRING:
            for _ in range(count):  # each takes some of the file
                self.string()
        else:
            raise ValueError(f"its metadata have a value of type {kind}")
        return None

    def tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self.string()
        sides = tuple(self.number("Q") for _ in range(self.number("I")))
        return name, sides[::-1], self.number("I"), self.number("Q")


def gguf_files(directory: Path) -> list[str]:
    """Names of the GGUF files of a model: one, or all parts of one. ValueError if there are several models, or if a
    part is missing."""
    names = sorted(path.name for path in directory.glob(f"*{SUFFIX}"))
    models: dict[tuple[str, str], str] = {}  # a file of each
    for name in names:
        part = SPLIT.fullmatch(name)
        models.setdefault((part[1], part[3]) if part else (name, ""), name)
    if len(models) > 1:
        one, other, *_ = models.values()
        raise ValueError(f"{one} and {other} are not the parts of one model; leave one model there")
    for stem, count in models:
        whole = [f"{stem}-{i:05}-of-{count}{SUFFIX}" for i in range(1, int(count or 0) + 1)]
        if absent := [name for name in whole if name not in names]:
            raise ValueError(f"{absent[0]} is missing: {len(absent)} of the {len(whole)} parts of this model")
    return names


def _parse(data: mmap.mmap, first: Header | None) -> Header:
    """The header of a mapped file. first: that of the first part of the model, if this is a later one."""
    reader = _Reader(data)
    if reader.take(4) != b"GGUF":
        raise ValueError("it is no GGUF file")
    version, tensors, pairs = reader.number("I"), reader.number("Q"), reader.number("Q")
    if version not in (2, 3):
        raise ValueError(f"it is of version {version}; 2 and 3 are read")
    about = {reader.string(): reader.value(reader.number("I")) for _ in range(pairs)}
    listed = [reader.tensor() for _ in range(tensors)]
    align = about.get("general.alignment", 32)
    if type(align) is not int or not 1 <= align <= 2**20:
        raise ValueError(f"its alignment is {align!r:.20}")
    base = -(-reader.at // align) * align
    if first is not None:
        of_model = ("general.architecture", f"{first.architecture}.")
        about |= {key: value for key, value in first.about.items() if key.startswith(of_model)}
    header = Header(about, str(about.get("general.architecture")))
    for name, shape, kind, offset in listed:
        if name not in UNUSED:
            known, entry = _named(header, name), _entry(header, name, shape, kind, base + offset)
            if entry.end > len(data):
                raise ValueError(f"it ends before the data of {name}")
            header.entries[known] = entry
    return header


def _named(header: Header, name: str) -> str:
    if header.architecture not in NAMED:
        raise ValueError(f"it is of architecture {header.architecture:.40}; {', '.join(NAMED)} are read")
    stem, _, kind = name.rpartition(".")
    if (found := re.fullmatch(r"blk\.(\d{1,5})\.(\w+)", stem)) and found[2] in INSIDE:
        return f"model.layers.{found[1]}.{INSIDE[found[2]]}.{kind}"
    if stem not in TOP:
        raise ValueError(f"it has a tensor {name:.60}, of no model of architecture {header.architecture} known here")
    return f"{TOP[stem]}.{kind}"


def _entry(header: Header, name: str, shape: tuple[int, ...], kind: int, begin: int) -> Entry:
    types = _package().constants
    try:
        form = types.GGMLQuantizationType(kind)
        block, size = types.GGML_QUANT_SIZES[form]
    except (ValueError, KeyError):
        raise ValueError(f"{name} is of type {kind}, which is not known here") from None
    numel = math.prod(shape)
    if not shape or numel < 1 or shape[-1] % block:
        raise ValueError(f"{name} has the shape {shape}, which {form.name} cannot have")
    heads: Any = 0
    if header.architecture == "llama" and (".attn_q." in name or ".attn_k." in name):
        heads = header.about.get("llama.attention.head_count")
        if ".attn_k." in name:
            heads = header.about.get("llama.attention.head_count_kv", heads)
        if type(heads) is not int or heads < 1 or shape[0] % (2 * heads):
            raise ValueError(f"its head counts, {heads!r:.20}, do not fit {name}")
    return Entry(form.name, shape, begin, begin + numel // block * size, heads)


@lru_cache(maxsize=64)
def _header(path: Path, key: tuple[int, ...], first: Header | None) -> Header:
    """The header of a file; key: what tells it from others that had this name."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return _parse(data, first)


class GGUFShard:
    """One GGUF file, with the interface of a weight file (weight_files.py)."""

    def __init__(self, path: Path) -> None:
        part, first = SPLIT.fullmatch(path.name), None
        if part and int(part[2]) > 1:
            first = GGUFShard(path.with_name(f"{part[1]}-00001-of-{part[3]}{SUFFIX}")).header
        with path.open("rb") as file:
            self.data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            about = os.fstat(file.fileno())
        key = (about.st_dev, about.st_ino, about.st_size, about.st_mtime_ns, about.st_ctime_ns)
        self.header: Header = _header(path.resolve(), key, first)
        self.entries = self.header.entries
        named = (int(part[2]) - 1, int(part[3])) if part else (0, 1)
        said = tuple(self.header.about.get(f"split.{key}", named[i]) for i, key in enumerate(("no", "count")))
        if said != named:
            raise ValueError(
                f"it says that it is number {said[0]!r:.20}, counted from 0, of {said[1]!r:.20} parts, and its name "
                "does not; parts are called NAME-00001-of-00003.gguf and so on"
            )

    def settings(self) -> Json:
        """The metadata of the model's architecture, without its name: {"block_count": 30, ...}; None for arrays."""
        prefix = f"{self.header.architecture}."
        return {key.removeprefix(prefix): v for key, v in self.header.about.items() if key.startswith(prefix)}

    def get_tensor(self, name: str) -> "torch.Tensor":
        """The weights as numbers: float32 if they were packed."""
        import torch

        entry = self.entries[name]
        raw = self._rows(entry)
        if entry.form in PLAIN:
            return torch.from_numpy(raw).view(getattr(torch, PLAIN[entry.form])).reshape(entry.shape)
        gguf = _package()
        try:
            found = gguf.quants.dequantize(raw, gguf.constants.GGMLQuantizationType[entry.form])
        except NotImplementedError as error:
            raise ValueError(f"{name} is of type {entry.form}, which the package gguf does not unpack") from error
        return torch.from_numpy(found).reshape(entry.shape)

    def get_codes(self, name: str) -> "tuple[torch.Tensor, torch.Tensor]":
        """Codes (uint8) and scales (float16) of a tensor on a grid of GRIDS, in the format of ops/lowbit.py."""
        import torch

        entry = self.entries[name]
        blocks = torch.from_numpy(self._rows(entry)).view(math.prod(entry.shape) // GRIDS[entry.form][1], -1)
        scales = 4 if entry.form == "Q4_1" else 2  # bytes
        return blocks[:, scales:].reshape(-1), blocks[:, :scales].contiguous().view(torch.float16).view(-1)

    def _rows(self, entry: Entry) -> "np.ndarray":
        """The bytes of a tensor, its rows in the order of Transformers."""
        import numpy as np

        raw = np.frombuffer(self.data, np.uint8, entry.end - entry.begin, entry.begin)
        if entry.heads:
            raw = raw.reshape(entry.heads, entry.shape[0] // entry.heads // 2, 2, -1).transpose(0, 2, 1, 3)
        found: np.ndarray = raw.copy().reshape(-1)
        return found
