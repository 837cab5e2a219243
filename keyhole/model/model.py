"""A Hugging Face decoder whose parameters live in flat memory, on the device or behind the link.

`Model` ties these together and is what `keyhole.load` returns:

    module    the HF model itself; its parameters are views into flat memory and are re-pointed as units come and go
    layout    which elements make up which unit (model/structure/layout.py)
    engine    the homes of the units, and what moves them (offload/engine.py)
    homes     the weights as parameters, where they live (model/weights/homes.py)
    binding   what the module's parameters point to at the moment (model/forward/binding.py)
    head      hidden states -> logits, in chunks (model/forward/head.py), or a classifier's logits (classification.py)

Between sweeps every parameter points to its home, so the module can be read or saved like any other. During a sweep a
*conductor* (model/forward/hooks.py) decides what a parameter points to: the lockstep of several passes
(model/forward/lockstep.py), or a `Generation` (model/forward/generate.py), which brings each unit in as its one pass
enters it. Without a conductor a resident model is an ordinary one.
Legend: B rows, T positions, M tokens looked up, N trained tokens, H width.
"""

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from torch import nn

from keyhole import ops
from keyhole.errors import UserError
from keyhole.machine.settings import Changes
from keyhole.model.attached import Addon, Attached, Placed
from keyhole.model.batch import Batch, DeviceBatch, as_list, check, check_alike, to_device
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
    """Other weights than those at home."""

    def weights(self, unit: Unit, stored: torch.Tensor) -> torch.Tensor:
        """Of a unit that is on the device as it is at home; in the dtype of compute."""

    def rows(self, stale_MH: torch.Tensor, ids_M: torch.Tensor) -> torch.Tensor:
        """Of the input embedding."""


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
        self.drawn = False  # a part of the weights is in no file: a new head, or all of them
        self.ranks = ranks or Ranks()
        self.pinned = False
        self.graphs: BlockGraphs | None = None
        self.reverse_graphs = reverse_graphs  # first-order steps may be recorded too
        self.classifies = is_classifier(module.config)
        self.head = ClassificationHead(module) if self.classifies else Head(module)
        self.embedding = module.get_input_embeddings()
        self.conductor: Conductor | None = None
        self.expert_gradients: Any = None  # who differentiates experts, while a reverse lasts (backward/experts.py)
        self.lens: Lens | None = None  # what weights are seen through, in `seen_through`
        self.addon: Addon | None = None
        self.factors: Factors | None = None  # what was learned beside the weights of linear layers
        self.factored: set[int] = set()  # ids of modules that ask for it
        self._deferred: list[tuple[weakref.ref[Attached], Callable[[], None]]] = []  # methods that defer updates
        self._lockstep = Lockstep(self.device)
        self._lockstep.expect = weakly(self.expect)
        weakref.finalize(self, self._lockstep.close)
        self.patches, self.changes = Patches(), changes or Changes()
        self._put_back = weakref.finalize(self, _put_back, self.patches, self.changes)
        self._put_back.atexit = False  # the end of the process puts back everything
        foreign = frozenset(page for page in engine.shared if not self.writes(page))
        self.homes = Homes(layout, engine.homes, formats, self.device, foreign, engine.parts())
        self.sharded = bool(engine.parts())
        self.call_others: Callable[[str], None] = lambda what: None  # of a leader: has other ranks write their parts
        self.binding = Binding(self.homes, self.head, keep_views=engine.reuse_slots)
        self._scratch: dict[str, torch.Tensor] = {}
        self._stack_pages: dict[str, set[int]] = {}  # of stacks of experts that are cut, by their names
        for unit in layout.units:
            if unit.expert is not None:
                self._stack_pages.setdefault(unit.tensors[0].name, set()).add(unit.index)
        self._keeps_packed_apart = False  # known only once the model was asked
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
        """Of what is evaluated, one sweep per group: this rank's part; and what it runs besides, for nothing, where
        every visit of a unit takes all ranks and others have one more."""
        own = self.ranks.share(groups)
        most = -(-len(groups) // self.ranks.size)
        return own, list(groups[:1]) * (most - len(own)) if self.sharded else []

    @property
    def generation_ranks(self) -> Ranks:
        """Who shares the batches of a generation: all ranks, or, where every visit of a unit takes all of them, each
        has all batches, since how many tokens an answer has is not known before."""
        return Ranks() if self.sharded else self.ranks

    def writes(self, page: int) -> bool:
        """Whether this rank changes the home of a unit; of one that several ranks share, one does."""
        return page not in self.engine.shared or page % self.ranks.local_size == self.ranks.local_rank

    @contextmanager
    def rewriting_shared(self) -> Iterator[None]:
        """A context in which homes that ranks share are changed, each by its writer: nobody uploads them meanwhile.
        Entered by all ranks."""
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
        """The parameter at its home, in the dtype of its home; of a packed unit, an unpacked copy."""
        return self.homes.read(tensor)

    # -- running it ------------------------------------------------------------------------------------------------

    def to_device(self, batch: Batch | list[Batch]) -> list[DeviceBatch]:
        """One batch or the micro-batches of a step, checked and sent."""
        return self.send(self.checked(batch))

    def checked(self, batch: Batch | list[Batch]) -> list[Batch]:
        """The micro-batches of a step; UserError for what cannot be trained on."""
        batches = as_list(batch)
        for one in batches:
            if self.classifies:
                self.head.check(one, self.layout.table.shape[0])
            else:
                check(one, self.layout.table.shape[0])
        if not self.classifies:
            check_alike(batches)
        return batches

    def send(self, batches: list[Batch]) -> list[DeviceBatch]:
        """Batches that were checked, on the device."""
        if self.classifies:
            return [self.head.to_device(one, self.device) for one in batches]
        sent = [to_device(one, self.device) for one in batches]
        if not self._keeps_packed_apart and any(one.packed for one in sent):
            self.check_packing(max(one["input_ids"].shape[1] for one in batches))
        return sent

    def check_packing(self, length: int | None = None) -> None:
        """UserError where samples that share a row of so many tokens would see each other. Asks the model once."""
        self._keeps_packed_apart = True  # the check itself runs packed batches
        try:
            check_packing(self, length)
        except BaseException:
            self._keeps_packed_apart = False
            raise

    def hidden(self, batch: DeviceBatch) -> torch.Tensor:
        """[N, H] hidden states at the positions that predict a trained token, as the output matrix needs them; of a
        classifier its logits, [B, L]."""
        if self.classifies:
            return self.head.logits(batch)
        try:
            hidden_BTD = self.head.decoder(**batch.inputs, use_cache=False)[0]
        except Exception as error:
            if not getattr(self.module, "keyhole_untried", ""):
                raise
            name, why = type(self.module).__name__, " ".join(str(error).split())
            raise UserError(f"model: {name} cannot be run on a batch of tokens: {why}") from error
        return self.head.transformed(hidden_BTD.flatten(0, 1)[batch.index_N])

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
        """A context for one visit of every unit, in the order of the model. of_all: every rank makes it, and asks
        nothing else of the others meanwhile."""
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
        """The units of a stack of experts that the sweep visits next, in order: the router has chosen."""
        among = set().union(*{id(unit.tensors[0]): self._stack_pages[unit.tensors[0].name] for unit in units}.values())
        self.engine.expect(among, [unit.index for unit in units])

    def acquire_weights(self, unit: Unit, place: int = 0) -> torch.Tensor:
        """The unit's weights on the device, in the dtype of compute, to be read. Release the unit afterwards."""
        stored = self.engine.acquire(unit.index, changes=False)
        return self.in_compute_dtype(unit, stored, place) if self.lens is None else self.lens.weights(unit, stored)

    @contextmanager
    def seen_through(self, lens: "Lens") -> Iterator[None]:
        """A context in which evaluations and generations use other weights than those at home, made from them unit by
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
        """`stored` itself, or a copy in memory that the next unit with the same `place` uses again."""
        if stored.dtype == self.dtype:
            return stored
        kind = "spine" if unit.kind == "spine" else f"unit {place}"
        if kind not in self._scratch:  # made once: parameters point into it
            numel = unit.numel if kind == "spine" else self.layout.largest_unit_numel
            self._scratch[kind] = torch.empty(numel, dtype=self.dtype, device=self.device)
        weights = self._scratch[kind][: unit.numel]
        if stored.dtype == PACKED:
            self.formats.decode(unit, stored, weights)
            return weights
        return weights.copy_(stored)

    def table_rows(self, ids_M: torch.Tensor) -> torch.Tensor:
        """Rows of the input embedding, as they are seen."""
        rows_MH = self._rows_at_home(ids_M)
        return rows_MH if self.lens is None else self.lens.rows(rows_MH, ids_M)

    def _rows_at_home(self, ids_M: torch.Tensor) -> torch.Tensor:
        """Rows of the input embedding, gathered where the table lives."""
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
        """Summed NLL and number of trained tokens of each row. A list of batches is run together: each unit crosses the
        link once."""
        results = evaluation.nll_by_row(self, self.to_device(batch))
        return results[0] if isinstance(batch, Mapping) else results

    @without_autocast()
    @torch.no_grad()
    def token_scores(self, batches: list[DeviceBatch]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """(nll_N, best_N) of each batch: the NLL of each target, and the token that is likeliest in its place. All
        batches are run together; a position may be asked for several targets."""
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
        """HF generation; a streamed model crosses the link once per token, for all rows of the batch."""
        if self.classifies:
            raise UserError(f"model: {type(self.module).__name__} classifies texts and cannot write any")
        if not isinstance(input_ids, torch.Tensor):
            found = type(input_ids).__name__
            raise UserError(f"input_ids: found a {found}, expected the tokens: tokenizer(text, return_tensors='pt')")
        self.apply_deferred()
        input_ids = input_ids.to(self.device)
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask.to(self.device)
        if self.is_plain:
            self.engine.wait_for_homes()  # a method may still be updating them
            return self.module.generate(input_ids=input_ids, attention_mask=mask, **options)
        with self.sweep("generate", learn=False), Generation(self) as conductor, self._conducted_by(conductor):
            return self.module.generate(input_ids=input_ids, attention_mask=mask, **options)

    @property
    def is_plain(self) -> bool:
        """Whether every unit is on the device in the dtype of compute, so that the module works without a conductor."""
        plain = not self.engine.streamed and all(home.dtype == self.dtype for home in self.engine.homes)
        return plain and self.lens is None

    # -- methods that train it -------------------------------------------------------------------------------------

    def attach(self, method: Attached) -> None:
        """A method is made on this model. What other methods have deferred is applied first."""
        check_loss(self.config)
        if self.formats.frozen is not None and not method.keeps_base:
            raise UserError(
                f"wire: {self.formats.name} weights are frozen, and {method.name} would change them: their grid is too "
                "coarse for updates. Use a method that learns beside them (lora), or wire=bf16"
            )
        self.apply_deferred()
        if self.factors is not None:
            self.factors.settle()
        if self.placed is not None:
            self.placed.check_method(method.name)
        self._deferred = [(owner, apply) for owner, apply in self._deferred if owner() is not None]  # may step again
        if method.deferred is not None:
            self._deferred.append((weakref.ref(method), method.deferred))
        self.addon = method.addon or self.addon  # adapters stay in the module

    @without_autocast()
    def apply_deferred(self, before_step_of: Attached | None = None) -> None:
        """Afterwards the weights at home are those after the last step of every method, or, before a step, of every
        other method."""
        for owner, apply in self._deferred:
            if before_step_of is None or owner() is not before_step_of:
                apply()

    # -- reading and saving it -------------------------------------------------------------------------------------

    def named_tensors(self, merged: bool = True) -> Iterator[tuple[str, torch.Tensor]]:
        """Every parameter at its home, a tied one once, as it is saved. merged=False: without what was learned beside
        it, which is in the method's state."""
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
        """(name, index of the first element, elements) of what this rank has of sharded tensors, and, on the leader, of
        all others."""
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
        """Ends threads, puts back what was changed in the process (machine/settings.py) and in the module, and gives
        page-locked memory back; the model cannot be used afterwards. A model that is dropped does the same."""
        self._lockstep.close()
        self._put_back()
        if self.engine.gate is not None:
            self.engine.gate.close()
        if self.pinned:
            for flat in self.host_memory():
                arena.unpin(flat)
            self.pinned = False

    def host_memory(self) -> list[torch.Tensor]:
        """The pieces of host memory that streamed homes lie in: one, or two where ranks share some of them."""
        flats = [*(self.engine.homes[page] for page in sorted(self.engine.streamed))]
        flats += [flat for _, flat in self.engine.parts().values()]
        storages = {flat.untyped_storage().data_ptr(): flat for flat in flats if flat.device.type == "cpu"}
        return [arena.storage_of(flat) for flat in storages.values()]

    @property
    def original(self) -> str | None:
        """The directory or hub id that holds these very weights as they were loaded: None where they were rounded to
        a frozen format on the way, or drawn."""
        return None if self.formats.rounds or self.drawn else self.source

    def describe(self) -> list[str]:
        """What the plan decided and why, one line per decision."""
        return [] if self.placed is None else self.placed.reasons


def _put_back(patches: Patches, changes: Changes) -> None:
    patches.take_out()
    changes.put_back()
