"""The weight files of a Hugging Face directory: their tensors with shapes, and how to read them.

    model.safetensors     or, cut into shards, model.safetensors.index.json with {"weight_map": {tensor: file}}
    pytorch_model.bin     or pytorch_model.bin.index.json; the older format: a pickle in a zip archive
    NAME.gguf             or its parts NAME-00001-of-00003.gguf (gguf.py)

Safetensors are preferred if there are several formats. Weights of linear layers that were published in 4 or 8 bits
(quantized.py, gguf.py) are listed as one tensor each, with the shape of the unpacked weights.

A .bin is opened by torch.load(weights_only=True), which builds tensors and refuses everything else in a pickle, so no
code in it runs; its data are mapped, and read only when a tensor is copied. Shards are opened one after the other.
Nothing here needs the module, so the tensors can be compared with a config before anything is built.

A hash identifies the weights of a directory, regardless of how they are cut into files:

    hash = SHA-256 over the sorted lines  "name dtype shape crc"       crc: CRC-32 of the tensor's bytes

The lines do not name files; a CRC is enough because the hash detects a wrong directory, not a deliberate forgery.
Tensors are read in parallel (zlib releases the GIL): a few GB/s, and right after a load mostly from the page cache. A
.bin or GGUF file has one line, with the CRC of its bytes. This file does not import torch, unless a .bin is opened or a
hash of tensors is asked for.
"""

import hashlib
import json
import os
import pickle
import re
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from keyhole.disk.gguf import GRIDS, PLAIN, SUFFIX, GGUFShard, gguf_files
from keyhole.disk.json_text import Json, read_json
from keyhole.disk.quantized import BNB, Form, check_finite, find_forms
from keyhole.errors import NonFinite, UserError
from keyhole.machine.out_of_memory import MORE_ROOM, cannot_map
from keyhole.machine.sizes import about

if TYPE_CHECKING:
    import torch  # only to open a .bin: directories are checked before torch is imported

KINDS = {"safetensors": ("model.safetensors.index.json", "model.safetensors")}
KINDS["bin"] = ("pytorch_model.bin.index.json", "pytorch_model.bin")
INDEX, SINGLE = KINDS["safetensors"]
OWN_NAME = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors")
PIECE_BYTES = 8 * 2**20
READERS = min(16, os.cpu_count() or 1)
Part = tuple[Path, int, int, str]  # bytes [begin, end) of a file, and name, dtype and shape of their tensor


@dataclass(frozen=True)
class Stored:
    """One tensor in a file. form: its quantised format, "" if it is plain; grid: the grid of ops/lowbit.py that holds
    it exactly, None if there is none; of: how it is stored, if that is as several tensors."""

    file: str
    shape: tuple[int, ...]
    form: str = ""
    grid: tuple[str, int, str, bool] | None = None
    of: Form | None = None
    dtype: str = "F32"  # as safetensors calls it

    @property
    def is_number(self) -> bool:
        """Whether the file has weights, and not codes that stand for them."""
        return bool(self.form) or self.dtype.startswith(("F", "BF"))

    def read(self, directory: Path, name: str) -> "torch.Tensor":
        """The tensor as numbers. UserError if those of a quantised one are not finite."""
        with _damaged(directory / self.file):
            found = open_shard(directory / self.file).get_tensor(name) if self.of is None else self.of.read()
            if self.form:
                check_finite(name, found)
        return found

    def codes(self, directory: Path, name: str) -> "tuple[torch.Tensor, torch.Tensor]":
        with _damaged(directory / self.file):
            if self.of is not None:
                return self.of.codes()
            codes, scales = GGUFShard(directory / self.file).get_codes(name)
            check_finite(f"the scales of {name}", scales)
        return codes, scales


class Shard(Protocol):
    """One open weight file."""

    def get_tensor(self, name: str) -> "torch.Tensor": ...


class _Pickled:
    """A .bin file; its tensors are views of the mapped file. Files from before PyTorch 1.6 are not archives and cannot
    be mapped, so they are read."""

    def __init__(self, file: Path) -> None:
        import torch

        is_archive = zipfile.is_zipfile(file)
        if is_archive and any(record.compress_type for record in zipfile.ZipFile(file).infolist()):
            raise ValueError("the records of its archive are compressed, and would be taken for weights; save it anew")
        found = torch.load(file, map_location="cpu", weights_only=True, mmap=is_archive)
        if not isinstance(found, dict) or not all(isinstance(name, str) for name in found):
            raise ValueError("it is no table of tensors by name")
        for name, x in found.items():
            plain = isinstance(x, torch.Tensor) and x.layout == torch.strided and x.device.type == "cpu"
            if not plain or x.is_nested or x.nbytes > x.untyped_storage().nbytes():
                raise ValueError(f"{name} is no plain tensor: sparse, without data, or wider than them")
        self.tensors: dict[str, torch.Tensor] = found

    def get_tensor(self, name: str) -> "torch.Tensor":
        return self.tensors[name]


def has_weights(directory: Path) -> bool:
    names = [name for kind in KINDS.values() for name in kind]
    return any((directory / name).exists() for name in names) or any(directory.glob(f"*{SUFFIX}"))


def is_pickled(directory: Path) -> bool:
    safe, pickled = (any((directory / name).exists() for name in KINDS[kind]) for kind in ("safetensors", "bin"))
    return pickled and not safe


def weight_files(directory: Path) -> dict[str, str] | list[str]:
    """Tensor name -> file, from the index; or a list with the single file."""
    for index, single in KINDS.values():
        if (directory / index).exists():
            named = _read_index(directory / index)
            if (directory / single).exists() and single not in named.values():
                raise UserError(
                    f"model: {directory} holds two models, {single} and the files that {index} names; Transformers "
                    "reads the first. Remove the one that belongs to another save"
                )
            return named
        if (directory / single).exists():
            return [single]
    try:
        found = gguf_files(directory) if directory.is_dir() else []
    except ValueError as error:
        raise UserError(f"model: {directory}: {error}") from error
    if found:
        return found
    if (directory / "keyhole_state.json").exists():
        raise UserError(
            f"model: {directory} is a checkpoint without weights: what its run has learned lies beside those of the "
            "original model. Go on with that run (--resume), take the model that it saved in its output_dir, or write "
            "one: keyhole replay ORIGINAL OUTPUT_DIR NEW --steps N"
        )
    raise UserError(
        f"model: {directory} has no weights (model.safetensors, pytorch_model.bin, or an index of several such files)"
    )


def _read_index(path: Path) -> dict[str, str]:
    weight_map: Any = read_json(path, "model").get("weight_map")
    named = isinstance(weight_map, dict) and all(isinstance(file, str) for file in weight_map.values())
    if not named or not weight_map:
        raise UserError(f"model: {path} cannot be read: its weight_map must name a file for every tensor")
    outside = [file for file in weight_map.values() if Path(file).name != file or file in ("", ".", "..")]
    if outside:
        raise UserError(f"model: {path} names {outside[0]!r}; weight files lie beside their index, without a path")
    missing = sorted({file for file in weight_map.values() if not os.path.isfile(path.parent / file)})
    if missing:
        raise UserError(f"model: {path} names {missing[0]}, which is missing ({len(missing)} files)")
    return dict[str, str](weight_map)


def open_shard(file: Path, framework: str = "pt") -> Shard:
    """One weight file, open as long as it is referenced; UserError if it is damaged, or contains more than
    tensors. (Safetensors checks the whole header, and the file's size against it.)"""
    from safetensors import safe_open

    try:
        if not file.is_file():
            raise OSError("it is no ordinary file")
        if file.suffix == SUFFIX:
            return GGUFShard(file)
        return _Pickled(file) if file.suffix == ".bin" else safe_open(file, framework=framework)
    except UserError:
        raise
    except pickle.UnpicklingError as error:
        raise UserError(
            f"model: {file} holds more than tensors, or is no weight file ({_first_line(error)}); such a pickle can "
            "run code, so it is not opened: convert it to safetensors where you trust it"
        ) from error
    except Exception as error:  # of safetensors, torch, zipfile: they have no common type
        if cannot_map(error):  # not MemoryError: what a damaged file asks for has no bounds
            size = about(file.stat().st_size)
            raise UserError(
                f"model: {file} cannot be mapped, {size} of addresses or memory are not free: {MORE_ROOM}"
            ) from error
        raise UserError(
            f"model: {file} cannot be read, it may be damaged or incomplete: {_first_line(error)}"
        ) from error


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0] or type(error).__name__


def read_header(path: Path) -> tuple[dict[str, Json], int]:
    """(name -> dtype, shape, data_offsets; where the data begin) of a safetensors file, which the library has checked;
    without torch."""
    open_shard(path, framework="numpy")
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    header.pop("__metadata__", None)
    return header, 8 + length


def tensors_in(path: Path) -> dict[str, Stored]:
    if path.suffix == ".safetensors":
        header, _ = read_header(path)
        return {name: Stored(path.name, tuple(each["shape"]), dtype=each["dtype"]) for name, each in header.items()}
    shard = open_shard(path)
    if isinstance(shard, GGUFShard):
        forms = {name: "" if entry.form in PLAIN else entry.form for name, entry in shard.entries.items()}
        return {n: Stored(path.name, shard.entries[n].shape, form, GRIDS.get(form)) for n, form in forms.items()}
    assert isinstance(shard, _Pickled)  # the third kind of file
    found = shard.tensors
    kinds = {name: "F32" if t.is_floating_point() else str(t.dtype) for name, t in found.items()}
    return {name: Stored(path.name, tuple(t.shape), dtype=kinds[name]) for name, t in found.items()}


def stored_tensors(directory: Path) -> dict[str, Stored]:
    """Every tensor of the directory, from the headers of its files: this takes a few milliseconds and reads no
    weights."""
    listed = weight_files(directory)
    found: dict[str, Stored] = {}
    for file in listed if isinstance(listed, list) else sorted(set(listed.values())):
        for name, stored in tensors_in(directory / file).items():
            if name in found:
                raise UserError(
                    f"model: {directory} holds {name} twice, in {found[name].file} and in {file}; remove the file that "
                    "belongs to another save"
                )
            found[name] = stored
    absent = [(name, file) for name, file in listed.items() if name not in found] if isinstance(listed, dict) else []
    if absent:
        name, file = absent[0]
        raise UserError(f"model: {directory / file} has no {name}, though the index says so")
    return _folded(directory, found)


def gguf_settings(directory: Path) -> dict[str, Json]:
    """What the GGUF files of a directory say of their model, by file; {} if its weights are in another format."""
    listed = weight_files(directory)
    files = [file for file in listed if file.endswith(SUFFIX)] if isinstance(listed, list) else []
    shards = {file: open_shard(directory / file) for file in files}
    return {file: shard.settings() for file, shard in shards.items() if isinstance(shard, GGUFShard)}


def _folded(directory: Path, found: dict[str, Stored]) -> dict[str, Stored]:
    """The same tensors, with every quantised weight as one tensor."""
    if not any(BNB in name or name.endswith((".qweight", ".SCB")) for name in found):
        return found
    said = read_json(directory / "config.json", "model").get("quantization_config")
    with _damaged(directory):
        forms = find_forms(
            {name: stored.shape for name, stored in found.items()},
            said if isinstance(said, dict) else {},
            lambda name: open_shard(directory / found[name].file).get_tensor(name),
        )
    parts = {part for form in forms.values() for part in form.parts.values()}
    whole = {name: stored for name, stored in found.items() if name not in parts and BNB not in name}
    for name, form in forms.items():
        if name in whole:
            raise UserError(
                f"model: {directory} holds {name} twice, as numbers and as {form.kind} codes; remove those that belong "
                "to another save"
            )
        kind = f"{form.kind} {form.about.get('quant_type') or form.about.get('bits')}"
        whole[name] = Stored(found[next(iter(form.parts.values()))].file, form.shape, kind, form.grid, form)
    return whole


@contextmanager
def _damaged(where: Path) -> Iterator[None]:
    try:
        yield
    except NonFinite as error:
        raise UserError(f"model: {where} is damaged: {error}; fetch it anew") from error
    except UserError:
        raise
    except (ValueError, IndexError, KeyError, TypeError, RuntimeError, OverflowError) as error:
        raise UserError(f"model: {where}: its quantised weights cannot be read: {_first_line(error)}") from error


# -- what a model consists of, and its hash ----------------------------------------------------------------------------


def stored_weights(directory: Path) -> set[str]:
    """Names of the files in a directory that a model saved there consists of: model.safetensors,
    model-NNNNN-of-NNNNN.safetensors, and what the index lists. All other files belong to the user."""
    names = {path.name for path in directory.iterdir() if OWN_NAME.fullmatch(path.name)}
    try:
        listed = json.loads((directory / INDEX).read_text(encoding="utf-8"))["weight_map"].values()
        names |= {name for name in listed if Path(name).name == name and name.endswith(".safetensors")}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        pass  # no valid index
    return {name for name in names if (directory / name).is_file()}


def content_hash(directory: Path) -> str:
    listed, parts = weight_files(directory), list[Part]()
    try:
        for path in sorted(directory / name for name in set(listed if isinstance(listed, list) else listed.values())):
            if path.suffix != ".safetensors":
                parts.append((path, 0, path.stat().st_size, "file"))
                continue
            header, begin = read_header(path)
            for name, about in header.items():
                first, last = about["data_offsets"]
                parts.append((path, begin + first, begin + last, f"{name} {about['dtype']} {about['shape']}"))
        with ThreadPoolExecutor(READERS) as pool:
            return _hash_of(pool.map(_line, parts))
    except OSError as error:
        raise UserError(f"model: the weights in {directory} cannot be read: {error}") from error


def tensors_hash(tensors: "Iterable[tuple[str, torch.Tensor]]") -> str:
    """The content_hash of a file with these tensors, which may be on any device."""
    from keyhole.disk.tensors import DTYPES, pieces  # here, because it imports torch

    lines = []
    for name, tensor in tensors:
        crc = 0
        for piece in pieces(tensor.detach()):
            crc = zlib.crc32(piece, crc)
        lines.append(f"{name} {DTYPES[tensor.dtype]} {list(tensor.shape)} {crc:08x}")
    return _hash_of(lines)


def _hash_of(lines: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest()


def _line(part: Part) -> str:
    path, begin, end, said = part
    crc, left = 0, end - begin
    with path.open("rb") as file:
        file.seek(begin)
        while left > 0 and (piece := file.read(min(left, PIECE_BYTES))):
            crc, left = zlib.crc32(piece, crc), left - len(piece)
    return f"{said} {crc:08x}"
