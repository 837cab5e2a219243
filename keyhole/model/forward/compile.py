"""Blocks of passes without gradients through torch.compile: between two matrix products, one kernel instead of five.

A block spends a third of its time in norms, rotary embeddings, activations and residuals, each of which reads and
writes memory several times; torch.compile fuses them. The compiled function is block.forward itself, with the block as
an argument and its weights as inputs, so that all blocks of one kind share the code. Compiled code cannot stop inside a
block, so it runs only in passes that wait for all units of a block before they enter it (block_at_once, hooks.py).
Passes that will be differentiated use model/backward/block_call.py.

Compiled arithmetic rounds differently from eager arithmetic: streamed still equals resident, but a compiled run does
not equal an eager one. Varying shapes make torch compile again; packing keeps them constant.
"""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from keyhole.errors import UserError
from keyhole.machine.settings import Changes, compiler

RECOMPILES = 64


def _forward(block: nn.Module, args: tuple, kwargs: dict[str, object]) -> Any:
    return type(block).forward(block, *args, **kwargs)


def prepare_compiling(changes: Changes) -> None:
    """Sets the process settings that compiled blocks need.

    All blocks share one function, with code for each kind of block, each varying dimension, and with or without a
    mask. By default torch stops after 8 variants and runs the rest eagerly, depending on what this process ran first.
    """
    limit = compiler("torch._dynamo", "recompile_limit")
    changes.set(limit, max(RECOMPILES, limit.read()))


def compile_forward(model: Any, backend: str = "inductor") -> None:
    """From now on, passes without gradients and with block_at_once run the model's blocks compiled."""
    if model.layout.has_cut_blocks:
        raise UserError(
            "compile: this model was loaded with blocks cut in several units. Pass keyhole.load(..., "
            "workload=Workload(settings=ZOConfig(compile=True))), or set compile=false"
        )
    if model.layout.parts.tiled_layers:
        raise UserError("compile: this model has matrices that are computed in row tiles; set compile=false")
    prepare_compiling(model.changes)
    run, model_of = torch.compile(_forward, backend=backend), weakref.ref(model)

    def compiled(block: nn.Module, ordinary: Callable) -> Callable:
        def forward(*args: object, **kwargs: object) -> Any:
            conductor = None if torch.is_grad_enabled() or (owner := model_of()) is None else owner.conductor
            if conductor is None or not conductor.block_at_once:
                return ordinary(*args, **kwargs)
            return run(block, args, kwargs)

        return forward

    for i, block in enumerate(model.blocks):
        if model.graphs is None:
            model.patches.forward(block, compiled(block, block.forward))
        else:  # a CUDA graph is captured from compiled code, and compared with it
            model.graphs.ordinary[i] = compiled(block, model.graphs.ordinary[i])
