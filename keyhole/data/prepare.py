"""From a source to a Dataset: read, normalise, tokenise, cut, drop, pack; and a report of all that.

    prepare("data/*.jsonl", tokenizer, max_length=1024) -> Dataset with .report

Rows stream through in blocks of 512, so the source is never in memory twice; what stays is 5 bytes a token.
A sample longer than max_length is cut at its end, dropped, or refused (`overlong`). The report gives the
share of *trained* tokens that was cut, which is what is lost. A sample with nothing left to train on is
dropped and counted: it would cost a forward pass and teach nothing. A data set of only such samples is an
error, since training on it would look like training.

The same for a whole run, train_data and eval_data out of one config: run.py.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np

from keyhole.data.dataset import Cut, Dataset, Report
from keyhole.data.files import Record, read
from keyhole.data.formats import COLUMNS, Example, detect, normalise
from keyhole.data.packing import pack
from keyhole.data.render import Renderer, Tokens
from keyhole.data.settings import PrepareSettings
from keyhole.errors import UserError

BLOCK = 512
CUT_SHOWN = 12  # tokens of a cut that the preview can show


def prepare(source: str | list[str], tokenizer: Any, *, limit: int | None = None, **settings: Any) -> Dataset:
    """Everything a source holds, as rows of tokens. settings: those of PrepareSettings; limit: rows to read."""
    how = PrepareSettings(**settings)
    renderer = Renderer(tokenizer, how.train_on)
    report = Report(max_length=how.max_length, train_on=how.train_on)
    gather = Gather(report, how.max_length, how.overlong)
    for block in _blocks(_examples(islice(read(source), limit), how.data_format, report), BLOCK):
        for example, tokens in zip(block, renderer(block), strict=True):
            gather.add(example, tokens)
    report.template = _template_line(renderer, gather)
    return gather.dataset(how.packing, _pad_token_id(tokenizer))


def _blocks(items: Iterable[Example], size: int) -> Iterator[list[Example]]:
    iterator = iter(items)
    while block := list(islice(iterator, size)):
        yield block


def _examples(records: Iterable[Record], data_format: str | None, report: Report) -> Iterator[Example]:
    """Normalised rows; the layout is found anew at the first row of every file."""
    layouts: dict[str, str] = {}
    for record in records:
        layout = layouts.get(record.file)
        if layout is None:
            given = data_format not in (None, "auto")
            layout = layouts[record.file] = str(data_format) if given else detect(record)
            why = "data_format is set" if given else f"found column {', '.join(COLUMNS[layout])}"
            report.formats[record.file] = f"format {layout} ({why})"
        report.read += 1
        yield normalise(record, layout)


def _template_line(renderer: Renderer, gather: "Gather") -> str:
    if not gather.chats:
        return "none; text is used as it stands, with eos at the end"
    kind = (
        "none in the tokenizer; '### Instruction:' and '### Response:' are used" if renderer.template.is_plain else ""
    )
    ends = ", ".join(renderer.special[i] for i in gather.end_token_ids if i in renderer.special)
    return f"{kind or 'chat template of the tokenizer'}; answers end with {ends or 'no special token'}"


def _pad_token_id(tokenizer: Any) -> int:
    """Any valid id will do: padding is masked."""
    candidates = (tokenizer.pad_token_id, tokenizer.eos_token_id, 0)
    return next(i for i in candidates if i is not None)


@dataclass
class Gather:
    """Collects samples, cutting and dropping; `report` keeps count."""

    report: Report
    max_length: int | None
    overlong: str
    ids: list[np.ndarray] = field(default_factory=list)
    trained: list[np.ndarray] = field(default_factory=list)
    where: list[str] = field(default_factory=list)
    cuts: dict[int, Cut] = field(default_factory=dict)
    ends: Counter = field(default_factory=Counter)
    roles: set[str] = field(default_factory=set)
    chats: int = 0

    def add(self, example: Example, tokens: Tokens) -> None:
        """One example: kept, cut or dropped."""
        r, ids_T, trained_T = self.report, tokens.ids_T, tokens.trained_T
        self.chats += example.turns is not None
        self.roles |= {turn["role"] for turn in example.turns or ()}
        cut = None
        if self.max_length is not None and len(ids_T) > self.max_length:
            if self.overlong == "error":
                raise UserError(
                    f"{example.record.where}: {len(ids_T):,} tokens, more than max_length={self.max_length}; "
                    "raise max_length, or set overlong to truncate or drop"
                )
            if self.overlong == "drop":
                r.dropped_overlong += 1
                return
            ids_T, trained_T, cut = self._truncate(ids_T, trained_T)
        if not trained_T.any():
            r.dropped_untrained += 1
            return
        if cut is not None:
            self.cuts[len(self.ids)] = cut
        self._keep(example, ids_T, trained_T, tokens)

    def _truncate(self, ids_T: np.ndarray, trained_T: np.ndarray) -> tuple[np.ndarray, np.ndarray, Cut]:
        n, r = self.max_length, self.report
        tail = ids_T[n:]
        cut = Cut(len(tail), int(trained_T[n:].sum()), tail[:CUT_SHOWN].tolist())
        r.truncated += 1
        r.cut_trained_tokens += cut.trained
        return ids_T[:n], trained_T[:n], cut

    def _keep(self, example: Example, ids_T: np.ndarray, trained_T: np.ndarray, tokens: Tokens) -> None:
        r = self.report
        self.ids.append(ids_T)
        self.trained.append(trained_T)
        self.where.append(example.record.where)
        if tokens.end_id is not None:
            self.ends[tokens.end_id] += 1
        r.samples += 1
        r.tokens += len(ids_T)
        r.trained_tokens += int(trained_T.sum())
        r.longest = max(r.longest, len(ids_T))
        r.straddling += tokens.straddles

    @property
    def end_token_ids(self) -> list[int]:
        """Special tokens that answers stop with, the most frequent first."""
        return [i for i, _ in self.ends.most_common()]

    def dataset(self, packing: bool, pad_token_id: int) -> Dataset:
        """The result; an error if nothing is left."""
        if not self.ids:
            raise UserError(self._nothing_left())
        rows = pack([len(x) for x in self.ids], self.max_length) if packing else None
        self.report.packed, self.report.rows = packing, len(rows) if rows is not None else len(self.ids)
        return Dataset(
            self.ids, self.trained, rows=rows, report=self.report, where=self.where, cuts=self.cuts,
            end_token_ids=self.end_token_ids, pad_token_id=pad_token_id,
        )  # fmt: skip

    def _nothing_left(self) -> str:
        r = self.report
        lines = [f"no sample is left to train on ({r.read:,} rows read, train_on={r.train_on})"]
        if r.dropped_overlong:
            lines.append(f"  {r.dropped_overlong:,} are longer than max_length={self.max_length}: raise it")
        if r.dropped_untrained:
            lines.append(
                f"  {r.dropped_untrained:,} have no trained token: no answer (roles found: "
                f"{', '.join(sorted(self.roles)) or 'none'}), an empty one, or one that begins after "
                f"max_length={self.max_length}"
            )
        return "\n".join(lines)
