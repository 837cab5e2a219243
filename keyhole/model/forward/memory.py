"""Bytes on the device and on the host, as plain functions of shapes. Nothing here touches a GPU.

A zeroth-order step that streams units through slots holds on the device, for b bytes per element
(homes and slots in the wire format):

    homes        the common unit and every resident unit                               b x their elements
    slots        slot_count x the largest streamed unit                          b x ...
    perturbed    w + eps z and w - eps z of one unit, and of the common unit for
                 each of q directions; one fp32 unit where packed ones have gaps b x (2 unit + 2 q common)
    activations  one running pass, and what each waiting pass keeps              below
    logits       [tokens, chunk] of one vocabulary chunk, in b and in fp32       below
    workspace    reserved by cuBLAS, once per stream

Activations are estimated from two widths: H, the hidden size, and W, the widest side of a matrix in a block. A pass
in the middle of an MLP holds the residual, its normalised copy and up to three tensors of width W (gate, up, product).
The allocator cannot always reuse freed memory at once: a seventh more (FRAGMENTATION). Blocks that are small enough for
CUDA graphs need a second set of activations in the graphs' memory pool, and are captured on a stream of their own, for
which cuBLAS reserves another workspace.
Activations and logits are never allocated at the same time, so the larger counts. These numbers decide what fits; the
measured peak is printed beside them after a few steps.
"""

from dataclasses import dataclass

from keyhole.model.forward.blocks import SMALL_FLOP
from keyhole.model.forward.head import HEAD_TOKENS
from keyhole.model.structure.layout import CHUNK_ROWS, Layout
from keyhole.model.weights.format import Wire

FRAGMENTATION = 1.15  # factor for activations, which differ in size
SLOT_COUNT = 3
ALLOCATOR_SLACK = 1.03  # memory that the caching allocator holds but cannot reuse


@dataclass(frozen=True)
class ForwardBytes:
    """The parts of the device peak."""

    homes: int
    slots: int
    perturbed: int
    activations: int
    logits: int
    workspace: int

    @property
    def during_a_step(self) -> int:
        """The part that is free between steps."""
        return self.perturbed + max(self.activations, self.logits) + self.workspace

    @property
    def total(self) -> int:
        moving = max(self.activations, self.logits)
        return int((self.homes + self.slots + self.perturbed + moving + self.workspace) * ALLOCATOR_SLACK)


def activation_bytes(layout: Layout, tokens: int, passes: int, element_bytes: int) -> int:
    """One running pass in the widest part of a block, and what all passes keep while they wait."""
    hidden, wide = layout.table.shape[1], layout.widest
    cut = len(layout.of_kind("block")) > layout.block_count  # then passes also wait in the middle of an MLP
    running = tokens * (2 * hidden + 3 * wide)
    waiting = tokens * passes * (2 * hidden + (wide if cut else 0))
    graphs = recorded_numel(tokens, passes, hidden, wide) if launched_as_graphs(layout, tokens) else 0
    return int((running + waiting + graphs) * element_bytes * FRAGMENTATION)


def recorded_numel(tokens: int, passes: int, hidden: int, wide: int) -> int:
    """Additional elements for blocks that run as CUDA graphs."""
    return tokens * (2 * hidden + 3 * wide) + tokens * passes * 2 * hidden


def launched_as_graphs(layout: Layout, tokens: int, limit_flop: float = SMALL_FLOP) -> bool:
    """Whether blocks are whole and small enough (model/forward/blocks.py), with no router that the host reads."""
    small = 2 * layout.largest_block_unit * tokens <= limit_flop
    return small and len(layout.of_kind("block")) == layout.block_count > 0 and not layout.experts


def logits_bytes(layout: Layout, tokens: int, passes: int, element_bytes: int) -> int:
    """Logits of one chunk in the model's dtype and two fp32 copies, and the hidden states of all passes."""
    at_once = min(tokens, HEAD_TOKENS)
    rows = min(CHUNK_ROWS, layout.table.shape[0])
    return at_once * rows * (element_bytes + 8) + tokens * passes * layout.table.shape[1] * element_bytes


def forward_bytes(
    layout: Layout,
    streamed: set[int],
    *,
    tokens: int,
    passes: int,
    directions: int,
    formats: Wire,
    workspace_bytes: int,
) -> ForwardBytes:
    """The device peak of forward passes in lockstep, with perturbed copies for this many directions at a time."""
    element_bytes = formats.dtype.itemsize
    gaps, homes = layout.largest_with_gaps if formats.packs else 0, formats.homes(layout)
    perturbed = element_bytes * (2 * layout.largest_unit_numel + 2 * directions * layout.common.numel)
    return ForwardBytes(
        homes=sum(homes) - sum(map(homes.__getitem__, streamed)),  # a map: models of many layers have many units
        slots=SLOT_COUNT * max(map(homes.__getitem__, streamed), default=0),
        perturbed=perturbed + 4 * gaps,
        activations=activation_bytes(layout, tokens, passes, element_bytes),
        logits=logits_bytes(layout, tokens, passes, element_bytes),
        workspace=workspace_bytes * _streams(layout, tokens, passes),
    )


def evaluation_bytes(layout: Layout, *, tokens: int, passes: int, formats: Wire, workspace_bytes: int) -> int:
    """Bytes that `passes` forward passes of unperturbed weights need beside homes and slots: activations or logits,
    cuBLAS's workspaces, and a unit in the dtype of compute if it is stored in another."""
    b = formats.dtype.itemsize
    unpacked = b * layout.largest_unit_numel if formats.packs or formats.plain != formats.dtype else 0
    moving = max(activation_bytes(layout, tokens, passes, b), logits_bytes(layout, tokens, passes, b))
    return int((moving + unpacked + workspace_bytes * _streams(layout, tokens, passes)) * ALLOCATOR_SLACK)


def _streams(layout: Layout, tokens: int, passes: int) -> int:
    """Streams that launch products: one; while graphs are captured, up to one more for each pass."""
    return 1 + (passes if launched_as_graphs(layout, tokens) else 0)


def host_bytes(layout: Layout, streamed: set[int], formats: Wire) -> int:
    """Host memory of the streamed units."""
    return sum(map(formats.homes(layout).__getitem__, streamed))
