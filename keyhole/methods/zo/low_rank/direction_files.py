"""The V of periods as files, beside the journal of a run with zo.guide: directions/000000.safetensors and so on.

A journal has scalars, from which a replay computes updates; with zo.guide their directions depend on weights and data
(guide.py), so V of each period is kept too. A file is written atomically and flushed before the first step of its
period, so every record of the journal has its V on the disk. It has a checksum of V, the id of its run and the
number of its period: other directions would give other weights, without an error.

Bytes per period: those of V (SmolLM2-135M, rank 1: 0.3 MB in 16 bit; OPT-13B: 4 MB).
"""

import zlib
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from keyhole.disk.files import make_directories, replacing
from keyhole.errors import UserError

NAME, CHECKSUM, RUN, PERIOD, FORMAT = "v", "crc32", "run", "period", "{:06d}.safetensors"


@dataclass(frozen=True)
class DirectionFiles:
    """The files of one run. run: its id."""

    directory: Path
    run: str | None

    def write(self, v: torch.Tensor, period: int) -> None:
        """Writes V of a period; UserError if that fails."""
        path = self.directory / FORMAT.format(period)
        try:
            make_directories(self.directory)
            with replacing(path) as file:
                about = {CHECKSUM: _checksum(v), RUN: str(self.run), PERIOD: str(period)}
                file.write(save({NAME: v.cpu()}, about))
        except OSError as error:
            raise UserError(
                f"zo.guide: {path} cannot be written: {error.strerror or error}; steps of this period could not be "
                "replayed. Free some space, and go on with --resume"
            ) from error

    def read(self, period: int, like: torch.Tensor, first_step: int) -> torch.Tensor:
        """V of a period, of the shape and dtype of `like`; UserError if it is missing, damaged, or of something else.
        first_step: of the period, for the message."""
        path = self.directory / FORMAT.format(period)
        way_on = (
            f"steps from {first_step} on of the journal need it. Put it back (the directory directions of the run, "
            "beside its journal), or resume from a checkpoint by its name"
        )
        try:
            with safe_open(path, "pt") as file:
                v, about = file.get_tensor(NAME), file.metadata() or {}
        except (OSError, SafetensorError) as error:
            raise UserError(f"zo.guide: {path} cannot be read ({error}); {way_on}") from error
        if v.shape != like.shape or v.dtype != like.dtype:
            raise UserError(f"zo.guide: {path} holds {v.dtype} {tuple(v.shape)}, not the directions of this model")
        if about.get(CHECKSUM) != _checksum(v):
            raise UserError(f"zo.guide: {path} is damaged, its checksum is wrong; {way_on}")
        if about.get(RUN) != str(self.run):
            raise UserError(f"zo.guide: {path} is of another run than the journal; {way_on}")
        if about.get(PERIOD, str(period)) != str(period):  # files of older versions do not say
            raise UserError(f"zo.guide: {path} is of period {about[PERIOD]}, not {period}; {way_on}")
        return v


def _checksum(v: torch.Tensor) -> str:
    return f"{zlib.crc32(v.cpu().contiguous().view(torch.uint8).numpy().data):08x}"
