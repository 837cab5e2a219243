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
VARIANTS = {
    "adamw": {"method": "adamw", "learning_rate": 1e-3, "max_grad_norm": 1.0, "weight_decay": 0.1, "save_steps": 2},
    "adamw-bf16": {"method": "adamw", "learning_rate": 1e-3, "dtype": "bfloat16"},
    "adamw-packed": {"method": "adamw", "learning_rate": 1e-3, "packing": True, "max_length": 48},
    "sgd": {"method": "sgd", "learning_rate": 1e-2, "sgd": SGDConfig(momentum=0.9)},
    "zo": {"method": "zo", "learning_rate": 1e-3, "zo": ZOConfig(directions=2)},
    "zo-streamed-bf16": {"method": "zo", "learning_rate": 1e-3, "placement": "stream", "dtype": "bfloat16"},
    "zo-streamed-fp8": {
        "method": "zo",
        "learning_rate": 1e-3,
        "placement": "stream",
        "dtype": "bfloat16",
        "wire": "fp8",
    },
    "zo-wire-fp32": {
        "method": "zo",
        "learning_rate": 1e-3,
        "placement": "stream",
        "dtype": "bfloat16",
        "wire": "fp32",
    },
    "zo-low-rank-streamed-bf16": {
        "method": "zo",
        "learning_rate": 1e-2,
        "placement": "stream",
        "dtype": "bfloat16",
        "save_steps": 1,
        "save_total_limit": None,
        "zo": ZOConfig(rank=2, refresh=2),
    },
    "zo-low-rank-kept": {"method": "zo", "learning_rate": 1e-2, "zo": ZOConfig(rank=2, refresh=2, fold=False)},
    "zo-low-rank-int4": {
        "method": "zo",
        "learning_rate": 1e-2,
        "placement": "stream",
        "wire": "int4",
        "zo": ZOConfig(rank=2, refresh=2, fold=False),
    },
    "lora-int4": {
        "method": "lora",
        "learning_rate": 1e-2,
        "placement": "stream",
        "wire": "int4",
        "lora": LoRAConfig(r=2, dropout=0.2),
    },
    "lomo-streamed-bf16": {"method": "lomo", "learning_rate": 1e-2, "placement": "stream", "dtype": "bfloat16"},
    "adalomo-streamed": {"method": "adalomo", "learning_rate": 1e-3, "placement": "stream"},
    "galore": {"method": "galore", "learning_rate": 1e-3},
    "lsp-streamed-bf16": {
        "method": "lsp",
        "learning_rate": 1e-3,
        "placement": "stream",
        "dtype": "bfloat16",
        "lsp": LSPConfig(d=16, r=4, check_freq=2, alpha=0.05, optimizer_on="cpu"),
    },
    "adam-offload-streamed": {"method": "adam-offload", "learning_rate": 1e-3, "placement": "stream", "save_steps": 2},
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
