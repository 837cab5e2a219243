"""Adapters as peft builds, names and stores them, beside a keyhole model: made by `lora` and `lomo-lora`, or loaded.

    y = W x + (alpha / r) B A x        A [r, I] random, B [O, r] zero at the start

The model's own parameters remain the same objects, so flat memory, streaming, evaluation and generation work as before;
the adapters are in fp32, on the device. The saved model is an ordinary one: W + (alpha / r) B A, rounded once
(`merge`), tensor by tensor while it is written; or the original model, and beside it the adapters in peft's own format,
in adapter/.

Evaluation, chat and `keyhole.load` attach the adapters of a directory to the layers they were trained on, by the same
code as in training, so that a loaded directory reproduces the results of its run. They are fixed: a method that would
train the model below them is refused (`Model.attach`), since its result would depend on adapters that it does not own.

peft follows adapter_config.json: it allocates matrices of any rank, and some settings make it import a module by name.
So only the settings of plain LoRA are read (PLAIN), and ranks are first compared with the stored shapes.
"""

import copy
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from keyhole.disk.json_text import read_json
from keyhole.disk.weight_files import open_shard, tensors_in
from keyhole.errors import UserError
from keyhole.limits import Rank, describe, fits
from keyhole.machine.held import alone
from keyhole.methods.base import Saved, Skeleton, State
from keyhole.methods.by_torch import load_optimizer, optimizer_state
from keyhole.methods.lora.adapted_linear import ADAPTER, use_products
from keyhole.model.model import Model
from keyhole.model.structure.layout import FlatTensor
from keyhole.model.structure.reach import is_left_out
from keyhole.model.structure.skeleton import is_classifier
from keyhole.model.structure.source import ADAPTER_FILES

Base = Model | Skeleton  # a model to adapt, or its outline (Method.outline)
NOT_WITH_MAMBA = ("out_proj", "conv1d")  # peft refuses them: state-space kernels use only the weights of these layers
MAMBAS = ("mamba", "mamba2", "falcon_mamba", "falcon_h1", "nemotron_h")
ABOUT = {"peft_type", "peft_version", "task_type", "inference_mode", "base_model_name_or_path", "revision"}
PLAIN = {"r", "lora_alpha", "lora_dropout", "use_rslora", "fan_in_fan_out", "target_modules"}
PATTERNS = {"rank_pattern", "alpha_pattern"}  # plain names only, since peft treats the keys as regular expressions
KINDS: dict[str, object] = {"r": Rank, "rank_pattern": dict[str, Rank] | None, "alpha_pattern": dict[str, float] | None}
KINDS |= {"lora_alpha": float | None, "lora_dropout": float | None, "base_model_name_or_path": str | None}
KINDS |= {"target_modules": list[str] | str}


@dataclass
class Adapters:
    """The addon of a model with adapters (model/attached.py), which references neither method nor model. layers: by the
    names of those that they adapt; weights: by name; trained: by the method that made them, else fixed; merges: they
    are merged into the saved weights, else saved beside them, where `base` names the model that they belong to."""

    config: Any
    layers: dict[str, Any]
    weights: dict[str, nn.Parameter]
    trained: bool = True
    merges: bool = False
    base: str | None = None

    @property
    def params(self) -> dict[str, nn.Parameter]:
        return self.weights if self.trained else {}

    @torch.no_grad()
    def as_saved(self, tensor: FlatTensor, home: torch.Tensor) -> torch.Tensor:
        """The tensor as it is saved: merged with its adapter, on the host, or unchanged."""
        over = (layer for layer in self.layers.values() if layer.base_layer.weight is tensor.param)
        layer = next(over, None) if self.merges else None
        if layer is None:
            return home
        delta = layer.get_delta_weight(ADAPTER).float()
        return (home.to(delta.device).float() + delta).to(home.dtype).cpu()

    def write_files(self, path: Path) -> None:
        """Adds the adapters in peft's own format to a model directory, unless they are merged into its weights."""
        if not self.merges:
            write_adapter(path, self.weights, self.config, self.base)

    def state(self, optimizer: torch.optim.Optimizer) -> State:
        """The adapters, and what their optimizer keeps."""
        return {f"{name}/adapter": p.data for name, p in self.weights.items()} | optimizer_state(
            optimizer, self.weights
        )

    def load(self, optimizer: torch.optim.Optimizer, state: Saved, method: str) -> None:
        """UserError for the state of a method that has adapted other layers."""
        saved = {name.removesuffix("/adapter") for name in state if name.endswith("/adapter")}
        if differ := sorted(saved ^ self.weights.keys()):
            has = "has an" if differ[0] in saved else "has no"
            raise UserError(
                f"{method}: the state {has} adapter {differ[0]}, other than this model; target_modules and freeze must "
                "be as they were"
            )
        for name, param in self.weights.items():
            param.data.copy_(state[f"{name}/adapter"])
        load_optimizer(optimizer, self.weights, state)


def write_adapter(path: Path, params: dict[str, nn.Parameter], config: Any, base: str | None = None) -> None:
    """Writes path/adapter/, as peft does. base: the model that the adapters belong to, a directory or a hub id."""
    from safetensors.torch import save_file

    (path / "adapter").mkdir()
    named = {_in_file(name): param.detach().cpu() for name, param in params.items()}
    save_file(named, path / "adapter" / "adapter_model.safetensors", metadata={"format": "pt"})
    config = copy.copy(config)
    config.base_model_name_or_path = str(Path(base).resolve()) if base is not None and Path(base).exists() else base
    config.save_pretrained(str(path / "adapter"))


def _in_file(name: str) -> str:
    return f"base_model.model.{name.replace(f'.{ADAPTER}.', '.')}"


# -- making them -------------------------------------------------------------------------------------------------------


@contextmanager
def whole_or_none(model: Model) -> Iterator[None]:
    """Around the making of a method: if it fails, the model is left without adapters, as it was."""
    trained = [(param, param.requires_grad) for param in model.module.parameters()]
    before = set(model.module.modules())
    try:
        yield
    except BaseException:
        for name, layer in list(model.module.named_modules()):
            if hasattr(layer, "lora_A") and layer not in before:
                model.module.set_submodule(name, layer.base_layer)
        for param, flag in trained:
            param.requires_grad_(flag)
        model.methods.addon = None
        raise


def adapt(
    base: Base,
    seed: int,
    *,
    r: int,
    alpha: float,
    target_modules: list[str] | str | None,
    dropout: float = 0.0,
    freezes: bool = False,
) -> Adapters:
    """Adds the adapters of a method, to an outline without memory. freezes: they alone are trained, else beside what
    was trained before."""
    module: Any = base.module
    targets = find_targets(base, target_modules)
    adapted = [name for name in targets if not is_left_out(module.get_submodule(name).weight)]
    if not adapted:  # an adapter would change what a frozen layer computes
        raise UserError(
            f"freeze: it describes the weights of all {len(targets)} layers that would get adapters, such as "
            f"{targets[0]}, so there is nothing to adapt; freeze fewer, or leave it out"
        )
    shapes = {id(t.param): t.shape for t in base.layout.tensors}  # weights of packed units are empty tensors
    weights = [id(module.get_submodule(name).weight) for name in adapted]
    most = max((min(shapes[weight]) for weight in weights if weight in shapes), default=r)
    if r > most:
        raise UserError(
            f"r: {r:,} is more than a change of these matrices can have: the smaller side of the largest is {most:,}, "
            f"and adapters of rank {most:,} can learn every change of it; a larger r takes memory and learns no more. "
            f"Set r to {most:,} at most"
        )
    config = peft_config(base, r=r, lora_alpha=alpha, lora_dropout=dropout, target_modules=adapted)
    return inject(base, config, seed, freezes)


def lora_config() -> Any:
    """peft's class."""
    try:
        from peft import LoraConfig
    except ImportError as error:
        raise UserError("method: adapters need the peft package: pip install peft") from error
    return LoraConfig


def peft_config(base: Base, **settings: Any) -> Any:
    """A classifier gets no task type: with one, peft would need generation, or add a head of its own beside ours."""
    return lora_config()(**settings, task_type=None if is_classifier(base.module.config) else "CAUSAL_LM")


def find_targets(base: Base, asked: list[str] | str | None) -> list[str]:
    """Names of the modules to adapt: the requested ones, or every linear layer of the blocks. lomo-lora uses this too,
    so errors here and above name the key without its section."""
    module: Any = base.module
    names = {id(m): name for name, m in module.named_modules()}
    inside = [names[id(m)] for block in base.blocks for m in block.modules() if _is_linear(m)]
    if is_classifier(module.config):  # a new head must be trained too
        pretrained = {id(m) for m in module.base_model.modules()}
        inside += [name for name, m in module.named_modules() if _is_linear(m) and id(m) not in pretrained]
    if asked is not None:
        asked = [asked] if isinstance(asked, str) else asked
        found = {word: [n for n in inside if n == word or n.endswith(f".{word}")] for word in asked}
        unknown = [word for word, hits in found.items() if not hits]
        if unknown:
            known = ", ".join(sorted({name.rpartition(".")[2] for name in inside}))
            raise UserError(f"target_modules: no linear layer of the blocks is called {unknown[0]!r}; known: {known}")
        return sorted({name for hits in found.values() for name in hits})
    if module.config.model_type in MAMBAS:
        inside = [name for name in inside if name.rpartition(".")[2] not in NOT_WITH_MAMBA]
    if not inside:
        raise UserError("target_modules: this model has no linear layers in blocks to adapt")
    return inside


def _is_linear(module: nn.Module) -> bool:
    """Whether this is a linear layer (GPT-2's is transposed). By name: a router may subclass one and return more."""
    return type(module).__name__.endswith("Linear") or type(module).__name__ == "Conv1D"


def inject(base: Base, config: Any, seed: int, freezes: bool = False) -> Adapters:
    """Injects the adapters in fp32. freezes: the rest is frozen, else it stays as it is."""
    from peft import inject_adapter_in_model
    from peft.tuners.lora import LoraLayer

    trained = [] if freezes else [param for param in base.module.parameters() if param.requires_grad]
    base.module.requires_grad_(False)
    held = nn.ModuleDict({"held": base.module})  # for some HF models peft would adapt experts that were not named
    inside = copy.copy(config)
    inside.target_modules = [f"held.{name}" for name in config.target_modules]
    with alone(), torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft warns that a Conv1D is transposed, and handles it
        torch.default_generator.manual_seed(seed)
        try:
            inject_adapter_in_model(inside, held, ADAPTER, low_cpu_mem_usage=isinstance(base, Skeleton))
        except ValueError as error:
            raise UserError(f"target_modules: peft refuses: {error}") from error
    layers: dict[str, Any] = {name: m for name, m in base.module.named_modules() if isinstance(m, LoraLayer)}
    for layer in layers.values():
        for part in (layer.lora_A, layer.lora_B):
            part.float()
        layer.train(layer.base_layer.training)  # new modules are in training mode
        layer.lora_dropout.eval()
        if hasattr(layer, "get_delta_weight"):
            use_products(layer)
    weights = {name: param for name, param in base.module.named_parameters() if param.requires_grad}
    for param in trained:
        param.requires_grad_(True)
    if isinstance(base, Model):
        for param in weights.values():
            param.data = param.data.to(base.device)
    return Adapters(config, layers, weights)


# -- reading them ------------------------------------------------------------------------------------------------------


def add_saved(model: Model, path: Path) -> str:
    """Adds the adapters of a directory to the model, fixed; they are saved with it unchanged. Returns a line for the
    start block."""
    file = next((path / name for name in ADAPTER_FILES if (path / name).exists()), path / ADAPTER_FILES[0])
    shard = open_shard(file)
    config = _read_config(path, file)
    targets = config.target_modules
    config.target_modules = find_targets(model, targets if isinstance(targets, str) else sorted(targets))
    found = inject(model, config, seed=0)
    names = {_in_file(name): param for name, param in found.weights.items()}
    if differ := sorted(set(tensors_in(file)) ^ set(names)):
        raise UserError(
            f"model: the adapters in {file} are not those that {path / 'adapter_config.json'} describes: "
            f"{differ[0]} is in one of them only ({len(differ)} such names)"
        )
    for stored, param in names.items():
        tensor = shard.get_tensor(stored)
        if tensor.shape != param.shape:
            shapes = f"with shape {tuple(tensor.shape)}; its config says {tuple(param.shape)}"
            raise UserError(f"model: {file} holds {stored} {shapes}")
        param.data.copy_(tensor)
        param.requires_grad_(False)
    found.trained, found.base = False, config.base_model_name_or_path
    model.methods.addon = found
    return f"adapters: {len(names) // 2} of rank {config.r}, from {path}"


def _read_config(path: Path, weights: Path) -> Any:
    file = path / "adapter_config.json"
    said = read_json(file, "model")
    if said.get("peft_type") != "LORA":
        raise UserError(
            f"model: {file} describes adapters of type {said.get('peft_type')!r}; LORA is the type that is read"
        )
    made = lora_config()
    usual = made().to_dict() | {"init_lora_weights": said.get("init_lora_weights")}  # overwritten anyway
    for key, value in said.items():
        if key not in ABOUT | PLAIN | PATTERNS and value and value != usual.get(key):
            raise UserError(f"model: {file} has {key}={value!r:.60}; adapters other than plain LoRA are not read")
    for key, kind in KINDS.items():
        value = said.get(key) or None if key in PATTERNS else said.get(key)
        if not fits(value, kind):
            raise UserError(f"model: {file}: {key} is {value!r:.60}; expected {describe(kind, full=True)}")
    if odd := [name for key in PATTERNS for name in said.get(key) or () if not re.fullmatch(r"\^?[\w.-]+", name)]:
        raise UserError(f"model: {file}: {odd[0]!r:.60} is a pattern; expected plain names")
    most = max((side for stored in tensors_in(weights).values() for side in stored.shape), default=0)
    if max(ranks := [said["r"], *(said.get("rank_pattern") or {}).values()]) > most:
        raise UserError(f"model: {file}: {max(ranks)} is no rank of the stored matrices, whose sides are 1 to {most}")
    read = PLAIN | {key for key in PATTERNS if said.get(key)} | {"base_model_name_or_path"}
    try:
        task = "CAUSAL_LM" if said.get("task_type") == "CAUSAL_LM" else None
        return made(**{key: said[key] for key in said if key in read}, task_type=task)
    except Exception as error:  # values of the wrong type
        raise UserError(f"model: {file} cannot be read: {error}") from error
