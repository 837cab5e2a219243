"""The host's work per block, tensor and adapter, measured without a GPU: the origin of methods/launches.py.

    python -m benchmarks.host_work                  # about a minute; another process on the same cores spoils it

Models of 16 numbers' width compute nothing worth mentioning, so a step is the host's work: Python, modules, autograd,
calls. Steps with FEW and MANY blocks give the microseconds per block, without what a step costs once. They are divided
by an operation of a forward pass on this machine (`called`, plan/measure.py), because hosts differ. From these:

    sweep     = block - UNRECORDED x forward - forward - backward          of `adam-offload`: hooks and offers alone
    update    = `lomo` - `adam-offload`;   sums, sketches = `adalomo`, `apollo-mini` - `lomo`
    adapters  = `lomo-lora` - `lomo`, and `lora` without its block; its forward pass: `lora` that recomputes blocks
                - `lora` that does not - UNRECORDED x forward. Its AdamW is left out: torch's loop over tensors on a CPU
                is a few kernels over all of them on a GPU

The column "beside its own" is the first line for all methods, without UNRECORDED x forward for those of torch alone.

A Llama block has 7 matrices and 2 vectors, one of OPT 6 and 10: two equations for each pair of constants. On a CPU our
own kernels are their references, about 20 small operations in place of one launch of Triton with its arguments: both
take about as long on the hosts that were compared (`lomo` on 30 Llama blocks: 268 ms measured on a GPU's host with
launches of 7 us, 257 here).

Streamed `zo`, two passes in lockstep, with blocks whole and cut in five units:

    UNIT      = (cut block - whole block) / 4         VISIT = (whole block - UNIT) / 2 - UNRECORDED x forward

Its kernel is left out, up to the launch, because a reference would be most of the step; so are CUDA's events, streams
and copies, about 20 calls per unit, which a CPU does not have. The last line is the turn alone: two passes that do
nothing but wait.

Counted are CPU seconds of all threads (on one core they take turns, and a neighbour's do not count), first quartiles.
Runs one after the other agreed within 2 to 6 % per block.
"""

import os
import time
from typing import Any
from unittest.mock import patch

import torch

import keyhole
from keyhole.bench.measure import random_batch
from keyhole.methods import METHODS
from keyhole.methods.launches import UNRECORDED, of_backward, of_forward
from keyhole.methods.workload import Workload
from keyhole.model.forward.lockstep import Lockstep
from keyhole.model.model import Model
from keyhole.model.structure.layout import Unit, find_layout
from keyhole.model.structure.skeleton import build
from keyhole.model.weights.format import Wire
from keyhole.offload.arena import split
from keyhole.offload.engine import Engine
from keyhole.ops.zo import flat
from keyhole.plan.measure import HostRates

FEW, MANY, STEPS, WARM_UP, TOKENS = 6, 18, 10, 3, 8
CUT, PARTS, TURNS = 512, 5, 400  # elements of a unit, units of a block, turns
CPU = torch.device("cpu")
CASES = ("sgd", "galore", "lora", "adam-offload", "lomo", "adalomo", "lsp", "lomo-lora", "apollo-mini")


def config(family: str, blocks: int) -> Any:
    from transformers import LlamaConfig, OPTConfig

    shared = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": blocks, "vocab_size": 32}
    if family == "llama":
        return LlamaConfig(**shared, intermediate_size=32, num_key_value_heads=2)
    return OPTConfig(**shared, ffn_dim=64, word_embed_proj_dim=16, max_position_embeddings=64)


def step_s(method: str, family: str, blocks: int, updates: bool = True, **options: Any) -> tuple[float, Any]:
    """CPU seconds of a step, a first quartile, and the layout. updates: of torch's optimizer."""
    row = METHODS[method]
    own = row.settings(**({"learn": False} if method == "lsp" else {}), **options)
    work = Workload(method, TOKENS, row.passes(own), own, length=TOKENS)
    model = keyhole.load(config(family, blocks), init="random", device=CPU, dtype=torch.float32, workload=work)
    trained, batch, found = row.load()(model, 1e-6, **vars(own)), random_batch(1, TOKENS, 32), []
    if not updates:
        trained.optimizer.step = lambda: None
    for _ in range(2 * STEPS):
        begin_s = time.process_time()
        trained.step(batch)
        found.append(time.process_time() - begin_s)
    model.close()
    return _quartile(found), model.layout


def _quartile(found: list[float]) -> float:
    """The first one, of the steps after the warm-up."""
    return sorted(found[WARM_UP:])[(len(found) - WARM_UP) // 4]


def streamed(blocks: int, cut: int | None) -> Model:
    """A Llama whose blocks are behind the engine; cut: the most elements of a unit. All weights are 0."""
    module = build(config("llama", blocks), torch.float32)
    for buffer in module.buffers():
        buffer.zero_()
    layout = find_layout(module, cut)
    homes = split(torch.zeros(layout.numel), [unit.numel for unit in layout.units])
    engine = Engine(homes, {unit.index for unit in layout.of_kind("block")}, CPU)
    model = Model(module, layout, engine, Wire(torch.float32))
    model.binding.bind_homes()
    return model


class _Unlaunched:
    """A kernel that is not launched."""

    def __getitem__(self, grid: Any) -> Any:
        return lambda *args, **options: None


def streamed_s(blocks: int, cut: int | None) -> tuple[float, float]:
    """CPU seconds of a step of zo, a first quartile, and units per block."""
    model = streamed(blocks, cut)
    zo, batch, found = METHODS["zo"].load()(model, 1e-6), random_batch(1, TOKENS, 32), []
    with patch.object(flat, "_zo_kernel", _Unlaunched()), patch.object(flat, "use_kernel", lambda device: True):
        for _ in range(2 * STEPS):
            begin_s = time.process_time()
            zo.step(batch)
            found.append(time.process_time() - begin_s)
    model.close()
    return _quartile(found), len(model.layout.of_kind("block")) / blocks


def turn_s() -> float:
    """CPU seconds per unit of two passes in lockstep that do nothing."""
    conductor, units, found = Lockstep(CPU), [Unit(i, "", "block", 0, 0, []) for i in range(TURNS)], []

    def body() -> None:
        for unit in units:
            conductor.current.meet(unit)

    for _ in range(STEPS):
        begin_s = time.process_time()
        conductor.run([body, body], lambda unit, resume: (resume(0), resume(1)))
        found.append((time.process_time() - begin_s) / TURNS)
    conductor.close()
    return min(found)


def print_adapters(called: float, reversed_: float) -> None:
    """The host's work per adapter, without its update."""
    for family, layers in (("llama", 7), ("opt", 6)):
        block = {}
        for how in ("block", "none"):
            few, layout = step_s("lora", family, FEW, False, activations=how)
            block[how] = (step_s("lora", family, MANY, False, activations=how)[0] - few) / (MANY - FEW)
        once, back = of_forward(layout).called / FEW * called, of_backward(layout).reversed / FEW * reversed_
        forward = (block["block"] - block["none"] - UNRECORDED * once) / layers
        backward = (block["none"] - once - back) / layers - forward
        print(f"adapter, {family}: forward {forward / called:.1f} called, backward {backward / called:.1f}")


def print_lockstep(called: float) -> None:
    """The host's work per block and unit of streamed zo."""
    block = {}
    for cut in (None, CUT):
        (few, parts), (many, _) = streamed_s(FEW, cut), streamed_s(MANY, cut)
        block[cut] = (many - few) / (MANY - FEW)
        whole = f"{1e6 * block[cut]:.0f} us per block, {1e6 * (few - FEW * block[cut]):.0f} per step"
        print(f"zo, streamed, {parts:.0f} units per block: {whole}")
    assert parts == PARTS, parts
    unit = (block[CUT] - block[None]) / (PARTS - 1)
    forward = of_forward(streamed(FEW, None).layout).called / FEW
    visit = (block[None] - unit) / 2 - UNRECORDED * forward * called
    print(f"per unit {1e6 * unit:.0f} us, {unit / called:.1f} called; per block and pass {visit / called:.1f} called")
    print(f"of which the turn: {1e6 * turn_s():.0f} us per unit of two passes")


def main() -> None:
    torch.set_num_threads(1)
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    rates = HostRates(CPU)
    for _ in range(4):
        rates.burst()
    launch, called, reversed_ = (rates.found[name] for name in ("launch", "called", "reversed"))
    print(f"launch {1e6 * launch:.1f} us, called {1e6 * called:.1f}, reversed {1e6 * reversed_:.1f}")
    print(f"{'method':13} {'family':7} us per block   in called  beside its own  us per step")
    for method in CASES:
        for family in ("llama", "opt"):
            few, layout = step_s(method, family, FEW)
            many, _ = step_s(method, family, MANY)
            block = (many - few) / (MANY - FEW)
            first = 0.0 if METHODS[method].load().__module__.startswith("keyhole.methods.baselines") else UNRECORDED
            forward, backward = of_forward(layout).called / FEW, of_backward(layout).reversed / FEW
            beside = block - (1 + first) * forward * called - backward * reversed_
            print(
                f"{method:13} {family:7} {1e6 * block:12.0f} {block / called:10.0f} {beside / called:15.0f} "
                f"{1e6 * (few - FEW * block):12.0f}",
                flush=True,
            )
    print_adapters(called, reversed_)
    print_lockstep(called)


if __name__ == "__main__":
    main()
