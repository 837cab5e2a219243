"""What was made of data files, on disk, for the next run on the same files (setting `data_cache`): tokens of files, and
the drawn questions of tasks.

An entry is identified by a hash of everything that it depends on: the bytes of the files, the settings and the
tokenizer or the task file, the versions of the libraries that tokenise, and the code of keyhole/data. Reading and
hashing a file is some hundred times faster than tokenising it. Packing and mixing are done after reading, so they share
an entry.

By default entries are in the user's cache directory (disk/user_cache.py), for files of 64 KiB and more, and errors with
them are ignored. A directory that the user names must be writable. An entry is an .npz of arrays, one of which is JSON,
and a hash of it; one whose hash does not match is rebuilt. Nothing is written if a file has changed since its bytes
were hashed. Hub ids are not cached here: `datasets` has its own cache.
"""

import hashlib
import json
import os
import zipfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from keyhole.data.examples import AUTO
from keyhole.disk.files import open_regular, replacing
from keyhole.disk.user_cache import cache_directory, digest_of_code, digest_of_files, trim, versions
from keyhole.errors import UserError

FORMAT, SUFFIX = 3, ".keyhole-data"
LEAST_BYTES = 2**16  # smaller files are read fast enough
DAMAGED = (
    OSError,
    EOFError,
    ValueError,
    KeyError,
    TypeError,
    IndexError,
    AttributeError,
    RecursionError,
    zipfile.BadZipFile,
)

About = dict[str, Any]  # what goes into JSON
Arrays = Mapping[str, np.ndarray]
Made = TypeVar("Made")


def kept(
    asked: str | Path | None,
    kind: str,
    names: list[str],
    key: object,
    make: Callable[[], Made],
    pack: Callable[[Made], tuple[About, Arrays]],
    unpack: Callable[[About, Arrays], Made],
) -> tuple[Made, Path | None]:
    """What `make` makes of these files, and the entry that it was read from; made, and written, if there is none.
    asked: the setting. key: all that it depends on besides the files, as JSON. pack, unpack: its parts."""
    directory = None if asked is None else cache_directory(kind) if str(asked) == AUTO else Path(asked)
    if directory is None or not all(Path(name).is_file() for name in names):
        return make(), None
    if str(asked) == AUTO and sum(map(os.path.getsize, names)) < LEAST_BYTES:
        return make(), None
    before = versions(names)
    digest = hashlib.blake2b(json.dumps([FORMAT, kind, key, names], sort_keys=True).encode(), digest_size=16)
    digest.update(digest_of_code(Path(__file__).parent))
    digest.update(digest_of_files(names))
    path = directory / f"{digest.hexdigest()}{SUFFIX}"
    try:
        with os.fdopen(open_regular(path, os.O_RDONLY), "rb") as file:
            with suppress(OSError):
                os.utime(file.fileno())  # the most recently used entry now
            with np.load(file) as entry:
                found = dict(entry)
        return unpack(json.loads(found.pop("about").tobytes()), found), path
    except DAMAGED:
        pass  # missing, damaged or not ours
    made = make()
    if versions(names) != before:
        return made, None  # a file was written to meanwhile: this may not be what the bytes in the key make
    try:
        about, arrays = pack(made)
        directory.mkdir(parents=True, exist_ok=True)
        with replacing(path) as file:
            np.savez(file, allow_pickle=False, about=np.frombuffer(json.dumps(about).encode(), np.uint8), **arrays)
        if str(asked) == AUTO:
            trim(directory, SUFFIX)
    except OSError as error:
        if str(asked) != AUTO:
            raise UserError(f"data_cache: cannot write to {directory}: {error.strerror or error}") from None
    return made, None
