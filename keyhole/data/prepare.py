"""From a source to a Dataset: read, normalise, tokenise, cut, drop, mix, pack; and a report about it.

    prepare("data/*.jsonl", tokenizer, max_length=1024) -> Dataset with .report

Rows are processed in blocks (512 rows, or 4 million characters), so the source is never in memory as a whole; 5 bytes
per token are kept. collect.py cuts samples that are too long. run.py prepares the data of a run with the settings of
its config; questions of tasks (tasks/encode.py) go through the same collector, and are mixed and packed alike.

`train_weights` mixes several sources: 2 gives every sample of a source two rows per epoch, 0.5 every second sample one
row (the seed decides which). Rows refer to samples, so a repeated sample costs no memory.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from keyhole.data.batches import order
from keyhole.data.cache import Arrays, kept
from keyhole.data.collect import Collector
from keyhole.data.dataset import Cut, Dataset, Places
from keyhole.data.files import read, remarks, resolve
from keyhole.data.formats import COLUMNS, Example, normalise, unread
from keyhole.data.opened import Record
from keyhole.data.render import Renderer
from keyhole.data.report import Report, count_names
from keyhole.data.settings import AUTO, DataSettings
from keyhole.data.sources import layout_of, with_columns
from keyhole.data.tokens import Tokenizer, content_of, pad_token_id, unknown_id
from keyhole.errors import UserError, listed
from keyhole.machine.progress import tell
from keyhole.model.rows import pack

LEAST_MIXED, MOST_GROWTH = 2**20, 16  # rows per epoch that weights may make: always, and per sample
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
    given = asdict(how)
    key = [{name: given[name] for name in IN_TOKENS}, str(template), date, sources, content_of(tokenizer)]
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
    report.template = _template_line(renderer, collector)
    report.endless = renderer.trains_end and renderer.eos is None and not collector.ends
    report.foreign = renderer.foreign
    about_chats = {"chat_template": how.chat_template, "chat_template_kwargs": how.chat_template_kwargs}
    report.unused = [key for key, value in about_chats.items() if value is not None and not collector.chats]
    foreign = collector.chats and (renderer.template.given or renderer.template.is_plain)
    return collector.dataset(pad_token_id(tokenizer), renderer.template.source if foreign else None)


def _packed(data: Dataset) -> tuple[dict[str, Any], Arrays]:
    """The parts of an entry of the cache."""
    where = data.where
    assert isinstance(where, Places)
    about = {
        "report": vars(data.report),
        "places": where.texts,
        "cuts": {str(i): list(cut) for i, cut in data.cuts.items()},
        "rest": {
            "end_token_ids": data.end_token_ids,
            "pad_token_id": data.pad_token_id,
            "chat_template": data.chat_template,
        },
    }
    arrays = {"ids": data.ids, "trained": data.trained, "lengths": np.array(data.lengths)}
    arrays |= {"sources": np.array(data.sources), "place": np.array(where.text), "row": np.array(where.number)}
    return about, arrays


def _unpacked(about: dict[str, Any], arrays: Arrays) -> Dataset:
    where = Places()
    where.texts = about["places"]
    where.text.frombytes(arrays["place"].tobytes())
    where.number.frombytes(arrays["row"].tobytes())
    return Dataset(
        arrays["ids"],
        arrays["trained"],
        lengths=arrays["lengths"].tolist(),
        sources=arrays["sources"].tolist(),
        report=Report.read_back(about["report"]),
        where=where,
        cuts={int(i): Cut(*cut) for i, cut in about["cuts"].items()},
        **about["rest"],
    )


def arrange(data: Dataset, how: DataSettings, sources: int) -> Dataset:
    """The data set with its rows: samples mixed by weight, then packed. sources: of files, or tasks."""
    weights = how.train_weights
    if weights is not None and len(weights) != sources:
        raise UserError(
            f"train_weights: {len(weights)} numbers for {sources} {'tasks' if how.task else 'sources'}; "
            "give one for each"
        )
    if weights is not None and not all(0 <= weight < math.inf for weight in weights):
        raise UserError(f"train_weights: {listed(weights)}: expected numbers from 0 on")
    chosen = None if weights is None else _mixed(data, weights, how.seed)
    if how.packing:
        assert how.max_length is not None  # DataSettings refuses packing without it
        members = range(len(data.lengths)) if chosen is None else chosen
        rows = pack([data.lengths[i] for i in members], how.max_length)
        data.rows, data.packed = [[members[k] for k in row] for row in rows], True
    elif chosen is not None:
        data.choose(chosen)
    if not data.rows:
        raise UserError("train_weights: no sample is left; give a source a weight above 0")
    data.report.packed, data.report.rows = how.packing, len(data.rows)
    return data


def _mixed(data: Dataset, weights: Sequence[float], seed: int) -> list[int]:
    """Rows in the order of their sources, each as often as the weight of its source requires."""
    sources = np.array([data.sources[row[0]] for row in data.rows])
    chosen: list[int] = []
    told: list[str] = []
    total, most = sum(weights[row] for row in sources.tolist()), max(LEAST_MIXED, MOST_GROWTH * len(sources))
    if total > most:
        raise UserError(
            f"train_weights: {total:,.0f} rows per epoch of {len(sources):,} samples; at most {most:,}: give smaller "
            "weights, and more num_train_epochs"
        )
    for source, weight in enumerate(weights):
        before = len(chosen)
        own = np.flatnonzero(sources == source)
        whole, part = divmod(weight, 1)
        some = np.sort(order(len(own), seed, source)[: round(part * len(own))])
        chosen += own.tolist() * int(whole) + own[some].tolist()
        told.append(f"{len(chosen) - before:,} of source {source + 1} (weight {weight:g})")
        if weight and len(chosen) == before:
            data.report.remarks.append(f"source {source + 1} has the weight {weight:g}, but gives no row")
    data.report.mixture = "rows per epoch: " + ", ".join(told)
    return chosen


def _blocks(items: Iterable[Example], most: int) -> Iterator[list[Example]]:
    block, characters = [], 0
    for example in items:
        block.append(example)
        texts = [turn["content"] for turn in example.turns or ()]
        count = len(example.prompt) + len(example.answer) + sum(map(len, texts))
        if count > MOST_CHARACTERS:
            raise UserError(
                f"{example.record.where}: {count:,} characters; a row has at most {MOST_CHARACTERS:,}: split it"
            )
        characters += count
        if len(block) >= most or characters > BLOCK_CHARACTERS:
            yield block
            block, characters = [], 0
    if block:
        yield block


def _examples(records: Iterable[Record], how: DataSettings, report: Report) -> Iterator[Example]:
    """Normalised rows; the layout is detected again at the first row of every file. A later row of another layout is
    refused: it would be read as the first."""
    layouts: dict[str, str] = {}
    for record in records:
        if record.is_document:
            _check_document(record, how)
        record = with_columns(record, how)
        layout = layouts.get(record.file)
        if layout is None:
            layout, why = layout_of(record, how)
            layouts[record.file] = layout
            report.formats[record.file] = f"format {layout} ({why})"
        elif how.data_format in (None, AUTO) and not how.row_templates:
            _check_layout(record, layout)
        report.read += record.ends
        example = normalise(record, layout)
        if not how.row_templates:  # they name the columns to use
            count_names(report.unread, unread(example, layout))
        yield example


def _check_document(record: Record, how: DataSettings) -> None:
    """Refuses settings about columns for a file that has none."""
    given = {"columns": how.columns, **how.row_templates}
    if named := [key for key, value in given.items() if value]:
        raise UserError(
            f"{record.file}: plain text has no columns, and {' and '.join(named)} is set; if the file is a table, "
            "rename it to .tsv or .csv"
        )
    if how.data_format not in (None, AUTO, "text"):
        raise UserError(f"{record.file}: plain text, and data_format={how.data_format}; leave data_format out")
    if how.max_length is None:
        raise UserError(f"{record.file}: plain text is cut into samples of max_length tokens, and it is null; set it")


def _check_layout(record: Record, layout: str) -> None:
    """Refuses a row that has the columns of a richer layout than the first row of its file."""
    richer = next(name for name, columns in COLUMNS.items() if name == layout or all(c in record.row for c in columns))
    if richer != layout:
        raise UserError(
            f"{record.where}: it has the columns of data format {richer}, but the first row of the file is {layout}; "
            f"set data_format={layout} or {richer}, or split the file"
        )


def _template_line(renderer: Renderer, collector: Collector) -> str:
    adds = "with eos at the end" if renderer.trains_end else "without an eos"
    adds = "without an eos, because the tokenizer has none" if renderer.eos is None else adds
    if not collector.chats:
        return f"none; text is used as it stands, {adds}"
    kind = "chat template of the tokenizer"
    if renderer.template.given:
        kind = "the one of the setting chat_template"
    elif renderer.template.is_plain:
        kind = "none in the tokenizer; '### Instruction:' and '### Response:' are used"
    ends = listed(renderer.special[i] for i, _ in collector.ends.most_common() if i in renderer.special)
    dated = f"; it prints the date, {renderer.template.date}" if renderer.dated else ""
    return f"{kind}; answers end with {ends or 'no special token'}{dated}"
