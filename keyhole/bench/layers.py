"""`keyhole bench layers`: one block of a model, on one device: LSP-Offload's Tables 1 and 5.

    FWD         the block's forward, with a graph
    BWD         its backward: gradients of its input and of its weights
    UPD torch   torch's fused AdamW on fp32 weights, gradients and moments
    UPD         keyhole's AdamW with fp32 master and moments, bf16 gradient in and bf16 weight out (ops/adam.py), as
                adam-offload uses it

The parts run one after the other, round by round. The block is in bf16, or in fp32 on a CPU without bf16
arithmetic. Floors, for P elements in the matrices of the block, M tokens in sequences of T, width H:

    FWD   (2 P M + 2 M T H) / rate of a large product        causal attention: half of 4 M T H
    BWD   twice that
    UPD   28 P bytes / rate of a large copy                  both kinds: 28 bytes read or written per parameter

Both rates are measured in the same process (measure.py). Activations are the tensors that the block's forward
keeps for its backward, counted as they are saved, times the number of blocks.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import nn

import keyhole
from keyhole.bench import measure
from keyhole.bench.cases import Case
from keyhole.bench.process import Emit, Job
from keyhole.bench.report import Cells, Record, Report, table
from keyhole.bench.shapes import BLOCKS, LEAST_BLOCKS, model_config
from keyhole.machine.gpu import ACCELERATOR
from keyhole.machine.host import cpu_has_bf16
from keyhole.machine.sizes import GIB, MIB
from keyhole.methods.workload import Workload
from keyhole.model.structure.find import find_blocks
from keyhole.ops.adam import SQUARES, adamw_, host_adamw_

LR = 1e-5
UPDATE_BYTES, STATE_BYTES = 28, 12  # per parameter: moved by an update; fp32 master and moments
QUICK_LENGTH, QUICK_SIDE, QUICK_COPY, QUICK_BLOCKS = 16, 128, 2**20, 3
LINK_BYTES = 64 * MIB
PARTS = ("FWD", "BWD", "UPD torch", "UPD")
NOTES = """\
Milliseconds of one block; in brackets the floor, and the time over it. FWD and BWD: its products at the rate of one
large product in the same dtype; UPD: 28 bytes per parameter at the rate of one large copy; both rates measured in the
same process on the same device. "UPD torch" is torch's fused AdamW, all in fp32; "UPD" keyhole's, with 16-bit gradients
and weights. "all blocks": FWD + BWD + UPD times the number of blocks, in seconds."""
HELD = """\
What training the whole model holds: 16-bit weights, fp32 master and Adam's moments, and what all blocks keep of one
forward without checkpointing (counted on one block). Link: pinned copies, up / down / each way when both run, GB/s."""
Call = tuple[torch.Tensor, tuple[Any, ...], dict[str, Any]]  # hidden states and the other arguments of a block


@cache
def rates_of(device: torch.device, dtype: torch.dtype, quick: bool) -> dict[str, float]:
    product = measure.product_rate(device, dtype, QUICK_SIDE if quick else None)
    return {"product": product, "copy": measure.copy_rate(device, QUICK_COPY if quick else None)}


def measure_layer(case: Case, job: Job, emit: Emit) -> Record:
    device = measure.device_of(case.device or job.device)
    dtype = torch.bfloat16 if device.type == ACCELERATOR or cpu_has_bf16() else torch.float32
    length, blocks = (QUICK_LENGTH, QUICK_BLOCKS) if job.quick else (case.length, BLOCKS[case.model])
    config, tokens = model_config(case.model, blocks=LEAST_BLOCKS, quick=job.quick), case.batch * length
    model = keyhole.load(
        config, init="random", dtype=dtype, device=device, workload=Workload(tokens=tokens), graphs=False
    )
    block, call = first_block(model, measure.random_batch(case.batch, length, config.vocab_size))
    rates, block_numel = rates_of(device, dtype, job.quick), sum(p.numel() for p in block.parameters())
    found = {
        "place": device.type,
        "dtype": str(dtype).removeprefix("torch."),
        "tokens": tokens,
        "layers": blocks,
        "rates": rates,
        "link": measure.link_rates(LINK_BYTES, rounds=3) if device.type == ACCELERATOR else None,
        "parameters": sum(t.shape.numel() for t in model.layout.tensors) + (blocks - LEAST_BLOCKS) * block_numel,
        "kept_bytes": kept_bytes(block, call),
        "floors": floors(block, tokens, length, config.hidden_size, rates),
        "parts": measure.time_parts(parts_of(block, call, device), device, job.warm_up, job.timed),
        "threads": torch.get_num_threads(),
    }
    model.close()
    return found


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


def kept_bytes(block: nn.Module, call: Call) -> int:
    """Bytes that a forward keeps for the backward, its output included; weights are not counted."""
    kept: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        note(forward(block, call))
    for own in (call[0], *block.parameters()):
        kept.pop(own.untyped_storage().data_ptr(), None)
    return sum(kept.values())


def parts_of(block: nn.Module, call: Call, device: torch.device) -> dict[str, Callable[[], object]]:
    """The timed parts, in order; each prepares the inputs of the next."""
    params = list(block.parameters())
    numel = sum(p.numel() for p in params)
    out: list[torch.Tensor] = []
    grad_out = torch.randn_like(call[0]) * 1e-3
    masters = [p.detach().to(torch.float32, copy=True) for p in params]
    for master in masters:
        master.grad = torch.randn_like(master) * 1e-3
    optimizer = torch.optim.AdamW(masters, lr=LR, fused=True)
    w, m, v = (torch.zeros(numel, device=device) for _ in range(3))  # master, moments
    grad, weight = (torch.full((numel,), 1e-3, dtype=torch.bfloat16, device=device) for _ in range(2))

    def run_forward() -> None:
        for tensor in (*params, call[0]):
            tensor.grad = None
        out[:] = [forward(block, call)]

    def run_update() -> None:
        if device.type == "cpu":
            host_adamw_(w, m, v, grad, weight, step=1, lr=LR)
        else:
            adamw_(w, m, v, grad, weight, squares=SQUARES[0], step=1, lr=LR)

    backward = lambda: out.pop().backward(grad_out)  # noqa: E731
    return {"FWD": run_forward, "BWD": backward, "UPD torch": optimizer.step, "UPD": run_update}


def floors(block: nn.Module, tokens: int, length: int, width: int, rates: dict[str, float]) -> dict[str, float]:
    matrices = sum(p.numel() for p in block.parameters() if p.dim() > 1)
    forward_s = (2 * matrices * tokens + 2 * tokens * length * width) / rates["product"]
    update_s = UPDATE_BYTES * sum(p.numel() for p in block.parameters()) / rates["copy"]
    return {"FWD": forward_s, "BWD": 2 * forward_s, "UPD torch": update_s, "UPD": update_s}


def all_blocks_s(r: Record) -> float:
    return float(r["layers"] * sum(r["parts"][part]["s"] for part in ("FWD", "BWD", "UPD")))


class LayerReport(Report):
    def cells(self, r: Record) -> Cells:
        place = "GPU" if r["place"] == "cuda" else f"CPU, {r['threads']} threads"
        found = {"model": r["case"]["model"], "on": place, "dtype": r["dtype"], "tokens": str(r["tokens"])}
        for part in PARTS:
            seconds, floor_s = r["parts"][part]["s"], r["floors"][part]
            found[f"{part} ms"] = f"{1e3 * seconds:.3f} ({1e3 * floor_s:.3f}, {seconds / floor_s:.2f}x)"
        return found | {
            "all blocks s": f"{all_blocks_s(r):.3f}",
            "product TFLOP/s": f"{r['rates']['product'] / 1e12:.3g}",
            "copy GB/s": f"{r['rates']['copy'] / 1e9:.3g}",
        }

    def held(self, r: Record) -> Cells:
        link, gpus = r["link"], self.machine.get("gpus")
        return {
            "model": r["case"]["model"],
            "blocks": str(r["layers"]),
            "weights GiB": f"{2 * r['parameters'] / GIB:.2f}",
            "optimizer state GiB": f"{STATE_BYTES * r['parameters'] / GIB:.2f}",
            "activations GiB": f"{r['layers'] * r['kept_bytes'] / GIB:.2f}",
            "link GB/s": " / ".join(f"{link[k]:.1f}" for k in ("up", "down", "duplex")) if link else "",
            "GPU GiB": f"{gpus[0]['total_bytes'] / GIB:.0f}" if gpus else "",
        }

    def line(self, found: Record) -> str:
        return " | ".join(self.cells(found).values()) if found.get("status") == "ok" else super().line(found)

    def sections(self) -> list[str]:
        found = list(self.ok().values())
        first = {r["case"]["model"]: r for r in reversed(found)}
        return [NOTES, table(list(map(self.cells, found))), HELD, table(list(map(self.held, reversed(first.values()))))]
