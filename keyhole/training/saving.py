"""When a checkpoint is written, whether the disk has room for it, and what happens when it fails.

A checkpoint needs   weights + the method's tensors + MARGIN_BYTES   on disk before the oldest one goes. Where
that is not there, the oldest goes first, as long as one good checkpoint stays; where it still is not there,
or the write fails, a save during training is skipped with a loud line and tried again after RETRY_STEPS steps
(training is worth more than a checkpoint), while the save that ends a run raises. Weights are checked to be
finite before they are written.
"""

import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from keyhole.checkpoint import find, hf
from keyhole.checkpoint.resume import flat_config
from keyhole.checkpoint.state import OWN_FILES, save_checkpoint
from keyhole.config import TrainConfig
from keyhole.errors import UserError
from keyhole.model.model import Model
from keyhole.training.guard import NonFinite, first_bad_tensor

GIB = 2**30
MARGIN_BYTES = 64 * 2**20
RETRY_STEPS = 10


def free_bytes(path: Path) -> int:
    """Free space on the file system that holds (or will hold) the path."""
    while not path.exists():
        path = path.parent
    return shutil.disk_usage(path).free


def saved_bytes(model: Model, method_state: dict[str, Any]) -> int:
    """Bytes on disk of the weights and of the method's tensors, and a margin for the small files."""
    tensors = [value for value in method_state.values() if isinstance(value, torch.Tensor)]
    weights = sum(t.shape.numel() for t in model.layout.tensors) * torch.finfo(model.dtype).bits // 8
    return weights + sum(t.numel() * t.element_size() for t in tensors) + MARGIN_BYTES


class Saver:
    """Writes checkpoints of one run into its directory and keeps the newest few."""

    def __init__(self, root: Path, model: Model, method: Any, config: TrainConfig, versions: dict[str, Any]) -> None:
        self.root, self.model, self.method, self.config, self.versions = root, model, method, config, versions
        self.last_good: Path | None = None
        self.last_step: int | None = None
        self.retry_at: int | None = None

    def refuse_full_disk(self) -> None:
        """Before training starts: there must be room for the weights at least."""
        need, free = saved_bytes(self.model, {}), free_bytes(self.root)
        if need > free:
            raise UserError(
                f"output_dir: saving the model takes {need / GIB:.2f} GiB, and {self.root} has "
                f"{free / GIB:.2f} GiB free; free some space, or set output_dir on another disk"
            )

    def went_on_from(self, path: Path | None, step: int) -> None:
        """The checkpoint this run goes on from is good; if it lies here, its step need not be saved again."""
        self.last_good = path
        if path is not None and path.resolve() == (self.root / f"checkpoint-{step}").resolve():
            self.last_step = step

    def is_due(self, step: int) -> bool:
        """Whether a checkpoint is to be written after this step."""
        every = self.config.save_steps
        return (every is not None and step % every == 0) or step == self.retry_at

    def try_save(self, step: int, loader: dict[str, Any]) -> str:
        """Saves during training; returns the line for the user, also when it did not work."""
        self.retry_at = None
        try:
            return f"saved {self.save(step, loader)}"
        except NonFinite:
            raise
        except UserError as error:
            self.retry_at = step + RETRY_STEPS
            kept = f"{self.last_good} stays" if self.last_good else "there is no checkpoint yet"
            again = f"trying again at step {self.retry_at}"
            return f"warning: checkpoint-{step} NOT saved ({error}); {kept}; {again}"

    def save(self, step: int, loader: dict[str, Any]) -> Path:
        """Flushes the method, checks weights and disk, writes checkpoint-step, deletes what is too old."""
        self.method.flush()
        bad = first_bad_tensor(self.model.named_tensors())
        if bad is not None:
            good = f"the last good checkpoint is {self.last_good}" if self.last_good else "there is no checkpoint"
            raise NonFinite(f"step {step}: {bad} holds NaN or infinity, so it is not saved; {good}")
        state = self.method.state_dict()
        self._make_room(step, state)
        path = self.root / f"checkpoint-{step}"
        named = {
            "step": step,
            "loader": loader,
            "config": flat_config(self.config),
            "versions": self.versions,
        }
        try:
            save_checkpoint(path, self.model, state, **named)
        except (OSError, SafetensorError) as error:
            raise UserError(f"output_dir: {path} could not be written: {error}") from error
        self.last_good, self.last_step = path, step
        find.prune(self.root, self.config.save_total_limit, step)
        return path

    def save_once(self, step: int, loader: dict[str, Any]) -> Path:
        """Saves, unless this step is on disk already. Raises when it cannot."""
        return self.last_good if self.last_good and self.last_step == step else self.save(step, loader)

    def _make_room(self, step: int, state: dict[str, Any]) -> None:
        need = saved_bytes(self.model, state)
        limit = self.config.save_total_limit
        if need > free_bytes(self.root) and limit is not None:
            find.prune(self.root, limit - 1, step)
        free = free_bytes(self.root)
        if need > free:
            raise UserError(
                f"output_dir: a checkpoint takes {need / GIB:.2f} GiB, and {self.root} has "
                f"{free / GIB:.2f} GiB free; free some space"
            )

    def publish(self) -> None:
        """The last checkpoint becomes the model of the output directory."""
        assert self.last_good is not None
        hf.publish(self.last_good, self.root, OWN_FILES)
