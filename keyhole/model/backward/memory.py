"""Bytes on the device of methods that differentiate block by block (model/backward/reverse.py), from shapes alone.

For b bytes per element, M tokens per micro-batch, m micro-batches, L blocks, width H, widest matrix side W:

    homes        the common unit and every resident unit                                          b x their elements
    slots        for the current block, for the next one, and one more                      2 k + 1 units, k per block
                 where experts are units: for an expert, and for the next one               k + 4, if that is more
    gradients    one matrix and its neighbour in flight; with m > 1 those of one block      b x ...
                 and one matrix more, or, compiled, one block more, since a compiled
                 backward pass returns all at its end (lsp: methods/lsp/memory.py)
    kept         block inputs: L m M H on the device, or three of them if they wait in host memory
                 if no block is recomputed: also what the graphs of the others keep         b M (L m - 1) saved
    activations  of one block that is recomputed with its graph, and gradients in flight    b M (saved + 2 H + (u+1) W)
    (parks)      where passes are parked (activation_store.py): kept 3 M H, and after the last block m M H b for hidden
                 states, (4 + b) H for the gradients of GROUP tokens, and the rest of one pass
    logits       one chunk of the vocabulary, twice in b; and what comes after the last      m M H (8 + 3 b)
                 block, of all micro-batches: its outputs, those of the norm before and
                 after its weight, the norm's input in fp32, the gradients in fp32
    workspace    reserved by cuBLAS
    updates      adam-offload: buffers of its lane (methods/adam_offload/updates.py), and master weights being uploaded

What autograd saves of a block is counted (model/structure/block_counts.py). In the backward pass of its MLP there
are also, with a gated one, gradients of the product, of the gate and of up (u = 2 matrices that widen), and two of
width H. A block that cannot be counted is taken for a pre-norm block with a gated MLP: HIDDEN and WIDE, as
measured on Llama shapes.
Activations and logits are never allocated at the same time, nor logits and block inputs that wait in host memory.
"""

from collections import Counter
from dataclasses import dataclass

from keyhole.model.forward.head import HEAD_TOKENS
from keyhole.model.forward.memory import ALLOCATOR_SLACK, FRAGMENTATION
from keyhole.model.structure.layout import CHUNK_ROWS, Layout
from keyhole.model.weights.format import Wire

HIDDEN, WIDE = 18, 6
FREE_SHARE = 1 / 16  # of the free memory, for the gradients of a block (sink.py)
IN_FLIGHT = 3  # inputs of blocks that are on the device while others wait in host memory
GROUP = 2**14  # tokens whose gradients behind the last block are on the device together, where there is no room for all
COPIES = 4  # of them, within a budget: while a backward pass is captured, two to compare and to restore
HELD = 2  # units of experts that are on the device at the same time (experts.py)


def block_bytes(layout: Layout, itemsize: int) -> int:
    """Bytes of the gradients of the largest block; 0 without blocks."""
    sizes: Counter[int | None] = Counter()
    for unit in layout.of_kind("block"):
        sizes[unit.block] += unit.numel * itemsize
    return max(sizes.values(), default=0)


def input_bytes(layout: Layout, tokens: int, itemsize: int) -> int:
    """Bytes of the inputs of one block, of so many tokens."""
    return itemsize * tokens * int(layout.table.shape[1])


def first_kept(blocks: int, each_bytes: int, room_bytes: int | None) -> int:
    """The first block whose inputs stay on the device, with so many bytes of inputs for each block, and room for so
    many of all (None: no limit). The last blocks' are needed first, so these stay; a few others are on their way."""
    stay = blocks if room_bytes is None else room_bytes // max(1, each_bytes)
    return 0 if stay >= blocks else blocks - max(0, stay - IN_FLIGHT)


def recording_bytes(layout: Layout, itemsize: int, tokens: int) -> int:
    """The most that CUDA graphs of all blocks take for one pass over so many tokens (recorded.py): the inputs of all
    blocks and two gradients, a buffer for the gradients of a block and two copies of it, and the activations of a block
    twice: in the pool, and of the eager run that the first replay is compared with."""
    inputs = (layout.block_count + 3) * tokens * layout.table.shape[1]
    blocks = 3 * layout.blocks_numel // max(1, layout.block_count)
    return int(itemsize * (inputs + blocks + 2 * tokens * block_numel(layout)) * FRAGMENTATION)


@dataclass(frozen=True)
class ReverseBytes:
    """The parts of the device peak."""

    homes: int
    slots: int
    gradients: int
    kept: int
    activations: int
    logits: int
    workspace: int
    updates: int = 0

    @property
    def during_a_step(self) -> int:
        """The part that is free between steps."""
        moving = max(int((self.activations + self.gradients) * FRAGMENTATION), self.logits)
        return self.kept + moving + self.workspace

    @property
    def total(self) -> int:
        return int((self.homes + self.slots + self.updates + self.during_a_step) * ALLOCATOR_SLACK)


def slot_count(layout: Layout) -> int:
    """All units of a block are needed at once, of its experts one; the units of the next block are prefetched."""
    own = of_a_block(layout)
    return max(2 * own + 1, own + 2 * HELD) if layout.has_expert_units else 2 * own + 1


def of_a_block(layout: Layout) -> int:
    """Number of units of a block, without those of experts."""
    if not layout.has_expert_units:
        return -(-len(layout.of_kind("block")) // max(1, layout.block_count))
    own = Counter(unit.block for unit in layout.of_kind("block") if unit.expert is None)
    return max(own.values(), default=0)


def block_numel(layout: Layout, trained: bool = True) -> float:
    """Numbers per token of the activations of one block that is differentiated. trained: its vectors are, too."""
    hidden = layout.table.shape[1]
    wide = layout.widest
    if layout.counts is None:
        return HIDDEN * hidden + WIDE * wide
    widening = sum(n for shape, n in layout.matrices.items() if shape[-2] == wide) // max(1, layout.block_count)
    return saved_numel(layout, trained) + 2 * hidden + (max(1, widening) + 1) * wide


def saved_numel(layout: Layout, trained: bool = True) -> float:
    """Numbers per token that autograd keeps between the forward and the backward pass of one block."""
    found = layout.counts
    if found is None:
        return block_numel(layout)
    return found.saved if trained else found.saved_frozen


def reverse_bytes(
    layout: Layout,
    streamed: set[int],
    *,
    tokens: int,
    passes: int,
    on_host: bool,
    formats: Wire,
    workspace_bytes: int,
    updates: int = 0,
    keeps: float = 0.0,
    compiled: bool = False,
    parks: bool = False,
) -> ReverseBytes:
    """The device peak of a step. on_host: block inputs wait in host memory; parks: so does what passes hold between
    blocks; updates: bytes that the method adds; keeps: the share of what autograd saves that every block keeps, 0 if
    blocks are recomputed; compiled: blocks are."""
    b, hidden = formats.dtype.itemsize, layout.table.shape[1]
    largest = max((shape.numel() for shape in layout.matrices), default=0)
    block = layout.blocks_numel // max(1, layout.block_count)
    homes = formats.homes(layout)
    rows = min(CHUNK_ROWS, layout.table.shape[0])
    at_once = min(tokens, HEAD_TOKENS)
    kept_blocks = min(IN_FLIGHT, layout.block_count) if on_host or keeps else layout.block_count
    step = passes * tokens
    kept, activations = b * kept_blocks * (tokens if parks else step) * hidden, int(b * tokens * block_numel(layout))
    kept += (layout.block_count * passes - 1) * int(keeps * b * tokens * saved_numel(layout))
    at_work = (of_a_block(layout) + HELD) * layout.largest_unit_numel if layout.has_expert_units else block
    after_blocks = step * hidden * (8 + 3 * b) - (b * kept_blocks * step * hidden if on_host else 0)
    if parks:
        after_blocks = hidden * (b * step + (4 + b) * min(step, GROUP) + (8 + 3 * b) * tokens)
    more = block if compiled else largest
    scratch = b * at_work if formats.packs or formats.plain != formats.dtype else 0
    return ReverseBytes(
        homes=sum(homes) - sum(homes[i] for i in streamed),
        slots=slot_count(layout) * max((homes[i] for i in streamed), default=0) + scratch,
        gradients=b * (block + more if passes > 1 else 2 * largest),
        kept=kept,
        activations=activations,
        logits=at_once * rows * (2 * b + 4) + b * rows * hidden * 2 + after_blocks,
        workspace=workspace_bytes * (min(passes, 2) + 2),
        updates=updates,
    )
