"""Baseline: LoRA by peft. The model is frozen; small matrices beside its linear layers are trained by AdamW.

    y = W x + (alpha / r) B A x        A [r, I] random, B [O, r] zero at the start; only A and B learn

Bytes on the device: b per parameter of the model (frozen, no gradient), and 16 per parameter of the adapters (fp32
weight, gradient, two moments), about r (I + O) / (I O) of the model. What LoRA can learn is a change of rank r.

The adapters are put into the module in place. The model's own parameters stay the objects they were, so flat memory,
evaluation and generation work as before; the adapters are the method's own. What is saved is an ordinary model:
W + (alpha / r) B A, rounded once (`merge`), or the model as it was, and beside it the adapters as peft writes them, in
adapter/. Either way the frozen weights in memory do not change, so nothing drifts from save to save. To go on from a
checkpoint, load the *original* model and give the state to the method.

Dropout is drawn from (seed, step), so N + M steps are N steps, a stop, and M more.
"""

import copy
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn

from keyhole.disk.tensors import tensors_hash
from keyhole.errors import UserError
from keyhole.methods.base import State
from keyhole.methods.baselines.first_order import TorchMethod
from keyhole.methods.dropout import ModelDropout
from keyhole.model.batch import Batch
from keyhole.model.model import Model
from keyhole.model.structure.find import find_blocks
from keyhole.model.structure.layout import FlatTensor

ADAPTER = "default"
NOT_WITH_MAMBA = ("out_proj", "conv1d")  # peft refuses them: the kernels of state-space layers use their weights alone
MAMBAS = ("mamba", "mamba2", "falcon_mamba", "falcon_h1", "nemotron_h")


class LoRA(TorchMethod):
    """Adapters beside a frozen model."""

    name = "lora"

    def __init__(
        self,
        model: Model,
        lr: float = 2e-4,
        *,
        r: int = 8,
        alpha: float = 16.0,
        dropout: float = 0.0,
        target_modules: list[str] | str | None = None,
        merge: bool = True,
        activations: str = "none",
        weight_decay: float = 0.0,
        weight_decay_on: str = "matrices",
        max_grad_norm: float | None = None,
        model_dropout: bool = True,
        seed: int = 0,
    ) -> None:
        if dropout and model.ranks.several:
            raise UserError(
                f"lora.dropout={dropout}: its draws follow each other from micro-batch to micro-batch, which several "
                "ranks have at the same time; set it to 0, or start without torchrun"
            )
        self.dropout, self.seed, self.step_count = dropout, seed, 0
        self._base: str | None = None
        self._require_plain(model)
        of_model = ModelDropout(model, seed, model_dropout)  # before there are adapters, which have their own
        config = peft_config(
            r=r, lora_alpha=alpha, lora_dropout=dropout, target_modules=find_targets(model, target_modules)
        )
        self.layers = inject(model, config, seed)
        self.config = config
        adapters = {name: p for name, p in model.module.named_parameters() if p.requires_grad}
        self._addon = Adapters(adapters, config, self.layers if merge else None, model.source)
        super().__init__(model, max_grad_norm, adapters, activations, of_model)
        self.optimizer = torch.optim.AdamW(self._groups(weight_decay, weight_decay_on), lr=lr)

    def step(self, batch: Batch | list[Batch]) -> torch.Tensor:
        """One update of the adapters. Returns the loss, unread."""
        self.step_count += 1
        if self.dropout == 0:
            return super().step(batch)
        devices = [self.model.device] if self.model.device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices):
            torch.manual_seed(self.seed * 1_000_003 + self.step_count)
            self._train(True)
            try:
                return super().step(batch)
            finally:
                self._train(False)

    def _train(self, mode: bool) -> None:
        for layer in self.layers.values():
            layer.lora_dropout.train(mode)

    # -- what others see of it (model/attached.py) -----------------------------------------------------------------

    @property
    def addon(self) -> "Adapters":
        return self._addon

    def describe(self) -> list[str]:
        """For the start block."""
        count = sum(p.numel() for p in self.params.values())
        rank = f"rank {self.config.r}, alpha {self.config.lora_alpha:g}"
        own = f"lora: {len(self.layers)} adapters of {rank}: {count:,} trained parameters; the model is frozen"
        return [own, *super().describe()]

    # -- state -----------------------------------------------------------------------------------------------------

    def state_dict(self) -> State:
        own = {f"{name}/adapter": p.data for name, p in self.params.items()}
        return {"step_count": self.step_count, "base": self._base_hash()} | own | super().state_dict()

    def load_state_dict(self, state: State) -> None:
        if not self._is_base(state["base"]):
            raise UserError(
                "model: these are not the weights that the adapters were trained on (a checkpoint holds them with the "
                "adapters added); load the original model, then the state"
            )
        self.step_count = int(state["step_count"])
        missing = [name for name in self.params if f"{name}/adapter" not in state]
        if missing:
            raise UserError(f"lora: the state has no adapter {missing[0]}; r and target_modules must be as they were")
        for name, param in self.params.items():
            param.data.copy_(state[f"{name}/adapter"])
        skip = ("step_count", "base")
        super().load_state_dict({k: state[k] for k in state if k not in skip and not k.endswith("/adapter")})

    def _base_hash(self) -> str:
        """Tells one set of frozen weights from another, by their bits. They never change, so it is computed once."""
        if self._base is None:
            self._base = tensors_hash((t.name, self.model.home(t)) for t in self.model.layout.tensors)
        return self._base

    def _is_base(self, saved: str | list[float]) -> bool:
        """Whether these are the weights that a state was saved with. Before version 0.2 a state had the sums of the
        first and the last adapted matrix, which depend a little on the number of threads."""
        if isinstance(saved, str):
            return saved == self._base_hash()
        weights = [layer.base_layer.weight.detach().double() for layer in self.layers.values()]
        ends = (weights[0], weights[-1])
        return all(abs(float(w.sum()) - s) <= 1e-9 * float(w.abs().sum()) for w, s in zip(ends, saved, strict=True))


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
        return (home.float() + layer.get_delta_weight(ADAPTER).float()).to(home.dtype).cpu()

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


def peft_config(**settings: Any) -> Any:
    try:
        from peft import LoraConfig
    except ImportError as error:
        raise UserError("method: lora needs the peft package: pip install 'keyhole[lora]'") from error
    return LoraConfig(**settings, task_type="CAUSAL_LM")


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
        layer.lora_dropout.eval()
    return layers
