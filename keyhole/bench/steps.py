"""Times the steps of a case: `keyhole bench zo | lomo | lsp`. Random weights of the true shape, the same for every
system; median of the timed steps. Beside a step, what bounds it:

products   the step's matrix products, of the same shapes and with the model's own weights, one after the other without
           a pause, for as many rounds as there were steps and directly after them: a GPU that multiplies without a
           pause is held at its power limit, and no step reaches the rate of one large product
updates    seconds in which the CPU updated parameters (adam-offload, lsp with moments on the host)
link       bytes that crossed per step, and the rates of the same run (step_tables.py)
"""

import time
from contextlib import nullcontext
from unittest.mock import patch

import torch
from torch import nn

import keyhole
from keyhole.bench import measure
from keyhole.bench.baselines import Native, Textbook, take_weights
from keyhole.bench.cases import BASELINES, NATIVE, RESIDENT, STREAMED, TEXTBOOK, Case
from keyhole.bench.process import Emit, Job
from keyhole.bench.report import Record
from keyhole.bench.shapes import QUICK_SHRINK, model_config
from keyhole.machine.gpu import ACCELERATOR
from keyhole.methods import METHODS
from keyhole.methods.adam_offload.method import AdamOffload
from keyhole.methods.base import Method
from keyhole.methods.baselines import galore
from keyhole.methods.lsp.method import LSP
from keyhole.methods.settings import MethodSettings
from keyhole.methods.workload import Workload
from keyhole.model.structure.find import find_blocks

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
RATES = {"forward": 1e-7, "reverse": 1e-5, "torch": 1e-5}  # by how a method sweeps the model
_links: dict[int, dict[str, float]] = {}  # rates by the size of the copies


def measure_steps(case: Case, job: Job, emit: Emit) -> Record:
    device, begin_s = measure.device_of(job.device), time.perf_counter()
    measure.clear_device(device)
    model = load(case, job.device, job.quick)
    batches = batches_of(case, job.quick, model.config.vocab_size)
    load_s, host_bytes = time.perf_counter() - begin_s, measure.host_memory()
    measure.clean_up(device)  # memory for drawing the weights must not be reused by the method
    drawn = patch.object(galore, "projector", random_bases)  # options: {svd: false}: without SVDs, which take minutes
    with nullcontext() if case.options.get("svd", True) else drawn:
        method = method_of(case, model)
        measure.clean_up(device)
        found = measure.time_steps(lambda: method.step(batches), model.engine, job.warm_up, job.timed)
    homes = [model.engine.homes[i] for i in sorted(model.engine.streamed)]
    planned = isinstance(method, Method) and METHODS[case.method].streams  # a baseline's memory is not planned
    found |= {
        "tokens": sum(batch["input_ids"].numel() for batch in batches),
        "parameters": sum(t.shape.numel() for t in model.layout.tensors),
        "blocks_run": model.layout.block_count,
        "weights_bytes": model.layout.numel * model.dtype.itemsize,
        "streamed_bytes": sum(home.nbytes for home in homes),
        "planned_bytes": model.placed.device_bytes.total if planned and model.placed is not None else None,
        "device": measure.device_memory(device),
        "host_bytes": max(host_bytes, measure.host_memory()),
        "decided": model.describe() + (method.describe() if isinstance(method, Method) else []),
        "load_s": load_s,
        "parts": step_parts(method) if isinstance(method, Method) else {},
    }
    tokens = batches[0]["input_ids"].numel()
    found["own_products_s"] = own_products_s(case, model.module, tokens, job.warm_up, job.timed)
    unit_bytes = sorted(home.nbytes for home in homes)[len(homes) // 2] if homes else 0
    model.close()
    homes.clear()
    measure.clear_device(device)
    found["link"] = link_of(unit_bytes, emit) if unit_bytes and device.type == ACCELERATOR else None
    return found


def load(case: Case, device: str, quick: bool, graphs: bool = True) -> keyhole.Model:
    """The case's model, placed as the case says for what the case runs."""
    tokens = case.batch * shortened(case.length, quick)
    work = Workload("eval", tokens, case.micro_batches)  # of a baseline, whose memory is not planned
    if case.system not in BASELINES:
        own = settings_of(case)
        clips = own.max_grad_norm is not None
        passes, length = case.micro_batches * own.passes, shortened(case.length, quick)
        work = Workload(case.method, tokens, passes, own, clips=clips, length=length)
    return keyhole.load(
        model_config(case.model, case.length, case.blocks, quick),
        placement="stream" if case.system == STREAMED else "resident",
        gpu_memory=case.quick_gpu_memory if quick else case.gpu_memory,
        dtype=DTYPES[case.dtype],
        device=measure.device_of(device),
        init="random",
        wire=case.wire,
        graphs=graphs,
        workload=work,
        **case.load,
    )


def settings_of(case: Case) -> MethodSettings:
    return METHODS[case.method].settings(**{key: value for key, value in case.options.items() if key != "svd"})


def shortened(length: int, quick: bool) -> int:
    return max(4, length // QUICK_SHRINK) if quick else length


def batches_of(case: Case, quick: bool, vocabulary: int) -> list[dict[str, torch.Tensor]]:
    rows = case.batch * case.micro_batches
    together = measure.random_batch(rows, shortened(case.length, quick), vocabulary)
    return [{k: x[i : i + case.batch] for k, x in together.items()} for i in range(0, rows, case.batch)]


def method_of(case: Case, model: keyhole.Model) -> Method | Textbook | Native:
    options = {key: value for key, value in case.options.items() if key != "svd"}
    rate = RATES[METHODS[case.method].sweep]
    if case.system == TEXTBOOK:
        return Textbook(take_weights(model), rate, **options)
    if case.system == NATIVE:
        return Native(take_weights(model), RATES["torch"], **options)
    method: Method = METHODS[case.method].load()(model, rate, **options)
    return method


def random_bases(grad: torch.Tensor, rank: int) -> torch.Tensor:
    side = min(grad.shape[-2:])
    q: torch.Tensor = torch.linalg.qr(torch.randn(*grad.shape[:-2], side, rank, device=grad.device)).Q
    return q


def link_of(unit_bytes: int, emit: Emit) -> dict[str, float]:
    """Rates of copies of this size, or of a similar one that were measured already."""
    near = [size for size in _links if 0.5 < size / unit_bytes < 2]
    if not near:
        _links[unit_bytes] = measure.link_rates(unit_bytes)
        emit({"kind": "link", **_links[unit_bytes]})
    return _links[near[0] if near else unit_bytes]


def own_products_s(case: Case, module: nn.Module, tokens: int, warm_up: int, rounds: int) -> float | None:
    """Seconds per step, for all micro-batches. None if the weights are not all on the device, or the method computes
    other products (adapters, subspaces). A method of forward passes alone multiplies the rows of all passes at once."""
    row, is_ours = METHODS[case.method], case.system != NATIVE
    others = (row.keeps_base or "d" in vars(row.settings())) if is_ours else "peft" in case.options
    if case.system not in (NATIVE, RESIDENT) or case.gpu_memory or case.wire or others:
        return None
    recomputes = case.options.get("activations", row.settings().keeps) in ("block", "host")  # `auto`: none is counted
    recomputes = recomputes if is_ours else bool(case.options.get("checkpointing", True))
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
            if recomputes:
                forward(block[:-1])  # the output of the last layer is not needed
            backward(block)

    with torch.no_grad():
        found = measure.time_parts({"products": step}, first.device, warm_up, rounds)
    return float(case.micro_batches * found["products"]["s"])


def step_parts(method: Method) -> dict[str, float]:
    """Seconds of the last step by part, of methods that update on the CPU; call it after synchronising the device."""
    found = {key: float(value) for key, value in method.metrics().items()}
    if isinstance(method, AdamOffload):
        found["update_s"] = method.updates.host_s
    if isinstance(method, LSP) and method.updates.host is not None:
        found["update_s"] = method.updates.host.update_s
    return found
