"""The block of lines printed at the start of a run: its decisions and their reasons.

It shows, before the first step: the model and its trained parameters, dtype and device with the reason, placement,
kernels, how the data was read, the number of steps, and the schedule.
"""

import re
from collections import Counter
from collections.abc import Iterable

import torch

import keyhole
from keyhole import ops
from keyhole.config import TrainConfig
from keyhole.machine.sizes import GIB
from keyhole.machine.text import counted
from keyhole.methods import METHODS
from keyhole.methods.base import Method
from keyhole.methods.traits import AUTO_RATE
from keyhole.model.model import Model
from keyhole.model.structure.layout import Layout
from keyhole.training.schedule import Schedule


def title(method: str, model: str) -> str:
    return f"keyhole {keyhole.__version__}: {method} on {model}"


def block(method: str, model: str, groups: Iterable[Iterable[object]]) -> list[str]:
    """All lines, indented under the title."""
    return [title(method, model), *(f"  {line}" for group in groups for line in group)]


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
    """The device, with its reason."""
    why_device = "as asked" if asked_device else "the first GPU" if device.type == "cuda" else "no GPU here"
    name = f" ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else ""
    return f"device: {device}{name}, {why_device}"


def machine_lines(asked_device: str | None, model: Model, method: Method) -> list[str]:
    """Device, dtype and placement with their reasons, the method's decisions, and kernels."""
    device = device_line(asked_device, model.device)
    fast = (
        []
        if method.settings.deterministic
        else ["deterministic=false: torch's fastest attention; bits are not promised"]
    )
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
    warm = counted(schedule.warmup_steps, "step") + " of warm-up"
    warm += ": the run ends before the peak" if schedule.warmup_steps >= schedule.total else ""
    search = METHODS[config.method].search_steps if config.learning_rate == AUTO_RATE else 0
    learns_nothing = f"warning: learning_rate: auto needs {search} steps, in which no weight changes, and the run has "
    learns_nothing += f"{counted(schedule.total, 'step')}: it learns nothing; raise max_steps, or set a rate"
    over = f"nothing is left to train: {counted(first, 'step')} done of {schedule.total}; to go on, raise "
    over += "max_steps" if config.max_steps is not None else "num_train_epochs"
    epoch = f"an epoch is {counted(steps_per_epoch, 'step')} of {micro * accumulation} {rows}{split}"
    return [
        f"steps: {schedule.total} ({why}){begun}; {epoch}",
        *([over] if first and first >= schedule.total else []),
        f"learning rate: {schedule.kind}, peak {peak}, {warm}",
        *([learns_nothing] if 0 < schedule.total <= search else []),
        f"output: {config.output_dir}; {saves}",
    ]
