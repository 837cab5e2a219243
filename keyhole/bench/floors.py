"""What bounds a step: its products, its link, its updates; and where the time of a step went.

products   the step's matrix products, of the same shapes and with the model's own weights, one after the other without
           a pause, for as many rounds as there were steps and directly after them: a GPU that multiplies without a
           pause is held at its power limit, and no step reaches the rate of one large product
updates    seconds in which the CPU updated parameters (adam-offload, lsp with moments on the host)
link       bytes that crossed per step: each way at the rate of that way alone, and bytes that went both ways at
           the duplex rate of the same run; the longest of the three
"""

import torch
from torch import nn

from keyhole.bench import measure
from keyhole.bench.cases import NATIVE, RESIDENT, Case
from keyhole.methods import METHODS
from keyhole.methods.adam_offload.method import AdamOffload
from keyhole.methods.base import Method
from keyhole.methods.lsp.method import LSP
from keyhole.model.structure.find import find_blocks


def recomputes(case: Case) -> bool:
    """Whether blocks run again in the backward pass. With `auto` as many as fit do not, so none is counted."""
    if case.system == NATIVE:
        return bool(case.options.get("checkpointing", True))
    return case.options.get("activations", METHODS[case.method].settings().keeps) in ("block", "host")


def own_products_s(case: Case, module: nn.Module, tokens: int, warm_up: int, rounds: int) -> float | None:
    """Seconds per step, for all micro-batches. None if the weights are not all on the device, or the method computes
    other products (adapters, subspaces). A method of forward passes alone multiplies the rows of all passes at once."""
    row, is_ours = METHODS[case.method], case.system != NATIVE
    others = is_ours and (row.keeps_base or "d" in vars(row.settings()))
    if case.system not in (NATIVE, RESIDENT) or case.gpu_memory or case.wire or others:
        return None
    forward_only = is_ours and row.sweep == "forward"
    tokens *= row.settings().passes if forward_only else 1
    blocks = [[m.weight for m in block.modules() if isinstance(m, nn.Linear)] for block in find_blocks(module)]
    inside = {id(weight) for block in blocks for weight in block}
    outside = [m.weight for m in module.modules() if isinstance(m, nn.Linear) and id(m.weight) not in inside]
    first, every = blocks[0][0], [*outside, *(weight for block in blocks for weight in block)]
    rows = {
        size: torch.randn(tokens, size, device=first.device, dtype=first.dtype)
        for size in {size for weight in every for size in weight.shape}
    }

    def forward(weights: list[torch.Tensor]) -> None:
        for weight in weights:
            torch.mm(rows[weight.shape[1]], weight.t())

    def backward(weights: list[torch.Tensor]) -> None:
        for weight in reversed(weights):
            torch.mm(rows[weight.shape[0]], weight)
            torch.mm(rows[weight.shape[0]].t(), rows[weight.shape[1]])

    def step() -> None:
        for block in blocks:
            forward(block)
        forward(outside)
        if forward_only:
            return  # otherwise logits are made again
        forward(outside)
        backward(outside)
        for block in reversed(blocks):
            if recomputes(case):
                forward(block[:-1])  # the output of the last layer is not needed
            backward(block)

    with torch.no_grad():
        found = measure.time_parts({"products": step}, first.device, warm_up, rounds)
    return float(case.micro_batches * found["products"]["s"])


def link_seconds(up_bytes: float, down_bytes: float, link: dict[str, float]) -> float:
    """The least time of the link (rates in GB/s, rates.py)."""
    both_bytes = min(up_bytes, down_bytes)
    return max(up_bytes / link["up"], down_bytes / link["down"], both_bytes / link["duplex"]) / 1e9


def step_parts(method: Method) -> dict[str, float]:
    """Seconds of the last step by part, of methods that update on the CPU; call it after synchronising the device."""
    found = {key: float(value) for key, value in method.metrics().items()}
    if isinstance(method, AdamOffload):
        found["update_s"] = method.updates.host_s
    if isinstance(method, LSP) and method.updates.host is not None:
        found["update_s"] = method.updates.host.update_s
    return found
