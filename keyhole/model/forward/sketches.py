"""One sketch for the layers that read the same input.

    p = x [V_1 V_2 V_3]        [M, 3 r] instead of three times [M, r]: x is read once (2048 x 5120 in 16 bit: 21 MB)

A linear layer with low-rank factors needs p = x V before its product (low_rank.py). q, k and v read the same x, and so
do the two halves of a gated MLP; their V are adjacent in memory (methods/zo/low_rank/parts.py). But the model's code
decides what a layer reads. So the first layer of a group computes p for all of them, and leaves it on x, as an
attribute of that tensor. A layer that finds it there uses its own columns, if nothing has changed since: the tensor's
memory, shape and version, V, and the pass. A layer that does not find it (the output projection, which has the same
parent and width) computes its own p, as without groups. So a wrong guess costs columns that nobody reads, and no wrong
number. (What PyTorch does not count as a change is not seen: a hook that writes into x by `.data` or NumPy, after one
layer has read it and before the next. Write into x itself, or return another tensor.)

Only the *leader* of a group computes p for all: the layer of the group that was called first in the first pass. So what
is computed together is the same in all steps, whether weights stream, passes take turns, or a run was resumed. (p
differs by rounding from one that is computed alone.)

The attribute goes when x goes. It holds for one pass of one step, whose `Share` is one object: a p of an eager step is
never used within the capture of a CUDA graph, or the other way round.
A ReLU whose output such a layer reads computes p on the way (ops/lowrank/relu.py): 84 MB less to read for 2048 x 20480
in 16 bit. It leaves it on its output in the same way, so nothing depends on which layer really reads that. The same
kernel adds what the ReLU's own input lacks (pending.py).
Legend: M tokens, I inputs, r rank, k columns of a group.
"""

from dataclasses import dataclass
from typing import Any

import torch

from keyhole import ops
from keyhole.model.forward.pending import rows_and_lack


@dataclass(frozen=True)
class Readers:
    """Layers that may read one input: their V, the first column of this layer's, and whether it is the one that
    computes p for all. share: of the running pass."""

    v_kI: torch.Tensor
    column: int
    leads: bool
    share: Any


@dataclass(frozen=True)
class _Sketch:
    """What a leader leaves on its input; state: of the input and of V."""

    p_Mk: torch.Tensor
    share: Any
    state: tuple


def sketch(x: torch.Tensor, v_rI: torch.Tensor, readers: Readers | None) -> torch.Tensor:
    """[M, r] float32: x V for one layer, of which rows may lie apart."""
    x_MI = x.reshape(-1, x.shape[-1]).contiguous()
    if readers is None or x.is_inference() or v_rI.is_inference():  # such tensors have no version
        return ops.narrow(x_MI, v_rI)
    state, found = _state(x, readers.v_kI), getattr(x, "keyhole_sketch", None)
    if found is None or found.share is not readers.share or found.state != state:
        if not readers.leads:
            return ops.narrow(x_MI, v_rI)
        found = _leave(x, ops.narrow(x_MI, readers.v_kI), readers)
    return found.p_Mk[:, readers.column : readers.column + v_rI.shape[0]]


def sketching_relu(x: torch.Tensor, readers: Readers) -> torch.Tensor:
    """max(x, 0), on which the sketch for these layers is left. x may be a Pending, and stays one."""
    x_MI, lacks = rows_and_lack(x)
    y_MI, p_Mk = ops.narrow_relu(x_MI, readers.v_kI, lacks)
    y = y_MI.view(x.shape)
    if not y.is_inference() and not readers.v_kI.is_inference():
        _leave(y, p_Mk, readers)
    return y


def _leave(x: torch.Tensor, p_Mk: torch.Tensor, readers: Readers) -> _Sketch:
    made = _Sketch(p_Mk, readers.share, _state(x, readers.v_kI))
    x.keyhole_sketch = made  # type: ignore[attr-defined]
    return made


def _state(x: torch.Tensor, v_kI: torch.Tensor) -> tuple:
    return x.data_ptr(), x.shape, x._version, v_kI.data_ptr(), v_kI.shape, v_kI._version
