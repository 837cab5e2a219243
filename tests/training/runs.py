"""What tests read from a finished run, and the runs that are stopped and resumed."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from keyhole.config import TrainConfig
from keyhole.methods.baselines.traits import SGDConfig
from keyhole.methods.lora.traits import LoRAConfig
from keyhole.methods.lsp.traits import LSPConfig
from keyhole.methods.zo.traits import ZOConfig
from keyhole.report.entries import read_metrics

Make = Callable[..., TrainConfig]
TIMED = {"seconds", "tokens_per_second", "host_gib", "gpu_gib", "host_wait_s", "gpu_updates", "learn_s"}


def variant(method: str, rate: float, **changes: Any) -> dict[str, Any]:
    return {"method": method, "learning_rate": rate, **changes}


STREAM: dict[str, Any] = {"placement": "stream"}
BF16 = STREAM | {"dtype": "bfloat16"}
KEPT = ZOConfig(rank=2, refresh=2, fold=False)
LSP = LSPConfig(d=16, r=4, check_freq=2, alpha=0.05, optimizer_on="cpu")
VARIANTS = {
    "adamw": variant("adamw", 1e-3, max_grad_norm=1.0, weight_decay=0.1, save_steps=2),
    "adamw-bf16": variant("adamw", 1e-3, dtype="bfloat16"),
    "adamw-packed": variant("adamw", 1e-3, packing=True, max_length=48),
    "sgd": variant("sgd", 1e-2, sgd=SGDConfig(momentum=0.9)),
    "zo": variant("zo", 1e-3, zo=ZOConfig(directions=2)),
    "zo-streamed-bf16": variant("zo", 1e-3, **BF16),
    "zo-streamed-fp8": variant("zo", 1e-3, wire="fp8", **BF16),
    "zo-wire-fp32": variant("zo", 1e-3, wire="fp32", **BF16),
    "zo-low-rank-streamed-bf16": variant(
        "zo", 1e-2, save_steps=1, save_total_limit=None, zo=ZOConfig(rank=2, refresh=2), **BF16
    ),
    "zo-low-rank-kept": variant("zo", 1e-2, zo=KEPT),
    "zo-low-rank-int4": variant("zo", 1e-2, wire="int4", zo=KEPT, **STREAM),
    "lora-int4": variant("lora", 1e-2, wire="int4", lora=LoRAConfig(r=2, dropout=0.2), **STREAM),
    "lomo-streamed-bf16": variant("lomo", 1e-2, **BF16),
    "adalomo-streamed": variant("adalomo", 1e-3, **STREAM),
    "galore": variant("galore", 1e-3),
    "lsp-streamed-bf16": variant("lsp", 1e-3, lsp=LSP, **BF16),
    "adam-offload-streamed": variant("adam-offload", 1e-3, save_steps=2, **STREAM),
}


def weights(path: Path | str) -> dict[str, torch.Tensor]:
    """A copy: the library maps files, and some tests damage them afterwards."""
    return {name: tensor.clone() for name, tensor in load_file(Path(path) / "model.safetensors").items()}


def metrics(config: TrainConfig, ignore: set[str] = TIMED) -> list[dict[str, Any]]:
    entries = read_metrics(Path(config.output_dir) / "run" / "metrics.jsonl")
    return [{name: value for name, value in entry.items() if name not in ignore} for entry in entries]


def losses(config: TrainConfig) -> list[float]:
    return [entry["loss"] for entry in metrics(config) if "loss" in entry]


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
