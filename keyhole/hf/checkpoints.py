"""The method's state in a Trainer's checkpoint, beside the Trainer's own files.

    checkpoint-N/   model.safetensors, config.json, ...     the model, written by keyhole
                    optimizer.safetensors                   tensors of the method's state, if it has any
                    scheduler.pt, training_args.bin         the Trainer's
                    keyhole_state.json                      its other state, the method's name and rate, checksums of
                                                            the files above
                    rng_state.pth, trainer_state.json       the Trainer's, written last

A checkpoint is verified before anything of it is loaded, so a run that cannot go on is refused with its weights as they
were, and a best checkpoint that is damaged leaves the last weights as they are. The Trainer writes a checkpoint under
its final name, so a killed process may leave an incomplete one: `resume_from_checkpoint=True` passes over it. keyhole
reads no pickle: the scheduler's file is loaded with weights_only.

The Trainer's model card reads `optim` of the arguments, which keyhole does not use: a published model would claim to
have been trained by AdamW. Its line is replaced by one that states the method.
"""

import json
import re
import warnings
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler
from transformers.trainer import SCHEDULER_NAME

from keyhole import __version__
from keyhole.checkpoint import select
from keyhole.checkpoint.state import STATE, TENSORS, Damaged, State, check_sizes, read_state, verify
from keyhole.checkpoint.writer import method_state, split_state, write_state
from keyhole.disk.tensors import write_tensors
from keyhole.errors import UserError
from keyhole.hf.arguments import Wanted
from keyhole.machine.host import versions
from keyhole.methods.base import Method
from keyhole.methods.settings import MethodSettings
from keyhole.model.model import Model
from keyhole.model.structure.config_files import config_fault, identity
from keyhole.model.weights.read import fill_from
from keyhole.model.weights.save import save_model
from keyhole.plan.dtype import NAMES

METHOD, RATE, SETTINGS, TRAINED = "method", "learning_rate", "settings", "trained"
LAST = ("rng_state.pth", "trainer_state.json")  # what the Trainer writes last
OPTIMIZER = re.compile(r"^- optimizer: .*$", re.MULTILINE)  # in the model card
MARK = "checkpoint-is-incomplete.txt"  # the Trainer's, of a checkpoint that a signal asked for


def trained_names(model: Model) -> list[str]:
    """The parameters that a method will train which is made now."""
    return sorted({tensor.name for tensor in model.layout.tensors if tensor.param.requires_grad})


def save(
    directory: Path,
    method: Method,
    scheduler: LRScheduler,
    step: int,
    asked: Wanted,
    trained: list[str],
    tokenizer: Any,
) -> None:
    """Writes the scheduler, the state, the method's own settings, the names of what it was made to train, and the
    checksums of the files that are there by then: the model's (with this tokenizer) and the scheduler's."""
    torch.save(scheduler.state_dict(), directory / SCHEDULER_NAME)
    for name in (STATE, TENSORS, *LAST):  # of an earlier checkpoint of this step
        (directory / name).unlink(missing_ok=True)
    tensors, scalars = split_state(method.state_dict())
    if method.model.methods.low_rank is not None:  # factors are part of the state: a run resumes within a period
        save_model(method.model, directory, merged=False, tokenizer=tokenizer)
    if tensors:
        write_tensors(directory / TENSORS, {n: t for n, t in tensors.items() if isinstance(t, torch.Tensor)})
    about = {METHOD: method.name, RATE: method.param_groups[0]["lr"], SETTINGS: asdict(asked.own), TRAINED: trained}
    numbers = identity(json.loads(method.model.config.to_json_string()))
    whole = State(step, method=scalars, config=about, versions=versions(), base_config=numbers)
    write_state(directory, whole, leave_out=(MARK,))


def drop_begun(directory: Path) -> None:
    """Removes a checkpoint of which there is only the Trainer's mark."""
    if directory.is_dir() and [path.name for path in directory.iterdir()] == [MARK]:
        (directory / MARK).unlink()
        directory.rmdir()


def newest_complete(root: Path) -> Path | None:
    """The newest checkpoint that was written to its end; None if there is none. Newer ones are named by a warning."""
    for path in reversed(select.numbered(root)):
        try:
            if (path / STATE).exists():
                check_sizes(path, read_state(path).files)
                _check_last(path)
                return path
            fault = f"{STATE} is missing"
        except Damaged as error:
            fault = str(error)
        warnings.warn(f"resume_from_checkpoint: {path} is incomplete and passed over: {fault}", stacklevel=3)
    return None


def verified(directory: Path, asked: Wanted, trained: list[str], model: Model) -> State:
    """The state of an intact checkpoint; UserError if it is damaged, incomplete, or of another method, settings or
    config, or of a run that trained other parameters."""
    if not directory.is_dir():
        raise UserError(f"resume_from_checkpoint: there is no directory {directory}")
    if not (directory / STATE).exists():
        raise UserError(
            f"resume_from_checkpoint: {directory} has no {STATE}: KeyholeTrainer did not write it, or did so with "
            "save_only_model, or did not finish. Go on from an older one, or start a new run with its weights as model"
        )
    try:
        state = verify(directory)
        _check_last(directory)
    except Damaged as error:
        raise UserError(f"resume_from_checkpoint: {directory}: {error}; go on from an older one") from error
    about, row = state.config, asked.row
    if not {METHOD, RATE, SETTINGS, TRAINED} <= about.keys():
        raise UserError(
            f"resume_from_checkpoint: {directory} is of another version of keyhole; start a new run with its weights "
            "as model"
        )
    if about[METHOD] != row.name:
        made_by = f"was made by method={about[METHOD]}, this run has {row.name}"
        raise UserError(f"resume_from_checkpoint: {directory} {made_by}")
    before, may_change = about[SETTINGS], {*row.may_change, *(each.name for each in fields(MethodSettings))}
    for key, value in asdict(asked.own).items():
        if before.get(key, value) != value and key not in may_change:
            raise UserError(
                f"resume_from_checkpoint: {directory} was made with {key}={before[key]} of {row.name}, this run has "
                f"{value}; give the same settings"
            )
    if fault := config_fault(state.base_config, identity(json.loads(model.config.to_json_string()))):
        raise UserError(
            f"resume_from_checkpoint: {directory} is of another model; {model.source or 'this one'} {fault}; restore "
            "it, or start a new run with the checkpoint as model"
        )
    differ = sorted({*about[TRAINED]} ^ {*trained})
    if differ and not row.keeps_base:  # else adapters alone are trained, and compared when the state is loaded
        was, is_now = ("trained", "frozen") if differ[0] in about[TRAINED] else ("frozen", "trained")
        raise UserError(
            f"resume_from_checkpoint: {directory} is of a run that trained {len(about[TRAINED])} parameters, this one "
            f"would train {len(trained)}: {differ[0]} was {was} and is {is_now} now. Freeze the same ones "
            "(keyhole.load(.., freeze=..), requires_grad), or start a new run with the checkpoint as model"
        )
    return state


def _check_last(directory: Path) -> None:
    """Damaged if the files that the Trainer writes last are not complete. (The generators' is read by the Trainer.)"""
    for name in LAST:
        if not (directory / name).is_file():
            raise Damaged(f"{name} is missing")
    try:
        json.loads((directory / name).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise Damaged(f"{name} cannot be read: {error}") from None


def load_method(directory: Path, state: State, method: Method) -> None:
    try:
        method.load_state_dict(method_state(directory, state))
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise UserError(f"resume_from_checkpoint: the state in {directory} does not fit this run: {error}") from error


def load_rate(directory: Path, state: State, method: Method, scheduler: LRScheduler, asked: float) -> None:
    """Loads the scheduler, and the rate of the next step: the scheduler's, or what a callback had set. Warns that the
    schedule goes on from the checkpoint's rate, as the Trainer's does, if the arguments have another. (The shape of the
    schedule is that of the arguments.)"""
    scheduler.load_state_dict(torch.load(directory / SCHEDULER_NAME, weights_only=True))
    for group in method.param_groups:
        group["lr"] = state.config[RATE]
    kept = {rate for rate in vars(scheduler).get("base_lrs", ()) if rate != asked}
    if kept:
        warnings.warn(
            f"learning_rate: {asked:g} is not used: resume_from_checkpoint goes on with the checkpoint's schedule, "
            f"from {', '.join(f'{rate:g}' for rate in sorted(kept))}; set the rate by a callback "
            "(optimizer.param_groups), or start a new run with the checkpoint as model",
            stacklevel=4,
        )


def load_weights(directory: Path, model: Model) -> None:
    model.apply_deferred()
    model.engine.wait_for_homes()
    try:
        fill_from(model, directory, model.dtype)
    except RuntimeError as error:
        raise UserError(
            f"resume_from_checkpoint: the weights in {directory} are not those of this model: {error}"
        ) from error
    model.methods.homes_written()


def state_method(card: Path, asked: Wanted, model: Model) -> None:
    settings = f", settings {json.dumps(asked.settings)}" if asked.settings else ""
    where = "streamed from host memory" if model.engine.streamed else "resident"
    line = f"- method: {asked.method} (keyhole {__version__}; {NAMES[model.dtype]}, {where}){settings}"
    card.write_text(OPTIMIZER.sub(lambda found: line, card.read_text(encoding="utf-8")), encoding="utf-8")
