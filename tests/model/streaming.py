"""A streamed twin of a resident model, cut and run as the test likes, past the decisions of plan/placement.py."""

from collections.abc import Callable
from typing import Any

import torch

import keyhole
from keyhole.model.model import Model
from keyhole.model.structure.layout import find_layout
from keyhole.model.structure.skeleton import build
from keyhole.offload.engine import Engine


def assert_trained_alike(models: list[Model], make: Callable, steps: list[list[dict[str, torch.Tensor]]]) -> None:
    """Losses and weights after these steps are the same to the bit."""
    losses = []
    for model in models:
        method = make(model)
        losses.append(torch.stack([method.step(batches) for batches in steps]))
        method.flush()
    assert torch.equal(*losses) and losses[0].isfinite().all()
    for (a, mine), (b, theirs) in zip(*(model.named_tensors() for model in models), strict=True):
        assert a == b and torch.equal(mine.cpu(), theirs.cpu()), a


def streamed(
    resident: keyhole.Model,
    max_unit_numel: int | None = None,
    keep: tuple[str, ...] = (),
    config: Any = None,
    **engine_options: Any,
) -> Model:
    """The same weights, every unit behind the engine but the spine and the kinds named in `keep`. config: of the whole,
    where the module knows only a part of it."""
    module = build(config or resident.config, resident.dtype)
    layout = find_layout(module, max_unit_numel)
    flat = torch.full((layout.numel,), float("nan"), dtype=resident.dtype)
    homes = list(flat.split([unit.numel for unit in layout.units]))
    away = {unit.index for unit in layout.units[1:] if unit.kind not in keep}
    model = Model(module, layout, Engine(homes, away, torch.device("cpu"), **engine_options), resident.formats)
    for mine, theirs in zip(layout.tensors, resident.layout.tensors, strict=True):
        assert mine.name == theirs.name and mine.start == theirs.start
        model.home(mine).copy_(resident.home(theirs))
    for name, buffer in resident.module.named_buffers():
        module.get_buffer(name).copy_(buffer)
    model.binding.bind_homes()
    return model
