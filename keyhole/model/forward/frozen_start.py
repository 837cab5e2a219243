"""Blocks before the first trained weight run once for all looks of a pass.

The looks of a zeroth-order step differ in trained weights only. A pass that carries L looks (low_rank.py) has the same
rows L times, one below the other, until it meets the first of them. So a block that comes before runs with the rows of
one look, and its output is repeated:

    [x; x]  ->  x  ->  y  ->  [y; y]        with the lower 10 of 30 blocks and the embedding frozen, two looks:
                                            (10 + 2 * 20) / 60 = 5 / 6 of the products

What comes before is seen in each pass, not concluded from names. The rows of looks begin to differ (`LowRank.part`)
where the rows of a trained embedding are looked up, at a module outside of the blocks whose vectors are trained, and at
a block in which something is trained. From there on every block runs with all rows.

Rows are the first dimension of a block's arguments. A tensor could have as many entries there for another reason (a
table by position, in a batch of as many rows as positions). So when arguments of new shapes come, their parts for the
looks are compared: if they are not the same numbers, such blocks run with all rows. They also do if an argument has
several entries per row (ALiBi's biases, by row and head), and if it is something else than tensors, plain values, and
tuples of these: a block may write into it. While a graph is captured, nothing can be compared, and arguments may have
shapes that were not seen before (Transformers makes masks then that it leaves out otherwise). They are taken to be the
same, as those before were: every recording is compared with a pass that was not recorded before it is used.

A plan is made before any pass. It counts the blocks that come before the first trained weight in the order of first use
(`blocks_run_once`), as if the arguments of blocks were the same for all looks: with ALiBi it saves too much.
"""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from keyhole.model.forward.low_rank import Share, rows_of_look
from keyhole.model.recorder import signature_of, tensors_of
from keyhole.model.structure.layout import FlatTensor, Layout
from keyhole.model.structure.reach import first_use


def blocks_run_once(layout: Layout) -> int:
    """Number of blocks that run once for all looks, for plans. A classifier's passes carry one look each: none."""
    if layout.table.param.requires_grad or not layout.head_units:
        return 0
    uses: dict[int, list[int]] = {}
    for tensor in layout.tensors:
        if tensor.block is not None and (use := first_use(tensor.param)) is not None:
            uses.setdefault(tensor.block, []).append(use)
    begins = [min(of_block) for of_block in uses.values()]

    def before(tensor: FlatTensor) -> int:
        """Blocks before the one in which a weight is used; outside of the blocks, before the last that has begun."""
        use = first_use(tensor.param)
        begun = 0 if use is None else sum(begin < use for begin in begins)
        return max(0, begun - 1) if tensor.block is None else tensor.block

    trained = (before(tensor) for tensor in layout.tensors if tensor.param.requires_grad)
    return min(trained, default=0)


def install_once(model: Any, blocks: list[nn.Module]) -> None:
    """Makes the blocks before the first trained weight run once for all looks. Once per model and block."""
    same: dict[tuple, bool] = {}  # by the shapes of arguments: whether their parts for the looks are the same
    for block in blocks:
        if id(block) not in model.factored:
            model.factored.add(id(block))
            model.patches.forward(block, _forward(weakref.ref(model), block, same))


def _forward(model: Callable[[], Any], block: nn.Module, same: dict[tuple, bool]) -> Callable[..., Any]:
    ordinary, block_id = block.forward, id(block)

    def forward(*args: Any, **kwargs: Any) -> Any:
        owner = model()
        factors: Any = None if owner is None or torch.is_grad_enabled() else owner.low_rank
        share = None if factors is None else factors.running
        if share is None or share.count == 1:
            return ordinary(*args, **kwargs)
        if block_id in factors.trained_blocks:
            factors.part()
        if factors.parted or not _alike((*args, *kwargs.values()), share, same):
            return ordinary(*args, **kwargs)
        rows = share.rows // share.count
        with factors.one_look():
            output = ordinary(*(_cut(x, share) for x in args), **{name: _cut(x, share) for name, x in kwargs.items()})
        return _repeated(output, rows, share.count)

    return forward


def _alike(values: tuple, share: Share, same: dict[tuple, bool]) -> bool:
    """Whether these arguments are the same for all looks. Reads the device once per combination of shapes."""
    if not values or not _has_rows(values[0], share):
        return False
    key = None if any(isinstance(x, dict | list) for x in _inside(values)) else signature_of(values)
    if key is None:
        return False
    key = (key, share.count)
    if key not in same:
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            return all(same.values())  # nothing can be read here; a recording that has other bits is not used
        tensors = [x for x in tensors_of(values) if x.dim() and x.shape[0] % share.rows == 0]
        same[key] = all(x.shape[0] == share.rows for x in tensors) and all(
            torch.equal(first, other) for first, *others in (x.chunk(share.count) for x in tensors) for other in others
        )
    return same[key]


def _inside(value: Any) -> list[Any]:
    """The value, and everything in the tuples that it consists of."""
    return [value, *(part for one in value for part in _inside(one))] if isinstance(value, tuple) else [value]


def _has_rows(value: Any, share: Share) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0 and value.shape[0] == share.rows


def _cut(value: Any, share: Share) -> Any:
    """An argument for the rows of one look."""
    if isinstance(value, tuple):
        return type(value)(_cut(part, share) for part in value)
    return rows_of_look(value, 0, share)


def _repeated(output: Any, rows: int, count: int) -> Any:
    """An output for the rows of all looks."""
    if isinstance(output, tuple):
        return type(output)(_repeated(part, rows, count) for part in output)
    if isinstance(output, torch.Tensor) and output.dim() > 0 and output.shape[0] == rows:
        return output.repeat(count, *[1] * (output.dim() - 1))
    return output
