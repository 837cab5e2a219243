"""Outputs that lack their small part: whatever reads them finds the numbers of the whole, to the bit."""

import copy
import io
import pickle
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F
from transformers.modeling_outputs import BaseModelOutput

from keyhole import ops
from keyhole.model.forward import pending
from keyhole.model.forward.low_rank import Added, product
from keyhole.model.forward.pending import Pending, finished
from keyhole.model.forward.sketches import Readers, sketching_relu
from keyhole.ops.backend import INTERPRETED, TRITON_MISSING, force
from tests.model.forward.op_calls import calls_of

SHAPE = (2, 5, 8)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return 2 * x


def past_torch_function(y: torch.Tensor) -> torch.Tensor:
    """As C++ code calls PyTorch."""
    with torch._C.DisableTorchFunctionSubclass():
        return torch.relu(y)


def at_random(y: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(0)
    return F.dropout(y, 0.5, training=True)


def saved(y: torch.Tensor) -> torch.Tensor:
    file = io.BytesIO()
    torch.save(y, file)
    file.seek(0)
    return torch.load(file)


def set_item(y: torch.Tensor, r: torch.Tensor) -> None:
    y[0] = r[1]


def in_bfloat16(y: torch.Tensor, r: torch.Tensor) -> tuple[torch.Tensor, ...]:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return y + r, y @ r.transpose(1, 2)


@torch.jit.script
def scripted(y: torch.Tensor, r: torch.Tensor) -> torch.Tensor:
    y.mul_(0.5)
    return y.view(-1, y.size(-1)) + r.view(-1, r.size(-1))


def in_place_sum(y: torch.Tensor, r: torch.Tensor) -> torch.Tensor:
    y += r
    return y


USES: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "y + r": lambda y, r: y + r,
    "r + y": lambda y, r: r + y,
    "torch.add": lambda y, r: torch.add(r, y),
    "Tensor.add": lambda y, r: y.add(r),
    "other=": lambda y, r: torch.add(r, other=y),
    "alpha": lambda y, r: torch.add(r, y, alpha=2),
    "out=": lambda y, r: torch.add(r, y, out=torch.empty_like(r)),
    "into y": lambda y, r: torch.add(r, r, out=y),
    "1 + y": lambda y, r: 1 + y,
    "y + 1": lambda y, r: y + 1,
    "y + y": lambda y, r: y + y,
    "+ row": lambda y, r: y + r[0, 0],
    "+ strided": lambda y, r: y + r.transpose(0, 1).contiguous().transpose(0, 1),
    "+ double": lambda y, r: y + r.double(),
    "+ parameter": lambda y, r: y + nn.Parameter(r, requires_grad=False),
    "y += r": in_place_sum,
    "add_": lambda y, r: y.add_(r),
    "r += y": lambda y, r: r.clone().add_(y),
    "y - r": lambda y, r: y - r,
    "r * y": lambda y, r: r * y,
    "mul_": lambda y, r: y.mul_(0.5),
    "copy_": lambda y, r: y.copy_(r),
    "copied": lambda y, r: r.clone().copy_(y),
    "y[0] = r": set_item,
    "y[0]": lambda y, r: y[0],
    "y[..., 3:]": lambda y, r: y[..., 3:],
    "y[y > 0]": lambda y, r: y[y > 0],
    "r[y > 0]": lambda y, r: r[y > 0],
    "view": lambda y, r: y.view(-1, 8),
    "view, +": lambda y, r: y.view(10, 8) + r.view(10, 8),
    "reshape, +": lambda y, r: r + torch.reshape(y, (1, 10, 8)).reshape(SHAPE),
    "reshape, input=": lambda y, r: torch.reshape(input=y, shape=(10, 8)),
    "numel, input=": lambda y, r: (torch.numel(input=y), torch.is_floating_point(input=y)),
    "heads": lambda y, r: y.view(2, 5, 2, 4).transpose(1, 2),
    "flat": lambda y, r: y.view(-1),
    "bits": lambda y, r: y.view(torch.uint8),
    "transpose": lambda y, r: y.transpose(0, 1).contiguous(),
    "unsqueeze": lambda y, r: y.unsqueeze(0).expand(3, -1, -1, -1),
    "float": lambda y, r: y.float(),
    "double": lambda y, r: y.to(torch.float64),
    "clone": lambda y, r: y.clone(),
    "detach": lambda y, r: y.detach(),
    "data": lambda y, r: y.data,
    "contiguous": lambda y, r: y.contiguous(),
    "deepcopy": lambda y, r: copy.deepcopy(y),
    "copy": lambda y, r: copy.copy(y),
    "pickle": lambda y, r: pickle.loads(pickle.dumps(y)),
    "save": lambda y, r: saved(y),
    "cat": lambda y, r: torch.cat([r, y, y]),
    "stack": lambda y, r: torch.stack((y, r), dim=1),
    "chunk": lambda y, r: y.chunk(2, dim=-1),
    "unbind": lambda y, r: torch.unbind(y),
    "iterate": lambda y, r: list(y),
    "max": lambda y, r: y.max(dim=-1),
    "where": lambda y, r: torch.where(r > 0, y, r),
    "linear": lambda y, r: F.linear(y, r[0]),
    "matmul": lambda y, r: y @ r.transpose(1, 2),
    "layer_norm": lambda y, r: F.layer_norm(y, (8,)),
    "relu": lambda y, r: torch.relu(y),
    "nn.ReLU": lambda y, r: nn.ReLU()(y),
    "softmax": lambda y, r: y.softmax(-1),
    "dropout, eval": lambda y, r: nn.Dropout(0.5).eval()(y),
    "dropout, p = 0": lambda y, r: F.dropout(y, p=0.0, training=True),
    "torch.dropout": lambda y, r: torch.dropout(y, 0.5, False),
    "dropout, then +": lambda y, r: r + F.dropout(y, p=0.5, training=False),
    "dropout": lambda y, r: at_random(y),
    "==": lambda y, r: y == r,
    "equal": lambda y, r: torch.equal(y, y.clone()) and not torch.equal(r, y),
    "allclose": lambda y, r: torch.allclose(y, y * 1),
    "repr": lambda y, r: (repr(y), str(y), f"{y[0, 0, 0]:.3f}"),
    "item": lambda y, r: (y.sum().item(), float(y[0, 0, 0]), y.tolist()),
    "any": lambda y, r: bool(y.isnan().any()),
    "numpy": lambda y, r: torch.from_numpy(y.float().numpy()),
    "asarray": lambda y, r: torch.from_numpy(np.asarray(y.double())),
    "dlpack": lambda y, r: torch.from_dlpack(y),
    "as_subclass": lambda y, r: y.as_subclass(torch.Tensor),
    "storage": lambda y, r: torch.empty(0, dtype=y.dtype).set_(y.untyped_storage()),
    "aten": lambda y, r: torch.ops.aten.mul.Tensor(y, r),
    "C++": lambda y, r: past_torch_function(y),
    "Function": lambda y, r: Doubled.apply(y),
    "autocast": lambda y, r: in_bfloat16(y, r),
    "script": lambda y, r: scripted(y, r),
    "vmap": lambda y, r: torch.vmap(torch.add)(y, r),
    "within vmap": lambda y, r: torch.vmap(lambda one: (y + one).sum())(torch.stack([r, r])),
    "jvp": lambda y, r: torch.func.jvp(torch.sin, (y,), (r,)),
    "within jvp": lambda y, r: torch.func.jvp(lambda one: one + y, (r,), (r,)),
    "within grad": lambda y, r: torch.func.grad(lambda one: (one + y).square().sum())(r),
    "within jacrev": lambda y, r: torch.func.jacrev(lambda one: (one + y).sum(-1))(r),
    "recorded": lambda y, r: make_fx(lambda one: y * one)(r)(r),
    "recorded sum": lambda y, r: make_fx(lambda one: y + one)(r)(r),
    "type": lambda y, r: y.type(torch.float64),
    "new": lambda y, r: y.new_ones(3),
    "shape": lambda y, r: (y.shape, y.size(-1), len(y), y.dim(), y.dtype, y.device, y.stride(), y.is_contiguous()),
}
BITS = [torch.float32, torch.bfloat16]
KEEP = ("view", "dropout, eval", "dropout, p = 0", "torch.dropout")
"""These return a Pending."""


@pytest.fixture(autouse=True)
def block() -> Iterator[list]:
    """The forward of a block is running, without gradients."""
    made: list = []
    pending._open.blocks.append(made)
    with torch.no_grad():
        yield made
    pending._open.blocks.remove(made)


def made(dtype: torch.dtype = torch.float32, bias: bool = True, seed: int = 0) -> tuple[Pending, torch.Tensor]:
    """A Pending, and the tensor that it stands for."""
    draw = torch.Generator().manual_seed(seed)
    y = torch.randn(10, 8, generator=draw).to(dtype)
    p, b, bias_LO = (torch.randn(shape, generator=draw) for shape in ((2, 5, 3), (2, 3, 8), (2, 8)))
    lacks = p, b, bias_LO if bias else None
    return pending.wait(y, lacks, SHAPE), ops.correct(y, *lacks).view(SHAPE)


def residual(dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(1)).to(dtype)


def same(found: Any, expected: Any) -> bool:
    """Whether two results are equal to the bit."""
    if isinstance(expected, torch.Tensor):
        found = finished(found)
        return found.dtype == expected.dtype and found.shape == expected.shape and torch.equal(found, expected)
    if isinstance(expected, tuple | list):
        return len(found) == len(expected) and all(map(same, found, expected))
    return found == expected


def has_pending(value: Any) -> bool:
    return isinstance(value, Pending) or (isinstance(value, tuple | list) and any(map(has_pending, value)))


@pytest.mark.parametrize("name", USES)
@pytest.mark.parametrize("dtype", BITS)
def test_every_use_finds_the_whole(dtype: torch.dtype, name: str) -> None:
    """What it returns, and what it leaves behind; the tensor itself is right whenever it is read later."""
    (y, whole), r = made(dtype), residual(dtype)
    found, expected = USES[name](y, r.clone()), USES[name](whole, r.clone())
    assert has_pending(found) == (name in KEEP)
    assert same(found, expected) and same(y.clone(), whole)


@pytest.mark.parametrize("name", KEEP)
def test_some_uses_leave_it_pending(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (y, whole), calls, use = made(), calls_of(monkeypatch), USES[name]
    found = use(y, residual(torch.float32))
    assert isinstance(found, Pending) and calls == [] and found.keyhole_product is y.keyhole_product
    assert same(found + 0.0, use(whole, residual(torch.float32))) and same(y * 1, whole) and calls == [False]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from(sorted(USES)), min_size=1, max_size=6), st.sampled_from(BITS), st.booleans())
def test_uses_one_after_the_other(names: list[str], dtype: torch.dtype, bias: bool) -> None:
    """Reads, views and writes in any order, on the tensor or on what a use has returned."""
    (y, whole), r = made(dtype, bias), residual(dtype)
    for name in names:
        found, expected = USES[name](y, r.clone()), USES[name](whole, r.clone())
        assert same(found, expected) and same(y.clone(), whole), name
        is_next = isinstance(expected, torch.Tensor) and expected.shape == SHAPE and expected.dtype == dtype
        y, whole = (found, expected) if is_next else (y, whole)


def test_metadata_computes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor do type checks, attributes and identity."""
    (y, whole), calls = made(), calls_of(monkeypatch)
    for name in pending._PROPERTIES:
        assert name == "_version" or getattr(y, name) == getattr(whole, name), name
    for name in pending._METHODS:
        if name != "get_device":
            assert getattr(y, name)() == getattr(whole, name)(), name
    assert isinstance(y, torch.Tensor) and torch.is_tensor(y) and y in {y} and y.size(0) == 2 and y.stride(0) == 40
    assert torch.numel(y) == 80 and torch.is_floating_point(y) and not torch.is_inference(y)
    y.note = 1
    assert y.note == 1 and calls == [] and y.keyhole_product.lacks is not None


@pytest.mark.parametrize(
    "use", ["y + r", "r + y", "torch.add", "Tensor.add", "+ parameter", "view, +", "reshape, +", "dropout, then +"]
)
def test_sums_take_one_kernel(use: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tensor itself is not finished by them."""
    (y, whole), calls, r = made(torch.bfloat16), calls_of(monkeypatch), residual(torch.bfloat16)
    assert type(found := USES[use](y, r)) is torch.Tensor and calls == [True]
    assert y.keyhole_product.lacks is not None and same(found, USES[use](whole, r)) and same(y.clone(), whole)
    assert calls == [True, False]


def test_a_sum_of_two(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in blocks whose halves run in parallel: one of them is finished, and the other added to it."""
    (y, whole_y), (z, whole_z) = made(seed=1), made(seed=2)
    calls, r = calls_of(monkeypatch), residual(torch.float32)
    assert same(y + z + r, whole_y + whole_z + r) and calls == [False, True]
    assert same(z * 1, whole_z) and same(y * 1, whole_y)


def test_views_are_finished_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """All share the memory of the first, before and after."""
    (y, whole), calls = made(), calls_of(monkeypatch)
    flat, rows = y.view(10, 8), y.reshape(1, 10, 8)
    assert same(flat * 2, 2 * whole.view(10, 8)) and calls == [False]
    assert same(rows * 2, 2 * whole.view(1, 10, 8)) and same(y.sum(), whole.sum()) and calls == [False]
    flat.zero_()
    assert bool((y == 0).all()) and bool((rows == 0).all()) and type(flat.view(-1, 8)) is torch.Tensor
    assert y.data_ptr() == flat.data_ptr() == y.keyhole_product.y_MO.data_ptr()


def test_data_ptr_is_that_of_the_whole() -> None:
    y, whole = made()
    y.data_ptr()
    assert y.keyhole_product.lacks is None and same(y.keyhole_product.y_MO.view(SHAPE), whole)


def test_code_past_torch_is_told() -> None:
    """It finds no memory, and the error says what to do: not a null pointer, which it would read."""
    read = torch.utils.dlpack.to_dlpack
    (y, whole), block = made(), pending._forward(lambda y: read(y))
    with pytest.raises(RuntimeError, match="access data pointer") as error:
        block(y)
    assert error.value.__notes__ == [pending.NO_MEMORY]
    assert same(torch.from_dlpack(read(y.contiguous())), whole)


def test_with_gradients_it_is_a_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hook that enables them gets a graph, and numbers that are those of the whole."""
    (y, whole), r = made(), residual(torch.float32).requires_grad_()
    with torch.enable_grad():
        (r + y).square().sum().backward()
    assert torch.equal(r.grad, 2 * (r.detach() + whole)) and not y.requires_grad


@pytest.mark.parametrize("choice", ["reference", "kernel"])
@pytest.mark.parametrize("rank", [2, 6])
def test_the_relu_of_a_pair(rank: int, choice: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Adds what its input lacks, leaves the sketch of the result, and does not finish its input."""
    if choice == "kernel" and (TRITON_MISSING or not INTERPRETED):
        pytest.skip("needs interpreted kernels")
    with force(choice):
        (y, whole), share = made(torch.bfloat16), object()
        readers = Readers(torch.randn(rank, 8).bfloat16(), 0, True, share)
        calls = calls_of(monkeypatch, "narrow_relu")
        x, expected = sketching_relu(y, readers), sketching_relu(whole, readers)
        assert calls == [True, False] and type(x) is torch.Tensor and y.keyhole_product.lacks is not None
        assert same(x, expected) and torch.equal(x.keyhole_sketch.p_Mk, expected.keyhole_sketch.p_Mk)
        assert same(y.clone(), whole) and torch.equal(sketching_relu(y, readers), x)
        assert torch.equal(sketching_relu(y.view(10, 8), readers), x.view(10, 8))


# -- blocks ------------------------------------------------------------------------------------------------------------


def test_a_block_finishes_what_is_left() -> None:
    """What somebody has kept, and its own output, in whatever it is."""
    kept: dict[str, Any] = {}

    def forward(shape: Callable[[torch.Tensor], Any]) -> Any:
        assert pending.may_wait()
        kept["y"], kept["whole"] = made(seed=1)
        made(seed=3)  # dies here
        out, kept["out"] = made(seed=2)
        return shape(out)

    run = pending._forward(forward)
    for shape in (lambda y: [y], lambda y: (y, None), lambda y: {0: y}):
        output = run(shape)
        assert type(output[0]) is torch.Tensor and torch.equal(output[0], kept["out"])
        assert kept["y"].keyhole_product.lacks is None and same(kept["y"] * 1, kept["whole"])
    assert type(run(lambda y: y)) is torch.Tensor
    named = run(lambda y: BaseModelOutput(last_hidden_state=y))
    assert type(named.last_hidden_state) is type(named[0]) is torch.Tensor
    odd = run(lambda y: SimpleNamespace(y=y))  # it does not look into objects, but nothing in them is pending
    assert odd.y.keyhole_product.lacks is None and same(odd.y + 0.0, kept["out"])


def test_a_block_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it has made is finished; if that fails too, the first error is the one that is raised."""
    kept: list = []

    def forward() -> None:
        kept.extend(made())
        raise KeyError("first")

    depth = len(pending._open.blocks)
    with pytest.raises(KeyError, match="first"):
        pending._forward(forward)()
    assert kept[0].keyhole_product.lacks is None and same(kept[0] * 1, kept[1])

    def fail(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("second")

    with monkeypatch.context() as patch, pytest.raises(KeyError, match="first"):
        patch.setattr(pending._Product, "finish", fail)
        pending._forward(forward)()
    assert len(pending._open.blocks) == depth


def test_where_nothing_waits() -> None:
    """With gradients, in inference mode, outside of a block, and on another thread than the block's."""
    found = [pending.may_wait()]
    with torch.enable_grad():
        found.append(pending.may_wait())
    with torch.inference_mode():
        found.append(pending.may_wait())
    blocks, pending._open.blocks = pending._open.blocks, []
    found.append(pending.may_wait())
    pending._open.blocks = blocks

    def elsewhere() -> None:
        with torch.no_grad():
            found.append(pending.may_wait())

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert found == [True, False, False, False, False]


def test_within_graphs_of_blocks() -> None:
    """A block's end is part of what is captured, and is installed once."""
    blocks = [nn.Identity(), nn.Identity()]
    ordinary = [lambda: made()[0], lambda: made()[0]]
    model = SimpleNamespace(factored=set(), graphs=SimpleNamespace(ordinary=list(ordinary)))
    pending.install_ends(model, blocks)
    first = list(model.graphs.ordinary)
    pending.install_ends(model, blocks)
    assert model.graphs.ordinary == first != ordinary and type(first[0]()) is torch.Tensor
    assert all("forward" not in block.__dict__ for block in blocks)


@pytest.mark.parametrize("dtype", BITS)
@pytest.mark.parametrize("kind", ["plain", "transposed", "tiles", "earlier", "earlier, tiles"])
def test_products_that_wait(dtype: torch.dtype, kind: str) -> None:
    """Those of products that do not, up to rounding. Nothing is read from memory that was not written."""
    draw = torch.Generator().manual_seed(0)
    x, w = (torch.randn(shape, generator=draw).to(dtype) for shape in ((2, 5, 12), (32, 12)))
    v, b, bias = (torch.randn(shape, generator=draw) for shape in ((2, 12), (2, 2, 32), (2, 32)))
    a_kO, v_kI = torch.randn(3, 32, generator=draw).to(dtype), torch.randn(3, 12, generator=draw).to(dtype)
    layer = SimpleNamespace(weight=w.t().contiguous() if kind == "transposed" else w)
    rows = [(0, 8), (8, 20), (20, 32)]
    tiles = SimpleNamespace(rows=rows, weight=lambda i: w[slice(*rows[i])]) if "tiles" in kind else None
    earlier = (a_kO, v_kI) if "earlier" in kind else None
    ways = [Added(v.to(dtype), b, bias, earlier, kind == "transposed", None, waits) for waits in (True, False)]
    torch.use_deterministic_algorithms(True)  # fills new memory with nan
    try:
        found, expected = (product(x, layer, added, tiles) for added in ways)
    finally:
        torch.use_deterministic_algorithms(False)
    assert type(found) is Pending and type(expected) is torch.Tensor
    limit = 1e-5 if dtype == torch.float32 else 2**-6
    torch.testing.assert_close(finished(found), expected, rtol=limit, atol=limit * float(expected.abs().max()))
