"""The block of lines printed at the start of a run: its decisions and their reasons.

It shows, before the first step: the model and its trained parameters, dtype and device with the reason, placement,
kernels, how the data was read, the number of steps, and the schedule.
"""

import re
from collections.abc import Collection, Iterable
from typing import Any

import torch

import keyhole
from keyhole import ops
from keyhole.config import TrainConfig
from keyhole.machine.sizes import GIB
from keyhole.methods import METHODS
from keyhole.methods.base import Method
from keyhole.methods.traits import AUTO_RATE
from keyhole.model.model import Model
from keyhole.model.structure.layout import Layout
from keyhole.training.schedule import Schedule


def title(method: str, model: str) -> str:
    return f"keyhole {keyhole.__version__}: {method} on {model}"


def model_lines(module: torch.nn.Module, layout: Layout, dtype: torch.dtype, keeps_base: bool = False) -> list[str]:
    """The model, and a table of its parameters; those of repeated blocks share a row. keeps_base: the method never
    changes the weights of blocks (a matrix that is not frozen has low-rank factors beside it, which are trained)."""
    count = sum(t.shape.numel() for t in layout.tensors)
    frozen = sum(t.shape.numel() for t in layout.tensors if not t.param.requires_grad)
    kept = _kept(layout) if keeps_base else {}
    held = sum(numel for _, numel in kept.values())
    own = {id(t.param) for t in layout.tensors}
    beside = sum(p.numel() for p in module.parameters() if p.requires_grad and id(p) not in own)
    of_them = f" ({beside:,} of adapters)" if beside else ""
    factors = f", low-rank factors beside {held:,} that stay as they are" if held else ""
    size_gib = count * torch.empty(0, dtype=dtype).element_size() / GIB
    tied = ", head tied to the embedding" if layout.tied else ""
    return [
        f"model: {type(module).__name__}, {count:,} parameters, {size_gib:.2f} GiB{tied}",
        f"parameters: {count - frozen - held + beside:,} trained{of_them}{factors}, {frozen:,} frozen",
        *(f"  {row}" for row in parameter_rows(layout, {name for name, _ in kept.values()})),
    ]


def _kept(layout: Layout) -> dict[int, tuple[str, int]]:
    """(name, elements) of each matrix of the blocks that is not frozen."""
    tensors = [t for unit in layout.of_kind("block") for t in unit.tensors if t.param.requires_grad]
    return {id(t.param): (t.name, t.shape.numel()) for t in tensors if len(t.shape) == 2}


def parameter_rows(layout: Layout, kept: Collection[str] = ()) -> list[str]:
    """`trained  32 x model.layers.*.mlp.up_proj.weight  [11008, 4096]`, one row per kind of tensor. kept: names of
    matrices whose factors are trained."""
    kinds: dict[tuple[str, tuple[int, ...], str], int] = {}
    for tensor in layout.tensors:
        how = "factors" if tensor.name in kept else "trained" if tensor.param.requires_grad else "frozen "
        kind = (re.sub(r"(?<=\.)\d+(?=\.)", "*", tensor.name), tuple(tensor.shape), how)
        kinds[kind] = kinds.get(kind, 0) + 1
    width = max(len(name) for name, _, _ in kinds)
    return [f"{how}  {times:>3} x {name:<{width}}  {list(shape)}" for (name, shape, how), times in kinds.items()]


def device_line(asked_device: str | None, device: torch.device) -> str:
    """The device, with its reason."""
    why_device = "as asked" if asked_device else "the first GPU" if device.type == "cuda" else "no GPU here"
    name = f" ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else ""
    return f"device: {device}{name}, {why_device}"


def machine_lines(asked_device: str | None, model: Model, method: Method) -> list[str]:
    """Device, dtype and placement with their reasons, the method's decisions, and kernels."""
    own = [*model.describe(), *method.describe(), *_frozen_head(model, method)]
    return [device_line(asked_device, model.device), *own, kernels()]


def _frozen_head(model: Model, method: Method) -> list[str]:
    """A warning if a head stays as it was drawn. One with adapters does not: they can make any change of a matrix that
    has no more rows than their rank. Its bias stays, which is not worth a warning."""
    adapted = {name.partition(".lora_")[0] for name, _ in model.module.named_parameters() if ".lora_" in name}
    frozen = [tensor.name for tensor in model.drawn_head if not tensor.param.requires_grad]
    names = [name for name in frozen if name.rpartition(".")[0] not in adapted]
    if not names:
        return []
    row, layers = METHODS[method.name], ", ".join(dict.fromkeys(name.rpartition(".")[0] for name in names))
    instead = f"take {layers} out of `freeze`"
    if row.keeps_base:
        instead = (
            f"leave {row.section}.target_modules out, or add {layers}, for adapters there ({layers} not in `freeze`)"
        )
    return [f"warning: head: {', '.join(names)}: drawn from the seed, and not trained; {instead}"]


def kernels() -> str:
    """Which kernels run, and why."""
    return ops.describe()


def counted_steps(number: int) -> str:
    """`1 step`, `7 steps`."""
    return f"{number} {'step' if number == 1 else 'steps'}"


def plan_lines(config: TrainConfig, first: int, schedule: Schedule, steps_per_epoch: int) -> list[str]:
    """Steps, samples, schedule, and output paths."""
    micro, accumulation = config.batch_size, config.gradient_accumulation_steps
    rows = "rows of packed samples" if config.packing else "samples"
    split = f" ({accumulation} micro-batches of {micro})" if accumulation > 1 else ""
    why = "max_steps" if config.max_steps is not None else f"num_train_epochs={config.num_train_epochs:g}"
    begun = f", {first} done" if first else ""
    kept = "all are kept" if config.save_total_limit is None else f"the newest {config.save_total_limit} are kept"
    every = f"every {config.save_steps} steps" if config.save_steps else ""
    if config.save_model:
        every += " and at the end" if every else "at the end"
    saves = f"a checkpoint {every}, {kept}" if every else "no checkpoint"
    saves += "" if config.save_model else "; no model is saved (save_model=false)"
    peak = config.learning_rate if config.learning_rate == AUTO_RATE else f"{schedule.peak:g}"
    warm = counted_steps(schedule.warmup_steps) + " of warm-up"
    warm += ": the run ends before the peak" if schedule.warmup_steps >= schedule.total else ""
    search = METHODS[config.method].search_steps if config.learning_rate == AUTO_RATE else 0
    learns_nothing = f"warning: learning_rate: auto needs {search} steps, in which no weight changes, and the run has "
    learns_nothing += f"{counted_steps(schedule.total)}: it learns nothing; raise max_steps, or set a rate"
    over = f"nothing is left to train: {counted_steps(first)} done of {schedule.total}; to go on, raise "
    over += "max_steps" if config.max_steps is not None else "num_train_epochs"
    epoch = f"an epoch is {counted_steps(steps_per_epoch)} of {micro * accumulation} {rows}{split}"
    return [
        f"steps: {schedule.total} ({why}){begun}; {epoch}",
        *([over] if first and first >= schedule.total else []),
        f"learning rate: {schedule.kind}, peak {peak}, {warm}",
        *([learns_nothing] if 0 < schedule.total <= search else []),
        f"output: {config.output_dir}; {saves}",
    ]


def block(method: str, model: str, groups: Iterable[Iterable[Any]]) -> list[str]:
    """All lines, indented under the title."""
    return [title(method, model), *(f"  {line}" for group in groups for line in group)]
