"""The model and the method of a run, as its config says.

    load_model    the weights of the checkpoint or of the model that the config names, placed for the run's workload
    dry_lines     the same decisions for --dry-run, from the model's config and the headers of its weight files
    make_method   the method's class with the settings that all methods share and its own section, and with the state of
                  the checkpoint
    workload      what the memory plan is made for: the largest micro-batch that the data can make, and the passes of a
                  step over it

The row of the method (methods/traits.py) says which section is its own, how many passes a step has, and whether a run
resumes from the original model or from the checkpoint's weights; no method is known here by its name.
"""

import math
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch

from keyhole.assets import MODEL, locate
from keyhole.checkpoint import select
from keyhole.checkpoint.journal.resume_point import Origin
from keyhole.checkpoint.writer import method_state
from keyhole.config import TrainConfig
from keyhole.data.loader import EvalBatches, Loader
from keyhole.data.padding import longest_row
from keyhole.data.run import Data
from keyhole.errors import UserError
from keyhole.loading import choose_device, load
from keyhole.machine.out_of_memory import out_of_memory
from keyhole.methods import METHODS
from keyhole.methods.base import Method, Shared, Skeleton
from keyhole.methods.traits import AUTO_RATE
from keyhole.methods.workload import Workload
from keyhole.model.model import Model
from keyhole.model.structure.added_loss import check_loss
from keyhole.model.structure.find import find_blocks
from keyhole.model.structure.freeze import freeze
from keyhole.model.structure.skeleton import build, read_config
from keyhole.model.weights.published import choose_format, forget_what_is_read
from keyhole.model.weights.read import check_weights
from keyhole.plan.dtype import AUTO, choose_dtype
from keyhole.plan.placement import place
from keyhole.ranks import Ranks
from keyhole.training import start_block


def total_steps(max_steps: int | None, epochs: float | None, steps_per_epoch: int) -> int:
    """max_steps, or the steps of `epochs` passes over the data, rounded up as Hugging Face does."""
    if max_steps is not None:
        return max_steps
    assert epochs is not None  # the config has one of them
    return math.ceil(epochs * steps_per_epoch)


def load_model(config: TrainConfig, choice: select.Choice, data: Data, ranks: Ranks | None = None) -> Model:
    """The weights of the checkpoint, or of the model the config names, placed as the config says."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()  # an earlier run in this process may have set a peak
    where: dict[str, Any] = {"placement": config.placement, "gpu_memory": config.gpu_memory, "device": config.device}
    if ranks is not None and ranks.several:
        where |= {"device": ranks.device(config.device), "ranks": ranks}
    source = weights_source(config, choice)
    how = {"dtype": config.dtype or AUTO, "wire": config.wire, "tf32": config.tf32, **asdict(config.offload)}
    how |= {"freeze": config.freeze, "expert_units": config.expert_units, **_head(config, data)}
    how["adapter"] = source == config.model  # in a checkpoint, adapters are part of the method's state
    how["tokenizer"] = data.tokenizer
    return load(source, seed=config.seed, workload=workload(config, data), **how, **where)


def _head(config: TrainConfig, data: Data) -> dict[str, Any]:
    """The head that the config asks for, as arguments for loading the model."""
    return {} if config.head is None else {"head": config.head, "num_labels": len(data.labels)}


def weights_source(config: TrainConfig, choice: select.Choice) -> str:
    """Where the weights come from: the checkpoint to resume from, or the model that the config names."""
    row = METHODS[config.method]
    original = choice.path is None or row.from_original(getattr(config, row.section))
    return config.model if original else str(choice.path)


def shares_tokenizer(config: TrainConfig, choice: select.Choice) -> bool:
    """Whether the model is read from the directory of the data's tokenizer. (That of a hub id would be named after the
    hub.)"""
    return weights_source(config, choice) == config.model and Path(locate(config.model, MODEL)).is_dir()


def make_method(model: Model, config: TrainConfig, origin: Origin) -> Method:
    """The method on the model, with the state of the checkpoint."""
    row = METHODS[config.method]
    shared = Shared(**{each.name: getattr(config, each.name) for each in fields(Shared)})
    method = row.load().make(model, shared, getattr(config, row.section))
    if origin.choice.state is not None:
        path = origin.choice.path
        assert path is not None
        try:
            method.load_state_dict(method_state(path, origin.choice.state))
        except UserError:
            raise
        except (KeyError, TypeError, ValueError, AttributeError, RuntimeError, OSError) as error:
            if out_of_memory(error) is not None:
                raise
            said = f"{type(error).__name__}: {error}"
            raise UserError(f"--resume: the optimizer's state in {path} does not fit this run: {said}") from error
    return method


def workload(config: TrainConfig, data: Data) -> Workload:
    """The workload for the memory plan: passes over the largest micro-batch that the data can make."""
    row = METHODS[config.method]
    own = getattr(config, row.section)
    tokens = max(_tokens(batches) for batches in (data.train, data.eval) if batches.dataset is not None)
    searches = config.learning_rate == AUTO_RATE
    passes = config.gradient_accumulation_steps * max(row.passes(own), row.search_passes if searches else 0)
    length = max(1, longest_row(data.train.dataset))
    clips, total = config.max_grad_norm is not None, config.max_steps
    total = total_steps(total, config.num_train_epochs, data.train.steps_per_epoch)
    trains = data.train.dataset
    about = {"chooses": config.loss == "candidates", "rows": len(trains), "trained": trains.trained.sum() / len(trains)}
    return Workload(config.method, tokens, passes, own, clips, searches, length, steps=total, **about)


def _tokens(batches: Loader | EvalBatches) -> int:
    """Tokens of the largest micro-batch, padding included."""
    assert batches.dataset is not None
    width = batches.padding.width(longest_row(batches.dataset))
    return batches.dataset.most_samples(batches.batch_size) * width


def dry_lines(config: TrainConfig, choice: select.Choice, data: Data) -> list[list[str]]:
    """The lines of the start block about model and machine, from the model's config and the headers of its weight
    files; no weight is read, and nothing is downloaded."""
    source = weights_source(config, choice)
    hf_config, device = read_config(source, **_head(config, data)), choose_device(config.device)
    check_loss(hf_config)
    chosen = choose_dtype(config.dtype or AUTO, hf_config, device, config.method)
    directory = Path(source) if Path(source).is_dir() else None
    forget_what_is_read(hf_config, directory)
    module = build(hf_config, chosen.dtype, expert_units=config.expert_units)
    freeze(module, config.freeze)
    formats, said = choose_format(module, directory, chosen.dtype, config.wire)
    layout, placed = place(module, config.placement, config.gpu_memory, formats, device, workload(config, data))
    where = [start_block.device_line(config.device, device), str(chosen), *said]
    weights = ["weights: on the hub, not checked"]
    if Path(source).is_dir():
        weights = check_weights(module, layout, Path(source), fresh_head=config.head is not None)
    row = METHODS[config.method]
    own = getattr(config, row.section)
    skeleton = Skeleton(module, layout, find_blocks(module))
    row.load().check_shapes(skeleton, own)
    row.load().outline(skeleton, own)
    model = [*start_block.model_lines(module, layout, chosen.dtype, row.from_original(own)), *weights]
    return [model, [*where, *placed.reasons, start_block.kernels()]]
