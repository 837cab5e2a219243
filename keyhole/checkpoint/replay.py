"""Recomputes weights from a journal: from a checkpoint when a run is resumed, or from the base, for `keyhole replay`.

Updates are elementwise, so all steps are applied to one unit before the next unit: each unit crosses the link once for
the whole journal, and the time is that of the update kernels alone.

`keyhole replay BASE JOURNAL OUT` needs no GPU and no data, only base weights with the right content hash, the journal,
and with zo.guide the directory `directions` beside it. A journal that was cut between two records looks like that of a
shorter run: it is compared with the max_steps in its header.

A journal that begins at a checkpoint needs that checkpoint as its base; with zo.rank its factors are loaded too. If it
is a light one, which holds no weights of blocks, these are read from the model that its run began with.

A classification head that the base lacks is initialised again with the run's seed. The result equals the run's
weights to the bit on every device, because noise and update give the same bits everywhere (ops/noise/gaussian.py,
ops/zo/element.py).
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from keyhole import assets
from keyhole.checkpoint import journal
from keyhole.checkpoint.journal import LIGHT, Header, Journal, Record, check_journal, check_out
from keyhole.checkpoint.state import Damaged, State, read_state
from keyhole.checkpoint.writer import method_state
from keyhole.disk.json_text import Json
from keyhole.disk.weight_files import content_hash
from keyhole.errors import UserError
from keyhole.loading import load
from keyhole.machine.gpu import ACCELERATOR, accelerator
from keyhole.methods import METHODS
from keyhole.methods.workload import Workload
from keyhole.methods.zo.low_rank.saved import find_factors
from keyhole.methods.zo.method import ZO
from keyhole.methods.zo.update import Pending
from keyhole.model.classification import name_labels
from keyhole.model.model import Model
from keyhole.model.structure.config_files import base_config, config_fault
from keyhole.model.structure.source import find_directory
from keyhole.model.weights import save as hf

Say = Callable[[str], None]


def apply_records(method: ZO, records: list[Record]) -> float:
    """Applies the records to the weights of the method's model; returns seconds."""
    device, begin_s = method.model.device, time.perf_counter()
    coef_SQ = torch.tensor([record.coef for record in records], dtype=torch.float32, device=device)
    pairs = zip(coef_SQ, records, strict=True)
    method.replay([Pending(coef_Q, record.step - 1, record.weight_decay) for coef_Q, record in pairs])
    method.model.engine.wait_for_homes()
    method.step_count = records[-1].step
    if device.type == ACCELERATOR:
        accelerator.synchronize(device)
    return time.perf_counter() - begin_s


@dataclass(frozen=True)
class Replayed:
    steps: int
    seconds: float
    total_seconds: float


def replay(base: str, path: Path, out: Path, *, steps: int | None = None, say: Say = print, **where: Any) -> Replayed:
    """Writes the model that a journal leads to from `base` (a directory, a hub id, or demo) to the directory `out`.

    steps: stop after this step of the run; None = all. where: device, placement, gpu_memory (keyhole.load).
    """
    begin_s, base, path = time.perf_counter(), assets.locate(base, assets.MODEL), check_journal(path)
    check_out(out)
    found = read_whole(path, steps)
    header, last = found.header, found.last if steps is None else steps
    planned = header.config.get("max_steps")
    if steps is None and isinstance(planned, int) and last < planned:
        say(f"the journal ends with step {last}, and its run had max_steps={planned}: it was stopped, or is cut")
    if steps is None and found.torn:
        say(f"the journal is incomplete: {found.fault}; step {last} is the last that is replayed")
    records = [record for record in found.records if record.step <= last]
    source, state = _source(header, base)
    if fault := config_fault(header.base_config, base_config(source)):
        raise UserError(f"BASE: {source} {fault}; restore the one that the run started from")
    where.setdefault("placement", "auto")
    where |= {"dtype": header.dtype, "wire": header.wire, "workload": Workload("replay")}
    where["adapter"] = header.first == 0  # a checkpoint's factors are part of the method's state
    if header.config.get("head") is not None:  # missing weights of a head are initialised with the run's seed
        labels = header.loader.get("labels", [])
        where |= {"head": header.config["head"], "num_labels": len(labels), "seed": header.config["seed"]}
    model = load(source, **where)
    try:
        for line in (line for line in model.describe() if line.startswith("warning: ")):
            say(line)
        method = method_of(header, model)
        keep_directions(method, path, header.run)
        if state is not None:
            method.load_state_dict(method_state(Path(find_directory(base)), state))
        content = f"content {header.base[:12]}, as recorded" if source == base else f"over the weights of {source}"
        say(f"base: {base}, {content}")
        say(f"replaying steps {header.first + 1} to {last} of {found.last} over {model.layout.numel:,} elements")
        seconds = apply_records(method, records)
        hf.add_end_tokens(model.module, header.end_token_ids)
        if "chat_template" in header.loader:
            model.tokenizer.chat_template = header.loader["chat_template"]
        if "labels" in header.loader:
            name_labels(model.config, header.loader["labels"], header.loader["pad_token_id"])
        try:
            for line in hf.save_model(model, out):
                say(line)
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
        method.guide.directory, method.guide.run = journal.with_name("directions"), run


def _source(header: Header, base: str) -> tuple[str, State | None]:
    """The model whose weights are loaded: the base, if it is the recorded one, or that of a light checkpoint's run. And
    the state of the checkpoint at which the journal begins, if factors beside its weights are to be loaded (zo.rank):
    the step, which V and the noise follow from, is in it."""
    directory, light = Path(find_directory(base)), header.base.startswith(LIGHT)
    if not light and (found := content_hash(directory)) != header.base:
        raise UserError(
            f"BASE: {base} holds other weights (content {found[:12]}) than the run started from (content "
            f"{header.base[:12]}, loaded from {header.source} after {header.first} steps)"
        )
    if header.first == 0 or header.config.get(f"{METHODS[ZO.row.name].section}.rank") is None:
        return base, None
    try:
        state = read_state(directory)
        if state.step != header.first or (light and header.base != LIGHT + state.tensors):
            raise Damaged(f"it is of step {state.step}, with other factors")
        factors = find_factors(directory)
    except (Damaged, UserError) as error:
        raise UserError(
            f"BASE: the journal begins after step {header.first}, and {base} is not the checkpoint that the run went "
            f"on from, which holds low-rank factors beside its weights (it was {header.source}; {error})"
        ) from error
    return (str(factors.weights()) if light and factors is not None else base), state


def read_whole(path: Path, steps: int | None) -> Journal:
    """Reads a journal that covers `steps`; an incomplete last record is dropped, other damage is refused."""
    try:
        found = journal.read(path)
    except journal.BadJournal as fault:
        raise UserError(f"JOURNAL: {fault}") from None
    way_on = f"--steps {found.last} rebuilds the weights up to there" if found.records else "no step is left"
    if found.fault and not found.torn and (steps is None or steps > found.last):
        raise UserError(f"JOURNAL: {path} is damaged: {found.fault}; {way_on}")
    if steps is not None and not found.header.first < steps <= found.last:
        raise UserError(f"--steps: {steps} is not in the journal, which holds {found.header.first + 1} to {found.last}")
    if not found.records:
        raise UserError(f"JOURNAL: {path} holds no steps yet; its weights are those of {found.header.source}")
    return found


def method_of(header: Header, model: Model) -> ZO:
    frozen = set(header.frozen)
    for tensor in model.layout.tensors:
        tensor.param.requires_grad_(tensor.name not in frozen)
    own, section = Json(), METHODS[ZO.row.name].section
    if header.config.get(f"{section}.rank") is not None:
        own = {name: header.config[f"{section}.{name}"] for name in ("rank", "refresh", "fold", "guide")}
    return ZO(
        model,
        eps=header.eps,
        directions=header.directions,
        distribution=header.distribution,
        rounding=header.rounding,
        seed=header.seed,
        weight_decay_on=header.config["weight_decay_on"],
        **own,
    )
