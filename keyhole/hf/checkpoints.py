"""The method's state in a Trainer's checkpoint, beside the Trainer's own files.

    checkpoint-N/   model.safetensors, config.json, ...     the model, written by keyhole
                    optimizer.safetensors                   tensors of the method's state, if it has any
                    keyhole_state.json                      its other state, the method's name, checksums: written last
                    scheduler.pt, rng_state.pth, trainer_state.json, training_args.bin        the Trainer's

keyhole reads no pickle: the scheduler's file is loaded with weights_only.
"""

from pathlib import Path
from typing import Any

import torch

from keyhole.checkpoint.files import TENSORS, About, method_state, split_state, write_state
from keyhole.checkpoint.state import Damaged, verify
from keyhole.disk.tensors import write_tensors
from keyhole.errors import UserError
from keyhole.machine.probe import versions
from keyhole.methods.base import Method
from keyhole.model.model import Model
from keyhole.model.weights.read import fill_from
from keyhole.model.weights.save import save_model

TENSORS_ABOUT = "method"


def save_method(directory: Path, method: Method, step: int) -> None:
    """Writes the state, with the checksums of the model's files, which must already be there."""
    tensors, scalars = split_state(method.state_dict())
    if method.model.factors is not None:  # factors are part of the state, so that a run resumes within a period
        save_model(method.model, directory, merged=False)
    if tensors:
        write_tensors(directory / TENSORS, tensors)
    write_state(directory, About(step, {}, {TENSORS_ABOUT: method.name}, versions()), scalars)


def load_method(directory: Path, method: Method) -> None:
    """Loads the state; UserError if the checkpoint is damaged, or of another method."""
    try:
        state = verify(directory)
    except Damaged as error:
        raise UserError(f"resume_from_checkpoint: {directory}: {error}; go on from an older one") from error
    made_by = state.config.get(TENSORS_ABOUT)
    if made_by != method.name:
        raise UserError(f"resume_from_checkpoint: {directory} was made by method={made_by}, this run has {method.name}")
    try:
        method.load_state_dict(method_state(directory, state))
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise UserError(f"resume_from_checkpoint: the state in {directory} does not fit this run: {error}") from error


def load_weights(directory: Path, model: Model) -> None:
    """Reads the weights of a checkpoint into the model, in place."""
    if not (directory / "config.json").exists():
        raise UserError(f"resume_from_checkpoint: {directory} holds no model")
    model.apply_deferred()
    model.engine.wait_for_homes()
    fill_from(model, directory, model.dtype)
    model.engine.invalidate()


def save_scheduler(directory: Path, scheduler: Any, name: str) -> None:
    torch.save(scheduler.state_dict(), directory / name)


def load_scheduler(directory: Path, scheduler: Any, name: str) -> None:
    if (directory / name).is_file():
        scheduler.load_state_dict(torch.load(directory / name, weights_only=True))
