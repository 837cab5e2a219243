"""From a Hugging Face directory to a `Model`, without a second copy of the weights.

    1. Build the module without its weights (model/structure/skeleton.py), lay it out flat (model/structure/layout.py).
    2. Decide where every unit lives (plan/placement.py).
    3. Reserve memory of exactly that size, with the engine that moves it (homes.py).
    4. Fill it from the weight files, shard after shard (model/weights/read.py); page-lock the host part.
    5. Add what the directory holds beside the weights: an adapter, low-rank factors.

Peak host memory: the weights that live on the host, plus one shard of the file mapping.
"""

import inspect
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from difflib import get_close_matches
from numbers import Integral
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # for transformers; its first import keeps its callers' frames alive: here none holds a model
import transformers
from torch import nn

from keyhole import assets
from keyhole.errors import UserError
from keyhole.loading.device import choose_device
from keyhole.loading.homes import make_engine
from keyhole.machine.settings import Changes, matmul_precision, memory_fraction
from keyhole.methods import METHODS
from keyhole.methods.base import FORWARD_ONLY, Workload
from keyhole.methods.lora.saved_adapter import SavedAdapter
from keyhole.methods.zo.low_rank.saved import find_factors
from keyhole.model.model import Model
from keyhole.model.structure.generation_file import read_generation_config
from keyhole.model.structure.skeleton import build, is_classifier, read_config
from keyhole.model.structure.source import find_directory
from keyhole.model.structure.tokenizer import read_tokenizer
from keyhole.model.weights.published import choose_format, forget_quantization, forms_in
from keyhole.model.weights.random import fill_random
from keyhole.model.weights.read import fill_from
from keyhole.model.weights.save import no_progress_bars
from keyhole.offload import arena
from keyhole.offload.gather import WAYS, GatheringEngine
from keyhole.plan.dtype import choose_dtype, warn_if_slow
from keyhole.plan.placement import place
from keyhole.ranks import Ranks

ENGINE_OPTIONS = ("overlap", "reuse_slots", "slot_count", "chaos")


def load(
    model: str | Path | Any,
    *,
    placement: str = "resident",
    gpu_memory: str | int | None = None,
    dtype: str | torch.dtype | None = None,
    device: str | torch.device | None = None,
    init: str = "pretrained",
    seed: int = 0,
    wire: str | None = None,
    tf32: bool = False,
    graphs: bool = True,
    reverse_graphs: bool = True,
    expert_units: bool = True,
    gather: str = "auto",
    workload: Workload | None = None,
    trust_remote_code: bool = False,
    adapter: bool = True,
    head: str | None = None,
    num_labels: int | None = None,
    ranks: Ranks | None = None,
    **engine_options: Any,
) -> Model:
    """Loads an HF directory, hub id, "demo" or config object; init="random" needs only the config.

    dtype: what kernels compute in (None: as stored; "auto": as stored, unless the workload's method or the device
    cannot use it). wire: the format in which weights are stored and moved (fp32, bf16, fp16, fp8, or frozen: int8,
    int4, nf4; default: dtype).
    tf32: float32 products may use TF32, in the whole process, while the model exists (docs/process.md).
    graphs: small blocks may run as CUDA graphs (model/forward/graphs.py); reverse_graphs: also in first-order steps
    (model/backward/recorded.py).
    expert_units=False: large stacks of experts are computed and moved whole (docs/methods.md).
    gather: whether each rank of a machine uploads a part of a unit (offload/gather.py): auto (measured), always, never.
    workload: what will run (method, tokens per pass, number of passes), so that the budget leaves room for it.
    head="classification" with num_labels makes a text classifier (num_labels=1: a regression) from an encoder or
    decoder; missing weights of its head are initialised by the seed. A model saved as a classifier needs neither.
    adapter=False ignores what a directory holds beside the weights (adapter/, the factors of a checkpoint).
    ranks: the processes that train this model together (keyhole/ranks); None: only this one.
    engine_options: overlap, reuse_slots, slot_count, chaos (offload/engine.py).
    """
    _check_source(model)
    if init not in ("pretrained", "random"):
        raise UserError(f"init={init!r}: choose pretrained or random")
    if gather not in WAYS:
        raise UserError(f"gather={gather!r}: choose {', '.join(WAYS)}")
    _check_names(engine_options)
    _check_work(workload)
    with _changes() as changes:
        changes.set(matmul_precision(), "high" if tf32 else "highest")
        device = choose_device(device)
        model = assets.locate(os.path.expanduser(model), assets.MODEL) if isinstance(model, str) else model
        config = read_config(model, trust_remote_code, head, num_labels)
        directory = None if model is config else find_directory(model)
        ranks = ranks or Ranks()
        workload = _shared_work(workload or Workload(), ranks)
        choice = choose_dtype(dtype, config, device, workload.method)
        dtype = choice.dtype
        warn_if_slow(choice, device)
        beside = find_factors(directory) if adapter and init == "pretrained" and directory is not None else None
        weights = directory if beside is None else beside.weights()
        learned_in = wire if beside is None else beside.wire
        wire = learned_in if wire is None else wire
        if forms_in(weights):
            forget_quantization(config)
        with torch.random.fork_rng(devices=[]):  # the model's own code initialises vectors from the global generator
            torch.default_generator.manual_seed(seed)
            module = build(config, dtype, trust_remote_code, expert_units=expert_units)
        if not is_classifier(config) and directory is not None and (directory / "generation_config.json").exists():
            module.generation_config = read_generation_config(directory)
        formats, said = choose_format(module, weights if init == "pretrained" else None, dtype, wire)
        layout, placed = place(module, placement, gpu_memory, formats, device, workload)
        if wire != learned_in:
            before = learned_in or str(dtype).removeprefix("torch.")
            said.append(f"wire: {wire}, as asked; the factors beside these weights were learned over {before}")
        placed.reasons[:0] = [str(choice), *said]
        _limit_memory(changes, placed.budget_bytes, device)
        engine = make_engine(layout, placed, formats, device, workload, ranks, gather, engine_options)
        _move_buffers(module, device)
        source = None if directory is None else str(model)
        tokenizer = None if directory is None else read_tokenizer(directory, trust_remote_code)
        about = {"tokenizer": tokenizer, "source": source, "placed": placed, "changes": changes, "ranks": ranks}
        about |= {"graphs": graphs, "reverse_graphs": reverse_graphs}
        loaded = Model(module, layout, engine, formats, **about)
        _fill(loaded, weights, dtype, seed, init, fresh_head=head is not None)
        ranks.barrier()  # shared homes are filled
        if isinstance(engine, GatheringEngine):
            placed.reasons.append(engine.decide(gather))
        loaded.binding.bind_homes()
        if adapter and directory is not None:
            _add_adapter(loaded, directory)
        if beside is not None:
            placed.reasons.append(beside.add_to(loaded))
        return loaded


def _fill(loaded: Model, weights: Any, dtype: torch.dtype, seed: int, init: str, fresh_head: bool) -> None:
    """Fills the homes with weights: from files, or initialised by the seed."""
    std = getattr(loaded.config, "initializer_range", None) or 0.02
    if init == "random":
        _pin(loaded, touch=True)
        fill_random(loaded, std, seed)
        loaded.drawn = True
        return
    if weights is None:
        raise UserError('a config object has no weights: pass init="random", or a model directory')
    fresh = fill_from(loaded, weights, dtype, fresh_head=fresh_head)
    fill_random(loaded, std, seed, only=fresh)
    loaded.drawn = bool(fresh)
    if fresh:
        names = ", ".join(tensor.name for tensor in fresh)
        loaded.placed.reasons.append(f"head: {names} are not in the files: drawn from seed {seed}")
    _pin(loaded, touch=False)


def _add_adapter(loaded: Model, directory: Path) -> None:
    """Attaches the adapter in a directory, if there is one."""
    if (directory / "adapter").is_dir():
        saved = SavedAdapter(loaded, directory / "adapter")
        loaded.placed.adapter = saved.path
        loaded.placed.reasons.append(str(saved))


@contextmanager
def _changes() -> Iterator[Changes]:
    """The process settings that loading changes, for the model to restore; restored here if loading fails."""
    changes = Changes()
    try:
        with no_progress_bars():
            yield changes
    except BaseException:
        changes.put_back()
        raise


def _limit_memory(changes: Changes, budget: int | None, device: torch.device) -> None:
    """Makes the allocator refuse allocations beyond the budget."""
    if budget is not None and device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        changes.set(memory_fraction(device), min(1.0, budget / total))


def _check_source(model: Any) -> None:
    """Refuses a module: a model is given by name, because its weights are read directly to their homes."""
    if isinstance(model, str | Path | transformers.PretrainedConfig):
        return
    known = getattr(getattr(model, "config", None), "_name_or_path", "") if isinstance(model, nn.Module) else ""
    raise UserError(
        f"keyhole.load: found a {type(model).__name__}, expected a directory, a hub id or a config; write "
        f'keyhole.load("{known or "path-or-hub-id"}")'
        + (", or save it first: model.save_pretrained(path)" if isinstance(model, nn.Module) else "")
    )


def _check_names(engine_options: dict[str, Any]) -> None:
    """Checks that keyword arguments that `load` does not name are options of the engine."""
    known = [name for name in inspect.signature(load).parameters if name != "engine_options"] + [*ENGINE_OPTIONS]
    for name in engine_options:
        if name not in ENGINE_OPTIONS:
            close = get_close_matches(name, known, n=1)
            meant = f"did you mean {close[0]}?" if close else f"known: {', '.join(known)}"
            raise UserError(f"keyhole.load: there is no argument {name!r}; {meant}")


def _check_work(work: Any) -> None:
    """Checks what memory is planned for: a misspelt method would be planned as forward passes alone."""
    if work is None:
        return
    if not isinstance(work, Workload):
        raise UserError(
            f"workload: found a {type(work).__name__}, expected keyhole.Workload(METHOD, tokens=...), those of a batch"
        )
    if work.method not in (*METHODS, *FORWARD_ONLY):
        close = get_close_matches(str(work.method), METHODS, n=1)
        meant = f"did you mean {close[0]}?" if close else f"expected one of {', '.join(METHODS)}"
        raise UserError(f"workload: there is no method {work.method!r}; {meant}")
    for name in ("tokens", "passes"):
        value = getattr(work, name)
        if isinstance(value, bool) or not isinstance(value, Integral) or value < 1:
            raise UserError(f"workload: {name}: found {value!r}, expected a whole number of at least 1")


def _shared_work(work: Workload, ranks: Ranks) -> Workload:
    """One rank's share of the workload; every rank makes a search for a rate by itself."""
    if not ranks.several:
        return work
    passes = work.passes if work.searches else -(-work.passes // ranks.size)
    return replace(work, passes=passes, ranks=ranks.size, local_ranks=ranks.local_size)


def _move_buffers(module: nn.Module, device: torch.device) -> None:
    for owner in module.modules():
        for name, buffer in owner._buffers.items():
            if buffer is not None:
                owner._buffers[name] = buffer.to(device)


def _pin(model: Model, touch: bool) -> None:
    """Page-locks the streamed homes."""
    if model.engine.streamed and model.device.type == "cuda":
        flats = model.host_memory()
        if touch and not model.engine.shared:  # uses all cores; pinning alone would touch the pages on one core
            for flat in flats:
                flat.fill_(0)
        model.pinned = all([arena.pin(flat, model.device) for flat in flats])
