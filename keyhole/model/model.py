"""A Hugging Face decoder whose parameters live in flat memory, on the device or in host memory.

`Model` ties these together and is what `keyhole.load` returns:

    module    the HF model itself; its parameters are views into flat memory, re-pointed as units are streamed
    layout    which elements make up which unit (model/structure/layout.py)
    engine    the homes of the units, and what moves them (offload/engine.py)
    homes     the weights as parameters, where they live (model/weights/homes.py)
    binding   what the module's parameters point to at the moment (model/forward/binding.py)
    head      batches -> hidden states -> logits (model/forward/head.py), or -> logits of classes (classification.py)

Between sweeps every parameter points to its home, so the module can be read or saved like any other. During a sweep a
*conductor* (model/forward/hooks.py) decides what a parameter points to: the lockstep of several passes
(model/forward/lockstep.py), or a `Generation` (model/forward/generate.py), which loads each unit when its one pass
enters it. Without a conductor a resident model behaves like any PyTorch module.
Legend: B rows, T positions, M tokens looked up, N trained tokens, H width.
"""

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from torch import nn
from torch.autograd.graph import increment_version

from keyhole import ops
from keyhole.errors import UserError
from keyhole.machine.settings import Changes
from keyhole.model.attached import Addon, Attached, Placed
from keyhole.model.batch import Batch, DeviceBatch, as_list
from keyhole.model.classification import ClassificationHead
from keyhole.model.forward import evaluation
from keyhole.model.forward.binding import Binding
from keyhole.model.forward.experts import compute_by_expert
from keyhole.model.forward.fused_relu import fuse_relu
from keyhole.model.forward.generate import Generation
from keyhole.model.forward.graphs import BlockGraphs
from keyhole.model.forward.head import Head
from keyhole.model.forward.hooks import Conductor, install_hooks
from keyhole.model.forward.lockstep import Lockstep
from keyhole.model.forward.low_rank import Factors
from keyhole.model.forward.patches import Patches
from keyhole.model.forward.row_tiles import compute_in_tiles
from keyhole.model.packing import check_packing
from keyhole.model.structure.added_loss import check_loss
from keyhole.model.structure.find import find_blocks
from keyhole.model.structure.layout import FlatTensor, Layout, Unit
from keyhole.model.structure.skeleton import is_classifier
from keyhole.model.weights.format import PACKED, Wire
from keyhole.model.weights.homes import Homes
from keyhole.offload import arena
from keyhole.offload.engine import Engine
from keyhole.ops.autocast import without_autocast
from keyhole.ranks import Ranks
from keyhole.weak import weakly

T = TypeVar("T")
Serve = Callable[[Unit | None, Callable[[int], None]], None]
Rows = Callable[[int, torch.Tensor], torch.Tensor]


class Lens(Protocol):
    """Computes other weights (such as perturbed ones) from those at home, for evaluation."""

    def weights(self, unit: Unit, stored: torch.Tensor) -> torch.Tensor:
        """The weights of a unit in the dtype of compute; `stored` is the unit on the device as at home."""

    def rows(self, stale_MH: torch.Tensor, ids_M: torch.Tensor) -> torch.Tensor:
        """The rows of the input embedding; stale_MH: these rows at home."""


class Model:
    """A decoder with its layout, its engine and its conductors. `dtype` is what kernels compute in; homes may hold
    another (the wire format)."""

    def __init__(
        self,
        module: nn.Module,
        layout: Layout,
        engine: Engine,
        formats: Wire,
        *,
        tokenizer: Any = None,
        source: str | None = None,
        placed: Placed | None = None,
        graphs: bool = True,
        reverse_graphs: bool = True,
        changes: Changes | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        self.module, self.layout, self.engine = module, layout, engine
        self.formats, self.dtype = formats, formats.dtype
        self.device, self.config = engine.device, module.config
        self.tokenizer, self.source, self.placed = tokenizer, source, placed
        self.drawn = False  # some weights were initialised at random: a new head, or all of them
        self.ranks = ranks or Ranks()
        self.pinned = False
        self.graphs: BlockGraphs | None = None
        self.reverse_graphs = reverse_graphs  # first-order steps may use CUDA graphs too
        self.classifies = is_classifier(module.config)
        self.head = ClassificationHead(module) if self.classifies else Head(module)
        self.embedding = module.get_input_embeddings()
        self.conductor: Conductor | None = None
        self.expert_gradients: Any = None  # set during a backward pass: differentiates experts (backward/experts.py)
        self.lens: Lens | None = None  # set within `seen_through`
        self._has_graph = False  # the module was called by itself, with gradients, since the last step
        self.steps = 0  # by all methods: one that keeps a copy of the weights sees that another has changed them
        self.addon: Addon | None = None
        self.factors: Factors | None = None  # low-rank factors trained beside the weights of linear layers
        self.factored: set[int] = set()  # ids of modules whose forward adds them
        self._deferred: list[tuple[weakref.ref[Attached], Callable[[], None]]] = []  # methods that defer updates
        self._lockstep = Lockstep(self.device)
        self._lockstep.expect = weakly(self.expect)
        weakref.finalize(self, self._lockstep.close)
        self.patches, self.changes = Patches(), changes or Changes()
        self._put_back = weakref.finalize(self, _put_back, self.patches, self.changes)
        self._put_back.atexit = False  # nothing to restore when the process ends
        foreign = frozenset(page for page in engine.shared if not self.writes(page))
        self.homes = Homes(layout, engine.homes, formats, self.device, foreign, engine.parts())
        self.sharded = bool(engine.parts())
        self.call_others: Callable[[str], None] = lambda what: None  # leader: makes the other ranks write their parts
        self.binding = Binding(self.homes, self.head, keep_views=engine.reuse_slots)
        self._scratch: dict[str, torch.Tensor] = {}
        self._stack_pages: dict[str, set[int]] = {}  # pages of each stack of experts that is cut, by its name
        for unit in layout.units:
            if unit.expert is not None:
                self._stack_pages.setdefault(unit.tensors[0].name, set()).add(unit.index)
        self._keeps_packed_apart = False  # not tested yet
        install_hooks(self)
        self.tiles = compute_in_tiles(self)
        compute_by_expert(self)
        fuse_relu(self)
        is_recordable = layout.block_count and not layout.has_cut_blocks and not layout.experts
        if graphs and self.device.type == "cuda" and is_recordable:
            self.graphs = BlockGraphs(self, find_blocks(module))

    def __repr__(self) -> str:
        count = sum(tensor.shape.numel() for tensor in self.layout.tensors)
        where = f"{len(self.engine.streamed)} of {len(self.layout.units)} units streamed"
        where = where if self.engine.streamed else "resident"
        dtype = str(self.dtype).removeprefix("torch.")
        source = "" if self.source is None else f", from {self.source!r}"
        return f"<Model: {type(self.module).__name__}, {count:,} parameters, {dtype} on {self.device}, {where}{source}>"

    def shared_out(self, groups: Sequence[T]) -> tuple[list[T], list[T]]:
        """This rank's share of the groups to evaluate, one sweep per group; and groups that it runs only to match the
        collectives of ranks that have one group more, if the model is sharded."""
        own = self.ranks.share(groups)
        most = -(-len(groups) // self.ranks.size)
        return own, list(groups[:1]) * (most - len(own)) if self.sharded else []

    @property
    def generation_ranks(self) -> Ranks:
        """The ranks that share the batches of a generation: all of them. If the model is sharded, every visit of a unit
        is a collective and the lengths of answers are unknown, so each rank runs all batches."""
        return Ranks() if self.sharded else self.ranks

    def writes(self, page: int) -> bool:
        """Whether this rank writes the home of a unit; for a home that several ranks share, exactly one does."""
        return page not in self.engine.shared or page % self.ranks.local_size == self.ranks.local_rank

    @contextmanager
    def rewriting_shared(self) -> Iterator[None]:
        """A context in which shared homes are rewritten, each by its one writer, while no rank uploads them. Entered by
        all ranks."""
        if not self.engine.shared:
            yield
            return
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.engine.invalidate(everywhere=True)
        self.ranks.barrier()
        yield
        self.engine.wait_for_homes()
        self.ranks.barrier()
        self.engine.invalidate(everywhere=True)

    def home(self, tensor: FlatTensor) -> torch.Tensor:
        """The parameter at its home, in the dtype of its home; for a packed unit, an unpacked copy."""
        return self.homes.read(tensor)

    # -- forward passes --------------------------------------------------------------------------------------------

    def to_device(self, batch: Batch | list[Batch]) -> list[DeviceBatch]:
        """One batch, or the micro-batches of a step, checked and copied to the device."""
        return self.send(self.checked(batch))

    def checked(self, batch: Batch | list[Batch]) -> list[Batch]:
        """The micro-batches of a step; UserError if they cannot be trained on."""
        batches = as_list(batch)
        self.head.check(batches, self.layout.table.shape[0])
        if self.placed is not None:
            self.placed.warn_if_larger(max(batch["input_ids"].numel() for batch in batches))
        return batches

    def send(self, batches: list[Batch]) -> list[DeviceBatch]:
        """Checked batches, copied to the device."""
        sent = [self.head.to_device(one, self.device) for one in batches]
        if not self._keeps_packed_apart and any(one.packed for one in sent):
            self.check_packing(max(one["input_ids"].shape[1] for one in batches))
        return sent

    def check_packing(self, length: int | None = None) -> None:
        """UserError if samples packed into a row of `length` tokens would attend to each other; tested once."""
        self._keeps_packed_apart = True  # the check itself runs packed batches
        try:
            check_packing(self, length)
        except BaseException:
            self._keeps_packed_apart = False
            raise

    def hidden(self, batch: DeviceBatch) -> torch.Tensor:
        """[N, H] hidden states at the positions that predict a trained token, as the output matrix needs them; for a
        classifier its logits, [B, L]."""
        return self.head.states(batch)

    @contextmanager
    def _conducted_by(self, conductor: Conductor) -> Iterator[None]:
        padding_idx, self.embedding.padding_idx = self.embedding.padding_idx, None
        self.conductor = conductor
        try:
            yield
        finally:
            self.conductor = None
            self.embedding.padding_idx = padding_idx
            self.embedding._parameters["weight"] = self.layout.table.param
            self.binding.bind_homes()

    @contextmanager
    def sweep(self, name: str, learn: bool = True, of_all: bool = False) -> Iterator[None]:
        """A context for one visit of every unit, in the order of the model. of_all: every rank makes this sweep and
        starts no other collective during it."""
        head = [u.index for u in self.layout.head_units]
        blocks = [u.index for u in self.layout.of_kind("block")]
        with self.engine.sweep(name, blocks + head, learn, of_all):
            try:
                yield
            finally:
                self.binding.bind_homes()

    def lockstep(
        self, batches: list[DeviceBatch], serve: Serve, rows: Rows, steady: bool = False, block_at_once: bool = False
    ) -> list[torch.Tensor]:
        """Hidden states of several passes that advance together. rows(pass, ids_M) gives rows of the table [M, H].
        steady: pass i finds a unit's weights at the same address in every block, so that graphs may be used.
        block_at_once: a pass waits for all units of a block before it enters the block."""
        passes = self._lockstep
        passes.rows, passes.steady, passes.block_at_once = rows, steady and self.engine.reuse_slots, block_at_once
        with self._conducted_by(passes):
            try:
                return passes.run([lambda b=b: self.hidden(b) for b in batches], serve)
            finally:
                passes.rows = None

    def expect(self, units: list[Unit]) -> None:
        """Tells the engine which units of a stack of experts the sweep visits next: the router has chosen."""
        among = set().union(*{id(unit.tensors[0]): self._stack_pages[unit.tensors[0].name] for unit in units}.values())
        self.engine.expect(among, [unit.index for unit in units])

    def acquire_weights(self, unit: Unit, place: int = 0) -> torch.Tensor:
        """The unit's weights on the device, in the dtype of compute, for reading. Release the unit afterwards."""
        stored = self.engine.acquire(unit.index, changes=False)
        return self.in_compute_dtype(unit, stored, place) if self.lens is None else self.lens.weights(unit, stored)

    @contextmanager
    def seen_through(self, lens: "Lens") -> Iterator[None]:
        """A context in which evaluation and generation use weights that the lens computes from those at home, unit by
        unit."""
        if self.lens is not None:
            raise UserError("closure: the model is seen through another one's weights already; steps do not nest")
        self.lens = lens
        try:
            yield
        finally:
            self.lens = None
            self.binding.bind_homes()

    def in_compute_dtype(self, unit: Unit, stored: torch.Tensor, place: int = 0) -> torch.Tensor:
        """`stored` itself, or a copy in scratch memory that the next unit with the same `place` overwrites."""
        if stored.dtype == self.dtype:
            return stored
        kind = "spine" if unit.kind == "spine" else f"unit {place}"
        if kind not in self._scratch:  # allocated once: parameters point into it
            numel = unit.numel if kind == "spine" else self.layout.largest_unit_numel
            with torch.inference_mode(False):  # an evaluation may be the first to need it, and a later step writes it
                self._scratch[kind] = torch.empty(numel, dtype=self.dtype, device=self.device)
        weights = self._scratch[kind][: unit.numel]
        if stored.dtype == PACKED:
            self.formats.decode(unit, stored, weights)
            return weights
        return weights.copy_(stored)

    def table_rows(self, ids_M: torch.Tensor) -> torch.Tensor:
        """Rows of the input embedding, through the lens if one is set."""
        rows_MH = self._rows_at_home(ids_M)
        return rows_MH if self.lens is None else self.lens.rows(rows_MH, ids_M)

    def _rows_at_home(self, ids_M: torch.Tensor) -> torch.Tensor:
        """Rows of the input embedding, read from the memory that holds the table."""
        table_VH = self.home(self.layout.table)
        if table_VH.device == self.device or (self.pinned and ops.use_kernel(self.device)):
            for unit in self.layout.of_kind("table"):
                self.engine.home_ready(unit.index)
            return ops.gather_rows(table_VH, ids_M)
        self.engine.wait_for_homes([unit.index for unit in self.layout.of_kind("table")])
        return table_VH[ids_M.to(table_VH.device)].to(self.device)

    @without_autocast()
    @torch.no_grad()
    def nll(self, batch: Batch | list[Batch]) -> Any:
        """Summed NLL and number of trained tokens of each row. The batches of a list run in lockstep: each unit crosses
        the link once."""
        results = evaluation.nll_by_row(self, self.to_device(batch))
        return results[0] if isinstance(batch, Mapping) else results

    @without_autocast()
    @torch.no_grad()
    def token_scores(self, batches: list[DeviceBatch]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """(nll_N, best_N) of each batch: the NLL of each target, and the likeliest token at its position. All batches
        run in lockstep; one position may have several targets."""
        return evaluation.token_scores(self, batches)

    @without_autocast()
    @torch.no_grad()
    def logits(self, batch: Batch | list[Batch]) -> Any:
        """Of a batch: the logits, [B, T, V] of a decoder (the whole vocabulary, streamed like a generation) or [B, L]
        of a classifier. Of a list of batches and a classifier: (logits, losses of the rows [B]) of each, in float32,
        all run together."""
        if self.classifies:
            found = evaluation.class_logits(self, self.to_device(batch))
            return found[0][0] if isinstance(batch, Mapping) else found
        if not isinstance(batch, Mapping):
            return [self.logits(each) for each in batch]
        sent = {name: x.to(self.device) for name, x in batch.items() if name != "labels"}
        self.apply_deferred()
        if self.is_plain:
            self.engine.wait_for_homes()  # a method may still be updating them
            return self.module(**sent, use_cache=False).logits
        with self.sweep("logits", learn=False), Generation(self) as conductor, self._conducted_by(conductor):
            return self.module(**sent, use_cache=False).logits

    @without_autocast()
    @torch.no_grad()
    def generate(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None, **options: Any
    ) -> torch.Tensor:
        """HF generation; a streamed model crosses the link once per token, for all rows of the batch together."""
        if self.classifies:
            raise UserError(f"model: {type(self.module).__name__} classifies texts and cannot write any")
        if not isinstance(input_ids, torch.Tensor):
            found = type(input_ids).__name__
            raise UserError(f"input_ids: found a {found}, expected the tokens: tokenizer(text, return_tensors='pt')")
        self.apply_deferred()
        input_ids = input_ids.to(self.device)
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask.to(self.device)
        if self.is_plain:
            self.engine.wait_for_homes()  # a method may still be writing them
            return self.module.generate(input_ids=input_ids, attention_mask=mask, **options)
        with self.sweep("generate", learn=False), Generation(self) as conductor, self._conducted_by(conductor):
            return self.module.generate(input_ids=input_ids, attention_mask=mask, **options)

    @property
    def is_plain(self) -> bool:
        """Whether every unit is on the device in the dtype of compute, so that the module works without a conductor."""
        plain = not self.engine.streamed and all(home.dtype == self.dtype for home in self.engine.homes)
        return plain and self.lens is None

    # -- methods ---------------------------------------------------------------------------------------------------

    def attach(self, method: Attached) -> None:
        """Called by a new method. Updates that other methods have deferred are applied first."""
        check_loss(self.config)
        if self.formats.frozen is not None and not method.keeps_base:
            raise UserError(
                f"wire: {self.formats.name} weights are frozen, and {method.name} would change them: their grid is too "
                "coarse for updates. Use a method that learns beside them (lora), or wire=bf16"
            )
        self.apply_deferred()
        self.engine.wait_for_homes()  # the new method may read them at once; another one may still be writing them
        if self.factors is not None:
            self.factors.settle()
        if self.placed is not None:
            self.placed.check_method(method.name)
        self._deferred = [(owner, apply) for owner, apply in self._deferred if owner() is not None]  # these may step on
        if method.deferred is not None:
            self._deferred.append((weakref.ref(method), method.deferred))
        self.addon = method.addon or self.addon  # adapters stay in the module

    @without_autocast()
    def apply_deferred(self, before_step_of: Attached | None = None) -> None:
        """Afterwards the weights at home are those after the last step of every method; with before_step_of, of every
        other method."""
        for owner, apply in self._deferred:
            if before_step_of is None or owner() is not before_step_of:
                apply()

    def used_directly(self, what: str) -> None:
        """Called before the module's own forward or save_pretrained: its parameters must be those after the last step.
        UserError where they cannot be."""
        if self.lens is not None:
            raise UserError(
                f"closure: the module's own {what} does not see the perturbed weights, and its number would say "
                "nothing of them; compute it from model.nll(batch), model.logits(batch) or model.generate(ids)"
            )
        if self.factors is not None and (what != "forward" or torch.is_grad_enabled()):
            raise UserError(
                f"module.{what}: the weights lack the low-rank factors that were trained beside them; use "
                "model.save_pretrained to save, and torch.no_grad() or model.nll(batch) to evaluate"
            )
        self.apply_deferred()
        if self.engine.gate is not None or self.engine.streamed:
            self.engine.wait_for_homes()
        self._has_graph = self._has_graph or (what == "forward" and torch.is_grad_enabled())

    def weights_changed(self) -> None:
        """Called after a step: autograd refuses to differentiate a graph that the module built with older weights."""
        self.steps += 1
        if self._has_graph:
            increment_version([tensor.param for tensor in self.layout.tensors])
            self._has_graph = False

    # -- reading and saving ----------------------------------------------------------------------------------------

    def named_tensors(self, merged: bool = True) -> Iterator[tuple[str, torch.Tensor]]:
        """Every parameter as it is saved, a tied one once. merged=False: without low-rank factors trained beside it,
        which are in the method's state."""
        if self.sharded:
            raise UserError("this rank has a part of the weights only; own_tensors gives what it has")
        self.apply_deferred()
        self.engine.wait_for_homes()
        for tensor in self.layout.tensors:
            home = self.home(tensor)
            if self.factors is not None:
                home = self.factors.as_saved(tensor, home, merged)
            yield tensor.name, home if self.addon is None else self.addon.as_saved(tensor, home)

    def own_tensors(self) -> Iterator[tuple[str, int, torch.Tensor]]:
        """(name, index of the first element, elements) of this rank's shards of sharded tensors and, on the leader, of
        all other tensors."""
        self.engine.wait_for_homes()
        for tensor in self.layout.tensors:
            if self.homes.unit_of(tensor).index in self.homes.parts:
                yield from ((tensor.name, begin, part) for begin, part in self.homes.own_parts(tensor))
            elif self.ranks.is_leader:
                yield tensor.name, 0, self.home(tensor)

    def save_pretrained(self, path: str | Path) -> None:
        """Writes an ordinary HF directory: safetensors, config, tokenizer."""
        from keyhole.model.weights.save import save_model

        self.apply_deferred()
        save_model(self, Path(path))

    def close(self) -> None:
        """Ends threads, restores the process settings (machine/settings.py) and the module, and releases page-locked
        memory; the model cannot be used afterwards. Deleting a model does the same."""
        self._lockstep.close()
        self._put_back()
        if self.engine.gate is not None:
            self.engine.gate.close()
        if self.pinned:
            for flat in self.host_memory():
                arena.unpin(flat)
            self.pinned = False

    def host_memory(self) -> list[torch.Tensor]:
        """The host memory that holds streamed homes: one tensor, or two if ranks share some of the homes."""
        flats = [*(self.engine.homes[page] for page in sorted(self.engine.streamed))]
        flats += [flat for _, flat in self.engine.parts().values()]
        storages = {flat.untyped_storage().data_ptr(): flat for flat in flats if flat.device.type == "cpu"}
        return [arena.storage_of(flat) for flat in storages.values()]

    @property
    def original(self) -> str | None:
        """The directory or hub id that holds exactly the weights that were loaded; None if they were rounded to a
        frozen format while loading, or initialised at random."""
        return None if self.formats.rounds or self.drawn else self.source

    def describe(self) -> list[str]:
        """The decisions of the plan and their reasons, one line per decision."""
        return [] if self.placed is None else self.placed.reasons


def _put_back(patches: Patches, changes: Changes) -> None:
    patches.take_out()
    changes.put_back()
