"""Graphs of blocks: what could spoil them while they are recorded, and what they return. (That they change no number
on a GPU: tests/methods/zo.)"""

import itertools
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

import keyhole
from keyhole.model import recorder
from keyhole.model.forward.blocks import BlockGraphs
from keyhole.model.recorder import UsersHooks, signature_of
from keyhole.model.spare_memory import SpareMemory
from keyhole.model.structure.find import find_blocks
from tests.methods.zo.loops import EPS
from tests.model.decoders import batch, load


class Loop:
    """Garbage that only a collection finds."""

    def __init__(self, held: Any) -> None:
        self.held, self.me = held, self


@pytest.mark.gpu
def test_graphs_of_a_model_that_is_gone_do_not_spoil_those_of_another() -> None:
    """Garbage with a graph in it, made while another graph is recorded, and objects enough for a collection."""
    old, x = [], torch.zeros(4, device="cuda")
    for _ in range(64):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            x.add_(1)
        old.append(graph)
    del graph
    model, littered = load("llama", device="cuda"), []

    def litter(module: torch.nn.Module, args: Any) -> None:
        if torch.cuda.is_current_stream_capturing() and old:
            littered.append(1)
            Loop(old.pop())
            [[] for _ in range(100_000)]

    litter.__module__ = "keyhole.tests"  # no hook of a user's, with which blocks run eagerly
    for module in model.module.modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_pre_hook(litter)
    opt = keyhole.ZO(model, 1e-3, eps=EPS)
    for _ in range(8):
        opt.step(batch())
    assert littered and model.graphs.recordings and all(model.graphs.recordings.values())


class Recorder(TorchDispatchMode):
    """A CUDA graph on the CPU: notes what is done between begin and end, and does it again at the same addresses."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[tuple] = []

    def capture_begin(self, **_: Any) -> None:
        self.__enter__()

    def capture_end(self) -> None:
        self.__exit__(None, None, None)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not func.is_view:  # memory, not tensors: a parameter may point elsewhere by then
            where = tree_map_only(torch.Tensor, torch.Tensor.detach, (args, kwargs or {}, out))
            self.steps.append((func, *where))
        return out

    def replay(self) -> None:
        for func, args, kwargs, out in self.steps:
            again = func(*args, **kwargs)
            for old, new in zip(leaves(out), leaves(again), strict=True):
                if old.data_ptr() != new.data_ptr():
                    old.copy_(new)


class Stream:
    def __init__(self, device: torch.device) -> None:
        pass


def leaves(value: Any) -> list[torch.Tensor]:
    return [x for x in tree_leaves(value) if isinstance(x, torch.Tensor)]


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA graphs on the CPU."""
    stand_ins = {"CUDAGraph": Recorder, "Stream": Stream, "graph_pool_handle": lambda: None}
    stand_ins |= {"stream": lambda stream: nullcontext(), "synchronize": lambda device: None}
    for name, value in stand_ins.items():
        monkeypatch.setattr(torch.cuda, name, value)


def graphed(**options: Any) -> keyhole.Model:
    model = load("llama", **options)
    if model.graphs is None:  # on the CPU
        model.graphs = BlockGraphs(model, find_blocks(model.module))
    return model


def outputs_of_every_block(model: keyhole.Model) -> tuple[list[list[torch.Tensor]], list[torch.Tensor]]:
    """Steps of a model that holds on to what its blocks return; copies of that at once, and the same read later."""
    at_once, later = [], []

    def keep(module: nn.Module, args: Any, output: Any) -> None:
        kept.append(output)
        copies.append(output.clone())

    for block in find_blocks(model.module):
        block.register_forward_hook(keep)
    opt = keyhole.ZO(model, 1e-3, eps=EPS)
    opt.recorded.possible = False  # recordings of whole steps: hooks of blocks would not be called
    for step in range(5):
        kept, copies = [], []
        opt.step(batch(seed=step))
        at_once += [copy.cpu() for copy in copies]
        later += [output.cpu() for output in kept]
    return at_once, later


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_what_a_block_returned_stays(device: str, request: pytest.FixtureRequest) -> None:
    if device == "cpu":
        request.getfixturevalue("pretended")
    plain = outputs_of_every_block(load("llama", graphs=False, device=device))
    model = graphed(device=device)
    at_once, later = outputs_of_every_block(model)
    graphs = model.graphs
    assert graphs.recordings and all(graphs.recordings.values()) and all(graphs.checked.values())
    for mine in (at_once, later):
        assert len(mine) == len(plain[0]) and all(torch.equal(a, b) for a, b in zip(mine, plain[0], strict=True))


@pytest.mark.usefixtures("pretended")
def test_blocks_with_factors_have_graphs_of_their_own() -> None:
    losses = []
    for model in (load("llama", graphs=False, device="cpu"), graphed(device="cpu")):
        opt = keyhole.ZO(model, 1e-2, eps=EPS, rank=2, refresh=4)
        opt.recorded.possible = False  # of whole steps
        losses.append([float(opt.step(batch(seed=step))) for step in range(10)])
    graphs = model.graphs
    assert len(graphs.recordings) == model.layout.block_count and all(graphs.recordings.values())
    assert all(graphs.checked.values()) and losses[0] == losses[1]


class Pair(nn.Module):
    """A block that hands on two tensors, of which the second is no hidden state."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, carried: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.linear(x) * mask, carried + x


class Writes(Pair):
    """The same, writing into an input."""

    def forward(self, x: torch.Tensor, carried: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        carried += x
        return self.linear(x) * mask, carried


class Around(SimpleNamespace):
    """A model as far as graphs know it; can be referred to weakly."""


def alone(block: nn.Module) -> BlockGraphs:
    """Graphs of one block, without a model around it."""
    tensors = [SimpleNamespace(param=p) for p in block.parameters()]
    unit = SimpleNamespace(index=0, block=0, tensors=tensors, numel=20)
    common = SimpleNamespace(start=0)
    model = Around(
        device=torch.device("cpu"),
        dtype=torch.float32,
        methods=SimpleNamespace(low_rank=None),
        conductor=SimpleNamespace(steady=True, block_at_once=False, current=SimpleNamespace(index=0)),
        layout=SimpleNamespace(of_kind=lambda kind: [unit], common=common),
        binding=SimpleNamespace(common_of={0: []}, common=torch.empty(0)),
        patches=SimpleNamespace(forward=lambda module, forward: setattr(module, "forward", forward)),
    )
    graphs = BlockGraphs(model, [block])
    graphs.held = model  # they hold it weakly
    graphs.sights = 1
    return graphs


@pytest.mark.usefixtures("pretended")
@pytest.mark.parametrize("kind", [Pair, Writes])
@torch.no_grad()
def test_inputs_that_are_handed_on_or_changed_are_seen(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    block, plain = kind(), kind()
    plain.load_state_dict(block.state_dict())
    graphs, found = alone(block), []
    for one in (block, plain):
        x, carried, mask = torch.ones(2, 4), torch.zeros(2, 4), torch.ones(2, 4)
        seen = []
        for _ in range(4):
            x, carried = one(x, carried, mask)
            mask.mul_(0.5)
            seen += [x, carried.clone()]
        found.append(seen)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert list(graphs.checked.values()) == [kind is Pair]


class Borrows(nn.Module):
    """A block that also reads a weight which it shares with others, and which therefore lies in the common unit."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.shared = nn.Linear(4, 4), [nn.Parameter(torch.empty(4))]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.shared[0]


@pytest.mark.usefixtures("pretended")
@torch.no_grad()
def test_a_common_unit_that_lies_elsewhere_is_seen() -> None:
    block, x = Borrows(), torch.ones(2, 4)
    graphs = alone(block)
    for value in (1.0, 2.0):
        graphs.held.binding.common = block.shared[0].data = torch.full((4,), value)
        for _ in range(3):
            assert torch.equal(block(x), graphs.ordinary[0](x))
    assert len(graphs.recordings) == 2 and all(graphs.checked.values())


def test_what_could_change_unseen_gets_no_graph() -> None:
    x = torch.ones(2)
    assert signature_of((x, [1, None, {"a": (x, "b", torch.float32)}])) is not None
    assert signature_of((x, {"cache": object()})) is None
    assert signature_of((True, x)) != signature_of((1, x)) and signature_of({"a": x}) != signature_of({"b": x})


def test_a_hook_of_the_user_s_is_called_at_every_step(pretended: None) -> None:
    """On a module inside of a block, registered after the block was recorded, or for all modules: the block runs
    eagerly, the others as graphs, and all of them when it is removed."""
    model = graphed()
    opt = keyhole.ZO(model, 1e-3, eps=EPS)
    opt.recorded.possible, calls = False, []
    for step in range(5):
        opt.step(batch(seed=step))
    assert model.graphs.recordings and all(model.graphs.checked.values())
    inside = find_blocks(model.module)[0].mlp.up_proj
    for register in (inside.register_forward_hook, nn.modules.module.register_module_forward_hook):
        handle = register(lambda module, args, output: calls.append(module) if module is inside else None)
        for step in range(2):
            opt.step(batch(seed=step))
        assert calls == 4 * [inside], "two looks a step"
        handle.remove()
        opt.step(batch())
        assert len(calls) == 4
        calls.clear()


@pytest.mark.usefixtures("pretended")
@torch.no_grad()
def test_a_pool_is_not_used_again_after_its_last_graph_or_a_failed_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch frees it, or may refuse it; other shapes are recorded all the same. The first recording here gives other
    bits and is dropped, the third capture fails."""
    pools, used = itertools.count(), []

    def begin(self: Recorder, pool: int, **_: Any) -> None:
        used.append(pool)
        if len(used) == 3:
            raise RuntimeError("operation not permitted when stream is capturing")
        self.__enter__()

    monkeypatch.setattr(Recorder, "capture_begin", begin)
    monkeypatch.setattr(Stream, "device_index", 0, raising=False)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: next(pools))
    recorded, x = recorder.Recorder(SpareMemory(None, torch.device("cpu")), most=9), torch.ones(4)
    runs = (lambda: x + torch.rand(4), lambda: 2 * x, lambda: 3 * x, lambda: 4 * x)
    for key, run in enumerate(runs):
        recorded.verify(key, recorded.capture(run), run())
    assert [one is not None for one in recorded.recordings.values()] == [False, True, False, True]
    assert used[0] != used[1] == used[2] != used[3]


def test_hooks_of_users_are_told_from_those_that_are_always_there() -> None:
    model = load("llama")
    hooks, layer = UsersHooks(model.module.modules()), model.module.model.layers[1].mlp.up_proj
    assert not hooks.any()
    with torch.no_grad():
        model.module(input_ids=batch()["input_ids"], output_hidden_states=True, output_attentions=True)
    assert not hooks.any()
    for register in (
        layer.register_forward_hook,
        layer.register_forward_pre_hook,
        layer.register_full_backward_hook,
        layer.register_full_backward_pre_hook,
        nn.modules.module.register_module_forward_hook,
        nn.modules.module.register_module_forward_pre_hook,
        nn.modules.module.register_module_full_backward_hook,
    ):
        handle = register(lambda *args: None)
        assert hooks.any(), register
        handle.remove()
        assert not hooks.any(), register
