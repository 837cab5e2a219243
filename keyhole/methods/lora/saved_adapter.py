"""Adapters in a model's directory: adapter/, as lomo-lora writes it, and lora if they are not merged.

Evaluation, chat and `keyhole.load` attach them to the layers they were trained on, in fp32 and by the same code as in
training, so that a loaded directory reproduces the results of its run. They are fixed: a method that would train the
model below them is refused (`Model.attach`), since its result would depend on adapters that it does not own.

peft follows adapter_config.json: it allocates matrices of any rank, and some settings make it import a module by name.
So only the settings of plain LoRA are read (PLAIN), and ranks are first compared with the stored shapes.
"""

import re
from pathlib import Path
from typing import Any

import torch
from torch import nn

from keyhole.disk.json_text import read_json
from keyhole.disk.weight_files import open_shard, tensors_in
from keyhole.errors import UserError
from keyhole.methods.lora.adapted_linear import ADAPTER
from keyhole.methods.lora.peft_layers import find_targets, inject, write_adapter
from keyhole.model.model import Model
from keyhole.model.structure.layout import FlatTensor
from keyhole.model.structure.source import ADAPTER_FILES as FILES

ABOUT = {"peft_type", "peft_version", "task_type", "inference_mode", "base_model_name_or_path", "revision"}
PLAIN = {"r", "lora_alpha", "lora_dropout", "use_rslora", "fan_in_fan_out", "target_modules"}
PATTERNS = {"rank_pattern", "alpha_pattern"}  # plain names only, since peft treats the keys as regular expressions


class SavedAdapter:
    """The addon of a model that was loaded with adapters; they are saved with the model unchanged."""

    def __init__(self, model: Model, path: Path) -> None:
        self.path, self.file = path, next((path / name for name in FILES if (path / name).exists()), path / FILES[0])
        self.config = _read_config(path, self.file)
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
        model.methods.addon = self

    def _fill(self, device: torch.device) -> None:
        file, shard = self.file, open_shard(self.file)
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
        """Empty: nothing is trained."""
        return {}

    def as_saved(self, tensor: FlatTensor, home: torch.Tensor) -> torch.Tensor:
        return home

    def write_files(self, path: Path) -> None:
        write_adapter(path, self.weights, self.config, self.base)

    def __str__(self) -> str:
        return f"adapters: {len(self.weights) // 2} of rank {self.config.r}, from {self.path}"


def _read_config(path: Path, weights: Path) -> Any:
    file = path / "adapter_config.json"
    said = read_json(file, "model")
    if said.get("peft_type") != "LORA":
        raise UserError(
            f"model: {file} describes adapters of type {said.get('peft_type')!r}; LORA is the type that is read"
        )
    try:
        from peft import LoraConfig
    except ImportError as error:
        raise UserError(
            f"model: {path} holds adapters, and reading them needs peft: pip install 'keyhole[lora]'"
        ) from error
    usual = LoraConfig().to_dict() | {"init_lora_weights": said.get("init_lora_weights")}  # overwritten anyway
    for key, value in said.items():
        if key not in ABOUT | PLAIN | PATTERNS and value and value != usual.get(key):
            raise UserError(f"model: {file} has {key}={value!r:.60}; adapters other than plain LoRA are not read")
    sides = [side for stored in tensors_in(weights).values() for side in stored.shape]
    if fault := _fault(said, max(sides, default=0)):
        raise UserError(f"model: {file}: {fault}")
    read = PLAIN | {key for key in PATTERNS if said.get(key)} | {"base_model_name_or_path"}
    try:
        task = "CAUSAL_LM" if said.get("task_type") == "CAUSAL_LM" else None
        return LoraConfig(**{key: said[key] for key in said if key in read}, task_type=task)
    except Exception as error:  # values of the wrong type
        raise UserError(f"model: {file} cannot be read: {error}") from error


def _fault(said: dict[str, Any], most: int) -> str:
    """The error in the numbers of a config; "" if they are valid. most: the largest side of a stored matrix."""
    for key in sorted(PATTERNS):
        table = said.get(key) or {}
        if not isinstance(table, dict) or not all(re.fullmatch(r"\^?[\w.-]+", name) for name in table):
            return f"{key} is {table!r:.60}; a table of numbers by name is expected"
        if not all(_is_number(value) for value in table.values()):
            return f"{key} is {table!r:.60}; numbers are expected"
    for rank in (said.get("r"), *(said.get("rank_pattern") or {}).values()):
        if type(rank) is not int or not 1 <= rank <= most:
            return f"a rank is {rank!r:.60}; the stored matrices have sides from 1 to {most}"
    for key in ("lora_alpha", "lora_dropout"):
        if not _is_number(said.get(key, 0)):
            return f"{key} is {said[key]!r:.60}; a number is expected"
    if not isinstance(said.get("base_model_name_or_path"), str | None):
        return f"base_model_name_or_path is {said['base_model_name_or_path']!r:.60}; a name is expected"
    targets = said.get("target_modules")
    if not isinstance(targets, str) and not (
        isinstance(targets, list) and all(isinstance(name, str) for name in targets)
    ):
        return f"target_modules is {targets!r:.60}; a list of names is expected"
    return ""


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < 1e9
