"""A model before its weights are read, in the order in which it is decided:

    Source     its config and its directory; the weights' directory and wire                        find_source
    Outline    dtype, and the module without weights, frozen parameters marked                      Source.outline
    Prepared   the format of weights, the layout, and where every unit lives                        Outline.place

`keyhole.load` fills what is prepared (loading/model.py), --dry-run prints it, `keyhole plan` plans its outline.

The module is built on the meta device by Transformers (model/structure/skeleton.py). Weights are usually in the model's
own directory; a light checkpoint (methods/zo/low_rank/) holds factors only, and names the model whose weights they
belong to and the wire that they were learned in.
"""

import os
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from keyhole import assets
from keyhole.disk.tensors import first_dtype
from keyhole.errors import UserError
from keyhole.machine.gpu import ACCELERATOR, accelerator
from keyhole.machine.held import alone
from keyhole.methods import METHODS
from keyhole.methods.base import Skeleton
from keyhole.methods.workload import Workload
from keyhole.methods.zo.low_rank.saved import SavedFactors, find_factors
from keyhole.model.structure.config_files import read_generation_config
from keyhole.model.structure.find import find_blocks
from keyhole.model.structure.layout import Layout
from keyhole.model.structure.reach import freeze as freeze_parameters
from keyhole.model.structure.skeleton import build, is_classifier, read_config
from keyhole.model.structure.source import find_directory, read_tokenizer
from keyhole.model.weights.fit import choose_format, forget_what_is_read
from keyhole.model.weights.format import Wire
from keyhole.plan.dtype import DtypeChoice, choose_dtype
from keyhole.plan.placement import Placement, place


@dataclass(frozen=True)
class Source:
    """A model by its config and its directory (None: not here, or given as a config object). name: for messages and
    cards; weights: the directory that holds them, with the factors `beside` them; learned_in: the wire of these."""

    config: PretrainedConfig
    directory: Path | None
    name: str | None
    trust_remote_code: bool
    weights: Path | None
    wire: str | None
    beside: SavedFactors | None
    learned_in: str | None

    def outline(
        self,
        dtype: str | torch.dtype | None,
        device: torch.device | None,
        method: str | None,
        freeze: str | list[str] | None = None,
        expert_units: bool = True,
        seed: int = 0,
    ) -> "Outline":
        """The module in the dtype that was asked for, or that the method and the device can use."""
        in_files = None if self.weights is None or self.config.dtype is not None else first_dtype(self.weights)
        choice = choose_dtype(dtype, self.config, device, method, in_files)
        with alone(), torch.random.fork_rng(devices=[]):  # vectors are drawn by the global one
            torch.default_generator.manual_seed(seed)
            module = build(self.config, choice.dtype, self.trust_remote_code, expert_units=expert_units)
        directory = None if is_classifier(self.config) else self.directory
        if directory is not None and (directory / "generation_config.json").exists():
            module.generation_config = read_generation_config(directory)
        freeze_parameters(module, freeze)
        return Outline(self, choice, module)

    def read_tokenizer(self) -> PreTrainedTokenizerBase | None:
        """None for a config object, and for a directory without one."""
        return None if self.directory is None else read_tokenizer(self.directory, self.trust_remote_code)


@dataclass(frozen=True)
class Outline:
    """A module without weights, and the dtype that it is computed in."""

    source: Source
    choice: DtypeChoice
    module: nn.Module

    def place(
        self,
        placement: str,
        gpu_memory: str | int | None,
        device: torch.device,
        work: Workload,
        from_files: bool = True,
    ) -> "Prepared":
        """The cut into units and their places, with the reasons for the start block. Refuses what does not fit, and
        shapes that the method cannot train. from_files: the weights' own format counts."""
        source, dtype = self.source, self.choice.dtype
        formats, said = choose_format(self.module, source.weights if from_files else None, dtype, source.wire)
        layout, placed = place(self.module, placement, gpu_memory, formats, device, work)
        if work.settings is not None and work.method in METHODS:
            skeleton = Skeleton(self.module, layout, find_blocks(self.module))
            METHODS[work.method].load().check_shapes(skeleton, work.settings)
        if source.wire != source.learned_in:
            before = source.learned_in or str(dtype).removeprefix("torch.")
            said = [
                *said,
                f"wire: {source.wire}, as asked; the factors beside these weights were learned over {before}",
            ]
        placed.reasons[:0] = [str(self.choice), *said]
        return Prepared(source, self.choice, self.module, formats, layout, placed)


@dataclass(frozen=True)
class Prepared(Outline):
    """All that is decided before the weights are read."""

    formats: Wire
    layout: Layout
    placed: Placement


def find_source(
    model: str | Path | PretrainedConfig,
    *,
    wire: str | None = None,
    head: str | None = None,
    num_labels: int | None = None,
    trust_remote_code: bool = False,
    factors: bool = False,
    download: bool = True,
) -> Source:
    """Reads the config, and finds or downloads the files (without `download` only its config, if it is not here).
    factors: those that a light checkpoint holds count too. The config forgets the quantization of weights that keyhole
    reads: what is saved later has 16 bits."""
    model = assets.locate(os.path.expanduser(model), assets.MODEL) if isinstance(model, str) else model
    config = read_config(model, trust_remote_code, head, num_labels)  # a copy, if a head is added
    directory: Path | None = None
    if not isinstance(model, PretrainedConfig):
        directory = find_directory(model) if download else Path(model) if os.path.isdir(model) else None
    beside = find_factors(directory) if factors and directory is not None else None
    weights = directory if beside is None else beside.weights()
    if not isinstance(model, PretrainedConfig):
        forget_what_is_read(config, weights)
    learned_in = wire if beside is None else beside.wire
    name = None if directory is None else str(model)
    wire = learned_in if wire is None else wire
    return Source(config, directory, name, trust_remote_code, weights, wire, beside, learned_in)


def check_source(model: object) -> None:
    """Refuses a module: a model is given by name, because its weights are read directly to their homes."""
    if isinstance(model, str | Path | PretrainedConfig):
        return
    known = getattr(getattr(model, "config", None), "_name_or_path", "") if isinstance(model, nn.Module) else ""
    raise UserError(
        f"keyhole.load: found a {type(model).__name__}, expected a directory, a hub id or a config; write "
        f'keyhole.load("{known or "path-or-hub-id"}")'
        + (", or save it first: model.save_pretrained(path)" if isinstance(model, nn.Module) else "")
    )


def choose_device(device: str | torch.device | None) -> torch.device:
    """The requested device, or the first GPU, or the CPU."""
    try:
        found = torch.device(device or (ACCELERATOR if accelerator.is_available() else "cpu"))
    except RuntimeError as error:
        raise UserError(f"device: {device!r} is not a device; use cpu, cuda or cuda:0") from error
    if found.type not in ("cpu", ACCELERATOR):
        raise UserError(f"device: {found} is not supported; use cpu, cuda or cuda:0")
    if found.type == "cpu":
        return found
    if not accelerator.is_available():
        raise UserError("device: cuda was asked for, but PyTorch sees no CUDA GPU here; use device=cpu")
    if (index := found.index or 0) >= accelerator.device_count():
        raise UserError(f"device: cuda:{index} was asked for, but there are {accelerator.device_count()} GPUs")
    return torch.device(ACCELERATOR, index)
