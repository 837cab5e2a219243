"""Recomputes weights from a journal: from a checkpoint when a run is resumed, or from the base, for `keyhole replay`.

Updates are elementwise, so all steps are applied to one unit before the next unit: each unit crosses the link once for
the whole journal, and the time is that of the update kernels alone,

    seconds = steps x elements / rate          rate: measured on the second unit that is large enough (the first one
                                               includes the compilation of kernels)

`keyhole replay BASE JOURNAL OUT` needs no GPU and no data, only base weights with the right content hash, the journal,
and with zo.guide the directory `directions` beside it. A journal that was cut between two records looks like that of a
shorter run. What lies beside it tells more: a checkpoint of a later step, which is written only after the records
before it, or later lines of metrics.jsonl. Then it is refused as a damaged one is; a journal that was copied alone is
compared with the max_steps in its header.

A journal that begins at a checkpoint needs that checkpoint as its base; with zo.rank its factors are loaded too. If it
is a light one, which holds no weights of blocks, these are read from the model that its run began with.

A classification head that the base lacks is initialised again with the run's seed. The result equals the run's
weights to the bit on every device, because noise and update give the same bits everywhere (ops/noise/gaussian.py,
ops/zo/element.py).
"""

import json
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from keyhole import assets
from keyhole.checkpoint.journal import format as journal
from keyhole.checkpoint.journal.asked import check_journal, check_out, journal_of
from keyhole.checkpoint.journal.format import LIGHT, Header, Journal, Record
from keyhole.checkpoint.select import checkpoints
from keyhole.checkpoint.state import Damaged, State, read_state
from keyhole.checkpoint.writer import method_state
from keyhole.disk.weights_hash import content_hash
from keyhole.errors import UserError
from keyhole.loading import load
from keyhole.machine.sizes import GIB
from keyhole.methods import METHODS
from keyhole.methods.workload import Workload
from keyhole.methods.zo.low_rank.direction_files import DirectionFiles
from keyhole.methods.zo.method import ZO
from keyhole.methods.zo.update import Pending
from keyhole.model.classification import name_labels
from keyhole.model.model import Model
from keyhole.model.structure.source import find_directory
from keyhole.model.weights import save as hf
from keyhole.ops.noise.index import DISTRIBUTIONS
from keyhole.ops.rounding.round import ROUNDINGS

TIMED_NUMEL = 2**20  # smaller units are not used to measure the rate
QUIET_S = 10.0
TAIL_BYTES = 2**16

Say = Callable[[str], None]


def apply_records(method: ZO, records: list[Record], say: Say) -> float:
    """Applies the records to the weights of the method's model; returns seconds."""
    device, begin_s = method.model.device, time.perf_counter()
    coef_SQ = torch.tensor([record.coef for record in records], dtype=torch.float32, device=device)
    pending = [Pending(coef_Q, record.step - 1) for coef_Q, record in zip(coef_SQ, records, strict=True)]
    updates = [(update, record.weight_decay) for update, record in zip(pending, records, strict=True)]
    left, large, mark_s = method.model.layout.numel, 0, 0.0
    for unit in method.replay(updates):
        left, large = left - unit.numel, large + (unit.numel >= TIMED_NUMEL)
        if large == 2 and mark_s:
            left_s, mark_s = (_now(device) - mark_s) * left / unit.numel, 0.0
            if left_s > QUIET_S:
                say(f"replaying {len(records)} steps: about {left_s:.0f} s")
        elif large == 1:
            mark_s = _now(device)
    method.model.engine.wait_for_homes()
    method.step_count = records[-1].step
    if method.memory.numel():
        method.remember(records[-1].memory)
    return _now(device) - begin_s


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


@dataclass(frozen=True)
class Replayed:
    """The result of `replay`."""

    steps: int
    seconds: float
    total_seconds: float


def replay(base: str, path: Path, out: Path, *, steps: int | None = None, say: Say = print, **where: Any) -> Replayed:
    """Writes the model that a journal leads to from `base` (a directory, a hub id, or demo) to the directory `out`.

    steps: stop after this step of the run; None = all. where: device, placement, gpu_memory (keyhole.load).
    """
    begin_s, base = time.perf_counter(), assets.locate(base, assets.MODEL)
    check_out(out)
    found = _with_last_merge(read_whole(path, steps), journal_of(path))
    planned = found.header.config.get("max_steps")
    if steps is None and isinstance(planned, int) and found.last < planned:
        say(f"the journal ends with step {found.last}, and its run had max_steps={planned}: it was stopped, or is cut")
    records = [record for record in found.records if steps is None or record.step <= steps]
    source = _weights_of(found.header, base)
    if found.torn and steps is None:
        say(f"the journal is incomplete: {found.fault}; step {found.last} is the last that is replayed")
    where.setdefault("placement", "auto")
    model = load(
        source,
        dtype=found.header.dtype,
        wire=found.header.wire,
        workload=Workload("replay"),
        adapter=found.header.first == 0,  # a checkpoint's factors are part of the method's state
        **where,
        **_head(found.header),
    )
    try:
        method = method_of(found.header, model)
        keep_directions(method, journal_of(path), found.header.run)
        if found.header.first > 0 and method.factors is not None:
            _load_factors(method, Path(find_directory(base)), found.header)
        _refuse_full_disk(out, model)
        content = (
            f"content {found.header.base[:12]}, as recorded" if source == base else f"over the weights of {source}"
        )
        say(f"base: {base}, {content}")
        numel = model.layout.numel
        say(f"replaying steps {found.header.first + 1} to {records[-1].step} of {found.last} over {numel:,} elements")
        seconds = apply_records(method, records, say)
        hf.add_end_tokens(model.module, found.header.end_token_ids)
        if "chat_template" in found.header.loader:
            model.tokenizer.chat_template = found.header.loader["chat_template"]
        if "labels" in found.header.loader:
            name_labels(model.config, found.header.loader["labels"], found.header.loader["pad_token_id"])
        try:
            model.save_pretrained(out)
        except OSError as error:
            raise UserError(
                f"OUT: {out} cannot be written: {error.strerror or error}; the journal is as it was: replay it again, "
                "or to another disk"
            ) from error
    finally:
        model.close()
    return Replayed(len(records), seconds, time.perf_counter() - begin_s)


def keep_directions(method: ZO, journal: Path, run: str | None) -> None:
    """Sets where a method that finds its directions (zo.guide) keeps them: beside its journal. run: the run's id."""
    if method.guide is not None:
        method.guide.files = DirectionFiles(journal.with_name("directions"), run)


def _weights_of(header: Header, base: str) -> str:
    """The model whose weights are loaded: the base, if it is the recorded one, or that of a light checkpoint's run."""
    if not header.base.startswith(LIGHT):
        check_base(header, base)
        return base
    state, recorded = _state_of(Path(find_directory(base)), header), header.base.removeprefix(LIGHT)
    if recorded != state.tensors and recorded != base:  # older journals have its path instead
        raise UserError(
            f"BASE: {base} holds other factors than the checkpoint that the run went on from: {header.source}"
        )
    original = assets.locate(str(state.config.get("model")), assets.MODEL)
    if state.base is not None and content_hash(find_directory(original)) != state.base:
        raise UserError(
            f"BASE: {base} holds what its run had learned beside the weights of {original}, which are others now: "
            "restore them there"
        )
    return original


def _load_factors(method: ZO, base: Path, header: Header) -> None:
    """For a journal that begins at a checkpoint: loads what its run had learned beside the weights (zo.rank), and the
    step, which V and the noise follow from."""
    method.load_state_dict(method_state(base, _state_of(base, header)))


def _state_of(base: Path, header: Header) -> State:
    """The state of the checkpoint at which a journal begins."""
    try:
        state = read_state(base)
    except (Damaged, UserError) as error:
        raise UserError(
            f"BASE: the journal begins after step {header.first}, and {base} is not the checkpoint of that step, which "
            f"holds low-rank factors beside its weights (it was {header.source}; {error})"
        ) from error
    if state.step != header.first:
        raise UserError(
            f"BASE: {base} is a checkpoint of step {state.step}, and the journal begins after {header.first}"
        )
    return state


def _refuse_full_disk(out: Path, model: Model) -> None:
    """Before the work: refuses a disk without room for the weights."""
    place = next(place for place in (out, *out.absolute().parents) if place.exists())
    need, free = model.layout.numel * model.dtype.itemsize, shutil.disk_usage(place).free
    if need > free:
        raise UserError(
            f"OUT: the model takes {need / GIB:.2f} GiB, and {out} has {free / GIB:.2f} GiB free; free some space, or "
            "name a directory on another disk"
        )


def _head(header: Header) -> dict[str, Any]:
    """The settings of the classification head of the run; missing weights are initialised with the run's seed."""
    if header.config.get("head") is None:
        return {}
    labels = header.loader.get("labels", [])
    return {"head": header.config["head"], "num_labels": len(labels), "seed": header.config["seed"]}


def read_whole(path: Path, steps: int | None) -> Journal:
    """Reads a journal that covers `steps`; an incomplete last record is dropped, other damage is refused."""
    path = check_journal(path)
    try:
        found = journal.read(path)
    except journal.BadJournal as fault:
        raise UserError(f"JOURNAL: {fault}") from None
    if found.fault and not found.torn and (steps is None or steps > found.last):
        way_on = f"--steps {found.last} rebuilds the weights up to there" if found.records else "no step is left"
        raise UserError(f"JOURNAL: {path} is damaged: {found.fault}; {way_on}")
    if steps is None and (more := _later_step(path, found)) is not None:
        raise UserError(
            f"JOURNAL: {path} is cut: it ends with step {found.last}, and {more}; --steps {found.last} rebuilds the "
            "weights up to there"
        )
    if steps is not None and not found.header.first < steps <= found.last:
        raise UserError(f"--steps: {steps} is not in the journal, which holds {found.header.first + 1} to {found.last}")
    if not found.records:
        raise UserError(f"JOURNAL: {path} holds no steps yet; its weights are those of {found.header.source}")
    return found


def _checkpoints_of(found: Journal, path: Path) -> Iterator[tuple[Path, State]]:
    """The intact checkpoints of its run that lie in the output directory of a journal, the newest first."""
    run = path.resolve().parent
    for checkpoint in reversed(checkpoints(run.parent) if run.name == "run" else []):
        try:
            state = read_state(checkpoint)
        except (Damaged, UserError):
            continue
        if state.run == found.header.run:
            yield checkpoint, state


def _with_last_merge(found: Journal, path: Path) -> Journal:
    """The journal with the last value of zo.merge that its run had: a resumed run may have another one than that with
    which its journal began."""
    key = f"{METHODS[ZO.row.name].section}.merge"
    for _, state in _checkpoints_of(found, path):
        if key in state.config:
            return replace(found, header=replace(found.header, config=found.header.config | {key: state.config[key]}))
    return found


def _later_step(path: Path, found: Journal) -> str | None:
    """What in the output directory of a journal shows that its run had more steps; None if nothing does."""
    run = path.resolve().parent
    if run.name != "run":
        return None
    for checkpoint, state in _checkpoints_of(found, path):
        if state.step > found.last:
            return f"{checkpoint} is of its run"
    step = _last_metrics(run / "metrics.jsonl")
    ahead = step > found.last + 1  # a line is written before the record of its step
    return f"run/metrics.jsonl has step {step}" if ahead else None


def _last_metrics(path: Path) -> int:
    """The last step with a line in metrics.jsonl; 0 if there is none."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - TAIL_BYTES))
            steps = [json.loads(line).get("step", 0) for line in file.read().splitlines()[-1:]]
    except (OSError, ValueError, AttributeError, RecursionError):  # none, or its last line is torn
        return 0
    return steps[0] if steps and isinstance(steps[0], int) else 0


def check_base(header: Header, base: str) -> None:
    """Checks that the base has exactly the weights that the run started from."""
    found = content_hash(find_directory(base))
    if found != header.base:
        raise UserError(
            f"BASE: {base} holds other weights (content {found[:12]}) than the run started from (content "
            f"{header.base[:12]}, loaded from {header.source} after {header.first} steps)"
        )


def method_of(header: Header, model: Model) -> ZO:
    """The method with the settings of the run."""
    for name, known in {"distribution": DISTRIBUTIONS, "rounding": ROUNDINGS}.items():
        asked = getattr(header, name)
        if asked not in known:
            raise UserError(f"JOURNAL: its header has {name}={asked}, which is none of {', '.join(known)}")
    frozen = set(header.frozen)
    for tensor in model.layout.tensors:
        tensor.param.requires_grad_(tensor.name not in frozen)
    return ZO(
        model,
        eps=header.eps,
        directions=header.directions,
        distribution=header.distribution,
        rounding=header.rounding,
        seed=header.seed,
        weight_decay_on=header.config.get("weight_decay_on", "all"),  # older journals: all tensors decay
        **_low_rank(header),
    )


def _low_rank(header: Header) -> dict[str, Any]:
    """The settings of low-rank directions; older journals lack them (those from before kept periods could be folded
    never fold)."""
    section = METHODS[ZO.row.name].section
    found = {
        name: header.config.get(f"{section}.{name}") for name in ("rank", "refresh", "fold", "fold_periods", "guide")
    }
    found |= {name: header.config.get(f"{section}.{name}", old) for name, old in (("fold_error", 0.0), ("merge", True))}
    return found if found["rank"] is not None else {}
