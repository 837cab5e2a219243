"""From a source to a Dataset: rows, examples, tokens, samples; in blocks of rows, so that the source is never in memory
as a whole. 5 bytes per token are kept.

    prepare("data/*.jsonl", tokenizer, max_length=1024) -> Dataset with .report

What was made of files, and the drawn questions of tasks, is kept on disk for the next run on the same files (setting
`data_cache`; `kept`). An entry is identified by a hash of everything that it depends on: the bytes of the files, the
settings and the tokenizer or the task file, the versions of the libraries that tokenise, and the code of keyhole/data.
Reading and hashing a file is some hundred times faster than tokenising it. Packing and mixing are done after reading,
so they share an entry.

By default entries are in the user's cache directory (disk/files.py), for files of 64 KiB and more, and errors with
them are ignored. A directory that the user names must be writable. An entry is an .npz of arrays, one of which is JSON;
one whose checksums do not match is rebuilt. Nothing is written if a file has changed since its bytes
were hashed. Hub ids are not cached here: `datasets` has its own cache.
"""

import hashlib
import json
import os
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from keyhole.data.collect import Collector, arrange
from keyhole.data.dataset import Cut, Dataset
from keyhole.data.examples import AUTO, COLUMNS, Example, example_of, layout_of, unread, with_columns
from keyhole.data.opened import Record
from keyhole.data.report import Report, count_names
from keyhole.data.settings import DataSettings
from keyhole.data.sources import read, remarks, resolve
from keyhole.data.tokenizer import Tokenizer, content_of, pad_token_id, unknown_id
from keyhole.data.tokens import Renderer
from keyhole.disk.files import cache_directory, digest_of_code, digest_of_files, open_regular, replacing, trim, versions
from keyhole.errors import UserError, listed
from keyhole.machine.progress import tell

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
    automatic = str(asked) == AUTO
    directory = None if asked is None else cache_directory(kind) if automatic else Path(asked)
    small = not all(map(os.path.isfile, names)) or (automatic and sum(map(os.path.getsize, names)) < LEAST_BYTES)
    if directory is None or small:
        return make(), None
    before = versions(names)
    content = [digest_of_code(Path(__file__).parent).hex(), digest_of_files(names).hex()]
    known = json.dumps([FORMAT, kind, key, names, content], sort_keys=True).encode()
    path = directory / f"{hashlib.blake2b(known, digest_size=16).hexdigest()}{SUFFIX}"
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
        if automatic:
            trim(directory, SUFFIX)
    except OSError as error:
        if not automatic:
            raise UserError(f"data_cache: cannot write to {directory}: {error.strerror or error}") from None
    return made, None


BLOCK, BLOCK_CHARACTERS, MOST_CHARACTERS = 512, 2**22, 2**24
IN_TOKENS = (  # settings that the tokens of a row depend on
    "data_format", "columns", "prompt", "completion", "max_length", "overlong", "train_on", "train_end_token", "dedup",
    "chat_template_kwargs", "stop_token_ids",
)  # fmt: skip


def prepare(
    source: str | Path | Sequence[str | Path],
    tokenizer: Tokenizer,
    *,
    limit: int | None = None,
    samples: int | None = None,
    **settings: Any,
) -> Dataset:
    """All rows of a source, tokenised. settings: those of DataSettings.

    limit: rows to read; samples: how many samples (or, where they are packed, full rows of them) are enough."""
    how = DataSettings(**settings)
    sources = [source] if isinstance(source, str | Path) else source
    return arrange(tokenise([str(name) for name in sources], tokenizer, how, limit, samples), how, len(sources))


def tokenise(
    sources: list[str], tokenizer: Tokenizer, how: DataSettings, limit: int | None = None, samples: int | None = None
) -> Dataset:
    """All samples, one per row; from the cache if the settings have one, and everything is read."""
    names = resolve(sources)
    if how.data_cache is None or limit is not None or samples is not None:
        return _tokenised(sources, names, tokenizer, how, limit, samples)
    template = how.template_text or tokenizer.chat_template
    date = str(how.day) if "strftime_now" in str(template) else None
    key = [{name: vars(how)[name] for name in IN_TOKENS}, str(template), date, sources, content_of(tokenizer)]
    data, entry = kept(
        how.data_cache, "data", names, key, lambda: _tokenised(sources, names, tokenizer, how), _packed, _unpacked
    )
    if entry is not None:
        data.report.cached, data.report.remarks = str(entry), remarks(sources, names)
    return data


def _tokenised(
    sources: list[str],
    names: list[str],
    tokenizer: Tokenizer,
    how: DataSettings,
    limit: int | None = None,
    samples: int | None = None,
) -> Dataset:
    renderer = Renderer(tokenizer, how)
    collector = Collector(how, renderer.bos, unknown_id(tokenizer))
    report, records = collector.report, islice(read(sources), limit)
    report.remarks = remarks(sources, names)
    for block in _blocks(_examples(records, how, report), 1 if samples is not None else BLOCK):
        for example, tokens in zip(block, renderer(block), strict=True):
            collector.add(example, tokens)
        pieces = collector.pieces.total()  # of documents, which are long: a row may take minutes
        tell("tokenising", report.samples if pieces else report.read, None, "samples" if pieces else "rows")
        got = report.tokens / (how.max_length or 1) if how.packing else report.samples
        if samples is not None and got >= samples:
            report.partial = next(records, None) is not None
            break
    template = renderer.template
    ends = listed(renderer.special[i] for i, _ in collector.ends.most_common() if i in renderer.special)
    report.template = f"none; text is used as it stands, with {ends or 'no special token'} at the end"
    if collector.chats:
        report.template = f"{template.name}; answers end with {ends or 'no special token'}{template.dated}"
    report.foreign = renderer.foreign
    about_chats = {"chat_template": how.chat_template, "chat_template_kwargs": how.chat_template_kwargs}
    report.unused = [key for key, value in about_chats.items() if value is not None and not collector.chats]
    foreign = collector.chats and not template.is_tokenizers
    return collector.dataset(pad_token_id(tokenizer), template.source if foreign else None)


def _packed(data: Dataset) -> tuple[About, Arrays]:
    about = {"report": vars(data.report), "where": list(data.where), "cuts": list(data.cuts.items())}
    about["rest"] = {name: vars(data)[name] for name in ("end_token_ids", "pad_token_id", "chat_template")}
    lengths, sources = np.array(data.lengths), np.array(data.sources)
    return about, {"ids": data.ids, "trained": data.trained, "lengths": lengths, "sources": sources}


def _unpacked(about: About, arrays: Arrays) -> Dataset:
    return Dataset(
        arrays["ids"],
        arrays["trained"],
        lengths=arrays["lengths"].tolist(),
        sources=arrays["sources"].tolist(),
        report=Report.read_back(about["report"]),
        where=about["where"],
        cuts={i: Cut(*cut) for i, cut in about["cuts"]},
        **about["rest"],
    )


def _blocks(items: Iterable[Example], most: int) -> Iterator[list[Example]]:
    block, characters = list[Example](), 0
    for example in items:
        texts = [example.prompt, example.answer, *(turn["content"] for turn in example.turns or ())]
        count = sum(map(len, texts))
        if count > MOST_CHARACTERS:
            raise UserError(
                f"{example.record.where}: {count:,} characters; a row has at most {MOST_CHARACTERS:,}: split it"
            )
        block.append(example)
        characters += count
        if len(block) >= most or characters > BLOCK_CHARACTERS:
            yield block
            block, characters = [], 0
    if block:
        yield block


def _examples(records: Iterable[Record], how: DataSettings, report: Report) -> Iterator[Example]:
    """Rows as examples; the layout is detected again at the first row of every file. A later row that has the columns
    of a richer layout is refused: it would be read as the first."""
    layouts: dict[str, str] = {}
    for record in records:
        if record.is_document and how.max_length is None:
            raise UserError(
                f"{record.file}: plain text is cut into samples of max_length tokens, and it is null; set it"
            )
        record = with_columns(record, how.columns, how.row_templates)
        if record.file not in layouts:
            layouts[record.file], why = layout_of(record, how.data_format, how.row_templates)
            report.formats[record.file] = f"format {layouts[record.file]} ({why})"
        layout = layouts[record.file]
        if how.data_format is None and not how.row_templates:
            richer = next(name for name, cs in COLUMNS.items() if name == layout or record.row.keys() >= set(cs))
            if richer != layout:
                raise UserError(
                    f"{record.where}: it has the columns of data format {richer}, but the first row of the file is "
                    f"{layout}; set data_format={layout} or {richer}, or split the file"
                )
        report.read += record.ends
        example = example_of(record, layout)
        if not how.row_templates:  # they name the columns to use
            count_names(report.unread, unread(example, layout))
        yield example
