"""Adapters as peft makes, names and stores them, put into a keyhole model in place. For `lora` and `lomo-lora`.

    y = W x + (alpha / r) B A x        A [r, I] random, B [O, r] zero at the start

The model's own parameters stay the objects they were, so flat memory, streaming, evaluation and generation work as
before; the adapters are the method's own, in fp32, on the device. What is saved is an ordinary model: W + (alpha / r)
B A, rounded once (`merge`), tensor by tensor as it is written; or the model as it was, and beside it the adapters in
peft's own layout, in adapter/.
"""

import copy
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn

from keyhole.errors import UserError
from keyhole.methods.lora.adapted_linear import ADAPTER, use_products
from keyhole.model.model import Model
from keyhole.model.structure.find import find_blocks
from keyhole.model.structure.layout import FlatTensor

NOT_WITH_MAMBA = ("out_proj", "conv1d")  # peft refuses them: the kernels of state-space layers use their weights alone
MAMBAS = ("mamba", "mamba2", "falcon_mamba", "falcon_h1", "nemotron_h")


class Adapters:
    """The addon of a model with adapters (model/attached.py). The model keeps it, so it holds neither method nor model.
    merged: the layers whose adapters are saved in the weights; None: adapters are saved beside them, and `base` names
    the model they belong to."""

    def __init__(
        self,
        params: dict[str, nn.Parameter],
        config: Any,
        merged: dict[str, nn.Module] | None = None,
        base: str | None = None,
    ) -> None:
        self.params, self.config, self.base, self.merges = params, config, base, merged is not None
        self._over = {id(layer.base_layer.weight): layer for layer in (merged or {}).values()}

    @torch.no_grad()
    def as_saved(self, tensor: FlatTensor, home: torch.Tensor) -> torch.Tensor:
        """The tensor as it is saved: with its adapter added, on the host, or as it is."""
        layer = self._over.get(id(tensor.param))
        if layer is None:
            return home
        delta = layer.get_delta_weight(ADAPTER).float()
        return (home.to(delta.device).float() + delta).to(home.dtype).cpu()

    def write_files(self, path: Path) -> None:
        """Adds the adapters in peft's own layout to a model directory, unless they are in its weights."""
        if not self.merges:
            write_adapter(path, self.params, self.config, self.base)


def write_adapter(path: Path, params: dict[str, nn.Parameter], config: Any, base: str | None = None) -> None:
    """path/adapter/, as peft writes it. base: the model that the adapters belong to, a directory or a hub id."""
    from safetensors.torch import save_file

    (path / "adapter").mkdir()
    plain = {name.replace(f".{ADAPTER}.", "."): p.detach().cpu() for name, p in params.items()}
    named = {f"base_model.model.{name}": p for name, p in plain.items()}
    save_file(named, path / "adapter" / "adapter_model.safetensors", metadata={"format": "pt"})
    config = copy.copy(config)
    config.base_model_name_or_path = str(Path(base).resolve()) if base is not None and Path(base).exists() else base
    config.save_pretrained(str(path / "adapter"))


def peft_config(model: Model, **settings: Any) -> Any:
    """Of a classifier without a task: peft would look for generation, or for a head of its own beside ours."""
    try:
        from peft import LoraConfig
    except ImportError as error:
        raise UserError("method: lora needs the peft package: pip install 'keyhole[lora]'") from error
    return LoraConfig(**settings, task_type=None if model.classifies else "CAUSAL_LM")


def find_targets(model: Model, asked: list[str] | str | None) -> list[str]:
    """Names of the modules to adapt: those asked for, or every linear layer of the blocks. Also for lomo-lora, so that
    refusals here and below name the key without its section."""
    names = {id(m): name for name, m in model.module.named_modules()}
    inside = [names[id(m)] for block in find_blocks(model.module) for m in block.modules() if _is_linear(m)]
    if model.classifies:  # a fresh head must learn too
        base = {id(m) for m in model.module.base_model.modules()}
        inside += [name for name, m in model.module.named_modules() if _is_linear(m) and id(m) not in base]
    if asked is not None:
        asked = [asked] if isinstance(asked, str) else asked
        found = {word: [n for n in inside if n == word or n.endswith(f".{word}")] for word in asked}
        unknown = [word for word, hits in found.items() if not hits]
        if unknown:
            known = ", ".join(sorted({name.rpartition(".")[2] for name in inside}))
            raise UserError(f"target_modules: no linear layer of the blocks is called {unknown[0]!r}; known: {known}")
        return sorted({name for hits in found.values() for name in hits})
    if model.config.model_type in MAMBAS:
        inside = [name for name in inside if name.rpartition(".")[2] not in NOT_WITH_MAMBA]
    if not inside:
        raise UserError("target_modules: this model has no linear layers in blocks to adapt")
    return inside


def _is_linear(module: nn.Module) -> bool:
    """A linear layer (GPT-2's is transposed). By name: a router may inherit from one and return something else."""
    return type(module).__name__.endswith("Linear") or type(module).__name__ == "Conv1D"


def inject(model: Model, config: Any, seed: int) -> dict[str, nn.Module]:
    """Puts the adapters in, in fp32; freezes the rest. Returns them by the names of the layers they adapt."""
    from peft import inject_adapter_in_model
    from peft.tuners.lora import LoraLayer

    model.module.requires_grad_(False)
    held = nn.ModuleDict({"held": model.module})  # for some HF models peft would adapt experts that were not named
    inside = copy.copy(config)
    inside.target_modules = [f"held.{name}" for name in config.target_modules]
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that a Conv1D is transposed, which peft then minds
        torch.default_generator.manual_seed(seed)
        try:
            inject_adapter_in_model(inside, held, ADAPTER)
        except ValueError as error:
            raise UserError(f"target_modules: peft refuses: {error}") from error
    layers = {name: m for name, m in model.module.named_modules() if isinstance(m, LoraLayer)}
    for layer in layers.values():
        for part in (layer.lora_A, layer.lora_B):
            part.float()
        layer.train(layer.base_layer.training)  # new modules are in training mode
        layer.lora_dropout.eval()
        if hasattr(layer, "get_delta_weight"):
            use_products(layer)
    return layers
