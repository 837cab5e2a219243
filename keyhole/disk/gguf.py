"""Reads GGUF files, llama.cpp's model format: the header, and the bytes of every tensor (gguf_blocks.py: as numbers).

    file     "GGUF", version, counts, key-value pairs, (name, sides, type, offset) of every tensor, padding, data

Q4_0, Q4_1 and Q8_0 equal the grids int4, int4 with offsets, and int8 of ops/lowbit.py with groups of 32, bit for bit,
so such weights can be used unchanged; the others are unpacked.

Tensors have the names that Transformers uses, for the architectures in NAMED. Files of `llama` have the rows of queries
and keys in another order (halves of a head interleaved): this is undone here, row by row, so that blocks stay whole.
The config.json of the original model must be beside the file.

A large model is cut into parts, NAME-00001-of-00003.gguf and so on. Each has a header of its own, for the tensors in
it; what is said of the model (its architecture, its heads) is in the first part alone, so that is read first.

The file is mapped and untrusted: every length is checked against the size of the file. A header holds the vocabulary,
and takes a fraction of a second: it is parsed once for a file and kept, as long as the file is the same by its inode,
size and times.
"""

import mmap
import os
import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from keyhole.disk.gguf_blocks import FORMS, unpacked

if TYPE_CHECKING:
    import torch

SUFFIX = ".gguf"
SPLIT = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")
GRIDS = {"Q4_0": ("int4", 32, "float16", False), "Q4_1": ("int4", 32, "float16", True)}
GRIDS |= {"Q8_0": ("int8", 32, "float16", False)}  # equal (grid, group, dtype of scales, with an offset)
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
MOST_KEPT = 64  # headers


@dataclass(frozen=True)
class Entry:
    """One tensor: its type, its shape in Transformers, its bytes in the file, and the number of heads whose rows are in
    another order (0: none)."""

    form: str
    shape: tuple[int, ...]
    begin: int
    end: int
    heads: int = 0


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

    def value(self, kind: int, depth: int = 0) -> Any:
        """A metadata value; arrays are skipped, and None is returned."""
        if kind in NUMBERS:
            return self.number(NUMBERS[kind])
        if kind == STRING:
            return self.string()
        if kind != ARRAY or depth > 2:
            raise ValueError(f"its metadata have a value of type {kind}")
        inner, count = self.number("I"), self.number("Q")
        if inner in NUMBERS:
            self.take(count * struct.calcsize(f"<{NUMBERS[inner]}"))
        elif count > len(self.data):
            raise ValueError("it ends in the middle of its header")
        else:
            for _ in range(count):
                self.value(inner, depth + 1)
        return None


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


class Header:
    """What a GGUF file says of itself: its metadata (about; None for arrays), and its tensors (entries). first: the
    header of the first part of the model, if this is a later one; key: what tells the file from others."""

    def __init__(self, data: mmap.mmap, first: "Header | None" = None, key: tuple[int, ...] = ()) -> None:
        self.size, self.key = len(data), key
        reader = _Reader(data)
        if reader.take(4) != b"GGUF":
            raise ValueError("it is no GGUF file")
        version, tensors, pairs = reader.number("I"), reader.number("Q"), reader.number("Q")
        if version not in (2, 3):
            raise ValueError(f"it is of version {version}; 2 and 3 are read")
        if max(tensors, pairs) > self.size:
            raise ValueError("it ends in the middle of its header")
        self.about = about = dict[str, Any]()
        for _ in range(pairs):
            name, kind = reader.string(), reader.number("I")
            about[name] = reader.value(kind)
        listed = [self._listed(reader) for _ in range(tensors)]
        align = about.get("general.alignment", 32)
        if type(align) is not int or not 1 <= align <= 2**20:
            raise ValueError(f"its alignment is {align!r:.20}")
        base = -(-reader.at // align) * align
        if first is not None:
            of_model = ("general.architecture", f"{first.architecture}.")
            about |= {key: value for key, value in first.about.items() if key.startswith(of_model)}
        self.architecture: str = str(about.get("general.architecture"))
        self.heads = about.get(f"{self.architecture}.attention.head_count")
        self.kv_heads = about.get(f"{self.architecture}.attention.head_count_kv", self.heads)
        self.entries: dict[str, Entry] = {}
        for name, sides, kind, offset in listed:
            if name not in UNUSED:
                known = self._named(name)
                self.entries[known] = self._entry(name, sides, kind, base + offset)

    @staticmethod
    def _listed(reader: _Reader) -> tuple[str, tuple[int, ...], int, int]:
        name, dims = reader.string(), reader.number("I")
        if dims > 4:
            raise ValueError(f"{name:.60} has {dims} dimensions")
        sides = tuple(reader.number("Q") for _ in range(dims))
        return name, sides[::-1], reader.number("I"), reader.number("Q")

    def _named(self, name: str) -> str:
        if self.architecture not in NAMED:
            raise ValueError(f"it is of architecture {self.architecture:.40}; {', '.join(NAMED)} are read")
        stem, _, kind = name.rpartition(".")
        if (found := re.fullmatch(r"blk\.(\d{1,5})\.(\w+)", stem)) and found[2] in INSIDE:
            return f"model.layers.{found[1]}.{INSIDE[found[2]]}.{kind}"
        if stem not in TOP:
            raise ValueError(f"it has a tensor {name:.60}, of no model of architecture {self.architecture} known here")
        return f"{TOP[stem]}.{kind}"

    def _entry(self, name: str, shape: tuple[int, ...], kind: int, begin: int) -> Entry:
        if kind not in FORMS:
            known = ", ".join(form for form, _, _ in FORMS.values())
            raise ValueError(f"{name} is of type {kind}; {known} are read: quantise the model to Q4_0 or Q8_0")
        form, block, size = FORMS[kind]
        numel = 1
        for side in shape:
            numel *= side
        if not shape or numel < 1 or shape[-1] % block:
            raise ValueError(f"{name} has the shape {shape}, which {form} cannot have")
        end = begin + numel // block * size
        if end > self.size:
            raise ValueError(f"it ends before the data of {name}")
        heads: Any = 0
        if self.architecture == "llama" and (".attn_q." in name or ".attn_k." in name):
            heads = self.heads if ".attn_q." in name else self.kv_heads
            if type(heads) is not int or heads < 1 or shape[0] % (2 * heads):
                raise ValueError(f"its head counts {self.heads!r:.20} and {self.kv_heads!r:.20} do not fit {name}")
        return Entry(form, shape, begin, end, heads)


_kept: dict[tuple[int, ...], Header] = {}


def _header(file: int, data: mmap.mmap, first: Header | None) -> Header:
    """The header of an open file, parsed or kept."""
    about = os.fstat(file)
    key = (about.st_dev, about.st_ino, len(data), about.st_mtime_ns, about.st_ctime_ns, *(first.key if first else ()))
    if (found := _kept.get(key)) is None:
        found = Header(data, first, key)
        while len(_kept) >= MOST_KEPT:
            _kept.pop(next(iter(_kept)), None)
        _kept[key] = found
    return found


class GGUFShard:
    """One GGUF file, with the interface of a weight file (weight_files.py)."""

    def __init__(self, path: Path) -> None:
        part, first = SPLIT.fullmatch(path.name), None
        if part and int(part[2]) > 1:
            first = GGUFShard(path.with_name(f"{part[1]}-00001-of-{part[3]}{SUFFIX}")).header
        with path.open("rb") as file:
            self.data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            self.header: Header = _header(file.fileno(), self.data, first)
        self.entries, about = self.header.entries, self.header.about
        named = (int(part[2]) - 1, int(part[3])) if part else (0, 1)
        if (said := (about.get("split.no", named[0]), about.get("split.count", named[1]))) != named:
            raise ValueError(
                f"it says that it is number {said[0]!r:.20}, counted from 0, of {said[1]!r:.20} parts, and its name "
                "does not; parts are called NAME-00001-of-00003.gguf and so on"
            )

    def settings(self) -> dict[str, Any]:
        """The metadata of the model's architecture, without its name: {"block_count": 30, ...}; None for arrays."""
        prefix = f"{self.header.architecture}."
        return {key.removeprefix(prefix): v for key, v in self.header.about.items() if key.startswith(prefix)}

    def keys(self) -> list[str]:
        return list(self.entries)

    def get_slice(self, name: str) -> "GGUFShape":
        return GGUFShape(list(self.entries[name].shape))

    def form(self, name: str) -> str:
        """The type of a tensor; "" if it is plain."""
        form = self.entries[name].form
        return "" if form in ("F32", "F16", "BF16") else form

    def get_tensor(self, name: str) -> "torch.Tensor":
        """The weights as numbers: float32 if they were packed."""
        import torch

        entry, dtypes = self.entries[name], {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
        raw = self._rows(entry)
        flat = raw.view(dtypes[entry.form]) if entry.form in dtypes else unpacked(raw, entry.form)
        return flat.reshape(entry.shape)

    def get_codes(self, name: str) -> "tuple[torch.Tensor, torch.Tensor]":
        """Codes (uint8) and scales (float16) of a tensor on a grid of GRIDS, in the format of ops/lowbit.py."""
        import torch

        entry = self.entries[name]
        _, _, size = next(form for form in FORMS.values() if form[0] == entry.form)
        blocks = self._rows(entry).view(-1, size)
        scales = 4 if entry.form == "Q4_1" else 2  # bytes
        return blocks[:, scales:].reshape(-1), blocks[:, :scales].contiguous().view(torch.float16).view(-1)

    def _rows(self, entry: Entry) -> "torch.Tensor":
        """The bytes of a tensor, its rows in the order of Transformers."""
        import torch

        raw = torch.frombuffer(bytearray(self.data[entry.begin : entry.end]), dtype=torch.uint8)
        if not entry.heads:
            return raw
        rows = raw.view(entry.heads, entry.shape[0] // entry.heads // 2, 2, -1)
        return rows.transpose(1, 2).reshape(-1)


@dataclass(frozen=True)
class GGUFShape:
    """The part of safetensors' slice interface that is used here."""

    shape: list[int]

    def get_shape(self) -> list[int]:
        return self.shape

    def get_dtype(self) -> str:
        return "F32"
