"""Tokenised data on disk, for the next run on the same files (setting `data_cache`).

An entry is identified by a hash of everything that its tokens depend on: the bytes of the files, the tokenizer, the
chat template, the settings of preparation, the versions of the libraries that tokenise, and the code of keyhole/data.
Reading and hashing a file is some hundred times faster than tokenising it. The date is part of the hash only if the
template uses it. Packing and mixing are done after reading, so they share an entry.

By default entries are in the user's cache directory (disk/user_cache.py), for files of 64 KiB and more, and errors with
them are ignored. A directory that the user names must be writable.

    directory/<32 hex digits>.keyhole-data

    8 bytes "KEYHOLED", length of the JSON u64, JSON (report, sizes), the arrays one after the other, BLAKE2b-128 of all

An entry whose hash does not match is rebuilt. Nothing is written if a file has changed since its bytes were hashed.
Hub ids are not cached here: `datasets` has its own cache.
"""

import hashlib
import json
import os
import struct
from array import array
from dataclasses import asdict, fields
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from keyhole.data.dataset import Cut, Dataset, Places
from keyhole.data.files import resolve
from keyhole.data.listing import remarks
from keyhole.data.prepare import tokenise
from keyhole.data.report import Report
from keyhole.data.settings import AUTO, PrepareSettings
from keyhole.disk import user_cache
from keyhole.disk.user_cache import cache_directory, digest_of_code, digest_of_files, versions
from keyhole.errors import UserError

MAGIC, FORMAT = b"KEYHOLED", 1
FRONT = struct.Struct("<8sQ")
SUFFIX = ".keyhole-data"
LEAST_BYTES = 2**16  # smaller files are tokenised fast enough
NOT_IN_TOKENS = ("packing", "chat_template", "template_date")
ARRAYS = {
    "ids": np.int32,
    "trained": bool,
    "lengths": np.int64,
    "sources": np.int32,
    "file": np.int32,
    "number": np.int64,
}


def cached(asked: str | Path, sources: list[str], tokenizer: Any, how: PrepareSettings) -> Dataset:
    """The samples of all sources, read from this directory (auto: the user's cache), or made and written there."""
    names = resolve(sources)
    directory = cache_directory("data") if str(asked) == AUTO else Path(asked)
    if directory is None or not all(Path(name).is_file() for name in names):
        return tokenise(sources, tokenizer, how)
    if str(asked) == AUTO and sum(os.path.getsize(name) for name in names) < LEAST_BYTES:
        return tokenise(sources, tokenizer, how)
    before = versions(names)
    path = directory / f"{key(names, sources, tokenizer, how)}{SUFFIX}"
    found = read_entry(path)
    if found is not None:
        found.report.cached, found.report.remarks = str(path), remarks(sources, names)
        return found
    found = tokenise(sources, tokenizer, how)
    if versions(names) != before:
        return found  # a file was written to meanwhile: these may not be the tokens of the bytes in the key
    try:
        write_entry(path, found)
        if str(asked) == AUTO:
            user_cache.trim(directory, SUFFIX)
    except OSError as error:
        if str(asked) != AUTO:
            raise UserError(f"data_cache: cannot write to {directory}: {error.strerror or error}") from None
    return found


def key(names: list[str], sources: list[str], tokenizer: Any, how: PrepareSettings) -> str:
    """A hash, 32 hex digits, of everything that the tokens depend on."""
    template = how.template_text or getattr(tokenizer, "chat_template", None)
    settings = {f.name: getattr(how, f.name) for f in fields(how) if f.name not in NOT_IN_TOKENS}
    settings |= {"template": template, "date": str(how.day) if "strftime_now" in str(template) else None}
    settings |= {"versions": [version(name) for name in ("transformers", "tokenizers", "jinja2")], "format": FORMAT}
    digest = hashlib.blake2b(
        json.dumps([settings, names, sources], sort_keys=True, default=str).encode(), digest_size=16
    )
    digest.update(_tokenizer(tokenizer))
    digest.update(digest_of_code(Path(__file__).parent))
    digest.update(digest_of_files(names))
    return digest.hexdigest()


def _tokenizer(tokenizer: Any) -> bytes:
    """The parts of a tokenizer that can be serialised."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    to_text = getattr(backend, "to_str", None)
    content = json.dumps(tokenizer.get_vocab(), sort_keys=True) if to_text is None else to_text()
    about = [type(tokenizer).__name__, repr(tokenizer), str(tokenizer.special_tokens_map)]
    return "\n".join([content, *about]).encode("utf-8", "surrogatepass")


def write_entry(path: Path, data: Dataset) -> None:
    """Writes the entry atomically."""
    where = data.where
    assert isinstance(where, Places)
    arrays: dict[str, Any]
    arrays = {"ids": data.ids, "trained": data.trained, "lengths": data.lengths, "sources": data.sources}
    arrays |= {"file": where.file, "number": where.number}
    about = {
        "sizes": {name: len(values) for name, values in arrays.items()},
        "report": asdict(data.report),
        "files": where.files,
        "cuts": {str(i): list(cut) for i, cut in data.cuts.items()},
        "end_token_ids": data.end_token_ids,
        "pad_token_id": data.pad_token_id,
        "chat_template": data.chat_template,
    }
    text = json.dumps(about).encode()
    parts = [np.asarray(values, dtype=ARRAYS[name]) for name, values in arrays.items()]
    user_cache.write_entry(path, (FRONT.pack(MAGIC, len(text)), text, *(memoryview(part).cast("B") for part in parts)))


def read_entry(path: Path) -> Dataset | None:
    """The data set of an entry; None if it is missing or damaged."""
    try:
        with user_cache.open_entry(path) as file:
            magic, length = FRONT.unpack(file.read(FRONT.size))
            size_bytes = os.fstat(file.fileno()).st_size
            if magic != MAGIC or length > size_bytes:
                return None
            text = file.read(length)
            about = json.loads(text)
            sizes = [about["sizes"][name] * np.dtype(kind).itemsize for name, kind in ARRAYS.items()]
            if min(sizes) < 0 or sum(sizes) > size_bytes:
                return None
            found = {name: np.fromfile(file, dtype=kind, count=about["sizes"][name]) for name, kind in ARRAYS.items()}
            digest = hashlib.blake2b(FRONT.pack(magic, length) + text, digest_size=16)
            for part in found.values():
                digest.update(memoryview(part).cast("B"))
            if file.read() != digest.digest():
                return None
        where = Places()
        where.files = [tuple(pair) for pair in about["files"]]
        where.file, where.number = array("i", found["file"].tobytes()), array("q", found["number"].tobytes())
        return Dataset(
            found["ids"],
            found["trained"],
            lengths=found["lengths"].tolist(),
            sources=found["sources"],
            report=Report(**about["report"]),
            where=where,
            cuts={int(i): Cut(*cut) for i, cut in about["cuts"].items()},
            end_token_ids=about["end_token_ids"],
            pad_token_id=about["pad_token_id"],
            chat_template=about["chat_template"],
        )
    except (OSError, ValueError, KeyError, TypeError, IndexError, struct.error, RecursionError):
        return None
