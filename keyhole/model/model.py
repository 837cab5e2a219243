"""A Hugging Face decoder whose parameters live in flat memory, on the device or in host memory.

`Model` ties these together and is what `keyhole.load` returns:

    module    the HF model itself; its parameters are views into flat memory, re-pointed as units are streamed
    layout    which elements make up which unit (model/structure/layout.py)
    engine    the homes of the units, and what moves them (offload/engine.py)
    homes     the weights as parameters, where they live (model/weights/homes.py)
    binding   what the module's parameters point to at the moment (model/forward/binding.py)
    head      batches -> hidden states -> logits (model/forward/head.py), or -> logits of classes (classification.py)
    device_weights    a unit's weights on the device, in the dtype of compute (model/forward/binding.py)
    methods   the methods that train it, what they have deferred, and what a caller has changed (model/attached.py)
    row_rules     which rows may be computed together (model/row_rules.py)

Between sweeps every parameter points to its home, so the module can be read or saved like any other. During a sweep a
*conductor* decides what a parameter points to: the lockstep of one or several passes (model/forward/lockstep.py).
Without one a resident model behaves like any PyTorch module. B rows, T positions, M tokens, H width.
"""

import os
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Self, SupportsIndex, overload

import torch
from torch import nn

from keyhole.disk.files import writing_to
from keyhole.errors import UserError, warn
from keyhole.machine.gpu import ACCELERATOR, accelerator, give_back
from keyhole.machine.held import Changes, alone
from keyhole.model.attached import Attached, AttachedMethods, computes
from keyhole.model.batch import Batch, DeviceBatch, as_list, split_all
from keyhole.model.classification import ClassificationHead
from keyhole.model.forward import evaluation
from keyhole.model.forward.binding import Binding, DeviceWeights
from keyhole.model.forward.blocks import BlockGraphs
from keyhole.model.forward.head import Head
from keyhole.model.forward.hooks import Patches, empty, install_hooks
from keyhole.model.forward.lockstep import Lockstep, Serve, T
from keyhole.model.forward.pieces import compute_in_pieces
from keyhole.model.row_rules import RowRules
from keyhole.model.spare_memory import Placed
from keyhole.model.structure.find import find_blocks
from keyhole.model.structure.layout import FlatTensor, Layout, Unit
from keyhole.model.structure.skeleton import is_classifier
from keyhole.model.weights.format import Wire
from keyhole.model.weights.homes import Homes
from keyhole.offload import arena
from keyhole.offload.engine import Engine
from keyhole.ops.autocast import computing
from keyhole.ranks import Ranks
from keyhole.weak import Closable, leaves_no_frames, weakly

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

    from keyhole.model.weights.small_files import SmallFiles

Rows = Callable[[int, torch.Tensor], torch.Tensor]
Scores = tuple[torch.Tensor, torch.Tensor]  # of each row


class Model(Closable):
    """A decoder. `dtype` is what kernels compute in; homes may hold another (the wire format)."""

    def __init__(
        self,
        module: "PreTrainedModel",
        layout: Layout,
        engine: Engine,
        formats: Wire,
        *,
        tokenizer: Any = None,
        source: str | None = None,
        published: "SmallFiles | None" = None,
        placed: Placed | None = None,
        graphs: bool = True,
        reverse_graphs: bool = True,
        changes: Changes | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        self.module = module
        self.layout, self.engine = layout, engine
        self.blocks = find_blocks(module)  # now: between passes, weights of packed units are empty tensors
        self.formats, self.dtype = formats, formats.dtype
        self.device = engine.device
        self.config: PretrainedConfig = module.config
        self.tokenizer, self.source, self.placed = tokenizer, source, placed
        self.published = published  # what its directory holds beside the weights
        self.drawn = False  # some weights were initialised at random: a new head, or all of them
        self.drawn_head: list[FlatTensor] = []  # those of a new head
        self.ranks = ranks or Ranks()
        self.pinned = False
        self.graphs: BlockGraphs | None = None
        self.reverse_graphs = reverse_graphs  # first-order steps may use CUDA graphs too
        self.classifies = is_classifier(module.config)
        self.head: Any = ClassificationHead(module) if self.classifies else Head(module)
        self.embedding: nn.Embedding = module.get_input_embeddings()
        self.conductor: Lockstep | None = None
        self.visits: dict[str, list[int]] = {}  # by a sweep's name: its units, in the order in which they were used
        self.expert_gradients: Any = None  # set during a backward pass: differentiates experts (backward/experts.py)
        self.factored: set[int] = set()  # ids of modules whose forward asks for them
        self._lockstep = Lockstep()
        self._lockstep.expect = weakly(self.expect)
        self.holds = self._lockstep.holds  # what passes hold that wait for a block (block_at_once)
        self.pass_tokens = None if placed is None else placed.pass_tokens  # of a pass that can be parted, at most
        self.patches, self.changes = Patches(), changes or Changes()
        self.changes.callback(self.patches.close)
        self._put_back = weakref.finalize(self, self.changes.close)
        self._put_back.atexit = False  # nothing to restore when the process ends
        foreign = frozenset(page for page in engine.shared if page % self.ranks.local_size != self.ranks.local_rank)
        self.homes = Homes(layout, engine.homes, formats, self.device, foreign, engine.parts())
        self.sharded = bool(engine.parts())
        self.call_others: Callable[[str], None] = lambda what: None  # leader: makes the other ranks write their parts
        self.binding = Binding(self.homes, self.head, keep_views=engine.reuse_slots)
        self.device_weights = DeviceWeights(engine, self.binding, formats)
        self.methods = AttachedMethods(module, self.device_weights, self.ranks, placed)
        tests = not self.classifies and not self.sharded
        table_rows = layout.table.shape[0]
        self.row_rules = RowRules(module, weakly(self._nll_by_token), table_rows, self.device, self.dtype, tests)
        self._stack_pages: dict[str, set[int]] = {}  # pages of each stack of experts that is cut, by its name
        for unit in layout.units:
            if unit.expert is not None:
                self._stack_pages.setdefault(unit.tensors[0].name, set()).add(unit.index)
        install_hooks(self)
        self.tiles = compute_in_pieces(self)
        is_recordable = layout.block_count and not layout.has_cut_blocks and not layout.experts
        if graphs and self.device.type == ACCELERATOR and is_recordable:
            self.graphs = BlockGraphs(self, self.blocks)

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise UserError("a model holds page-locked memory, and is not copied or pickled; load it again")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        if not vars(self):
            return "<Model: closed>"
        count = sum(tensor.shape.numel() for tensor in self.layout.tensors)
        away = len(self.engine.streamed)
        where = f"{away} of {len(self.layout.units)} units streamed" if away else "resident"
        source = "" if self.source is None else f", from {self.source!r}"
        about = f"{type(self.module).__name__}, {count:,} parameters, {str(self.dtype).removeprefix('torch.')}"
        return f"<Model: {about} on {self.device}, {where}{source}>"

    def home(self, tensor: FlatTensor) -> torch.Tensor:
        """The parameter at its home, in the dtype of its home; for a packed unit, an unpacked copy."""
        return self.homes.read(tensor)

    # -- forward passes --------------------------------------------------------------------------------------------

    def to_device(self, batch: Batch | Sequence[Batch], of_step: bool = True) -> list[DeviceBatch]:
        """One batch, or the micro-batches of a step, checked and copied to the device."""
        return self.send(self.checked(batch, of_step))

    def checked(self, batch: Batch | Sequence[Batch], of_step: bool = True) -> list[Batch]:
        """The passes of a step: its micro-batches, split as the method's settings or the plan say; UserError if they
        cannot be trained on. of_step: warns if the step is larger than planned; evaluations have their own size."""
        batches, method = as_list(batch), self.methods.stepping
        self.head.check(batches, self.layout.table.shape[0])
        if of_step and method is not None:
            batches = split_all(batches, method.settings.micro_batch_size, self.pass_tokens)
            if self.placed is not None:
                self.placed.check_step(method.name, method.settings, [one["input_ids"].shape for one in batches])
        return batches

    def send(self, batches: list[Batch], shares: bool = False, joins: bool = False) -> list[DeviceBatch]:
        """Checked batches, copied to the device. For passes without a backward pass: shares: candidates may share a row
        (rows.py); joins: short rows may be joined."""
        shares, most = self.row_rules.of(batches, shares, joins)
        sent = [self.head.to_device(one, self.device, shares, most) for one in batches]
        self.row_rules.check_packed(batches, sent)
        return sent

    def _nll_by_token(self, batches: list[DeviceBatch]) -> list[torch.Tensor]:
        return evaluation.nll_by_token(self, batches)

    def hidden(self, batch: DeviceBatch) -> torch.Tensor:
        """[N, H] hidden states at positions that predict a trained token; for a classifier its logits, [B, L]."""
        return self.head.states(batch)

    def conduct(self, runs: list[Callable[[], T]], serve: Serve, rows: Rows) -> list[T]:
        """Runs passes that advance together; they decide what the module's parameters point to."""
        self.check_idle()
        padding_idx, self.embedding.padding_idx = self.embedding.padding_idx, None
        self.conductor, self.methods.in_pass, self._lockstep.rows = self._lockstep, True, rows
        try:
            return self._lockstep.run(runs, serve)
        finally:
            self.conductor, self.methods.in_pass, self._lockstep.rows = None, False, None
            self.embedding.padding_idx = padding_idx
            self.embedding._parameters["weight"] = self.layout.table.param
            self.binding.bind_homes()

    def check_idle(self) -> None:
        """UserError if a pass is running, whose weights another would take; or if another thread makes a step."""
        if self.conductor is not None:
            raise UserError(
                "model: it is in the middle of a pass; a hook inside of it, or another thread, cannot call step, nll, "
                "logits or generate of the same model: call them before or after"
            )
        self.methods.check_turn()

    @contextmanager
    def sweep(self, name: str, experts: bool = False, order: list[int] | None = None) -> Iterator[None]:
        """Visits of units in the order of the last sweep of this name; of the first: in `order`, or each once. experts:
        all that are units of their own are visited too; otherwise those that a router has chosen (`expect`)."""
        self.check_idle()
        units = [*self.layout.of_kind("block"), *self.layout.head_units]
        order = self.visits.get(name) or order or [u.index for u in units if experts or u.expert is None]
        with self.engine.sweep(name, order):
            try:
                yield
            finally:
                self.binding.bind_homes()
        if not (self.ranks.several or self.layout.has_expert_units):  # ranks upload in the order that all of them know
            self.visits[name] = list(self.engine.visited)

    def lockstep(
        self,
        batches: list[DeviceBatch],
        serve: Serve,
        rows: Rows,
        steady: bool = False,
        block_at_once: bool = False,
        streams: dict[int, accelerator.Stream] | None = None,
    ) -> list[torch.Tensor]:
        """Hidden states of several passes that advance together. rows(pass, ids_M): rows of the table [M, H]. steady:
        pass i finds a unit's weights at the same address in every block, so that graphs may be used. block_at_once: a
        pass enters a block when all its units are there. streams: of single passes, in place of the current one;
        `serve` forks and joins them (forward/captured.py)."""
        passes, steady = self._lockstep, steady and self.engine.reuse_slots
        passes.steady, passes.block_at_once, passes.streams = steady, block_at_once, streams or {}
        try:
            return self.conduct([partial(self.hidden, b) for b in batches], serve, rows)
        finally:
            passes.steady, passes.block_at_once, passes.streams = False, False, {}

    def expect(self, units: list[Unit]) -> None:
        """Tells the engine which units of a stack of experts the sweep visits next: the router has chosen."""
        among = set().union(*{id(unit.tensors[0]): self._stack_pages[unit.tensors[0].name] for unit in units}.values())
        self.engine.expect(among, [unit.index for unit in units])

    def table_rows(self, ids_M: torch.Tensor) -> torch.Tensor:
        """[M, H] rows of the input embedding, or their replacement."""
        return self.device_weights.table_rows(ids_M, self.pinned)

    @overload
    def nll(self, batch: Batch) -> Scores: ...

    @overload
    def nll(self, batch: Sequence[Batch]) -> list[Scores]: ...

    @computes
    @torch.no_grad()
    def nll(self, batch: Batch | Sequence[Batch]) -> Scores | list[Scores]:
        """Summed NLL and number of trained tokens of each row. The batches of a list run in lockstep."""
        parts = [split_all([one], "auto", self.pass_tokens) for one in self.checked(batch, of_step=False)]
        found = iter(evaluation.nll_by_row(self, self.send(sum(parts, []), shares=True)))
        results: list[Any] = [tuple(map(torch.cat, zip(*islice(found, len(one)), strict=True))) for one in parts]
        return results[0] if isinstance(batch, Mapping) else results

    @computes
    @torch.no_grad()
    def token_scores(self, batches: list[DeviceBatch]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """(nll_N, best_N) of each batch: the NLL of each target, and the likeliest token at its position."""
        return evaluation.token_scores(self, batches)

    @overload
    def logits(self, batch: Batch) -> torch.Tensor: ...

    @overload
    def logits(self, batch: Sequence[Batch]) -> list[torch.Tensor] | list[Scores]: ...

    @computes
    @torch.no_grad()
    def logits(self, batch: Batch | Sequence[Batch]) -> torch.Tensor | list[torch.Tensor] | list[Scores]:
        """Of a batch: the logits, [B, T, V] of a decoder (the whole vocabulary, streamed like a generation) or [B, L]
        of a classifier. Of a list of batches and a classifier: (logits, losses of the rows [B]) of each, in float32,
        all run together."""
        if self.classifies:
            found = evaluation.class_logits(self, self.to_device(batch, of_step=False))
            return found[0][0] if isinstance(batch, Mapping) else found
        if not isinstance(batch, Mapping) and isinstance(batch, Sequence):
            return [self.logits(one) for one in batch]
        return evaluation.logits(self, batch)

    @computes
    @torch.no_grad()
    def generate(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None, **options: object
    ) -> torch.Tensor:
        """HF generation; a streamed model crosses the link once per token of a batch."""
        return evaluation.generate(self, input_ids, attention_mask, options)

    # -- methods ---------------------------------------------------------------------------------------------------

    @computing()
    def apply_deferred(self, before_step_of: Attached | None = None) -> None:
        """Afterwards weights at home are those after the last step of every method (before_step_of: every other)."""
        if before_step_of is None:
            self.methods.take_changes()
        self.methods.apply_deferred(before_step_of)

    @contextmanager
    def rewriting_shared(self) -> Iterator[None]:
        """A context in which homes that ranks share are rewritten, each by its one writer, while no rank uploads them.
        Entered by all ranks."""
        if not self.engine.shared:
            yield
            return
        if self.device.type == ACCELERATOR:
            accelerator.synchronize(self.device)
        self.engine.invalidate()
        self.ranks.barrier()
        yield
        self.engine.wait_for_homes()
        self.ranks.barrier()
        self.engine.invalidate()

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
            if self.methods.low_rank is not None:
                home = self.methods.low_rank.as_saved(tensor, home, merged)
            yield tensor.name, home if self.methods.addon is None else self.methods.addon.as_saved(tensor, home)

    def own_tensors(self) -> Iterator[tuple[str, int, torch.Tensor]]:
        """(name, index of the first element, elements): this rank's shards and, on the leader, all other tensors."""
        self.engine.wait_for_homes()
        for tensor in self.layout.tensors:
            if self.homes.unit_of(tensor).index in self.homes.parts:
                yield from ((tensor.name, begin, part) for begin, part in self.homes.own_parts(tensor))
            elif self.ranks.is_leader:
                yield tensor.name, 0, self.home(tensor)

    @leaves_no_frames
    def save_pretrained(self, path: str | Path, tokenizer: Any = None) -> None:
        """Writes an ordinary HF directory, with the files published beside the weights; tokenizer: another one."""
        from keyhole.model.weights.save import save_model

        if not isinstance(path, str | Path) or not str(path):
            raise UserError(f"save_pretrained: found {path!r}, expected the path of a directory ('.' is this one)")
        self.apply_deferred()
        with writing_to(path, "save_pretrained"):
            for line in save_model(self, Path(path), tokenizer=tokenizer):
                warn(line)

    @alone()
    def close(self) -> None:
        """Applies what is deferred (ranks do so before), ends what works on the host, restores the process's settings,
        and gives all memory back, whoever still holds the model, its methods or its module: every later call of them is
        refused. (Deleting the model leaves the module as Hugging Face made it.)"""
        if not vars(self) or self.methods.process != os.getpid():  # a fork leaves all to its parent
            return
        self.check_idle()
        with ExitStack() as rest:  # all of it, from the last line up, also after an error
            rest.callback(give_back)
            rest.callback(vars(self).clear)
            rest.callback(empty, self.module)
            rest.callback(lambda: list(map(arena.unpin, self.engine.host_memory())) if self.pinned else ())
            rest.callback(self._put_back)
            rest.callback(tuple if self.engine.gate is None else self.engine.gate.close)
            for method in self.methods.trained:
                rest.callback(vars(method).clear)
                rest.callback(method.close)
            rest.callback(*((accelerator.synchronize, self.device) if self.device.type == ACCELERATOR else (tuple,)))
            try:
                if not self.ranks.several:
                    self.methods.apply_deferred()  # what the caller pointed elsewhere is no matter any more
                    self.engine.wait_for_homes()
            except Exception as error:  # a step that broke cannot be completed
                warn(f"close: the last step is not in the weights: {error}")

    @property
    def original(self) -> str | None:
        """The directory or hub id that holds exactly the weights that were loaded; None if they were rounded to a
        frozen format while loading, or initialised at random."""
        return None if self.formats.rounds or self.drawn else self.source

    def describe(self) -> list[str]:
        """The decisions of the plan and their reasons, one line per decision."""
        return [] if self.placed is None else self.placed.reasons
