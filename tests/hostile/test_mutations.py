"""Files with a few bytes changed: refused, or read as what they say, never a crash, and no text from beside the file.

`make test` tries TWENTY of each format, `make matrix` ten times as many. The kernel holds the process that reads to ten
seconds of computing and two GiB (machine/worker.py), so no clock decides here.
"""

import ctypes
import gzip
import random
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

from keyhole.config.loader import load_config, parse_config
from keyhole.config.recipes import recipes
from keyhole.data import sources
from keyhole.data.chat_template import PLAIN_TEMPLATE, ChatTemplate
from keyhole.disk.weight_files import stored_tensors
from keyhole.errors import UserError
from keyhole.machine import worker
from keyhole.machine.worker import bounded
from tests.data.chats import chat, tokenizer
from tests.data.test_sources import saved, write
from tests.matrix import in_every_run

TWENTY, SEED = 20, 7
ROWS: list[dict[str, Any]] = [
    {"prompt": f"question {i} \u00e9 {'x' * i}", "completion": f"answer {i}", "n": i, "m": [{"role": "user"}]}
    for i in range(30)
]


FORMATS: dict[str, Callable[[Path], Path]] = {
    "arrow": lambda folder: saved(folder / "data", ROWS),
    "parquet": lambda folder: write(folder / "data.parquet", ROWS),
    "plain parquet": lambda folder: write(folder / "data.parquet", ROWS, compression="none", use_dictionary=False),
    "gzip": lambda folder: write(folder / "data.jsonl.gz", ROWS),
}


def mutated(content: bytes, tries: int) -> Iterator[bytes]:
    """Bits flipped, bytes and words replaced, ends cut off: one to four changes each."""
    rng = random.Random(SEED)
    words = [b"\xff" * 8, bytes(8), (2**31).to_bytes(8, "little"), (64).to_bytes(8, "little")]
    for _ in range(tries):
        changed = bytearray(content)
        for _ in range(rng.choice([1, 1, 4])):
            at, how = rng.randrange(len(changed)), rng.randrange(4)
            if how < 2:
                changed[at] = changed[at] ^ 1 << rng.randrange(8) if how else rng.choice([0, 127, 128, 255])
            elif how == 2:
                changed[at : at + 8] = rng.choice(words)
            else:
                del changed[at + 1 :]
        yield bytes(changed)


@in_every_run(lambda tries: tries == TWENTY)
@pytest.mark.parametrize("tries", [TWENTY, 10 * TWENTY])
@pytest.mark.parametrize("kind", FORMATS)
def test_a_changed_file_of_rows(tmp_path: Path, kind: str, tries: int) -> None:
    """Texts are those of the file, byte by byte; in a format with a checksum, those that were written."""
    assert worker.SECONDS + 1 < 10 and worker.MEMORY_BYTES <= 2**31
    path = FORMATS[kind](tmp_path)
    source = path.parent if kind == "arrow" else path
    assert [record.row for record in sources.read(str(source))] == ROWS
    refused = 0
    for content in mutated(path.read_bytes(), tries):
        path.write_bytes(content)
        try:
            found = [record.row for record in sources.read(str(source))]
        except UserError as error:
            assert "data" in str(error)
            refused += 1
            continue
        assert kind != "gzip" or found == ROWS
        texts = [text for row in found for text in row.values() if isinstance(text, str)]
        assert kind in ("parquet", "gzip") or all(text.encode() in content for text in texts)
    assert refused > tries // 2


@in_every_run(lambda tries: tries == TWENTY)
@pytest.mark.parametrize("tries", [TWENTY, 10 * TWENTY])
def test_changed_texts_and_weights(tmp_path: Path, tries: int) -> None:
    """Configs, chat templates and a .bin: a value, or a UserError."""
    for content in mutated(recipes()["zo-small"].read_bytes(), tries):
        with suppress(UserError):
            parse_config(content.decode("utf-8", "replace"))
    for content in mutated(PLAIN_TEMPLATE.encode(), tries):
        with suppress(UserError):
            ChatTemplate(tokenizer(content.decode("utf-8", "replace"))).write(chat("a", "b"))
    path = tmp_path / "pytorch_model.bin"
    torch.save({"a.weight": torch.ones(4, 4), "b.weight": torch.ones(4)}, path)
    for content in mutated(path.read_bytes(), tries):
        path.write_bytes(content)
        with suppress(UserError):
            stored_tensors(tmp_path)


@pytest.mark.parametrize(
    ("function", "item", "says"),
    [
        (ctypes.string_at, 0, "ended its process"),
        (bytes, 2**40, "takes more than 2 GiB"),
        (max, count(), "takes more than 1 s"),
    ],
)
def test_what_happens_in_the_process_is_a_message(
    function: Any, item: Any, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A crash, hunger, no end; the next file is read as ever, and one that nobody reads to its end costs nothing."""
    monkeypatch.setattr(worker, "SECONDS", 1)
    with pytest.raises(UserError, match=f"^a.parquet {says}.*, so it was stopped"):
        list(worker.streamed(function, item, "a.parquet"))
    assert next(iter(worker.streamed(count, 5, "b"))) == 5
    assert bounded(str, [1], str) == ["1"]


def test_small_files_that_take_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Empty lines by the hundred million, a pattern that matches without end, 100,000 merges."""
    monkeypatch.setattr(worker, "SECONDS", 1)
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b"\n" * 2**22) * 64)
    for link in ("one", "two"):
        (tmp_path / link).symlink_to(tmp_path)
    for name in ("a.jsonl.gz", "**/*.csv"):
        with pytest.raises(UserError, match="takes more than 1 s, so it was stopped"):
            list(sources.read(str(tmp_path / name)))
    (tmp_path / "a.yaml").write_text("a: &a {b: 1}\nzo:\n" + "  <<: *a\n" * 100_000)
    with pytest.raises(UserError, match="it has more than 262,144 bytes"):
        load_config(tmp_path / "a.yaml")
