"""The model of a run: from the config, or from the checkpoint it goes on from.

Placement needs to know what will run, so that the budget leaves room for it: `workload` says how many tokens
a forward pass has and how many passes advance together (zeroth-order: two a direction, times the
micro-batches). `dry_lines` makes the same decisions without reading a weight.
"""

from dataclasses import asdict

import torch

from keyhole.checkpoint import select as find
from keyhole.config import TrainConfig
from keyhole.config.fields import section_of
from keyhole.loading import choose_device, choose_dtype, load
from keyhole.methods.lsp.memory import LSPWork
from keyhole.model.forward.memory import Workload
from keyhole.model.model import Model
from keyhole.model.structure.skeleton import build, read_config
from keyhole.model.weights.format import Wire
from keyhole.plan.placement import place
from keyhole.training import start_block as start

UNKNOWN_LENGTH = 2048  # tokens, where max_length is null


def workload(config: TrainConfig) -> Workload:
    """What will run, for the memory plan."""
    directions = config.zo.directions if config.method == "zo" else 1
    passes = config.gradient_accumulation_steps * (2 * directions if config.method == "zo" else 1)
    tokens = config.batch_size * (config.max_length or UNKNOWN_LENGTH)
    own = getattr(config, section_of(config.method), None)
    kept = getattr(own, "activations", "block")
    clips = config.max_grad_norm is not None
    lsp = None
    if config.method == "lsp":
        lsp = LSPWork(own.d, own.r, own.others, own.optimizer_on, clips, own.kind, own.learn)
    whole = config.method == "zo" and config.zo.compile
    return Workload(config.method, tokens, passes, directions, kept, lsp, whole)


def load_model(config: TrainConfig, choice: find.Choice) -> Model:
    """The weights of the checkpoint, or of the model the config names, placed as the config says."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()  # of a run before this one
    where = {"placement": config.placement, "gpu_memory": config.gpu_memory, "device": config.device}
    adds = config.method == "lora"  # to a model that stays as it was: a checkpoint's weights have the adapters added
    source = config.model if choice.path is None or adds else str(choice.path)
    how = {"dtype": config.dtype, "wire": config.wire, "tf32": config.tf32, **asdict(config.offload)}
    return load(source, seed=config.seed, workload=workload(config), **how, **where)


def dry_lines(config: TrainConfig) -> list[list[str]]:
    """The lines of the start block about model and machine, from the model's config.json alone."""
    hf_config, device = read_config(config.model), choose_device(config.device)
    dtype = choose_dtype(config.dtype, hf_config)
    module = build(hf_config, dtype)
    formats = Wire(dtype, config.wire)
    layout, placed = place(module, config.placement, config.gpu_memory, formats, device, workload(config))
    machine = start.machine_lines(config, dtype, device, placed.reasons)
    return [start.model_lines(module, layout, dtype), machine]
