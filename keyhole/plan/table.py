"""Every method x placement x wire for one model on one machine: bytes, seconds, and whether it fits.

The bytes come from the engine's own formulas: `fit` (plan/fit.py) cuts and places units as loading would, and
each method's memory.py gives the memory of a step. So a row equals the plan that a run with these settings prints.
Rows per method and wire:

    resident   every weight on the GPU
    auto       as many weights on the GPU as the budget has room for, the rest streamed (if not all fit)
    stream     everything streamed that can be

    gpu    the planned peak of the allocator
    host   weights in host memory, the method's state, and the process itself
    disk   checkpoints (weights in the compute dtype, and the method's state): those kept, and one being written

The process itself takes, with a GPU, PROCESS_BYTES for Python, PyTorch, its libraries and the CUDA context; KERNELS
more where Triton compiles our kernels (all methods but the baselines, which run torch's own); BACKWARD more where
autograd runs (the backward kernels of cuBLAS and cuDNN, loaded when first used, and autograd's threads); COMPILER more
with torch.compile. On an H200, each case in a process of its own (plan_check_h200_*), `zo` took 1.45 to 1.55 GiB, plain
autograd 1.48 to 1.69, the others 1.51 to 1.82 beside their weights and state: the least `lora`, the most `lsp`. Several
cases in one process (benchmarks/records/zo_h200_*, lomo_h200_*, lsp_h200_*, frozen_base_h200_*; the first of each):
1.29 to 1.43, 1.47 to 1.54, 1.73 to 1.90, and compiled blocks 0.1 to 0.6 more. The constants are those of the former.

A wire of the same width as the dtype is left out, since its row would be the same. The table needs no weights and no
GPU: the module is a skeleton (model/structure/skeleton.py).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import nn

from keyhole.errors import UserError
from keyhole.machine.rates import Rates
from keyhole.machine.sizes import GIB, about
from keyhole.methods import METHODS
from keyhole.methods.settings import Around, MethodSettings
from keyhole.methods.traits import Traits
from keyhole.methods.work import experts_share
from keyhole.methods.workload import Room, Workload
from keyhole.model.forward.memory import host_bytes
from keyhole.model.structure.find import Parts, find_parts
from keyhole.model.structure.layout import Layout, find_layout
from keyhole.model.weights.format import CODECS, PLAIN, Wire, bytes_per_element
from keyhole.plan.fit import Costs, fit, split, too_small
from keyhole.plan.seconds import StepSeconds, step_seconds

PROCESS_BYTES = {True: int(1.35 * GIB), False: int(0.45 * GIB)}  # with CUDA, without
KERNELS, BACKWARD, COMPILER = int(0.11 * GIB), int(0.19 * GIB), int(0.3 * GIB)
PLACEMENTS = ("resident", "auto", "stream")


@dataclass(frozen=True)
class Question:
    """The model, the step and the machine to plan for. gpu_bytes: the most that PyTorch may use on the GPU (None: no
    GPU)."""

    module: nn.Module
    dtype: torch.dtype
    rates: Rates
    gpu_bytes: int | None
    host_bytes: int
    batch: int = 4
    length: int = 1024
    accumulation: int = 1
    steps: int = 1000  # of the run
    clips: bool = False
    keeps: int = 2  # number of checkpoints that are kept
    settings: Mapping[str, MethodSettings] = field(default_factory=dict)  # by method
    methods: tuple[str, ...] = tuple(METHODS)
    chooses: bool = False  # loss: candidates
    layouts: dict[tuple[int, int | None, bool, bool], Layout] = field(
        default_factory=dict, repr=False, compare=False
    )  # found so far
    parts: dict[int, Parts] = field(default_factory=dict, repr=False, compare=False)  # by the id of the module
    wires: dict[tuple[torch.dtype, str | None], Wire] = field(default_factory=dict, repr=False, compare=False)

    def find(
        self, module: nn.Module, max_unit_numel: int | None = None, cut_rows: bool = True, cut_experts: bool = True
    ) -> Layout:
        """A layout, found once and cached: for a large model it takes a tenth of a second, and rows share layouts."""
        key = (id(module), max_unit_numel, cut_rows, cut_experts)
        if key not in self.layouts:
            if id(module) not in self.parts:
                self.parts[id(module)] = find_parts(module)
            self.layouts[key] = find_layout(module, max_unit_numel, cut_rows, cut_experts, self.parts[id(module)])
        return self.layouts[key]

    @property
    def tokens_per_step(self) -> int:
        return self.batch * self.length * self.accumulation

    def workload(self, row: Traits) -> Workload:
        own = self.settings.get(row.name) or row.settings()
        passes, tokens = self.accumulation * own.passes, self.batch * self.length
        clips = self.clips and row.sweep != "forward"  # without gradients there is no norm to clip by
        share = experts_share(self.module.config)
        return Workload(
            row.name,
            tokens,
            passes,
            own,
            clips,
            length=self.length,
            experts=share,
            steps=self.steps,
            chooses=self.chooses,
        )


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    method: str
    placement: str
    wire: str | None
    gpu_bytes: int
    host_bytes: int
    disk_bytes: int
    step_seconds: float
    tokens_per_second: float
    run_hours: float
    bound_by: str
    fits: bool
    seconds: StepSeconds
    missing: str = ""  # which memory, if it does not fit
    refused: str = ""  # why `keyhole train` would refuse a run of this many steps without another setting
    on_gpu: float = 1.0  # share of the weights that stay on the GPU
    full: bool = True  # all parameters of the model are trained
    stored: str = ""  # the storage format at home and on the link; `wire` is the setting, None for the dtype itself

    def to_dict(self) -> dict[str, object]:
        """Plain values for JSON."""
        parts = {"compute": self.seconds.compute, "link": self.seconds.link, "cpu": self.seconds.cpu}
        kept = {name: value for name, value in vars(self).items() if name not in ("seconds", "stored")}
        return kept | {"wire": self.stored, "wire_setting": self.wire, "parts_seconds": parts}


def process_bytes(row: Traits, own: MethodSettings | None, on_gpu: bool) -> int:
    """Host memory of the process itself."""
    if not on_gpu:
        return PROCESS_BYTES[False]
    found = PROCESS_BYTES[True] + (0 if row.sweep == "torch" else KERNELS) + (0 if row.sweep == "forward" else BACKWARD)
    return found + (COMPILER if own is not None and own.is_compiled else 0)


def wires_of(row: Traits, dtype: torch.dtype, own: MethodSettings | None = None) -> list[str | None]:
    """None for the dtype itself, and the formats of another width that the method accepts (of the frozen formats of one
    width, the first)."""
    plain = [name for name in row.wires if name in PLAIN and PLAIN[name].itemsize != dtype.itemsize]
    of_width = {PLAIN[name].itemsize: name for name in reversed(plain)}  # the first of a width
    packed = [name for name in row.wires if name in CODECS]
    frozen = {bytes_per_element(name): name for name in reversed((own or row.settings()).frozen_wires)}
    return [None, *reversed(of_width.values()), *packed, *reversed(frozen.values())]


def rows(question: Question) -> list[Row]:
    """All rows, by method in the order of the table of methods."""
    found = (
        plan_row(question, traits, placement, wire)
        for traits in (METHODS[name] for name in question.methods)
        for wire in wires_of(traits, question.dtype, question.settings.get(traits.name))
        for placement in (PLACEMENTS if traits.streams else PLACEMENTS[:1])
    )
    return [row for row in found if row is not None]


def room_of(question: Question, wire: str | None) -> Room:
    workspace = question.rates.workspace_bytes if question.rates.gpu_bytes is not None else 0
    key = question.dtype, wire
    if key not in question.wires:  # rows share the sizes of units that it computes
        question.wires[key] = Wire(question.dtype, wire)
    return Room(question.wires[key], workspace, question.gpu_bytes)


def plan_row(question: Question, traits: Traits, placement: str, wire: str | None = None) -> Row | None:
    """One row; None if it would equal another one, or is impossible."""
    work, room = question.workload(traits), room_of(question, wire)
    own = work.settings or traits.settings()
    if any(True for _ in own.faults(Around(wire, placement))):
        return None
    whole, gpu = question.find(question.module), question.gpu_bytes
    if placement != "resident" and (not whole.of_kind("block") or gpu is None and placement == "auto"):
        return None

    def where(costs: Costs) -> tuple[Layout, set[int]]:
        layout, streamed = whole, set[int]()
        if placement == "stream" or placement == "auto" and costs.of(whole, streamed).total > (gpu or 0):
            layout, streamed = fit(question.module, costs, gpu if placement == "auto" else None, question.find)
        if placement == "stream" and gpu is not None and costs.of(layout, streamed).total > gpu:
            layout = question.find(question.module, *costs.finest(question.find, question.module))
            streamed = {unit.index for unit in layout.units[1:]}
        return layout, streamed

    def place(costs: Costs) -> tuple[Layout, set[int]]:
        layout, streamed = where(costs)
        if gpu is not None and costs.is_planned and costs.of(layout, streamed).total > gpu:
            raise too_small(gpu, costs.of(layout, streamed), costs.work, streamed=bool(streamed))
        return layout, streamed

    costs = Costs(work, room, traits)
    try:
        costs, layout, streamed = split(costs, gpu, place)
    except UserError:  # below the minimum: the rows with all or nothing streamed say what is missing
        if placement == "auto":
            return None
        *_, costs = costs.splits(gpu)
        layout, streamed = where(costs)
    if placement == "auto" and (not streamed or len(streamed) == len(layout.units) - 1):
        return None  # the same as another row
    return make_row(question, traits, placement, wire, layout, streamed, costs.work)


def make_row(
    question: Question,
    traits: Traits,
    placement: str,
    wire: str | None,
    layout: Layout,
    streamed: set[int],
    work: Workload | None = None,
) -> Row:
    """The row of a given placement. work: the step as it is split; None: as it is asked for."""
    work, room = work or question.workload(traits), room_of(question, wire)
    costs = Costs(work, room, traits)
    asked = traits.planned_work(layout, streamed, costs.work_of(layout, streamed), room, question.rates)
    itemsize = question.dtype.itemsize
    seconds = step_seconds(asked, question.rates, rows=work.tokens, itemsize=itemsize)
    gpu = costs.of(layout, streamed).total + asked.kept_bytes
    process = process_bytes(traits, work.settings, question.rates.gpu_bytes is not None)
    away = host_bytes(layout, streamed, room.formats)
    host = away + asked.host_bytes + process
    if question.gpu_bytes is None:  # the CPU is the device
        host, gpu = host + gpu, 0
    weights = itemsize * sum(t.shape.numel() for t in layout.tensors)
    own = work.settings or traits.settings()
    changed = [u for u in layout.units if u.kind != "block" and any(t.param.requires_grad for t in u.tensors)]
    dense = itemsize * sum(unit.numel for unit in changed)  # in light checkpoints too
    checkpoint = (dense if own.light else weights) + asked.saved_bytes
    disk = checkpoint * (question.keeps + 1) + (weights if own.light else 0)  # and the model at the end
    total = sum(room.formats.homes(layout))
    lacks = [
        f"{about(need - have)} of {what}"
        for what, need, have in (
            ("GPU memory", gpu, question.gpu_bytes if question.gpu_bytes is not None else gpu),
            ("host memory", host, question.host_bytes),
        )
        if need > have
    ]
    faults = own.faults(Around(wire, placement, work.steps))
    return Row(
        method=traits.name,
        placement=placement,
        wire=wire,
        gpu_bytes=gpu,
        host_bytes=host,
        disk_bytes=disk,
        step_seconds=seconds.total,
        tokens_per_second=question.tokens_per_step / seconds.total,
        run_hours=seconds.total * question.steps / 3600,
        bound_by=seconds.bound_by,
        fits=not lacks,
        missing=" and ".join(lacks),
        refused="; ".join(why for _, why in faults),
        on_gpu=1 - away / max(1, total),
        seconds=seconds,
        full=not traits.keeps_base,
        stored=wire or next(name for name, dtype in PLAIN.items() if dtype == question.dtype),
    )
