"""The model and the method of a run, as its config says, and the block of lines about them at its start.

load_model    the weights of the checkpoint or of the model that the config names, placed for the run's workload
dry_lines     the same decisions for --dry-run, from the model's config and the headers of its weight files
make_method   the model adapted to the data, and the method on it, with the state of the checkpoint
workload      what the memory plan is made for: the largest micro-batch that the data can make, and the passes of a
              step over it
block         before the first step: the model and its trained parameters, dtype and device with the reason,
              placement, kernels, how the data was read, the number of steps, and the schedule
"""

import math
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

import torch

import keyhole
from keyhole import ops
from keyhole.checkpoint import select
from keyhole.checkpoint.resume import Origin
from keyhole.checkpoint.state import State
from keyhole.checkpoint.writer import method_state
from keyhole.config import TrainConfig
from keyhole.config.fields import around, own_settings
from keyhole.data.batches import EvalBatches, Loader
from keyhole.data.run import Data
from keyhole.errors import UserError
from keyhole.loading import choose_device, load
from keyhole.loading.prepare import find_source
from keyhole.machine.gpu import ACCELERATOR, accelerator
from keyhole.machine.out_of_memory import out_of_memory
from keyhole.machine.sizes import GIB
from keyhole.machine.text import counted
from keyhole.methods import METHODS
from keyhole.methods.base import Method, Skeleton
from keyhole.methods.workload import Workload
from keyhole.model.classification import name_labels
from keyhole.model.model import Model
from keyhole.model.structure.config_files import check_loss
from keyhole.model.structure.find import find_blocks
from keyhole.model.structure.layout import Layout
from keyhole.model.weights.fit import check_weights
from keyhole.model.weights.save import add_end_tokens
from keyhole.plan.dtype import AUTO
from keyhole.ranks import Ranks
from keyhole.training.schedule import Schedule


def make_schedule(config: TrainConfig, steps_per_epoch: int) -> Schedule:
    """Rates for max_steps, or for the steps of num_train_epochs, rounded up as Hugging Face does. The method may refuse
    the number of steps if it follows from the data; other settings were checked before."""
    total = total_steps(config, steps_per_epoch)
    for key, fault in own_settings(config).faults(replace(around(config), max_steps=total)):
        raise UserError(f"{key}: {fault}")
    assert config.learning_rate is not None  # the config is resolved
    warmup = config.warmup_ratio, config.min_lr_ratio, config.warmup_steps
    return Schedule(config.lr_scheduler_type, config.learning_rate, total, *warmup)


def total_steps(config: TrainConfig, steps_per_epoch: int) -> int:
    if config.max_steps is not None:
        return config.max_steps
    assert config.num_train_epochs is not None  # the config has one of them
    return math.ceil(config.num_train_epochs * steps_per_epoch)


def load_model(config: TrainConfig, choice: select.Choice, data: Data, ranks: Ranks) -> Model:
    """The weights of the checkpoint, or of the model the config names, placed as the config says."""
    if accelerator.is_available():
        accelerator.reset_peak_memory_stats()  # an earlier run in this process may have set a peak
    source = weights_source(config, choice)
    return load(
        source,
        placement=config.placement,
        gpu_memory=config.gpu_memory,
        device=ranks.device(config.device) if ranks.several else config.device,
        ranks=ranks if ranks.several else None,
        dtype=config.dtype or AUTO,
        wire=config.wire,
        tf32=config.tf32,
        freeze=config.freeze,
        expert_units=config.expert_units,
        head=config.head,
        num_labels=None if config.head is None else len(data.labels),
        adapter=source == config.model,  # in a checkpoint, adapters are part of the method's state
        tokenizer=data.tokenizer,
        seed=config.seed,
        workload=workload(config, data, choice.state),
        graphs=config.offload.graphs,
        reverse_graphs=config.offload.graphs,
    )


def weights_source(config: TrainConfig, choice: select.Choice) -> str:
    """Where the weights come from: the checkpoint to resume from, or the model that the config names."""
    original = choice.path is None or METHODS[config.method].from_original(own_settings(config))
    return config.model if original else str(choice.path)


def make_method(model: Model, config: TrainConfig, origin: Origin, data: Data) -> Method:
    """The method, with the state of the checkpoint, on a model that has been adapted to the data: its end tokens,
    labels and chat template."""
    if config.packing:
        model.row_rules.check_packing(config.max_length)
    add_end_tokens(model.module, data.end_token_ids)
    if data.labels:
        name_labels(model.config, data.labels, data.train.dataset.pad_token_id)
    if data.chat_template is not None:
        model.tokenizer.chat_template = data.chat_template  # `keyhole chat` must use the template of training
    method: Method = METHODS[config.method].load()(model, config.learning_rate, **vars(own_settings(config)))
    path, state = origin.choice.path, origin.choice.state
    if path is not None and state is not None:
        try:
            method.load_state_dict(method_state(path, state))
        except (KeyError, TypeError, ValueError, AttributeError, RuntimeError, OSError) as error:
            if isinstance(error, UserError) or out_of_memory(error) is not None:
                raise
            said = f"{type(error).__name__}: {error}"
            raise UserError(f"--resume: the optimizer's state in {path} does not fit this run: {said}") from error
    return method


def workload(config: TrainConfig, data: Data, state: State | None = None) -> Workload:
    """The workload for the memory plan: passes over the largest micro-batch that the data can make. state: of the
    checkpoint that the run resumes from, whose passes it keeps if they fit."""
    trains = data.train.dataset
    own = own_settings(config)
    return Workload(
        config.method,
        tokens=max(_tokens(batches) for batches in (data.train, data.eval) if batches.dataset is not None),
        passes=config.gradient_accumulation_steps * own.passes,
        settings=own,
        clips=config.max_grad_norm is not None,
        length=max(1, data.train.padding.width(trains.longest_row())),
        steps=total_steps(config, data.train.steps_per_epoch),
        chooses=config.loss == "candidates",
        rows=len(trains),
        trained=trains.trained.sum() / len(trains),
        pass_tokens=None if state is None else state.pass_tokens,
    )


def _tokens(batches: Loader | EvalBatches) -> int:
    """Tokens of the largest micro-batch, padding included."""
    assert batches.dataset is not None
    return batches.dataset.most_samples(batches.batch_size) * batches.padding.width(batches.dataset.longest_row())


def dry_lines(config: TrainConfig, choice: select.Choice, data: Data) -> list[list[str]]:
    """The lines of the start block about model and machine, from the model's config and the headers of its weight
    files; no weight is read, and nothing is downloaded."""
    name, device = weights_source(config, choice), choose_device(config.device)
    labels = None if config.head is None else len(data.labels)
    source = find_source(name, wire=config.wire, head=config.head, num_labels=labels, download=False)
    check_loss(source.config)
    outline = source.outline(config.dtype or AUTO, device, config.method, config.freeze, config.expert_units)
    ready = outline.place(config.placement, config.gpu_memory, device, workload(config, data, choice.state))
    weights = ["weights: on the hub, not checked"]
    if source.directory is not None:
        weights = check_weights(ready.module, ready.layout, source.directory, fresh_head=config.head is not None)
    row, own = METHODS[config.method], own_settings(config)
    row.load().outline(Skeleton(ready.module, ready.layout, find_blocks(ready.module)), own)
    model = model_lines(ready.module, ready.layout, ready.choice.dtype, row.from_original(own))
    return [[*model, *weights], [device_line(config.device, device), *ready.placed.reasons, ops.describe()]]


def block(method: str, model: str, groups: Iterable[Iterable[object]]) -> list[str]:
    """All lines, indented under the title."""
    return [f"keyhole {keyhole.__version__}: {method} on {model}", *(f"  {line}" for group in groups for line in group)]


def model_lines(module: torch.nn.Module, layout: Layout, dtype: torch.dtype, keeps_base: bool = False) -> list[str]:
    """The model, and a table of its parameters, `trained  32 x model.layers.*.mlp.up_proj.weight  [11008, 4096]`, with
    one row per kind of tensor. keeps_base: the method never changes the weights of blocks (a matrix that is not frozen
    has low-rank factors beside it, which are trained)."""
    blocks = {id(t) for unit in layout.of_kind("block") for t in unit.tensors} if keeps_base else set()
    counts, kinds = {"trained": 0, "factors": 0, "frozen ": 0}, Counter[tuple[str, str, tuple[int, ...]]]()
    for t in layout.tensors:
        how = "trained" if t.param.requires_grad else "frozen "
        how = "factors" if how == "trained" and id(t) in blocks and len(t.shape) == 2 else how
        counts[how] += t.shape.numel()
        kinds[how, re.sub(r"(?<=\.)\d+(?=\.)", "*", t.name), tuple(t.shape)] += 1
    own, count = {id(t.param) for t in layout.tensors}, sum(counts.values())
    beside = sum(p.numel() for p in module.parameters() if p.requires_grad and id(p) not in own)
    of_them = f" ({beside:,} of adapters)" if beside else ""
    held = counts["factors"]
    factors = f", low-rank factors beside {held:,} that stay as they are" if held else ""
    tied = ", head tied to the embedding" if layout.tied else ""
    width = max(len(name) for _, name, _ in kinds)
    return [
        f"model: {type(module).__name__}, {count:,} parameters, {count * dtype.itemsize / GIB:.2f} GiB{tied}",
        f"parameters: {counts['trained'] + beside:,} trained{of_them}{factors}, {counts['frozen ']:,} frozen",
        *(f"  {how}  {times:>3} x {name:<{width}}  {list(shape)}" for (how, name, shape), times in kinds.items()),
    ]


def device_line(asked_device: str | None, device: torch.device) -> str:
    why_device = "as asked" if asked_device else "the first GPU" if device.type == ACCELERATOR else "no GPU here"
    name = f" ({accelerator.get_device_name(device)})" if device.type == ACCELERATOR else ""
    return f"device: {device}{name}, {why_device}"


def machine_lines(asked_device: str | None, model: Model, method: Method) -> list[str]:
    """Device, dtype and placement with their reasons, the method's decisions, and kernels."""
    device = device_line(asked_device, model.device)
    fast = [] if method.settings.deterministic else ["deterministic=false: bits of attention are not promised"]
    return [device, *model.describe(), *method.describe(), *fast, *_frozen_head(model, method), ops.describe()]


def _frozen_head(model: Model, method: Method) -> list[str]:
    """A warning if a head stays as it was drawn. One with adapters does not: they can make any change of a matrix that
    has no more rows than their rank. Its bias stays, which is not worth a warning."""
    adapted = {name.partition(".lora_")[0] for name, _ in model.module.named_parameters() if ".lora_" in name}
    frozen = [tensor.name for tensor in model.drawn_head if not tensor.param.requires_grad]
    names = [name for name in frozen if name.rpartition(".")[0] not in adapted]
    if not names:
        return []
    row, layers = METHODS[method.name], ", ".join(dict.fromkeys(name.rpartition(".")[0] for name in names))
    adapters = f"leave {row.section}.target_modules out, or add {layers}, for adapters there ({layers} not in `freeze`)"
    instead = adapters if row.keeps_base else f"take {layers} out of `freeze`"
    return [f"warning: head: {', '.join(names)}: drawn from the seed, and not trained; {instead}"]


def plan_lines(config: TrainConfig, first: int, schedule: Schedule, steps_per_epoch: int) -> list[str]:
    micro, accumulation = config.batch_size, config.gradient_accumulation_steps
    rows = "rows of packed samples" if config.packing else "samples"
    split = f" ({accumulation} micro-batches of {micro})" if accumulation > 1 else ""
    key = "max_steps" if config.max_steps is not None else "num_train_epochs"
    why = key if config.max_steps is not None else f"{key}={config.num_train_epochs:g}"
    begun = f", {first} done" if first else ""
    lines = [
        f"steps: {schedule.total} ({why}){begun}; an epoch is {counted(steps_per_epoch, 'step')} of "
        f"{micro * accumulation} {rows}{split}"
    ]
    if first and first >= schedule.total:
        done = f"{counted(first, 'step')} done of {schedule.total}"
        lines.append(f"nothing is left to train: {done}; to go on, raise {key}")
    never = ": the run ends before the peak" if schedule.warmup_steps >= schedule.total else ""
    warm = f"{counted(schedule.warmup_steps, 'step')} of warm-up{never}"
    lines.append(f"learning rate: {schedule.kind}, peak {schedule.peak:g}, {warm}")
    times = [f"every {config.save_steps} steps"] if config.save_steps else []
    times += ["at the end"] if config.save_model else []
    kept = "all are kept" if config.save_total_limit is None else f"the newest {config.save_total_limit} are kept"
    saves = f"a checkpoint {' and '.join(times)}, {kept}" if times else "no checkpoint"
    unsaved = "" if config.save_model else "; no model is saved (save_model=false)"
    return [*lines, f"output: {config.output_dir}; {saves}{unsaved}"]
