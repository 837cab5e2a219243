"""Where a run goes on from: the newest whole checkpoint, and the journal behind it.

    checkpoint-N + records N+1 .. M of run/journal  ->  the weights after step M, as if the run had never stopped

Without a checkpoint a journal that starts from the model itself does as well: base + records 1 .. M. Damaged
checkpoints are named and passed over; an older one and a longer journal lead to the same weights. A checkpoint
asked for by its path is gone on from as it is: records behind it are cut.
"""

from dataclasses import dataclass, field, replace
from pathlib import Path

from keyhole.checkpoint import select
from keyhole.checkpoint.journal import format as journal
from keyhole.checkpoint.journal.format import Journal, Record
from keyhole.checkpoint.journal.writer import Writer
from keyhole.checkpoint.state import State
from keyhole.disk.weights_hash import content_hash
from keyhole.errors import UserError
from keyhole.model.structure.source import find_directory


@dataclass(frozen=True)
class Origin:
    """A checkpoint (None: the model itself) and the records to apply to it; `journal` is what run/journal holds."""

    choice: select.Choice = field(default_factory=select.Choice)
    journal: Journal | None = None
    tail: list[Record] = field(default_factory=list, repr=False)
    notes: list[str] = field(default_factory=list)

    @property
    def state(self) -> State | None:
        """What the checkpoint, or the journal's header, says of the run; None for a new one."""
        if self.choice.state is not None or not self.tail:
            return self.choice.state
        h = self.journal.header
        return State(h.first, h.loader, {}, h.config, h.versions, {})

    @property
    def step(self) -> int:
        """Steps done, the journal's included."""
        return self.tail[-1].step if self.tail else self.state.step if self.state else 0

    @property
    def loader(self) -> dict:
        """The position in the data after `step`."""
        at = {"epoch": self.tail[-1].epoch, "offset": self.tail[-1].row} if self.tail else {}
        return self.state.loader | at


def find_origin(resume: str | None, root: Path, journal_path: Path, model: str, journaled: bool) -> Origin:
    """What `--resume` means here. Reads, and changes nothing. journaled: the method keeps a journal."""
    if resume is None:
        return Origin()
    if not journaled:
        return Origin(select.choose(resume, root))
    found, notes = _read(journal_path)
    if resume not in select.LAST:
        return Origin(select.choose(resume, root), found, notes=notes)
    choice = select.newest(root)
    if choice.path is None and (found is None or found.header.first > 0 or not found.records):
        return Origin(select.choose(resume, root), found, notes=notes)
    begin = choice.state.step if choice.state else 0
    fits = found is not None and found.header.first <= begin <= found.last
    origin = Origin(choice, found, found.after(begin) if fits else [], notes)
    if choice.path is None:
        _check_base(found, model)
    return origin


def _read(path: Path) -> tuple[Journal | None, list[str]]:
    if not path.exists():
        return None, []
    try:
        found = journal.read(path)
    except journal.BadJournal as fault:
        return None, [f"resume: {fault}; it is set aside"]
    if found.fault is None:
        return found, []
    what = "ends in a torn record" if found.torn else "is damaged"
    return found, [f"resume: {path} {what} ({found.fault}); steps after {found.last} are done again"]


def _check_base(found: Journal, model: str) -> None:
    """A journal is worth something only with the weights that it starts from."""
    if content_hash(find_directory(model)) != found.header.base:
        raise UserError(
            f"--resume: the journal of this run starts from the weights of {found.header.source}, and "
            f"model={model} holds others; restore them, or start a new run in another output_dir"
        )


def continued(origin: Origin, source: str, path: Path, header: journal.Header, sync_every: int) -> Writer:
    """The journal, ready for the step after origin.step: the old one cut there, or a new one from these weights.

    header: of the new one, its base left open; source: where the weights were loaded from.
    """
    found, step = origin.journal, origin.step
    if found is None or not found.header.first <= step <= found.last:
        if path.exists():
            journal.rename_old(path)
        base = content_hash(find_directory(source))
        found = journal.create(path, replace(header, base=base, first=step, source=source))
    return Writer(path, found, step, sync_every)
