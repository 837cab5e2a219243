"""Adapters as peft builds, names and stores them, injected into a keyhole model. For `lora` and `lomo-lora`.

    y = W x + (alpha / r) B A x        A [r, I] random, B [O, r] zero at the start

The model's own parameters remain the same objects, so flat memory, streaming, evaluation and generation work as before;
the adapters belong to the method, in fp32, on the device. The saved model is an ordinary one: W + (alpha / r) B A,
rounded once (`merge`), tensor by tensor while it is written; or the original model, and beside it the adapters in
peft's own format, in adapter/.
"""

import copy
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from keyhole.errors import UserError
from keyhole.methods.lora.adapted_linear import ADAPTER, use_products
from keyhole.model.model import Model
from keyhole.model.structure.freeze import is_left_out
from keyhole.model.structure.layout import FlatTensor, Layout
from keyhole.model.structure.skeleton import is_classifier

NOT_WITH_MAMBA = ("out_proj", "conv1d")  # peft refuses them: state-space kernels use only the weights of these layers
MAMBAS = ("mamba", "mamba2", "falcon_mamba", "falcon_h1", "nemotron_h")


class Base(Protocol):
    """A model to adapt, or its outline (Method.outline): modules and shapes, without weights."""

    module: nn.Module
    layout: Layout
    blocks: list[nn.Module]


@dataclass(frozen=True)
class Adapted:
    """Adapters in a module: peft's config, the layers by the names of those that they adapt, the weights by name."""

    config: Any
    layers: dict[str, Any]
    params: dict[str, nn.Parameter]


class Adapters:
    """The addon of a model with adapters (model/attached.py). The model keeps it, so it references neither method nor
    model. merged: the layers whose adapters are merged into the saved weights; None: adapters are saved beside the
    weights, and `base` names the model that they belong to."""

    def __init__(
        self,
        params: dict[str, nn.Parameter],
        config: Any,
        merged: dict[str, Any] | None = None,
        base: str | None = None,
    ) -> None:
        self.params, self.config, self.base, self.merges = params, config, base, merged is not None
        self._over = {id(layer.base_layer.weight): layer for layer in (merged or {}).values()}

    @torch.no_grad()
    def as_saved(self, tensor: FlatTensor, home: torch.Tensor) -> torch.Tensor:
        """The tensor as it is saved: merged with its adapter, on the host, or unchanged."""
        layer = self._over.get(id(tensor.param))
        if layer is None:
            return home
        delta = layer.get_delta_weight(ADAPTER).float()
        return (home.to(delta.device).float() + delta).to(home.dtype).cpu()

    def write_files(self, path: Path) -> None:
        """Adds the adapters in peft's own format to a model directory, unless they are merged into its weights."""
        if not self.merges:
            write_adapter(path, self.params, self.config, self.base)


def write_adapter(path: Path, params: dict[str, nn.Parameter], config: Any, base: str | None = None) -> None:
    """Writes path/adapter/, as peft does. base: the model that the adapters belong to, a directory or a hub id."""
    from safetensors.torch import save_file

    (path / "adapter").mkdir()
    plain = {name.replace(f".{ADAPTER}.", "."): p.detach().cpu() for name, p in params.items()}
    named = {f"base_model.model.{name}": p for name, p in plain.items()}
    save_file(named, path / "adapter" / "adapter_model.safetensors", metadata={"format": "pt"})
    config = copy.copy(config)
    config.base_model_name_or_path = str(Path(base).resolve()) if base is not None and Path(base).exists() else base
    config.save_pretrained(str(path / "adapter"))


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
    empty: bool = False,
) -> Adapted:
    """Adds the adapters of a method. freezes: they alone are trained, else beside what was trained before. empty: they
    take no memory."""
    targets = _without_frozen(base, find_targets(base, target_modules))
    _check_rank(base, targets, r)
    config = peft_config(base, r=r, lora_alpha=alpha, lora_dropout=dropout, target_modules=targets)
    trained = [] if freezes else [p for p in base.module.parameters() if p.requires_grad]
    layers = inject(base, config, seed, empty)
    params = {name: p for name, p in base.module.named_parameters() if p.requires_grad}
    for param in trained:
        param.requires_grad_(True)
    return Adapted(config, layers, params)


def _without_frozen(base: Base, targets: list[str]) -> list[str]:
    """The targets that `freeze` does not name: an adapter would change what a frozen layer computes."""
    module: Any = base.module
    left = [name for name in targets if not is_left_out(module.get_submodule(name).weight)]
    if not left:
        raise UserError(
            f"freeze: it describes the weights of all {len(targets)} layers that would get adapters, such as "
            f"{targets[0]}, so there is nothing to adapt; freeze fewer, or leave it out"
        )
    return left


def _check_rank(base: Base, targets: list[str], r: int) -> None:
    """Refuses a rank that no adapted matrix can use, before its adapters take memory."""
    shapes = {id(t.param): t.shape for t in base.layout.tensors}  # weights of packed units are empty tensors
    weights = [id(base.module.get_submodule(name).weight) for name in targets]
    most = max((min(shapes[weight]) for weight in weights if weight in shapes), default=r)
    if r > most:
        raise UserError(
            f"r: {r:,} is more than a change of these matrices can have: the smaller side of the largest is {most:,}, "
            f"and adapters of rank {most:,} can learn every change of it; a larger r takes memory and learns no more. "
            f"Set r to {most:,} at most"
        )


def check_adapters(method: str, params: Mapping[str, nn.Parameter], state: Mapping[str, Any]) -> None:
    """Refuses the state of a method that has adapted other layers."""
    saved = {name.removesuffix("/adapter") for name in state if name.endswith("/adapter")}
    if differ := sorted(saved ^ params.keys()):
        has = "has an" if differ[0] in saved else "has no"
        raise UserError(
            f"{method}: the state {has} adapter {differ[0]}, other than this model; target_modules and freeze must be "
            "as they were"
        )


def peft_config(base: Base, **settings: Any) -> Any:
    """A classifier gets no task type: with one, peft would need generation, or add a head of its own beside ours."""
    try:
        from peft import LoraConfig
    except ImportError as error:
        raise UserError("method: lora needs the peft package: pip install 'keyhole[lora]'") from error
    return LoraConfig(**settings, task_type=None if is_classifier(base.module.config) else "CAUSAL_LM")


def find_targets(base: Base, asked: list[str] | str | None) -> list[str]:
    """Names of the modules to adapt: the requested ones, or every linear layer of the blocks. lomo-lora uses this too,
    so errors here and below name the key without its section."""
    names = {id(m): name for name, m in base.module.named_modules()}
    inside = [names[id(m)] for block in base.blocks for m in block.modules() if _is_linear(m)]
    whole: Any = base.module
    if is_classifier(whole.config):  # a new head must be trained too
        pretrained = {id(m) for m in whole.base_model.modules()}
        inside += [name for name, m in base.module.named_modules() if _is_linear(m) and id(m) not in pretrained]
    if asked is not None:
        asked = [asked] if isinstance(asked, str) else asked
        found = {word: [n for n in inside if n == word or n.endswith(f".{word}")] for word in asked}
        unknown = [word for word, hits in found.items() if not hits]
        if unknown:
            known = ", ".join(sorted({name.rpartition(".")[2] for name in inside}))
            raise UserError(f"target_modules: no linear layer of the blocks is called {unknown[0]!r}; known: {known}")
        return sorted({name for hits in found.values() for name in hits})
    if whole.config.model_type in MAMBAS:
        inside = [name for name in inside if name.rpartition(".")[2] not in NOT_WITH_MAMBA]
    if not inside:
        raise UserError("target_modules: this model has no linear layers in blocks to adapt")
    return inside


def _is_linear(module: nn.Module) -> bool:
    """Whether this is a linear layer (GPT-2's is transposed). By name: a router may subclass one and return more."""
    return type(module).__name__.endswith("Linear") or type(module).__name__ == "Conv1D"


def inject(base: Base, config: Any, seed: int, empty: bool = False) -> dict[str, Any]:
    """Injects the adapters in fp32 and freezes the rest. Returns them by the names of the layers that they adapt.
    empty: on the meta device."""
    from peft import inject_adapter_in_model
    from peft.tuners.lora import LoraLayer

    base.module.requires_grad_(False)
    held = nn.ModuleDict({"held": base.module})  # for some HF models peft would adapt experts that were not named
    inside = copy.copy(config)
    inside.target_modules = [f"held.{name}" for name in config.target_modules]
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft warns that a Conv1D is transposed, and handles it
        torch.default_generator.manual_seed(seed)
        try:
            inject_adapter_in_model(inside, held, ADAPTER, low_cpu_mem_usage=empty)
        except ValueError as error:
            raise UserError(f"target_modules: peft refuses: {error}") from error
    layers: dict[str, Any]
    layers = {name: m for name, m in base.module.named_modules() if isinstance(m, LoraLayer)}
    for layer in layers.values():
        for part in (layer.lora_A, layer.lora_B):
            part.float()
        layer.train(layer.base_layer.training)  # new modules are in training mode
        layer.lora_dropout.eval()
        if hasattr(layer, "get_delta_weight"):
            use_products(layer)
    return layers
