"""Where a run resumes: the newest intact checkpoint, and the later records of the journal.

    checkpoint-N + records N+1 .. M of run/journal  ->  the weights after step M, as if the run had never stopped

Without a checkpoint, a journal that starts from the original model is enough: base + records 1 .. M. Damaged
checkpoints are named and skipped; an older checkpoint with more records leads to the same weights. A checkpoint that
was given by its path is resumed as it is: later records are cut off.

One directory has one history. A run has an id, which is in its directory, its checkpoints and its journal. Resuming is
refused if these ids differ, or if a checkpoint from another directory would be resumed in a directory that has a run of
its own. Resuming another run's checkpoint in a new directory starts a new run with its own id.
"""

from dataclasses import dataclass, field, replace
from pathlib import Path

from keyhole.checkpoint import journal, select
from keyhole.checkpoint.journal import Header, Journal, Record, Writer
from keyhole.checkpoint.state import State
from keyhole.disk.json_text import Json
from keyhole.disk.weight_files import content_hash, stored_weights
from keyhole.errors import UserError
from keyhole.model.structure.config_files import base_config, config_fault
from keyhole.model.structure.source import find_directory


@dataclass(frozen=True)
class Place:
    """The directory in which a run is to be resumed: its journal, the id of its run, and what it has of that run
    ("checkpoint-6"; None: nothing to resume from)."""

    root: Path
    journal: Path
    run: str | None = None
    holds: str | None = None


@dataclass(frozen=True)
class Origin:
    """A checkpoint (None: the original model) and the records to apply to it; `journal` is the content of run/journal.
    elsewhere: the checkpoint is in another directory, and a new run begins."""

    choice: select.Choice = field(default_factory=select.Choice)
    journal: Journal | None = None
    tail: list[Record] = field(default_factory=list, repr=False)
    notes: list[str] = field(default_factory=list)
    elsewhere: bool = False

    @property
    def state(self) -> State | None:
        """The state in the checkpoint or in the journal's header; None for a new run."""
        if self.choice.state is not None or not self.tail or self.journal is None:
            return self.choice.state
        h = self.journal.header
        return State(h.first, h.loader, config=h.config, versions=h.versions, run=h.run)

    @property
    def step(self) -> int:
        return self.tail[-1].step if self.tail else self.state.step if self.state else 0

    @property
    def loader(self) -> Json:
        """The position in the data after `step`."""
        at = {"epoch": self.tail[-1].epoch, "offset": self.tail[-1].row} if self.tail else {}
        return at if self.state is None else self.state.loader | at

    @property
    def original(self) -> State | Header | None:
        """What says of which content (`base`, `base_config`) the run's original model was, if that is known."""
        if self.state is not None and self.state.base is not None:
            return self.state
        known = self.journal is not None and self.journal.header.first == 0 and not self.elsewhere
        return self.journal.header if self.journal is not None and known else None


def find_origin(resume: str | None, place: Place, journaled: bool) -> Origin:
    """Finds the starting point of `--resume`. Changes nothing. journaled: the method keeps a journal."""
    if resume is None:
        return Origin()
    found, notes = None, list[str]()
    if journaled and place.journal.exists():
        try:
            found = journal.read(place.journal)
        except journal.BadJournal as fault:
            notes = [f"resume: {fault}; it gets another name"]
    if found is not None and found.fault is not None:
        what = "ends in a torn record" if found.torn else "is damaged"
        notes = [f"resume: {place.journal} {what} ({found.fault}); steps after {found.last} are done again"]
    choice = select.newest(place.root) if resume in select.LAST else select.Choice()
    if choice.path is None and (resume not in select.LAST or found is None or found.header.first or not found.records):
        choice = select.choose(resume, place.root)
    elsewhere = choice.path is not None and choice.path.resolve().parent != place.root.resolve()
    if elsewhere:
        elsewhere = _refuse_to_splice(choice, place)
    else:
        _check_ids(choice, found, place)
    begin = choice.state.step if choice.state else 0
    fits = found is not None and found.header.first <= begin <= found.last
    tail = [record for record in found.records if record.step > begin] if found is not None and fits else []
    tail = tail if resume in select.LAST else []
    if journaled and not notes and not fits and not elsewhere and choice.state is not None:
        lies = f"ends with step {found.last}" if found is not None and found.last < begin else "begins later"
        what = f"{place.journal} is missing" if found is None else f"{place.journal} {lies}, and gets another name"
        notes = [f"resume: {what}; a new one begins after step {begin}, and `keyhole replay` needs that checkpoint"]
    if choice.path is None and not tail and place.root.is_dir() and stored_weights(place.root):
        raise UserError(
            f"--resume: {place.root} holds a finished model, and no checkpoint that its run could go on from: a new "
            f"run would write over it. Choose another output_dir (model={place.root} trains on), or move the model away"
        )
    return Origin(choice, found, tail, notes, elsewhere)


def _refuse_to_splice(choice: select.Choice, place: Place) -> bool:
    """For a checkpoint in another directory: whether it belongs to another run; refused if this directory has a run of
    its own."""
    if place.holds is None:
        return True
    assert choice.state is not None and choice.path is not None  # as the caller has seen
    if choice.state.run is None or choice.state.run != place.run:
        raise UserError(
            f"--resume: {place.root} holds a run of its own ({place.holds}), and {choice.path} is of another: two "
            "histories in one directory; go on in a new output_dir, or with --resume alone from what is here"
        )
    select.refuse_to_branch(choice.state.step, choice.path, place.root)
    return False


def _check_ids(choice: select.Choice, found: Journal | None, place: Place) -> None:
    """Checks that all files in the directory belong to one run."""
    witnesses: dict[str, str | None] = {} if place.run is None else {f"{place.root}/run": place.run}
    if choice.state is not None:
        witnesses[str(choice.path)] = choice.state.run
    if found is not None and found.records:
        witnesses[str(place.journal)] = found.header.run
    (first, its_id), *others = witnesses.items() or [("", None)]
    for name, other_id in others:
        if other_id != its_id:
            raise UserError(
                f"--resume: {first} and {name} are of different runs (ids {its_id} and {other_id}), and would be two "
                "histories in one directory; move away what does not belong here"
            )


def check_original(origin: Origin, model: str, from_original: bool) -> None:
    """Checks that the model is the original one, where that is needed: by a journal without a checkpoint, and by a
    checkpoint of what is learned beside its weights."""
    if origin.choice.path is not None:
        needed = origin.original if from_original else None
        what = f"{origin.choice.path} holds what a run has learned beside the weights that it began with"
    elif origin.tail and origin.journal is not None:
        needed = origin.journal.header
        what = f"the journal of this run starts from the weights of {origin.journal.header.source}"
    else:
        return
    if needed is None or needed.base is None:
        return
    is_same = content_hash(find_directory(model)) == needed.base
    if fault := config_fault(needed.base_config, base_config(model)) if is_same else "holds others":
        raise UserError(
            f"--resume: {what}, and model={model} {fault}; restore them, or start a new run in another output_dir"
        )


def continued(origin: Origin, source: str, path: Path, header: Header, sync_every: int) -> Writer:
    """The journal, ready for the step after origin.step: the old one, cut there, or a new one that starts from these
    weights.

    header: of a new journal, with base "" if unknown; source: where the weights were loaded from.
    """
    found, step = origin.journal, origin.step
    fits = found is not None and found.header.run == header.run and found.header.first <= step <= found.last
    if found is None or not fits:
        if path.exists():
            select.set_aside(path, "old")
        state = origin.choice.state
        light = None if state is None or not state.method.get("light") else journal.LIGHT + state.tensors
        base = header.base or light or content_hash(find_directory(source))
        found = journal.create(path, replace(header, base=base, first=step, source=source))
    return Writer(path, found, step, sync_every)
