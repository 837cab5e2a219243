"""What the host does per block and pass, in operations by kind (machine/rates.py).

    called      of the forward pass, called from Python by the modules of a block while autograd records them
    reversed    of the backward pass, called by autograd from C++
    kernels     launches without either: of an optimizer, of a CUDA graph

The rates of the first two are those of a tiny Llama block in float32, divided by its kernels (plan/measure.py). It
makes 69 calls for 33 kernels in its forward pass and 161 for 66 in its backward pass, and the host pays for views too.
So the calls of another block are counted (model/structure/block_counts.py), and PER_CALL converts them: an OPT block
has only 12 and 26 kernels, but 37 and 101 calls, which are worth 18 and 41 operations.

All other constants of the host are here too. Beside the block's own operations:

    UNRECORDED  the share of a forward pass that is left without autograd's record (the first one of a sweep that
                recomputes blocks, and those of zo)
    TENSOR      per trained tensor under plain autograd: its gradient is accumulated, and it is in the lists of the
                optimizer's foreach kernels
    MATRIX      per matrix in a reverse sweep: hooks, the offer of its gradient, the product; each with Python around it
    VECTOR      per vector in a reverse sweep: a hook and its gradient
    UPDATE      per matrix and per vector that is updated at once by our own kernels (lomo, lsp; not adam-offload)
    ADAPTED     per adapted layer: in each forward pass, in the backward pass, and its AdamW
                (methods/lora/adapted_linear.py)
    AWAY        per group and per unit whose numbers the CPU updates (lsp): norm, copies and job; then the copy back and
                the update of the weights
    VISIT       per block and pass in lockstep (model/forward/lockstep.py): a turn, hooks, weights that are bound
    UNIT        per unit in lockstep: acquired, perturbed, committed, released
    STEP        per step: embedding, head and loss, batch and bookkeeping; plain, and in a sweep or in lockstep
    PLAIN       launches per operation of an optimizer that allocates its result (the measured one adds in place)
    HOOKED      reversed operations per operation of MATRIX, VECTOR and UPDATE (and of sketches,
                methods/lomo/memory.py): hooks run in autograd's own thread
    RECORDED    per block that runs as CUDA graphs, whatever it holds: one graph each for the forward pass, for the
                backward pass and for the updates of a unit, copies of inputs, and the sweep's own work
    EXPERT      per expert that a pass uses, in the forward pass and in the backward pass

Where the numbers come from. A script timed steps of models 16 numbers wide on one core, where
nothing is computed, so that a step is the host's work alone. Differences between 6 and 18 blocks, and between methods,
give the constants in operations of the same machine: a Neoverse N1 (launch 6.2 us, called 31, reversed 18). They were
then checked, and some of them chosen, by steps on hosts of an H200
(benchmarks/records/plan_check_h200_2026-11-17_c.json to _i.json; below: _c to _i).

    MATRIX, VECTOR,     beside a block's own operations, in three runs, on Llama and on OPT: `adam-offload` 86 to 100
    UPDATE              and 133 to 145, `lomo` 153 to 157 and 257, `lomo-lora` 300 to 316 and 392 to 402. Llama and OPT
                        are the two equations for each pair of constants
    STEP                120 to 170 under plain autograd, 110 to 250 in a sweep, 200 to 220 in lockstep
    HOOKED              on four hosts of an H200 `launch` was 5.9 to 9.5 us, `called` 16 to 30 and `reversed` 24 to 34,
                        and `apollo-mini`, whose step is mostly hooks, took 0.348 to 0.459 s: 1.32 times as long on the
                        slowest, where launches take 1.6 times as long and reversed operations 1.4 times (_c to _f)
    ADAPTED             4.1 to 6.1 in a forward pass and 5.6 to 14.8 in a backward pass, in six measurements on the N1.
                        The extremes are `lora` on Llama and on OPT, because of the blocks rather than the adapters: in
                        operations of a Llama block, one of OPT takes 20 more than is counted. The work is Python's, and
                        follows `called`, not `launch`: on the host of an H200 `lora` and `lomo-lora` on OPT took 0.128
                        and 0.234 s with launches of 6.0 us and calls of 15, 0.215 and 0.405 s with 9.7 and 33 (_c, _e).
                        The constants are a compromise of seven runs there: they plan 0.89 to 1.11 of what these took.
                        The update is an estimate: torch's AdamW takes 3 to 5 per adapter with one tensor after the
                        other, as on a CPU, 1 to 2 with lists of tensors, as on a GPU, which then launches a few kernels
                        for all
    TENSOR, PLAIN       0.2 and 1.3, and 1.1 to 1.3, on the N1; chosen within these bounds by `sgd` and `galore` on an
                        H200 (_e to _i: 0.86 to 1.07 of what they took)
    AWAY                six runs of streamed `lsp` on a Llama-3.5B whose blocks were cut in five, with a job per unit,
                        took 2.1 to 2.6 times the launches that had been counted, beyond the exposed update of the
                        embedding, whatever the number of threads that update; a profile showed the GPU waiting for
                        launches. With one job per block a run took 0.371 s, for 0.378 planned (_i)
    UNIT                10.4 on the N1, 0.7 for Triton's launcher (21 us there, measured with a driver that launches
                        nothing), and 3 for CUDA's events, streams and copies, which a CPU does not have: about 20 calls
                        of a third of a launch each, and two copies (an estimate)
    VISIT               4.0 to 6.8 in five measurements
    RECORDED            SmolLM2-135M, 30 blocks: 37 ms with launches of 7 us (LOG.md, "Short batches")

On the host of an H200 (6.0, 15.5 and 23 us) they give `lomo-lora` on OPT-1.3B 0.245 s for 0.234 measured, `apollo-mini`
0.366 for 0.348, `lora` 0.118 for 0.128, `galore` 0.096 for 0.091 (_c).
"""

from dataclasses import dataclass

from keyhole.model.structure.layout import Layout

LLAMA_KERNELS = 37  # of a block's forward pass in bfloat16, where it cannot be counted
LLAMA_CALLS = 73, 165  # of its forward and backward pass
PER_CALL = 33 / 69, 66 / 161
UNRECORDED = 0.7
TENSOR, MATRIX, VECTOR = 0.8, 12, 7
UPDATE = 6, 8
ADAPTED = 7, 18, 1.3
VISIT, UNIT = 5.5, 14
STEP = 140, 200
PLAIN = 1.2
HOOKED = 0.8
AWAY = 54, 36


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


def hooked(operations: float) -> Launches:
    """Operations of hooks, updates and sketches."""
    return Launches(reversed=HOOKED * operations)


def tensors_of_blocks(layout: Layout) -> tuple[int, int]:
    """(matrices, vectors) of all blocks, wherever their vectors are kept."""
    found = [t for t in layout.tensors if t.block is not None]
    matrices = sum(len(t.shape) > 1 for t in found)
    return matrices, len(found) - matrices


def forward_kernels(layout: Layout) -> int:
    """Kernels of a forward pass over all blocks."""
    return layout.block_count * (layout.counts.forward_kernels if layout.counts else LLAMA_KERNELS)


def of_forward(layout: Layout) -> Launches:
    """A forward pass over all blocks, operation by operation, recorded by autograd."""
    each = layout.counts.forward_calls if layout.counts else LLAMA_CALLS[0]
    return Launches(called=layout.block_count * PER_CALL[0] * each)


def of_backward(layout: Layout) -> Launches:
    """A backward pass over all blocks, without what is done with gradients."""
    each = layout.counts.backward_calls if layout.counts else LLAMA_CALLS[1]
    return Launches(reversed=layout.block_count * PER_CALL[1] * each)


def of_gradients(layout: Layout, plain: bool) -> Launches:
    """What is done with the gradients of all blocks: by plain autograd with its optimizer, or in a reverse sweep
    without updates."""
    matrices, vectors = tensors_of_blocks(layout)
    if plain:
        return Launches(called=TENSOR * (matrices + vectors))
    return hooked(MATRIX * matrices + VECTOR * vectors)


def of_updates(layout: Layout) -> Launches:
    """Updates of all tensors of the blocks by our own kernels, as their gradients are handed over."""
    matrices, vectors = tensors_of_blocks(layout)
    return hooked(UPDATE[0] * matrices + UPDATE[1] * vectors)


def of_updates_away(groups: int, units: int) -> Launches:
    """Updates by the CPU of numbers that the GPU compresses and applies: of groups of units, and of the units."""
    return Launches(called=AWAY[0] * groups + AWAY[1] * units)


def of_adapters(layers: int, forwards: float, passes: int) -> Launches:
    """A step of adapted layers: `forwards` forward passes and a backward pass for each of `passes` micro-batches, and
    their update."""
    return Launches(called=(passes * (forwards * ADAPTED[0] + ADAPTED[1]) + ADAPTED[2]) * layers)


def of_lockstep(layout: Layout, passes: int) -> Launches:
    """Forward passes in lockstep over all blocks, operation by operation."""
    passing = UNRECORDED * of_forward(layout) + Launches(called=VISIT * layout.block_count)
    return passes * passing + Launches(called=UNIT * len(layout.units))
