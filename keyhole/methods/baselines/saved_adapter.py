"""Adapters that lie in a model's directory: adapter/, as lomo-lora writes it, and lora where they are not merged.

Evaluation, chat and `keyhole.load` put them beside the layers they were trained on, in fp32 and by the same code as in
training, so that a directory is worth what its run reported. They are fixed: a method that would train the model below
them is refused (`Model.attach`), since what it learns would depend on adapters that it does not own.
"""

from pathlib import Path
from typing import Any

import torch
from torch import nn

from keyhole.disk.read_json import read_json
from keyhole.disk.weight_files import open_shard
from keyhole.errors import UserError
from keyhole.methods.baselines.lora import ADAPTER, find_targets, inject, write_adapter
from keyhole.model.model import Model
from keyhole.model.structure.layout import FlatTensor

FILES = ("adapter_model.safetensors", "adapter_model.bin")


class SavedAdapter:
    """The addon of a model that was loaded with adapters; saved with the model as they are."""

    def __init__(self, model: Model, path: Path) -> None:
        self.path, self.config = path, _read_config(path)
        self.base = self.config.base_model_name_or_path
        trained = [p for p in model.module.parameters() if p.requires_grad]
        targets = self.config.target_modules
        self.config.target_modules = find_targets(model, targets if isinstance(targets, str) else sorted(targets))
        inject(model, self.config, seed=0)
        self.weights = {name: p for name, p in model.module.named_parameters() if p.requires_grad}
        self._fill(model.device)
        for param in self.weights.values():
            param.requires_grad_(False)
        for param in trained:
            param.requires_grad_(True)
        model.addon = self

    def _fill(self, device: torch.device) -> None:
        file = next((self.path / name for name in FILES if (self.path / name).exists()), self.path / FILES[0])
        shard = open_shard(file)
        names = {f"base_model.model.{name.replace(f'.{ADAPTER}.', '.')}": name for name in self.weights}
        differ = sorted(set(shard.keys()) ^ set(names))
        if differ:
            raise UserError(
                f"model: the adapters in {file} are not those that {self.path / 'adapter_config.json'} describes: "
                f"{differ[0]} is in one of them only ({len(differ)} such names)"
            )
        for stored, name in names.items():
            param, tensor = self.weights[name], shard.get_tensor(stored)
            if tensor.shape != param.shape:
                found, expected = tuple(tensor.shape), tuple(param.shape)
                raise UserError(f"model: {file} holds {stored} with shape {found}; its config says {expected}")
            param.data = tensor.to(device, torch.float32).clone()

    @property
    def params(self) -> dict[str, nn.Parameter]:
        """Nothing that is trained."""
        return {}

    def as_saved(self, tensor: FlatTensor, home: torch.Tensor) -> torch.Tensor:
        return home

    def write_files(self, path: Path) -> None:
        write_adapter(path, self.weights, self.config, self.base)

    def __str__(self) -> str:
        return f"adapters: {len(self.weights) // 2} of rank {self.config.r}, from {self.path}"


def _read_config(path: Path) -> Any:
    file = path / "adapter_config.json"
    kind = read_json(file, "model").get("peft_type")
    if kind != "LORA":
        raise UserError(f"model: {file} describes adapters of type {kind!r}; LORA is the type that is read")
    try:
        from peft import LoraConfig
    except ImportError as error:
        raise UserError(
            f"model: {path} holds adapters, and reading them needs peft: pip install 'keyhole[lora]'"
        ) from error
    try:
        return LoraConfig.from_pretrained(str(path))
    except Exception as error:  # keys of another version, values of another type
        raise UserError(f"model: {file} cannot be read: {error}") from error
