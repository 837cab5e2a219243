"""The host's work per block, tensor and adapter, measured without a GPU: the origin of methods/launches.py.

    python -m benchmarks.host_work                  # half a minute; another process on the same cores spoils it

Models of 16 numbers' width compute nothing worth mentioning, so a step is the host's work: Python, modules, autograd,
calls. Steps with FEW and MANY blocks give the microseconds per block, without what a step costs once. They are divided
by an operation of a forward pass on this machine (`called`, plan/measure.py), because hosts differ. From these:

    sweep     = block - UNRECORDED x forward - forward - backward          of `adam-offload`: hooks and offers alone
    update    = `lomo` - `adam-offload`;   sums, sketches = `adalomo`, `apollo-mini` - `lomo`
    adapters  = `lomo-lora` - `lomo`, and `lora` without its block

The column "beside its own" is the first line for all methods, without UNRECORDED x forward for those of torch alone.

A Llama block has 7 matrices and 2 vectors, one of OPT 6 and 10: two equations for each pair of constants. On a CPU our
own kernels are their references, about 20 small operations in place of one launch of Triton with its arguments: both
take about as long on the hosts that were compared (`lomo` on 30 Llama blocks: 268 ms measured on a GPU's host with
launches of 7 us, 257 here).
"""

import time
from typing import Any

import torch

import keyhole
from keyhole.bench.measure import random_batch
from keyhole.methods import METHODS
from keyhole.methods.launches import UNRECORDED, of_backward, of_forward
from keyhole.methods.workload import Workload
from keyhole.plan.measure import host_rates

FEW, MANY, STEPS, WARM_UP, TOKENS = 6, 18, 10, 3, 8
CPU = torch.device("cpu")
CASES = ("sgd", "galore", "lora", "adam-offload", "lomo", "adalomo", "lsp", "lomo-lora", "apollo-mini")


def config(family: str, blocks: int) -> Any:
    from transformers import LlamaConfig, OPTConfig

    shared = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": blocks, "vocab_size": 32}
    if family == "llama":
        return LlamaConfig(**shared, intermediate_size=32, num_key_value_heads=2)
    return OPTConfig(**shared, ffn_dim=64, word_embed_proj_dim=16, max_position_embeddings=64)


def step_s(method: str, family: str, blocks: int) -> tuple[float, Any]:
    """The best seconds of a step, and the layout."""
    row = METHODS[method]
    own = row.settings(**({"learn": False} if method == "lsp" else {}))
    work = Workload(method, TOKENS, row.passes(own), own, length=TOKENS)
    model = keyhole.load(config(family, blocks), init="random", device=CPU, dtype=torch.float32, workload=work)
    trained, batch, found = row.load()(model, 1e-6, **vars(own)), random_batch(1, TOKENS, 32), []
    for _ in range(STEPS):
        begin_s = time.perf_counter()
        trained.step(batch)
        found.append(time.perf_counter() - begin_s)
    model.close()
    return min(found[WARM_UP:]), model.layout


def main() -> None:
    torch.set_num_threads(1)
    launch, called, reversed_ = (host_rates(CPU)[name] for name in ("launch", "called", "reversed"))
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


if __name__ == "__main__":
    main()
