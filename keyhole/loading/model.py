"""From a Hugging Face directory to a `Model`, without a second copy of the weights.

    1. Find the files, build the module without its weights, lay it out flat, and decide where every unit lives
       (prepare.py).
    2. Reserve memory of exactly that size, with the engine that moves it (homes.py).
    3. Fill it from the weight files, shard after shard (model/weights/read.py); page-lock the host part.
    4. Add what the directory holds beside the weights: an adapter, low-rank factors.

Peak host memory: the weights that live on the host, plus one shard of the file mapping.
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path

import torch
import torch._dynamo  # for transformers; its first import keeps its callers' frames alive: here none holds a model
from torch import nn
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from keyhole.errors import UserError
from keyhole.limits import Count, Seed, describe, fits
from keyhole.loading.homes import make_engine
from keyhole.loading.prepare import Prepared, check_source, choose_device, find_source
from keyhole.machine.gpu import ACCELERATOR
from keyhole.machine.held import Changes, alone
from keyhole.machine.settings import matmul_precision, memory_limit, progress_bars
from keyhole.machine.text import counted
from keyhole.methods import METHODS
from keyhole.methods.lora.adapters import add_saved
from keyhole.methods.workload import FORWARD_ONLY, Workload
from keyhole.model.model import Model
from keyhole.model.structure.source import has_adapter
from keyhole.model.weights.read import fill_from, fill_random
from keyhole.model.weights.small_files import SmallFiles
from keyhole.offload import arena
from keyhole.offload.engine import EngineOptions
from keyhole.ops.autocast import with_gradients
from keyhole.plan.dtype import warn_if_slow
from keyhole.ranks import Ranks
from keyhole.weak import leaves_no_frames


@leaves_no_frames
@alone()  # meanwhile Transformers changes the default dtype for all threads
def load(
    model: str | Path | PretrainedConfig,
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
    freeze: str | list[str] | None = None,
    expert_units: bool = True,
    workload: Workload | None = None,
    trust_remote_code: bool = False,
    adapter: bool = True,
    head: str | None = None,
    num_labels: int | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    ranks: Ranks | None = None,
    overlap: bool = True,
    reuse_slots: bool = True,
    slot_count: int = 0,
    chaos: random.Random | None = None,
) -> Model:
    """Loads an HF directory, hub id, "demo" or config object; init="random" needs only the config.

        model = keyhole.load("path-or-hub-id", placement="stream", gpu_memory="8GiB", dtype="bfloat16")

    placement: "resident" (weights on the device), "stream" (in host memory, uploaded as they are used), or "auto"
    (resident if everything fits).
    gpu_memory: most GPU memory to use, such as "8GiB" or a number of bytes; as many weights as fit beside the workload
    stay there. None: all that is free.
    dtype: what kernels compute in: "float32", "bfloat16", "float16" (None: as stored; "auto": as stored, unless the
    workload's method or the device cannot use it). wire: the format in which weights are stored and moved: "fp32",
    "bf16", "fp16", "fp8", or frozen: "int8", "int4", "nf4"; None: that of dtype.
    device: "cpu", "cuda" or "cuda:N"; None: the first GPU, or the CPU if there is none.
    init, seed: "random" draws all weights by the seed, and reads no file of weights.
    tf32: float32 products may use TF32, in the whole process, while the model exists.
    graphs: small blocks may run as CUDA graphs; reverse_graphs: also in steps with gradients.
    freeze: parameters that are not trained: "embeddings" (with the head), modules such as "model.layers.0", names with
    *; or a list of them.
    expert_units=False: large stacks of experts are computed and moved whole, not one expert at a time.
    workload: what will run, so that the budget leaves room for it: keyhole.Workload("lomo", tokens=4096), the tokens of
    a pass; passes: the micro-batches of a step. None: passes of zo over 2048 tokens.
    trust_remote_code: the directory's own code may build the model.
    adapter=False ignores what a directory holds beside the weights (adapter/, the factors of a checkpoint).
    head="classification" with num_labels makes a text classifier (num_labels=1: a regression) from an encoder or
    decoder; missing weights of its head are initialised by the seed. A model saved as a classifier needs neither.
    tokenizer: the one of the directory, if it has been read already.
    ranks: the processes that train this model together, as `keyhole train` has joined them; None: only this one.
    overlap, reuse_slots, slot_count (0: as planned), chaos: how units are moved, for ablations and tests.
    """
    check_source(model)
    if init not in ("pretrained", "random"):
        raise UserError(f"init={init!r}: choose pretrained or random")
    if not fits(seed, Seed):
        raise UserError(f"seed: found {seed!r:.80}, expected {describe(Seed)}")
    _check_work(workload)
    with _changes() as changes:
        changes.set(matmul_precision(), "high" if tf32 else "highest")
        device, ranks, is_read = choose_device(device), ranks or Ranks(), init == "pretrained"
        work = _shared_work(workload or Workload(), ranks)
        found = find_source(
            model,
            wire=wire,
            head=head,
            num_labels=num_labels,
            trust_remote_code=trust_remote_code,
            factors=adapter and is_read,
        )
        outline = found.outline(dtype, device, work.method, freeze, expert_units, seed)
        warn_if_slow(outline.choice, device)
        ready = outline.place(placement, gpu_memory, device, work, from_files=is_read)
        module, layout, formats, placed = ready.module, ready.layout, ready.formats, ready.placed
        if device.type == ACCELERATOR:  # from here on the allocator refuses what is beyond the budget
            memory_limit(device).admit(changes, placed.budget_bytes)
        options = EngineOptions(slot_count=slot_count, overlap=overlap, reuse_slots=reuse_slots, chaos=chaos)
        engine = make_engine(ready, device, work, ranks, options)
        if ranks.several:  # all split a step alike, whatever memory each has
            limits = [tokens for tokens in ranks.objects(placed.pass_tokens) if tokens is not None]
            placed.pass_tokens = min(limits, default=None)
        _move_buffers(module, device)
        tokenizer, at = found.read_tokenizer() if tokenizer is None else tokenizer, found.directory
        loaded = Model(
            module,
            layout,
            engine,
            formats,
            tokenizer=tokenizer,
            source=found.name,
            published=None if at is None else SmallFiles.read(at, tokenizer, found.weights if is_read else None),
            placed=placed,
            graphs=graphs,
            reverse_graphs=reverse_graphs,
            changes=changes,
            ranks=ranks,
        )
        if is_read:
            _fill(loaded, ready, seed, fresh_head=head is not None)
        else:
            _pin(loaded, touch=True)
            fill_random(loaded, _std(loaded), seed)
            loaded.drawn = True
        ranks.barrier()  # shared homes are filled
        loaded.binding.bind_homes()
        if adapter and found.directory is not None and has_adapter(found.directory):
            placed.adapter = found.directory / "adapter"
            placed.reasons.append(add_saved(loaded, placed.adapter))
        if found.beside is not None:
            placed.reasons.append(found.beside.add_to(loaded))
        return loaded


def _fill(loaded: Model, ready: Prepared, seed: int, fresh_head: bool) -> None:
    """Fills the homes with weights from files. A head that they lack is initialised by the seed, or comes later, with
    the factors of a light checkpoint."""
    source = ready.source
    if source.weights is None:
        raise UserError('a config object has no weights: pass init="random", or a model directory')
    given_head = source.beside is not None and source.beside.original is not None
    fresh = fill_from(loaded, source.weights, ready.choice.dtype, fresh_head=fresh_head or given_head)
    loaded.drawn_head = fresh
    if not given_head:
        fill_random(loaded, _std(loaded), seed, only=fresh)
        loaded.drawn = bool(fresh)
        if fresh:
            names, labels = ", ".join(tensor.name for tensor in fresh), loaded.config.num_labels
            ready.placed.reasons.append(
                f"head: {names} are not in the files, or not for {counted(labels, 'label')}: drawn from seed {seed}"
            )
    _pin(loaded, touch=False)


def _std(loaded: Model) -> float:
    return getattr(loaded.config, "initializer_range", None) or 0.02


@contextmanager
def _changes() -> Iterator[Changes]:
    """The process settings that loading changes, for the model to restore; restored here if loading fails. Weights are
    ordinary tensors, also in the caller's inference mode: whoever loads a model there may train it elsewhere."""
    changes = Changes()
    try:
        with progress_bars().held(False), with_gradients():
            yield changes
    except BaseException:
        changes.close()
        raise


def _check_work(work: object) -> None:
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
        if not fits(value := getattr(work, name), Count):
            raise UserError(f"workload: {name}: found {value!r}, expected a whole number of at least 1")


def _shared_work(work: Workload, ranks: Ranks) -> Workload:
    """One rank's share of the workload."""
    return replace(work, passes=-(-work.passes // ranks.size), ranks=ranks.size, local_ranks=ranks.local_size)


def _move_buffers(module: nn.Module, device: torch.device) -> None:
    for owner in module.modules():
        for name, buffer in owner._buffers.items():
            if buffer is not None:
                owner._buffers[name] = buffer.to(device)


def _pin(model: Model, touch: bool) -> None:
    """Page-locks the streamed homes."""
    if model.engine.streamed and model.device.type == ACCELERATOR:
        flats = model.engine.host_memory()
        if touch and not model.engine.shared:  # uses all cores; pinning alone would touch the pages on one core
            for flat in flats:
                flat.fill_(0)
        model.pinned = all([arena.pin(flat, model.device) for flat in flats])
