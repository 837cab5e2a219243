"""What `import keyhole` offers, for editors and type checkers: the module imports each name on first use."""

from typing import Any, Literal

from keyhole.loading import load as load
from keyhole.methods.adam_offload.method import AdamOffload as _AdamOffload
from keyhole.methods.apollo_mini.method import APOLLOMini as _APOLLOMini
from keyhole.methods.baselines.first_order import SGD as _SGD
from keyhole.methods.baselines.first_order import AdamW as _AdamW
from keyhole.methods.baselines.galore import GaLore as _GaLore
from keyhole.methods.lomo.adalomo import AdaLOMO as _AdaLOMO
from keyhole.methods.lomo.lomo_lora import LOMOLoRA as _LOMOLoRA
from keyhole.methods.lomo.method import LOMO as _LOMO
from keyhole.methods.lora.method import LoRA as _LoRA
from keyhole.methods.lsp.method import LSP as _LSP
from keyhole.methods.muon.method import Muon as _Muon
from keyhole.methods.workload import Workload as Workload
from keyhole.methods.zo.method import ZO as _ZO
from keyhole.model.model import Model as Model

__version__: str
__all__: list[str]

class AdamOffload(_AdamOffload):
    def __init__(
        self,
        model: Model,
        lr: float | str | None = None,
        *,
        weight_decay: float = ...,
        weight_decay_on: Literal["matrices", "all"] = ...,
        max_grad_norm: float | None = ...,
        model_dropout: bool = ...,
        deterministic: bool = ...,
        micro_batch_size: int | Literal["auto"] = ...,
        seed: int = ...,
        beta1: float = ...,
        beta2: float = ...,
        eps: float = ...,
        threads: int | None = ...,
        gpu_updates: bool | None = ...,
        activations: Literal["block", "host", "none", "auto"] = ...,
        compile: bool | str = ...,
    ) -> None: ...

class APOLLOMini(_APOLLOMini):
    def __init__(
        self,
        model: Model,
        lr: float | str | None = None,
        *,
        weight_decay: float = ...,
        weight_decay_on: Literal["matrices", "all"] = ...,
        max_grad_norm: float | None = ...,
        model_dropout: bool = ...,
        deterministic: bool = ...,
        micro_batch_size: int | Literal["auto"] = ...,
        seed: int = ...,
        rounding: Literal["stochastic", "nearest", "kahan"] = ...,
        activations: Literal["none", "block", "host", "auto"] = ...,
        compile: bool | str = ...,
        fused: bool = ...,
        groups: list[dict[str, Any]] | None = ...,
        beta1: float = ...,
        beta2: float = ...,
        eps: float = ...,
        scale: float = ...,
        refresh: int = ...,
    ) -> None: ...

class SGD(_SGD):
    def __init__(
        self,
        model: Model,
        lr: float | str | None = None,
        *,
        weight_decay: float = ...,
        weight_decay_on: Literal["matrices", "all"] = ...,
        max_grad_norm: float | None = ...,
        model_dropout: bool = ...,
        deterministic: bool = ...,
        micro_batch_size: int | Literal["auto"] = ...,
        seed: int = ...,
        momentum: float = ...,
    ) -> None: ...

class AdamW(_AdamW):
    def __init__(
        self,
        model: Model,
        lr: float | str | None = None,
        *,
        weight_decay: float = ...,
        weight_decay_on: Literal["matrices", "all"] = ...,
        max_grad_norm: float | None = ...,
        model_dropout: bool = ...,
        deterministic: bool = ...,
        micro_batch_size: int | Literal["auto"] = ...,
        seed: int = ...,
        beta1: float = ...,
        beta2: float = ...,
        eps: float = ...,
    ) -> None: ...

class GaLore(_GaLore):
    def __init__(
        self,
        model: Model,
        lr: float | str | None = None,
        *,
        weight_decay: float = ...,
        weight_decay_on: Literal["matrices", "all"] = ...,
        max_grad_norm: float | None = ...,
        model_dropout: bool = ...,
        deterministic: bool = ...,
        micro_batch_size: int | Literal["auto"] = ...,
        seed: int = ...,
        beta1: float = ...,
        beta2: float = ...,
        eps: float = ...,
        rank: int = ...,
        update_proj_gap: int = ...,
        scale: float = ...,
        activations: Literal["auto", "none", "block"] = ...,
    ) -> None: ...

class AdaLOMO(_AdaLOMO):
    def __init__(
        self,
        model: Model,
        lr: float | str | None = None,
        *,
        weight_decay: float = ...,
        weight_decay_on: Literal["matrices", "all"] = ...,
        max_grad_norm: float | None = ...,
        model_dropout: bool = ...,
        deterministic: bool = ...,
        micro_batch_size: int | Literal["auto"] = ...,
        seed: int = ...,
        rounding: Literal["stochastic", "nearest", "kahan"] = ...,
        activations: Literal["none", "block", "host", "auto"] = ...,
        compile: bool | str = ...,
        fused: bool = ...,
        groups: list[dict[str, Any]] | None = ...,
    ) -> None: ...

class LOMOLoRA(_LOMOLoRA):
    def __init__(
        self,
        model: Model,
        lr: float | str | None = None,
        *,
        weight_decay: float = ...,
        weight_decay_on: Literal["matrices", "all"] = ...,
        max_grad_norm: float | None = ...,
        model_dropout: bool = ...,
        deterministic: bool = ...,
        micro_batch_size: int | Literal["auto"] = ...,
        seed: int = ...,
        rounding: Literal["stochastic", "nearest", "kahan"] = ...,
        activations: Literal["none", "block", "host", "auto"] = ...,
        compile: bool | str = ...,
        fused: bool = ...,
        groups: list[dict[str, Any]] | None = ...,
        clip_value: float | None = ...,
        adapter_lr: float = ...,
        adapter_warmup_ratio: float | None = ...,
        r: int = ...,
        alpha: float = ...,
        target_modules: str | list[str] | None = ...,
    ) -> None: ...

class LOMO(_LOMO):
    def __init__(
        self,
        model: Model,
        lr: float | str | None = None,
        *,
        weight_decay: float = ...,
        weight_decay_on: Literal["matrices", "all"] = ...,
        max_grad_norm: float | None = ...,
        model_dropout: bool = ...,
        deterministic: bool = ...,
        micro_batch_size: int | Literal["auto"] = ...,
        seed: int = ...,
        rounding: Literal["stochastic", "nearest", "kahan"] = ...,
        activations: Literal["none", "block", "host", "auto"] = ...,
        compile: bool | str = ...,
        fused: bool = ...,
        groups: list[dict[str, Any]] | None = ...,
        clip_value: float | None = ...,
    ) -> None: ...

class LoRA(_LoRA):
    def __init__(
        self,
        model: Model,
        lr: float | str | None = None,
        *,
        weight_decay: float = ...,
        weight_decay_on: Literal["matrices", "all"] = ...,
        max_grad_norm: float | None = ...,
        model_dropout: bool = ...,
        deterministic: bool = ...,
        micro_batch_size: int | Literal["auto"] = ...,
        seed: int = ...,
        r: int = ...,
        alpha: float = ...,
        dropout: float = ...,
        target_modules: str | list[str] | None = ...,
        activations: Literal["none", "block", "host", "auto"] = ...,
        merge: bool = ...,
    ) -> None: ...

class LSP(_LSP):
    def __init__(
        self,
        model: Model,
        lr: float | str | None = None,
        *,
        weight_decay: float = ...,
        weight_decay_on: Literal["matrices", "all"] = ...,
        max_grad_norm: float | None = ...,
        model_dropout: bool = ...,
        deterministic: bool = ...,
        micro_batch_size: int | Literal["auto"] = ...,
        seed: int = ...,
        beta1: float = ...,
        beta2: float = ...,
        eps: float = ...,
        preset: Literal["default", "paper"] = ...,
        d: int = ...,
        r: int = ...,
        alpha: float = ...,
        check_freq: int = ...,
        fit_steps: int = ...,
        others: Literal["adam", "frozen"] = ...,
        optimizer_on: Literal["auto", "gpu", "cpu"] = ...,
        threads: int | None = ...,
        kind: Literal["blocks", "free"] | None = ...,
        check_share: float | None = ...,
        learn: bool = ...,
        rounding: Literal["stochastic", "nearest"] = ...,
        activations: Literal["block", "host", "auto"] = ...,
        compile: bool | str = ...,
    ) -> None: ...

class Muon(_Muon):
    def __init__(
        self,
        model: Model,
        lr: float | str | None = None,
        *,
        weight_decay: float = ...,
        weight_decay_on: Literal["matrices", "all"] = ...,
        max_grad_norm: float | None = ...,
        model_dropout: bool = ...,
        deterministic: bool = ...,
        micro_batch_size: int | Literal["auto"] = ...,
        seed: int = ...,
        rounding: Literal["stochastic", "nearest", "kahan"] = ...,
        activations: Literal["none", "block", "host", "auto"] = ...,
        compile: bool | str = ...,
        fused: bool = ...,
        groups: list[dict[str, Any]] | None = ...,
        beta1: float = ...,
        beta2: float = ...,
        eps: float = ...,
        momentum: float = ...,
        nesterov: bool = ...,
        ns_coefficients: list[float] | None = ...,
        ns_steps: int = ...,
        ns_eps: float = ...,
        adjust_lr_fn: Literal["match_rms_adamw", "original"] = ...,
        moments: Literal["bfloat16", "float32"] = ...,
    ) -> None: ...

class ZO(_ZO):
    def __init__(
        self,
        model: Model,
        lr: float | str | None = None,
        *,
        weight_decay: float = ...,
        weight_decay_on: Literal["matrices", "all"] = ...,
        max_grad_norm: float | None = ...,
        model_dropout: bool = ...,
        deterministic: bool = ...,
        micro_batch_size: int | Literal["auto"] = ...,
        seed: int = ...,
        estimator: Literal["mezo", "fzoo"] = ...,
        eps: float | None = ...,
        directions: int | None = ...,
        distribution: Literal["gaussian", "rademacher"] | None = ...,
        rounding: Literal["stochastic", "nearest"] = ...,
        clip: float | None = ...,
        deferred_update: bool = ...,
        write_back_every: int | None = ...,
        compile: bool | str = ...,
        fp8_steps: int = ...,
        rank: int | None = ...,
        refresh: int = ...,
        fold: bool = ...,
        guide: int | None = ...,
    ) -> None: ...
