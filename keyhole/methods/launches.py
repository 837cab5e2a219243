"""What the host does per block and pass: operations that it launches, by kind (machine/rates.py).

    called      of the forward pass, called from Python by the modules of a block while autograd records them
    reversed    of the backward pass, called by autograd from C++
    kernels     launches without either: of an optimizer, of a CUDA graph

A block's own operations are counted (model/structure/block_counts.py). Beside them, in operations of these kinds:

    TENSOR      per trained tensor under plain autograd: its gradient is accumulated, and it is in the lists of the
                optimizer's foreach kernels; 1.2 `reversed`
    MATRIX      per matrix in a reverse sweep: hooks, the offer of its gradient, product, update, each with Python code
                around it; 14 `called`
    VECTOR      per vector in a reverse sweep: a hook and an update; 2 `called`
    ADAPTED     per adapted layer: 2 casts and 2 products in each forward pass, 11 operations in the backward pass
                (methods/lora/adapted_linear.py)

The constants are fitted to two hosts. One had launches of 7 us: SmolLM2-135M, 30 Llama blocks in short batches, 268 ms
of host time in `lomo` eagerly, 37 ms as CUDA graphs, 93 ms in plain SGD (LOG.md, "Short batches"); 10 ms in a forward
pass of OPT-1.3B. The other had launches of 11.6 us (benchmarks/plan_check_h200_2026-11-16.json): `sgd` 57 ms, `lora`
189, `lomo-lora` 357 on OPT-1.3B, all bound by the host; `lomo` on Llama-3.5B 246 at most. One forward operation is then
worth 5.7 launches, one of a backward pass 2.9.

A block that runs as CUDA graphs costs RECORDED launches, whatever it holds: one graph each for the forward pass, for
the backward pass and for the updates of a unit, copies of inputs, and the sweep's own work. Experts: per expert.
"""

from dataclasses import dataclass

from keyhole.model.structure.layout import Layout

LLAMA_KERNELS = 37, 70  # of a block, forward and backward, where they cannot be counted
TENSOR, MATRIX, VECTOR = 1.2, 14, 2
ADAPTED = 4, 11


@dataclass(frozen=True)
class Launches:
    """Operations of the host."""

    called: float = 0.0
    reversed: float = 0.0
    kernels: float = 0.0

    def __add__(self, other: "Launches") -> "Launches":
        return Launches(self.called + other.called, self.reversed + other.reversed, self.kernels + other.kernels)

    def __mul__(self, times: float) -> "Launches":
        return Launches(times * self.called, times * self.reversed, times * self.kernels)

    __rmul__ = __mul__


RECORDED = Launches(kernels=20), Launches(kernels=140)
EXPERT = Launches(kernels=25), Launches(kernels=60)


def tensors_of_blocks(layout: Layout) -> tuple[int, int]:
    """(matrices, vectors) of all blocks, wherever their vectors are kept."""
    found = [t for t in layout.tensors if t.block is not None]
    matrices = sum(len(t.shape) > 1 for t in found)
    return matrices, len(found) - matrices


def of_forward(layout: Layout) -> Launches:
    """A forward pass over all blocks, operation by operation."""
    each = layout.counts.forward_kernels if layout.counts else LLAMA_KERNELS[0]
    return Launches(called=layout.block_count * each)


def of_backward(layout: Layout) -> Launches:
    """A backward pass over all blocks, without what is done with gradients."""
    each = layout.counts.backward_kernels if layout.counts else LLAMA_KERNELS[1]
    return Launches(reversed=layout.block_count * each)


def of_gradients(layout: Layout, plain: bool) -> Launches:
    """What is done with the gradients of all blocks: by plain autograd, or in a reverse sweep."""
    matrices, vectors = tensors_of_blocks(layout)
    if plain:
        return Launches(reversed=TENSOR * (matrices + vectors))
    return Launches(called=MATRIX * matrices + VECTOR * vectors)


def of_adapters(layers: int, forwards: float) -> Launches:
    """A backward pass and this many forward passes of adapted layers."""
    return Launches(called=forwards * ADAPTED[0] * layers, reversed=ADAPTED[1] * layers)
