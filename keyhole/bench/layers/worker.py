"""Times one block of a model on one device, in a separate process (process.py): LSP-Offload's Tables 1 and 5.

    FWD         the block's forward, with a graph
    BWD         its backward: gradients of its input and of its weights
    UPD torch   torch's fused AdamW on fp32 weights, gradients and moments
    UPD         keyhole's AdamW with fp32 master and moments, bf16 gradient in and bf16 weight out (ops/adam/), as
                adam-offload uses it

The parts run one after the other, round by round. The block is in bf16, or in fp32 on a CPU without bf16
arithmetic. Floors, for P elements in the matrices of the block, M tokens in sequences of T, width H:

    FWD   (2 P M + 2 M T H) / rate of a large product        causal attention: half of 4 M T H
    BWD   twice that
    UPD   28 P bytes / rate of a large copy                  both kinds: 28 bytes read or written per parameter

Both rates are measured in the same process (rates.py). Activations are the tensors that the block's forward
keeps for its backward, counted (memory/ledger.py), times the number of blocks.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import keyhole
from keyhole.bench import measure
from keyhole.bench.link import measure_link
from keyhole.bench.memory.ledger import ACTIVATIONS, WEIGHTS, Ledger
from keyhole.bench.process import Emit, Job, device_of, serve
from keyhole.bench.rates import copy_rate, product_rate
from keyhole.bench.shapes import LEAST_BLOCKS, named_config
from keyhole.machine.host import cpu_has_bf16
from keyhole.methods.workload import Workload
from keyhole.model.structure.find import find_blocks
from keyhole.ops.adam import SQUARES, adamw_, host_adamw_

LR = 1e-5
UPDATE_BYTES = 28  # per parameter
QUICK_LENGTH, QUICK_SIDE, QUICK_COPY = 16, 128, 2**20
LINK_BYTES = 64 * 2**20


@dataclass(frozen=True)
class Layer:
    """A block of a model, somewhere."""

    model: str  # its full name: shapes.named
    place: str  # cpu or cuda
    batch: int
    length: int

    @property
    def name(self) -> str:
        return f"{self.model} {self.place}"


class LayerWorker:
    """One block after the other."""

    def __init__(self, emit: Emit, job: Job) -> None:
        self.job, self.device = job, device_of(job.device)
        self.rates: dict[str, dict[str, float]] = {}

    def machine(self) -> dict[str, Any]:
        return {"link": measure_link(LINK_BYTES, rounds=3)} if self.job.device == "cuda" else {}

    def estimate_s(self, layer: Layer) -> float:
        return 0.0 if self.job.quick else 30.0

    def clear(self) -> None:
        measure.clear_device(self.device)

    def measure(self, layer: Layer) -> dict[str, Any]:
        quick, device = self.job.quick, device_of(layer.place)
        dtype = torch.bfloat16 if device.type == "cuda" or cpu_has_bf16() else torch.float32
        length = QUICK_LENGTH if quick else layer.length
        if layer.place not in self.rates:
            sizes = (QUICK_SIDE, QUICK_COPY) if quick else (None, None)
            self.rates[layer.place] = {"product": product_rate(device, dtype, sizes[0])}
            self.rates[layer.place]["copy"] = copy_rate(device, sizes[1])
        blocks = named_config(layer.model, quick=quick).num_hidden_layers
        config = named_config(layer.model, LEAST_BLOCKS, quick)
        work = Workload(tokens=layer.batch * length)
        model = keyhole.load(config, init="random", dtype=dtype, device=device, workload=work, graphs=False)
        block, call = first_block(model, measure.random_batch(layer.batch, length, config.vocab_size))
        block_numel = sum(p.numel() for p in block.parameters())
        found = {
            "dtype": str(dtype).removeprefix("torch."),
            "tokens": layer.batch * length,
            "layers": blocks,
            "rates": self.rates[layer.place],
            "parameters": sum(t.shape.numel() for t in model.layout.tensors) + (blocks - LEAST_BLOCKS) * block_numel,
            "block_parameters": block_numel,
            "kept_bytes": kept_bytes(block, call, device),
            "floors": floors(block, layer.batch * length, length, config.hidden_size, self.rates[layer.place]),
            "parts": measure.time_parts(parts_of(block, call, device), device, self.job.warm_up, self.job.timed),
            "threads": torch.get_num_threads(),
        }
        model.close()
        del model, block, call
        self.clear()
        return found


Call = tuple[torch.Tensor, tuple[Any, ...], dict[str, Any]]  # hidden states and the other arguments of a block


def first_block(model: keyhole.Model, batch: dict[str, torch.Tensor]) -> tuple[nn.Module, Call]:
    """The first block, and the arguments that the model calls it with."""
    block, calls = find_blocks(model.module)[0], []

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls.append((args, dict(kwargs)))

    hook = block.register_forward_pre_hook(note, with_kwargs=True)
    with torch.no_grad():
        model.module(input_ids=batch["input_ids"].to(model.device), use_cache=False)
    hook.remove()
    args, kwargs = calls[0]
    hidden = args[0] if args else kwargs.pop("hidden_states")
    return block, (hidden.detach().requires_grad_(), args[1:], kwargs)


def forward(block: nn.Module, call: Call) -> torch.Tensor:
    hidden, args, kwargs = call
    found = block(hidden, *args, **kwargs)
    out: torch.Tensor = found[0] if isinstance(found, tuple) else found
    return out


def kept_bytes(block: nn.Module, call: Call, device: torch.device) -> int:
    """Bytes that a forward keeps for the backward, its output included."""
    ledger = Ledger(device)
    ledger.hold(WEIGHTS, block.parameters())
    with ledger:
        out = forward(block, call)
    kept = ledger.alive()[ACTIVATIONS]
    del out
    return kept


def parts_of(block: nn.Module, call: Call, device: torch.device) -> dict[str, Callable[[], None]]:
    """The timed parts, in order; each prepares the inputs of the next."""
    params = list(block.parameters())
    numel = sum(p.numel() for p in params)
    out: list[torch.Tensor] = []
    grad_out = torch.randn_like(call[0]) * 1e-3
    masters = [p.detach().to(torch.float32, copy=True) for p in params]
    for master in masters:
        master.grad = torch.randn_like(master) * 1e-3
    optimizer = torch.optim.AdamW(masters, lr=LR, fused=True)
    flat = [torch.zeros(numel, device=device) for _ in range(3)]  # master, moments
    grad, weight = (torch.full((numel,), 1e-3, dtype=torch.bfloat16, device=device) for _ in range(2))
    state = (*flat, grad, weight)

    def run_forward() -> None:
        for tensor in (*params, call[0]):
            tensor.grad = None
        out[:] = [forward(block, call)]

    def run_backward() -> None:
        out.pop().backward(grad_out)

    def run_update() -> None:
        if device.type == "cpu":
            host_adamw_(*state, step=1, lr=LR)
        else:
            adamw_(*state, squares=SQUARES[0], step=1, lr=LR)

    return {"FWD": run_forward, "BWD": run_backward, "UPD torch": lambda: optimizer.step(), "UPD": run_update}


def floors(block: nn.Module, tokens: int, length: int, width: int, rates: dict[str, float]) -> dict[str, float]:
    """Seconds, by the formulas above."""
    matrices = sum(p.numel() for p in block.parameters() if p.dim() > 1)
    forward_s = (2 * matrices * tokens + 2 * tokens * length * width) / rates["product"]
    update_s = UPDATE_BYTES * sum(p.numel() for p in block.parameters()) / rates["copy"]
    return {"FWD": forward_s, "BWD": 2 * forward_s, "UPD torch": update_s, "UPD": update_s}


if __name__ == "__main__":
    sys.exit(serve(LayerWorker, Layer))
