"""A Hugging Face decoder whose parameters live in flat memory, on the device or behind the link.

`Model` ties four things together and is what `keyhole.load` returns:

    module    the HF model itself; its parameters are views into flat memory and are re-pointed as units come and go
    layout    which elements make up which unit (layout.py)
    engine    the homes of the units, and what moves them (offload/engine.py)
    head      hidden states -> logits, in chunks (head.py)

Between sweeps every parameter points to its home, so the module can be saved or looked at like any other. During a
sweep a *conductor* decides what a parameter points to: the lockstep of several passes (lockstep.py), or `_Solo`, which
brings each unit in as a single pass enters it (generation). Without a conductor a resident model is an ordinary one.
Legend: B rows, T positions, N trained tokens, H width.
"""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from keyhole import ops
from keyhole.model.batch import Batch, DeviceBatch, as_list, to_device
from keyhole.model.graphs import BlockGraphs
from keyhole.model.head import Head
from keyhole.model.layout import FlatTensor, Layout, Unit, find_blocks
from keyhole.model.lockstep import Lockstep
from keyhole.offload import arena
from keyhole.offload.engine import Engine
from keyhole.offload.wire import PACKED
from keyhole.ops.loss import RunningNLL

Serve = Callable[[Unit | None, Callable[[int], None]], None]
Rows = Callable[[int, torch.Tensor], torch.Tensor]


class Model:
    """See the top of this file. `dtype` is what kernels compute in; homes may hold another (the wire format)."""

    def __init__(
        self,
        module: nn.Module,
        layout: Layout,
        engine: Engine,
        dtype: torch.dtype,
        *,
        tokenizer: Any = None,
        source: str | None = None,
        placed: Any = None,
        graphs: bool = True,
    ) -> None:
        self.module, self.layout, self.engine, self.dtype = module, layout, engine, dtype
        self.device, self.config = engine.device, module.config
        self.tokenizer, self.source, self.placed = tokenizer, source, placed
        self.pinned = False
        self.graphs: BlockGraphs | None = None
        self.head = Head(module)
        self.embedding = module.get_input_embeddings()
        self.conductor: Any = None
        self._lockstep = Lockstep(self.device)
        weakref.finalize(self, self._lockstep.close)
        self._home_views: list[tuple[nn.Parameter, torch.Tensor]] = []
        self._unpacked: dict[int, tuple[torch.Tensor, set[str]]] = {}  # packed units that are being filled
        self._scratch: dict[str, torch.Tensor] = {}
        self._views: dict[tuple, list[tuple[nn.Parameter, torch.Tensor]]] = {}
        self.bound_spine: torch.Tensor  # what the spine's parameters point into, for the pass that runs
        spine = layout.spine.tensors
        self._spine_tensors = {b: [t for t in spine if t.block == b] for b in (None, *range(layout.block_count))}
        self._install_hooks()
        whole = len(layout.of_kind("block")) == layout.block_count > 0
        if graphs and self.device.type == "cuda" and whole:
            self.graphs = BlockGraphs(self, find_blocks(module))

    # -- where parameters point to ---------------------------------------------------------------------------------

    def unit_of(self, tensor: FlatTensor) -> Unit:
        """The unit that the tensor starts in (a table goes on into the next ones)."""
        return next(u for u in self.layout.units if u.start <= tensor.start < u.stop)

    def home(self, tensor: FlatTensor) -> torch.Tensor:
        """The parameter at its home, in the dtype of its home; of a packed unit, an unpacked copy."""
        unit = self.unit_of(tensor)
        flat = self.engine.homes[unit.index]
        if flat.dtype == PACKED:
            unpacked = torch.empty(unit.numel, dtype=self.dtype, device=flat.device)
            ops.fp8_decode(flat, unpacked)
            return _view(unpacked, tensor, unit.start)
        strides = torch.empty(tensor.shape, device="meta").stride()
        return flat.as_strided(tensor.shape, strides, flat.storage_offset() + tensor.start - unit.start)

    def fill(self, tensor: FlatTensor, write: Callable[[torch.Tensor], None]) -> None:
        """Has `write` fill the parameter. A packed unit is gathered in fp32 and packed when its last tensor came."""
        unit = self.unit_of(tensor)
        packed = self.engine.homes[unit.index]
        if packed.dtype != PACKED:
            write(self.home(tensor))
            return
        blank = (torch.zeros(unit.numel, device=packed.device), set())
        whole, written = self._unpacked.setdefault(unit.index, blank)
        write(_view(whole, tensor, unit.start))
        written.add(tensor.name)
        if len(written) == len(unit.tensors):
            ops.fp8_encode_(whole, packed, offset=unit.start, seed=0, step=0, rounding="nearest")
            del self._unpacked[unit.index]

    def bind_homes(self) -> None:
        """Points every parameter to its home (chunks of a table lie side by side, so a table is one view)."""
        if not self._home_views:
            plain = [t for t in self.layout.tensors if self.engine.homes[self.unit_of(t).index].dtype != PACKED]
            self._home_views = [(tensor.param, self.home(tensor)) for tensor in plain]
        for param, view in self._home_views:
            param.data = view

    def bind(self, unit: Unit | None, flat: torch.Tensor | None, spine: torch.Tensor) -> None:
        """Points the parameters of a block unit into `flat`, and those of the spine outside of blocks and in the
        unit's block into `spine`. (A pass that enters the next block takes that block's with it: `on_block`.)"""
        self.bound_spine = spine
        self._point_spine(None)
        if unit is not None:
            self._point_spine(unit.block)
            self._point((unit.index, flat.data_ptr()), unit.tensors, flat, unit.start)

    def spine_of(self, block: int) -> list[FlatTensor]:
        """The spine's tensors inside a block: its norms."""
        return self._spine_tensors[block]

    def _point_spine(self, block: int | None) -> None:
        key = ("spine", block, self.bound_spine.data_ptr())
        self._point(key, self._spine_tensors[block], self.bound_spine, self.layout.spine.start)

    def _point(self, key: tuple, tensors: list[FlatTensor], flat: torch.Tensor, start: int) -> None:
        """Points tensors into `flat`, whose first element is `start`. Views of reused memory are made once."""
        views = self._views.get(key)
        if views is None:
            views = [(t.param, _view(flat, t, start)) for t in tensors]
            if self.engine.reuse_slots:
                self._views[key] = views
        for param, view in views:
            param.data = view

    def bind_head(self, unit: Unit, flat: torch.Tensor, spine: torch.Tensor) -> None:
        """Lets the head hold the rows of a chunk."""
        first, last = unit.rows
        bias = self.head.linear.bias
        if bias is not None:
            tensor = next(t for t in self._spine_tensors[None] if t.param is bias)
            bias = _view(spine, tensor, self.layout.spine.start)[first:last]
        width = unit.tensors[0].shape[1]
        self.head.bind(flat[: (last - first) * width].view(last - first, width), bias)

    # -- running it ------------------------------------------------------------------------------------------------

    def hidden(self, batch: DeviceBatch) -> torch.Tensor:
        """[N, H] hidden states at the positions that predict a trained token."""
        hidden_BTH = self.head.decoder(**batch.inputs, use_cache=False)[0]
        return hidden_BTH.flatten(0, 1)[batch.index_N]

    @contextmanager
    def _conducted_by(self, conductor: Any) -> Iterator[None]:
        padding_idx, self.embedding.padding_idx = self.embedding.padding_idx, None
        self.conductor = conductor
        try:
            yield
        finally:
            self.conductor = None
            self.embedding.padding_idx = padding_idx
            self.bind_homes()

    @contextmanager
    def sweep(self, name: str, learn: bool = True) -> Iterator[None]:
        """One visit of every unit, in the order of the model."""
        head = [u.index for u in self.layout.head_units]
        blocks = [u.index for u in self.layout.of_kind("block")]
        with self.engine.sweep(name, blocks + head, learn):
            try:
                yield
            finally:
                self.bind_homes()

    def lockstep(
        self, batches: list[DeviceBatch], serve: Serve, rows: Rows, steady: bool = False
    ) -> list[torch.Tensor]:
        """Hidden states of several passes that advance together. rows(pass, ids_M) gives rows of the table [M, H].
        steady: pass i finds a unit's weights at the same address in every block, so that graphs may be used."""
        self._lockstep.rows, self._lockstep.steady = rows, steady and self.engine.reuse_slots
        with self._conducted_by(self._lockstep):
            try:
                return self._lockstep.run([lambda b=b: self.hidden(b) for b in batches], serve)
            finally:
                self._lockstep.rows = None

    def clean(self, unit: Unit) -> torch.Tensor:
        """The unit's weights on the device, in the dtype of compute. Release the unit afterwards."""
        stored = self.engine.acquire(unit.index)
        if stored.dtype == self.dtype:
            return stored
        kind = "spine" if unit.kind == "spine" else "unit"
        if kind not in self._scratch:  # kept: parameters point into it
            numel = unit.numel if kind == "spine" else self.layout.largest_unit_numel
            self._scratch[kind] = torch.empty(numel, dtype=self.dtype, device=self.device)
        clean = self._scratch[kind][: unit.numel]
        if stored.dtype == PACKED:
            ops.fp8_decode(stored, clean)
            return clean
        return clean.copy_(stored)

    def table_rows(self, ids_M: torch.Tensor) -> torch.Tensor:
        """Rows of the input embedding, gathered where the table lives."""
        table_VH = self.home(self.layout.table)
        if table_VH.device == self.device or (self.pinned and ops.use_kernel(self.device)):
            for unit in self.layout.of_kind("table"):
                self.engine.home_ready(unit.index)
            return ops.gather_rows(table_VH, ids_M)
        self.engine.wait_for_homes()
        return table_VH[ids_M.to(table_VH.device)].to(self.device)

    @torch.no_grad()
    def nll(self, batch: Batch | list[Batch]) -> Any:
        """Summed NLL and number of trained tokens of each row. A list of batches crosses the link once, together."""
        batches = [to_device(b, self.device) for b in as_list(batch)]
        spine = self.clean(self.layout.spine)

        def serve(unit: Unit | None, resume: Callable[[int], None]) -> None:
            self.bind(unit, self.clean(unit) if unit else None, spine)
            for i in range(len(batches)):
                resume(i)
            if unit:
                self.engine.release(unit.index)

        with self.sweep("evaluate"):
            hidden = self.lockstep(batches, serve, lambda i, ids_M: self.table_rows(ids_M).to(self.dtype))
            running = [RunningNLL(b.target_N) for b in batches]
            for unit in self.layout.head_units:
                self.bind_head(unit, self.clean(unit), spine)
                for state, x in zip(running, hidden, strict=True):
                    self.head.add_nll(state, x, unit.rows[0])
                self.engine.release(unit.index)
        results = [_by_row(state.nll_N(), b) for state, b in zip(running, batches, strict=True)]
        return results[0] if isinstance(batch, dict) else results

    @torch.no_grad()
    def generate(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None, **options: Any
    ) -> torch.Tensor:
        """HF generation; a streamed model crosses the link once a token (the whole batch together)."""
        input_ids = input_ids.to(self.device)
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask.to(self.device)
        if self.is_plain:
            return self.module.generate(input_ids=input_ids, attention_mask=mask, **options)
        with self.sweep("generate", learn=False), _Solo(self) as solo, self._conducted_by(solo):
            return self.module.generate(input_ids=input_ids, attention_mask=mask, **options)

    @property
    def is_plain(self) -> bool:
        """Every unit is on the device in the dtype it is computed in: the module works as it stands."""
        return not self.engine.streamed and all(home.dtype == self.dtype for home in self.engine.homes)

    def _install_hooks(self) -> None:
        def on_enter(unit: Unit) -> Callable:
            def hook(module: nn.Module, args: tuple) -> None:
                current = self.conductor and self.conductor.current
                if current and current.wants is not unit:
                    current.meet(unit)

            return hook

        def on_block(block: int) -> Callable:
            def hook(module: nn.Module, args: tuple) -> None:
                if self.conductor is not None:
                    self._point_spine(block)

            return hook

        def on_embed(module: nn.Module, args: tuple) -> tuple | None:
            if self.conductor is None:
                return None
            ids = args[0]
            module.weight.data = self.conductor.rows(self.conductor.current.index, ids.flatten())
            return (torch.arange(ids.numel(), device=ids.device).view(ids.shape),)

        for unit in self.layout.of_kind("block"):
            for owner in unit.modules:
                owner.register_forward_pre_hook(on_enter(unit))
        for block, owner in enumerate(find_blocks(self.module)):  # after on_enter: the unit's pass is bound by then
            owner.register_forward_pre_hook(on_block(block))
        self.embedding.register_forward_pre_hook(on_embed)

    # -- looking at it, and saving ---------------------------------------------------------------------------------

    def named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every parameter at its home, a tied one once."""
        self.engine.wait_for_homes()
        for tensor in self.layout.tensors:
            yield tensor.name, self.home(tensor)

    def save_pretrained(self, path: str | Path) -> None:
        """Writes an ordinary HF directory: safetensors, config, tokenizer."""
        from keyhole.checkpoint.hf import save_model

        save_model(self, Path(path))

    def close(self) -> None:
        """Ends threads and gives page-locked memory back; the model cannot be used afterwards."""
        self._lockstep.close()
        if self.pinned:
            torch.cuda.synchronize(self.device)
            arena.unpin(arena.whole(self.engine.homes[min(self.engine.streamed)]))
            self.pinned = False

    def describe(self) -> list[str]:
        """What was decided and why, a line each."""
        return self.placed.reasons


def _view(flat: torch.Tensor, tensor: FlatTensor, start: int) -> torch.Tensor:
    begin = tensor.start - start
    return flat[begin : begin + tensor.shape.numel()].view(tensor.shape)


def _by_row(nll_N: torch.Tensor, batch: DeviceBatch) -> tuple[torch.Tensor, torch.Tensor]:
    nll_B = torch.zeros(batch.row_count, device=nll_N.device).index_add_(0, batch.row_N, nll_N)
    count_B = torch.zeros(batch.row_count, dtype=torch.long, device=nll_N.device)
    return nll_B, count_B.index_add_(0, batch.row_N, torch.ones_like(batch.row_N))


class _Solo:
    """A conductor for one pass on the caller's thread: units come in as they are entered."""

    index = 0

    def __init__(self, model: Model) -> None:
        self.model, self.current, self.wants = model, self, None
        self.spine = model.clean(model.layout.spine)

    def __enter__(self) -> "_Solo":
        self.model.head.linear.forward = self._head
        self.model.bind(None, None, self.spine)
        return self

    def __exit__(self, *exc: object) -> None:
        del self.model.head.linear.forward
        self._leave()

    def _leave(self) -> None:
        if self.wants is not None:
            self.model.engine.release(self.wants.index)
            self.wants = None

    def meet(self, unit: Unit) -> None:
        self._leave()
        self.wants = unit
        self.model.bind(unit, self.model.clean(unit), self.spine)

    def rows(self, index: int, ids_M: torch.Tensor) -> torch.Tensor:
        return self.model.table_rows(ids_M).to(self.model.dtype)

    def _head(self, x: torch.Tensor) -> torch.Tensor:
        self._leave()
        parts = []
        for unit in self.model.layout.head_units:
            self.model.bind_head(unit, self.model.clean(unit), self.spine)
            parts.append(nn.functional.linear(x, self.model.head.linear.weight, self.model.head.linear.bias))
            self.model.engine.release(unit.index)
        return torch.cat(parts, dim=-1)
