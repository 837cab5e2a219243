"""What LSP decides before its first step: which tensors go through projectors, where Adam's moments live, what to say.

    matrices of blocks with a side longer than d     through projectors
    others                                           plain Adam (others: adam), or not trained at all (frozen):
        vectors, embeddings, head, stacks of experts, matrices with both sides <= d (these are trained either way:
        for them the subspace is the whole space)

Bytes, and which units' moments are on the device: methods/lsp/memory.py.
"""

from dataclasses import replace
from typing import Any

import torch

from keyhole.errors import UserError
from keyhole.machine.sizes import GIB
from keyhole.methods.lsp.gather import Pieces
from keyhole.methods.lsp.memory import LSPBytes, Numbers, choose_units, group_of
from keyhole.methods.lsp.piece import Piece, is_plain
from keyhole.model.backward.sink import chunk
from keyhole.model.model import Model
from keyhole.model.structure.layout import Unit
from keyhole.ops.lsp.projector import KINDS

ALLOWED = {
    "kind": tuple(KINDS),
    "others": ("adam", "frozen"),
    "optimizer_on": ("auto", "gpu", "cpu"),
    "rounding": ("stochastic", "nearest"),
    "activations": ("block", "host"),
}


def check_settings(
    model: Any, d: int, r: int, kind: str, others: str, optimizer_on: str, rounding: str, activations: str
) -> None:
    if not isinstance(model, Model):
        raise UserError(f"lsp: found a {type(model).__name__}, expected the model that keyhole.load returns")
    given = {"kind": kind, "others": others, "optimizer_on": optimizer_on, "rounding": rounding}
    for key, value in (given | {"activations": activations}).items():
        if value not in ALLOWED[key]:
            raise UserError(f"lsp.{key}: {value!r} is not one of {', '.join(ALLOWED[key])}")
    if r < 1 or d < 1 or r > d:
        raise UserError(f"lsp.r: {r} numbers a row do not fit into d = {d} columns; set 1 <= r <= d")
    if model.dtype == torch.float16:
        raise UserError("dtype: lsp has no loss scaling, and float16 gradients underflow without; use bfloat16")


def find_pieces(model: Model, d: int, r: int, kind: str, others: str, seed: int) -> Pieces:
    """All that is trained, by unit. Freezes the rest."""
    found: Pieces = {}
    for unit in model.layout.units:
        members = [Piece(t, unit.index, kind) for t in _tensors(unit) if t.param.requires_grad]
        for piece in list(members):
            matrix = unit.kind == "block" and len(piece.tensor.shape) == 2
            if matrix and not is_plain(piece.tensor.shape, d):
                piece.p, piece.q = piece.draw(d, r, seed, model.device)
                piece.rescale()
            elif not matrix and others == "frozen":
                piece.tensor.param.requires_grad_(False)
                members.remove(piece)
        if members:
            found[unit.index] = members
    if not any(piece.p is not None or len(piece.tensor.shape) == 2 for group in found.values() for piece in group):
        raise UserError("lsp: no matrix of a block is trained; unfreeze some, or use method=adamw")
    return found


def _tensors(unit: Unit) -> list[Any]:
    return [chunk(unit)] if unit.rows is not None else unit.tensors


def place_moments(model: Model, pieces: Pieces, optimizer_on: str, clips: bool) -> set[int]:
    """Units whose moments are on the device: by the setting, or what the budget leaves room for. The plan is told."""
    groups = {unit: group_of(model.layout.units[unit]) for unit in pieces}
    numbers = Numbers({unit: sum(piece.numel for piece in members) for unit, members in pieces.items()}, groups)
    if model.placed is None:
        return choose_units(numbers, optimizer_on, clips, None)
    planned, limit = model.placed.device_bytes, model.placed.limit_bytes
    taken = planned.without_state if isinstance(planned, LSPBytes) else planned.total
    numbers = replace(numbers, projector_bytes=_projector_bytes(pieces))
    chosen = choose_units(numbers, optimizer_on, clips, None if limit is None else limit - taken)
    if isinstance(planned, LSPBytes):
        moments, buffers = numbers.state(chosen, clips)
        model.placed.device_bytes = replace(planned, moments=moments, buffers=buffers)
    return chosen


def _projector_bytes(pieces: Pieces) -> int:
    found = [piece for members in pieces.values() for piece in members if piece.p is not None]
    return sum(4 * side.values_Rr.numel() for piece in found for side in (piece.p, piece.q))


def say_pieces(method: Any) -> list[str]:
    """What was decided, for the start block."""
    pieces = list(method.pieces.values())
    low = [piece for piece in pieces if piece.p is not None]
    full = [piece for piece in pieces if piece.p is None]
    before = sum(piece.tensor.shape.numel() for piece in low)
    after = sum(piece.numel for piece in low)
    lines = [
        f"lsp: {len(low)} matrices through ({method.d}, {method.r})-sparse projectors ({method.kind}): {before:,} "
        f"weights seen as {after:,}; {_say_moments(method)}"
    ]
    clamped = [piece for piece in low if min(piece.tensor.shape) <= method.d]
    clamped += [piece for piece in full if piece.tensor.block is not None and len(piece.tensor.shape) == 2]
    if clamped:
        lines.append(f"lsp: d = {method.d} is more than a side of {len(clamped)} matrices has: nothing is lost there")
    stacks = [piece for piece in full if len(piece.tensor.shape) > 2]
    if stacks:
        lines.append(f"lsp: {len(stacks)} stacks of matrices (experts) are trained by plain Adam, not compressed")
    if method.others == "frozen":
        frozen = [t.name for t in method.model.layout.tensors if not t.param.requires_grad]
        lines.append(f"lsp: not trained: {_names(frozen)}")
    elif full:
        lines.append(f"lsp: by plain Adam: {_names([piece.name for piece in full])}")
    return lines


def _say_moments(method: Any) -> str:
    here = sum(method.optimizer.device.lengths.values())
    away = sum(method.optimizer.lengths.values()) - here
    units, there = method.model.layout.units, method.optimizer.device.lengths
    places = [f"{8 * here / GIB:.2f} GiB in device memory"] if here else []
    places += [f"{8 * away / GIB:.2f} GiB in host memory, updated by the CPU"] if away else []
    said = f"Adam's moments: {' and '.join(places)}"
    first = [units[unit].name for unit in method.optimizer.lengths if unit not in there]
    return f"{said} (from {first[0]} on)" if here and away else said


def _names(names: list[str]) -> str:
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"
