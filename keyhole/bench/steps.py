"""Times the steps of a case: `keyhole bench zo | lomo | lsp`. Random weights of the true shape, the same for every
system; median of the timed steps."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

import keyhole
from keyhole.bench import measure
from keyhole.bench.baselines import Native, Textbook, take_weights
from keyhole.bench.cases import NATIVE, STREAMED, TEXTBOOK, Case
from keyhole.bench.floors import own_products_s, step_parts
from keyhole.bench.process import Emit, Job
from keyhole.bench.rates import link_rates
from keyhole.bench.report import Record
from keyhole.bench.shapes import QUICK_SHRINK, model_config
from keyhole.methods import METHODS
from keyhole.methods.base import Method
from keyhole.methods.settings import MethodSettings
from keyhole.methods.workload import Workload

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
RATES = {"forward": 1e-7, "reverse": 1e-5, "torch": 1e-5}  # by how a method sweeps the model
_links: dict[int, dict[str, float]] = {}  # rates by the size of the copies


def measure_steps(case: Case, job: Job, emit: Emit) -> Record:
    """The numbers of a case, for the tables of step_tables.py."""
    device, begin_s = measure.device_of(job.device), time.perf_counter()
    measure.clear_device(device)
    model = load(case, job.device, job.quick)
    batches = batches_of(case, job.quick, model.config.vocab_size)
    load_s, host_bytes = time.perf_counter() - begin_s, measure.host_memory()
    measure.clean_up(device)  # memory for drawing the weights must not be reused by the method
    with random_bases(case):
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
    rows = batches[0]["input_ids"].numel()
    found["own_products_s"] = own_products_s(case, model.module, rows, job.warm_up, job.timed)
    unit_bytes = sorted(home.nbytes for home in homes)[len(homes) // 2] if homes else 0
    model.close()
    homes.clear()
    measure.clear_device(device)
    found["link"] = link_of(unit_bytes, emit) if unit_bytes and device.type == "cuda" else None
    return found


def load(case: Case, device: str, quick: bool, graphs: bool = True) -> keyhole.Model:
    """The case's model, placed as the case says for what the case runs."""
    tokens = case.batch * shortened(case.length, quick)
    work = Workload("eval", tokens, case.micro_batches)  # of a baseline, whose memory is not planned
    if case.system != NATIVE:
        own = settings_of(case)
        clips = own.max_grad_norm is not None
        work = Workload(case.method, tokens, case.micro_batches * own.passes, own, clips=clips)
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
    """Of the case's method."""
    return METHODS[case.method].settings(**{key: value for key, value in case.options.items() if key != "svd"})


def shortened(length: int, quick: bool) -> int:
    return max(4, length // QUICK_SHRINK) if quick else length


def batches_of(case: Case, quick: bool, vocabulary: int) -> list[dict[str, torch.Tensor]]:
    """The micro-batches of every step."""
    rows = case.batch * case.micro_batches
    together = measure.random_batch(rows, shortened(case.length, quick), vocabulary)
    return [{k: x[i : i + case.batch] for k, x in together.items()} for i in range(0, rows, case.batch)]


def method_of(case: Case, model: keyhole.Model) -> Method | Textbook | Native:
    """The case's method on that model, or the baseline."""
    options = {key: value for key, value in case.options.items() if key != "svd"}
    rate = RATES[METHODS[case.method].sweep]
    if case.system == TEXTBOOK:
        return Textbook(take_weights(model), rate)
    if case.system == NATIVE:
        return Native(model, RATES["torch"], **options)
    method: Method = METHODS[case.method].load()(model, rate, **options)
    return method


@contextmanager
def random_bases(case: Case) -> Iterator[None]:
    """options: {svd: false} replaces galore's SVDs, which take minutes, by random bases."""
    from keyhole.methods.baselines import galore

    def drawn(grad: torch.Tensor, rank: int) -> torch.Tensor:
        side = min(grad.shape[-2:])
        q: torch.Tensor = torch.linalg.qr(torch.randn(*grad.shape[:-2], side, rank, device=grad.device)).Q
        return q

    usual = galore.projector
    galore.projector = usual if case.options.get("svd", True) else drawn
    try:
        yield
    finally:
        galore.projector = usual


def link_of(unit_bytes: int, emit: Emit) -> dict[str, float]:
    """Rates of copies of this size, or of a similar one that were measured already."""
    near = [size for size in _links if 0.5 < size / unit_bytes < 2]
    if not near:
        _links[unit_bytes] = link_rates(unit_bytes)
        emit({"kind": "link", **_links[unit_bytes]})
    return _links[near[0] if near else unit_bytes]
