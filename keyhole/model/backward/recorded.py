"""One launch per block instead of hundreds: CUDA graphs of a block's forward, and of its recomputation and backward.

A block's forward is some forty kernels, its backward three times as many. With a small model or short sequences the
kernels take less time than their launches by Python and autograd, and the host is the bottleneck. So a block that is
small enough is captured as a CUDA graph once per shape of its inputs, and replayed from then on:

    forward    static inputs -> static output, which is the next block's static input
    reverse    static inputs, gradient of the output -> gradient of the input; gradients of matrices in the buffer of
               unit_gradients.py; gradients of other parameters

A reverse recomputes its block first. Or, where there is room (activations: auto), the forward is captured together with
its autograd graph, which the recording holds for good: its activations then have memory that no other recording uses,
each replay of the forward fills it, and the reverse only reads it: a quarter less work.

Both only read weights and write to memory of their own, so the first replay can be compared with eager execution: it
has to give the same bits, or that block runs eagerly from then on. Graphs change no number. Updates are not part of
the graph, because the sink's use of gradients (rates, steps) changes from step to step.

All graphs share one memory pool for their temporaries, so the next replay of any graph may overwrite them. Results that
are used later are therefore copied out of the pool, within the graph itself. Activations that are kept are not copied,
so they must not lie where another graph, captured earlier, had a temporary: it may be replayed before they are used.
Forwards that keep theirs therefore have pools of their own, one per pass and shape of inputs. In such a pool memory is
reused from one block to a later one only, and blocks are replayed in that order. A forward that is captured out of
order begins a new pool.

Compiled blocks (compiled.py) are rehearsed: they run on the static memory once before they are captured, since what is
compiled or chosen then cannot be captured.

A graph is tied to the addresses of weights, static inputs and the buffer. A resident block always has the same
addresses, a streamed one has those of its slot. Hidden states are already at a static address, where the block before
wrote them; other inputs (masks, rotary tables) are copied to static memory once per pass, not once per block. Gradients
go from block to block through two buffers that alternate.

Not captured: a block in training mode (random numbers), a block with inputs or outputs other than tensors and plain
values, a block whose gradients reach parameters outside of it, and code that cannot be captured (host reads).

Bytes per pass: the inputs of all blocks (which are kept between forward and backward in any case) for the longest
shape, two gradients of such an input, and in the pool one block's activations; where activations are kept, those of all
blocks for every shape. All of it is memory that a step can do without (model/spare_memory.py).
"""

import itertools
from collections import Counter
from collections.abc import Callable, Hashable
from typing import Any

import torch

from keyhole.machine.captures import capturing
from keyhole.model.backward.block_graph import BlockGraph
from keyhole.model.backward.static_memory import StaticMemory, Values, copy_into
from keyhole.model.forward.graphs import signature_of, tensors_of
from keyhole.model.spare_memory import SpareMemory

MAX_GRAPHS = 2048  # a few shapes of forward and reverse for each block
MOST_PARAMETERS = 2**20  # elements of parameter gradients per recording; those of linear layers go to the buffer
NUMBERS = itertools.count(1)
OTHER_BITS = "a recording gave other bits"
SIGHTS = 2  # a call is captured the second time: in the first, libraries choose kernels and workspaces


class _Recording:
    """A CUDA graph, and the tensors that it writes."""

    def __init__(self) -> None:
        self.graph = torch.cuda.CUDAGraph()
        self.result: Any = None
        self.kept: list[BlockGraph] = []  # of a forward: its autograd graph, if it is kept
        self.number = 0  # of a forward whose graph is kept: no other has it, while the id of an object comes back


class RecordedBlocks(StaticMemory):
    """Captures and replays the forward, the backward and the updates of blocks. turn: the index of the pass."""

    def __init__(self, spare: SpareMemory, block_count: int, rehearses: bool = False) -> None:
        super().__init__(spare.device)
        self.spare, device = spare, spare.device
        self.block_count, self.rehearses = block_count, rehearses
        self.pool, self.stream = self._new_pool(), torch.cuda.Stream(device)
        self.kept_pools: dict[Hashable, tuple[int, Any]] = {}  # of kept activations: the last block, and the pool
        self.recordings: dict[Hashable, _Recording | None] = {}  # None: runs eagerly
        self.seen: Counter[Any] = Counter()
        self.ran: dict[Hashable, _Recording | None] = {}  # (turn, block) -> its forward of this pass, if replayed
        self.why = ""  # the reason of the last capture that failed

    # -- what is captured ------------------------------------------------------------------------------------------

    def forward(
        self,
        turn: Hashable,
        block: int,
        values: Values,
        depends_on: Hashable,
        run: Callable[[Values], Any],
        keep: Callable[[Values], BlockGraph] | None = None,
        has_room: Callable[[], bool] = lambda: True,
    ) -> Any:
        """run(values), or the replay of it. The result is valid until the next forward of the same turn. depends_on:
        addresses of weights, and whatever else the graph depends on. keep: the same run with its autograd graph, which
        is kept if there is room."""
        self.ran[turn, block] = None
        kind = ("forward", turn, block, signature_of(values), depends_on)
        if not self._is_due(kind):
            return run(values)
        key = (kind, self.sources_of(values))
        if self._is_full(key):
            return run(values)
        if key not in self.recordings:
            expected = run(values)
            if signature_of(expected) is None:
                self.recordings[key] = None
                return expected
            places = self.places_for(("output", turn), block, self.block_count, tensors_of(expected))
            static = self.copy_in(turn, values)
            key = (kind, self.sources_of(values))  # again: if memory had to grow, inputs have lost their place
            result = expected
            if keep is not None and has_room():
                pool = self._kept_pool((turn, kind[3]), block)
                result = self._checked(key, self._capture_kept(places, static, keep, pool), expected)
                if self.recordings[key] is None:  # a pool goes with its last graph
                    self.kept_pools.pop((turn, kind[3]), None)
            if self.recordings.get(key) is None:
                self._rehearse(run, static)
                result = self._checked(key, self._capture(lambda: copy_into(places, run(static))), expected)
            self.ran[turn, block] = self.recordings[key]
            return result
        self.copy_in(turn, values)
        self.ran[turn, block] = self.recordings[key]
        return self._replay(key, lambda: run(values))

    def reverse(
        self,
        turn: Hashable,
        block: int,
        values: Values,
        grads: Values,
        depends_on: Hashable,
        run: Callable[[Values, Values], tuple[Values, Values]],
        memory: list[torch.Tensor],
        run_kept: Callable[[BlockGraph, Values], tuple[Values, Values]] | None = None,
    ) -> tuple[tuple[Values, Values], bool]:
        """run(values, grads) or the replay of it, and whether it was replayed. run returns the gradients of inputs and
        of parameters, and writes to `memory`. run_kept: the same from the graph that the block's forward has kept."""
        ran = self.ran.get((turn, block))
        kept = ran.kept if ran is not None and run_kept is not None else []
        read = [] if kept else values  # a graph that was kept has the inputs
        of_forward = ran.number if kept and ran is not None else 0
        kind = ("reverse", turn, block, signature_of([*values, *grads]), depends_on, of_forward)
        if not self._is_due(kind):
            return run(values, grads), False
        of_grads = ("gradient", turn)
        key = (kind, self.sources_of(read), self.sources_of(grads))
        if self._is_full(key):
            return run(values, grads), False
        if key not in self.recordings:
            before = [flat.clone() for flat in memory]
            expected = run(values, grads)
            after = [flat.clone() for flat in memory]
            found = None
            if sum(g.numel() for g in tensors_of(expected[1])) <= MOST_PARAMETERS:
                places = self.places_for(("input gradient", turn), block % 2, 2, tensors_of(expected[0]))
                more = self.places_for(("parameter gradient", turn, block), 0, 1, tensors_of(expected[1]))
                if kept and self.ran.get((turn, block)) is not ran:  # memory has grown: the forward is dropped
                    return expected, False
                static = self.copy_in(turn, read), self.copy_in(of_grads, grads)
                key = (kind, self.sources_of(read), self.sources_of(grads))  # again: see `forward`

                def run_static() -> tuple[Values, Values]:
                    return run_kept(kept[0], static[1]) if kept and run_kept is not None else run(*static)

                def captured() -> tuple[Values, Values]:
                    of_inputs, of_parameters = run_static()
                    return copy_into(places, of_inputs), copy_into(more, of_parameters)

                self._rehearse(run_static)
                for flat, old in zip(memory, before, strict=True):
                    flat.copy_(old)
                found = self._capture(captured)
            result = self._checked(key, found, expected)
            if self.recordings[key] is not None and not all(map(torch.equal, memory, after)):
                self.recordings[key], self.why = None, OTHER_BITS
            if self.recordings[key] is None:
                kept.clear()  # from the next step on, this block is recomputed
            for flat, new in zip(memory, after, strict=True):
                flat.copy_(new)
            return result, False
        self.copy_in(turn, read)
        self.copy_in(of_grads, grads)
        replayed = self.recordings[key] is not None
        return self._replay(key, lambda: run(values, grads)), replayed

    def update(self, depends_on: Hashable, run: Callable[[], None]) -> bool:
        """run(), or the replay of it; returns whether it was replayed. The replay cannot be compared, because run
        changes what it reads. So run must launch kernels at addresses that are part of depends_on, and keep nothing
        that it allocates."""
        key = ("update", depends_on)
        alone = self.spare.budget_bytes is not None and not any(self.recordings.values())  # no room for the blocks
        if alone or not self._is_due(key) or self._is_full(key):
            run()
            return False
        if key not in self.recordings:
            self.recordings[key] = self._capture(run)
        if self.recordings[key] is None:
            run()
            return False
        self._replay(key, run)
        return True

    # -- capture and replay ----------------------------------------------------------------------------------------

    def _is_due(self, kind: tuple[Hashable, ...]) -> bool:
        if None in kind:
            return False
        self.seen[kind] += 1
        return self.seen[kind] >= SIGHTS

    def _is_full(self, key: Hashable) -> bool:
        """Whether there is no room for a new key: in the table of recordings, or in the budget."""
        return key not in self.recordings and (len(self.recordings) >= MAX_GRAPHS or self.spare.is_spent)

    def _rehearse(self, run: Callable[..., Any], *args: Any) -> None:
        if self.rehearses:
            run(*args)

    def _capture(self, run: Callable[[], Any], pool: Any = None) -> _Recording | None:
        """None: the capture failed. pool: instead of the common one."""
        one, captured = _Recording(), False
        if not any(self.recordings.values()):  # a pool goes with its last graph, also one that was not kept
            self.pool = self._new_pool()
        torch.cuda.synchronize(self.device)
        try:
            kind = "graphs" if pool is None else "kept graphs"
            with self.spare.holding(kind), capturing(one.graph, pool or self.pool, self.stream):
                one.result = run()
            captured = True
        except RuntimeError as error:
            self.why = str(error).partition("\n")[0]
            self.pool = self._new_pool()  # the old one may be refused (machine/captures.py)
            self.kept_pools.clear()
        torch.cuda.synchronize(self.device)
        self.spare.held["static memory"] = self.nbytes
        return one if captured else None

    def _new_pool(self) -> Any:
        return torch.cuda.graph_pool_handle()

    def _kept_pool(self, of: Hashable, block: int) -> Any:
        """The pool of kept activations of a pass and shape: a new one if the block is not later than the last one."""
        last, pool = self.kept_pools.get(of, (block, None))
        if last >= block:
            pool = self._new_pool()
        self.kept_pools[of] = block, pool
        return pool

    def _capture_kept(
        self, places: list[torch.Tensor], static: Values, keep: Callable[[Values], BlockGraph], pool: Any
    ) -> _Recording | None:
        """Like `_capture`, with the autograd graph of the run. It reads static memory, which changes between steps: by
        tensors with version counters of their own, because the forward is replayed before each use of the graph."""
        kept: list[BlockGraph] = []
        values = [v.data if isinstance(v, torch.Tensor) else v for v in static]

        def captured() -> Any:
            kept[:] = [keep(values)]
            return copy_into(places, kept[0].output)

        self._rehearse(keep, values)
        one = self._capture(captured, pool)
        if one is not None:
            one.kept, one.number = kept, next(NUMBERS)
        return one

    def _checked(self, key: Hashable, found: _Recording | None, expected: Any) -> Any:
        """Keeps a recording if its replay gives the expected bits, and returns its result."""
        self.recordings[key] = None
        if found is None:
            return expected
        found.graph.replay()
        if signature_of(found.result) != signature_of(expected) or not all(
            torch.equal(x, y) for x, y in zip(tensors_of(found.result), tensors_of(expected), strict=True)
        ):
            self.why = OTHER_BITS
            return expected
        self.recordings[key] = found
        return found.result

    def _replay(self, key: Hashable, ordinary: Callable[[], Any]) -> Any:
        one = self.recordings[key]
        if one is None:
            return ordinary()
        one.graph.replay()
        return one.result

    def forget(self) -> None:
        """Drops all recordings, and their static memory."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        super().forget()
        for kept in (self.recordings, self.ran, self.kept_pools):
            kept.clear()
        for kind in [one for one in self.seen if one[0] == "reverse" and one[-1]]:  # of forwards that are dropped
            del self.seen[kind]
        self.pool = self._new_pool()  # the old pool is freed with its last graph
        for kind in ("graphs", "kept graphs", "static memory"):
            self.spare.held.pop(kind, None)
