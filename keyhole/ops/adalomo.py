"""AdaLOMO's update of one tensor: a factored second moment, a normalised update, a step relative to the weights.

For a matrix [R, C] (or E of them, [E, R, C], each with its own factors), with decay = -0.8, t = 1, 2, ..:

    g    = grad * scale                                             beta = 1 - t^decay
    row  = beta row + (1 - beta) mean_C(g^2 + eps1)                 col  = beta col + (1 - beta) mean_R(g^2 + eps1)
    u    = g rsqrt(row / mean(row)) rsqrt(col)                      u   /= max(1, rms(u) / clip_threshold)
    a    = lr max(eps2, rms(w))                                     w    = round(w (1 - a wd) - a u)

A vector keeps its full second moment v = beta v + (1 - beta) (g^2 + eps1), and u = g rsqrt(v); the second half, from u
on, is the same for both. rms is over the whole tensor, all E matrices together.
This is the published rule (Lv et al., AdaLomo, 2023, and its code): Adafactor without momentum, with eps1 = 1e-30,
eps2 = 1e-3, clip_threshold = 1, decoupled weight decay. It differs from the code in two points: loss scale and gradient
clipping are one factor on the device (`scale`); and if the gradient of a tensor has an inf or nan (or a sum of squares
beyond float32), weights and state stay unchanged and `bad` is set, because one such element would spread over the
factors of its row and its column, and through the rms over everything.

Rounding is that of rounding/store.py. State: 4 (R + C) bytes per matrix.

Three passes over memory, 12 bytes per bfloat16 element: (1) g and w: sums over rows, over columns, of g^2 and of w^2;
(2) g: sum of u^2; (3) g and w: the update. Every sum has a fixed order, tile by tile into scratch and then over the
tiles (a seventh of a byte per element), so results repeat bit for bit; kernel and reference differ only by rounding.
The host never waits. A vector is one program: a norm's weight or a bias has a few thousand elements, and three passes
over them read from cache, so the cost is one launch. State: 4 bytes per element of a vector.
Legend: E matrices, R rows, C columns.
"""

from dataclasses import dataclass

import torch

from keyhole.ops.arguments import VECTOR, Count, Number, Scalar, check_scalars, float32, is_on_device, number
from keyhole.ops.backend import jit, on_device, tl, use_kernel
from keyhole.ops.noise.words import NUM_WARPS, WIDTH, key, lanes, program_span, span, unsigned
from keyhole.ops.rounding.bits import TILE, bits_at, bits_reference, tile_bits, vector_bits
from keyhole.ops.rounding.round import FLOAT32_MAX
from keyhole.ops.rounding.store import Store, store_weight, store_weight_reference_
from keyhole.ops.sgd import scale_or_one, scaled_reference

_FLOAT32_MAX = tl.constexpr(FLOAT32_MAX)

State = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Rule:
    """The settings of one update, and the tensors to which it adds its sums."""

    lr: Number
    weight_decay: float
    beta: Number
    eps1: float
    eps2: float
    clip_threshold: float
    scale: Scalar
    sum_squares: Scalar
    bad: Scalar


def step_reference_(w: torch.Tensor, u: torch.Tensor, total: torch.Tensor, rule: Rule, how: Store) -> None:
    """The formulas above, in order. total: the sum of squares of the gradient."""
    c, w_fp32, fine = how.compensation, w.to(torch.float32), total <= FLOAT32_MAX
    u = u / (u.square().mean().sqrt() / rule.clip_threshold).clamp(min=1.0)
    a, wd = float(rule.lr) * w_fp32.square().mean().sqrt().clamp(min=rule.eps2), rule.weight_decay
    x = w_fp32 * (1 - a * wd) - a * u if c is None else (c - a * u) - (a * wd) * w_fp32
    bits = bits_reference(w, how.offset, how.seed, int(how.step)) if how.is_stochastic(w.dtype) else None
    store_weight_reference_(w, c, x, fine, bits, how)
    if rule.sum_squares is not None:
        rule.sum_squares.add_(total)
    if rule.bad is not None:
        rule.bad.bitwise_or_(~fine)


def moment_reference_(old: torch.Tensor, mean: torch.Tensor, beta: Number, total: torch.Tensor) -> torch.Tensor:
    """beta old + (1 - beta) mean, in place, unless the gradient is bad."""
    beta = float(beta)
    return old.copy_(torch.where(total <= FLOAT32_MAX, old * beta + mean * (1 - beta), old))


@jit()
def if_finite(total, n):
    """n, or 0 if the gradient is bad: the end of the range to store."""
    return tl.where(total <= _FLOAT32_MAX, n, 0)


@jit()
def step_size(w_squares, u_squares, n, lr, eps2, clip_threshold):
    """a = lr max(eps2, rms(w)) and the divisor max(1, rms(u) / clip_threshold) of u."""
    a = lr * tl.maximum(tl.sqrt(w_squares / n), eps2)
    return a, tl.maximum(tl.sqrt(u_squares / n) / clip_threshold, 1.0)


@jit()
def moved(w_fp32, c_ptr, mask, u, a, wd):
    """x of store_weight: the new weight, or Kahan's step."""
    if c_ptr is not None:
        x = tl.load(c_ptr, mask, 0.0).to(tl.float32) - a * u - (a * wd) * w_fp32
    else:
        x = w_fp32 * (1 - a * wd) - a * u
    return x


def vector_reference_(w: torch.Tensor, grad: torch.Tensor, state: State, rule: Rule, how: Store) -> None:
    g = scaled_reference(grad, rule.scale)
    square = g.square()
    total = square.sum()
    v = moment_reference_(state["v"], square + rule.eps1, rule.beta, total)
    step_reference_(w, g * v.rsqrt(), total, rule, how)


@jit()
def _moment(v, g, beta, eps1):
    """The new second moment of a vector."""
    return beta * v + (1 - beta) * (g * g + eps1)


@jit(do_not_specialize=["offset", "n", "step", "k0", "k1", "lr", "beta", "wd", "eps1", "eps2", "clip_threshold"])
def _vector_kernel(
    w_ptr, c_ptr, grad_ptr, v_ptr, scale_ptr, sum_ptr, bad_ptr, changed_ptr,
    offset, n, step, k0, k1, lr, beta, wd, eps1, eps2, clip_threshold,
    STOCHASTIC: tl.constexpr, SPAN: tl.constexpr, ON_DEVICE: tl.constexpr,
):  # fmt: skip
    """The whole vector, one program, three passes over it: sums of g^2 and w^2, sum of u^2, moment and update.
    ON_DEVICE: lr, beta and step are pointers."""
    if ON_DEVICE:
        lr, beta, step = tl.load(lr), tl.load(beta), tl.load(step)
    key = unsigned(step, k0, k1)
    scale, lane = scale_or_one(scale_ptr), tl.arange(0, SPAN)
    g_squares, w_squares, u_squares = lane * 0.0, lane * 0.0, lane * 0.0
    for start in range(0, n, SPAN):
        i, mask = start + lane, start + lane < n
        g = tl.load(grad_ptr + i, mask, 0.0).to(tl.float32) * scale
        w_fp32 = tl.load(w_ptr + i, mask, 0.0).to(tl.float32)
        g_squares += g * g
        w_squares += w_fp32 * w_fp32
    total = tl.sum(g_squares)
    stop = if_finite(total, n)
    for start in range(0, n, SPAN):
        i, mask = start + lane, start + lane < n
        g = tl.load(grad_ptr + i, mask, 0.0).to(tl.float32) * scale
        u = g * tl.rsqrt(_moment(tl.load(v_ptr + i, mask, 1.0), g, beta, eps1))
        u_squares += u * u
    a, divisor = step_size(tl.sum(w_squares), tl.sum(u_squares), n.to(tl.float32), lr, eps2, clip_threshold)
    changed = lane * 0
    for start in range(0, n, SPAN):
        i, mask = start + lane, start + lane < n
        g = tl.load(grad_ptr + i, mask, 0.0).to(tl.float32) * scale
        v = _moment(tl.load(v_ptr + i, mask, 1.0), g, beta, eps1)
        tl.store(v_ptr + i, v, i < stop)
        u = g * tl.rsqrt(v)
        w = tl.load(w_ptr + i, mask, 0.0)
        at_c = c_ptr
        if c_ptr is not None:
            at_c = c_ptr + i
        x = moved(w.to(tl.float32), at_c, mask, u / divisor, a, wd)
        bits = lane
        if STOCHASTIC:
            bits = bits_at(offset.to(tl.int64) + i, key)
        changed += store_weight(w_ptr + i, at_c, i < stop, mask, w, x, bits, STOCHASTIC)
    if sum_ptr is not None:
        tl.store(sum_ptr, tl.load(sum_ptr) + total)
    if bad_ptr is not None:
        tl.store(bad_ptr, 1, mask=stop == 0)
    if changed_ptr is not None:
        tl.store(changed_ptr, tl.load(changed_ptr) + tl.sum(changed))


def vector_triton_(w: torch.Tensor, grad: torch.Tensor, state: State, rule: Rule, how: Store) -> None:
    tensors = (w, how.compensation, grad, state["v"], rule.scale, rule.sum_squares, rule.bad, how.changed)
    rates = (rule.lr, rule.beta, rule.weight_decay, rule.eps1, rule.eps2, rule.clip_threshold)
    flags = {"STOCHASTIC": how.is_stochastic(w.dtype), "SPAN": SPAN, "num_warps": NUM_WARPS, "enable_fp_fusion": False}
    flags["ON_DEVICE"] = is_on_device(rule.lr, rule.beta, how.step)
    with on_device(w):
        _vector_kernel[(1,)](*tensors, how.offset, w.numel(), *key(how.seed, how.step), *rates, **flags)


ROWS, COLUMNS = 64, 128  # of a tile of the statistics
SPAN = 1024  # elements of a vector, or of a row or column state, that a program holds at a time

_WIDTH, _TILE = tl.constexpr(WIDTH), tl.constexpr(TILE)


def adalomo_state(shape: torch.Size | tuple[int, ...], device: torch.device | str) -> State:
    """The state before the first step: {"row", "col"} for matrices, {"v"} for vectors, float32."""
    if len(shape) < 2:
        return {"v": torch.zeros(shape, device=device)}
    return {"row": torch.zeros(shape[:-1], device=device), "col": torch.zeros((*shape[:-2], shape[-1]), device=device)}


def matrix_reference_(w: torch.Tensor, grad: torch.Tensor, state: State, rule: Rule, how: Store) -> None:
    g = scaled_reference(grad, rule.scale)
    square = g.square()
    total = square.sum()
    row = moment_reference_(state["row"], (square + rule.eps1).mean(-1), rule.beta, total)
    col = moment_reference_(state["col"], (square + rule.eps1).mean(-2), rule.beta, total)
    r = (row / row.mean(-1, keepdim=True)).rsqrt()
    step_reference_(w, g * r.unsqueeze(-1) * col.rsqrt().unsqueeze(-2), total, rule, how)


@jit()
def _tile(R, C, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """This program's matrix, row tile (numbered over all matrices), column tile, rows, columns, positions, mask."""
    pid, row_tiles, column_tiles = tl.program_id(0), tl.cdiv(R, ROWS), tl.cdiv(C, COLUMNS)
    i, j = pid // column_tiles, pid % column_tiles
    e = (i // row_tiles).to(tl.int64)
    row, column = i % row_tiles * ROWS + tl.arange(0, ROWS), j * COLUMNS + tl.arange(0, COLUMNS)
    at = (e * R + row)[:, None] * C + column[None, :]
    return e, i, j, row, column, at, (row < R)[:, None] & (column < C)[None, :]


@jit()
def _statistics_kernel(
    w_ptr, grad_ptr, scale_ptr, row_ptr, col_ptr, total_ptr,
    E, R, C, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Pass 1, one program per tile: its sums to row[column tile, e, r], col[e, row tile, c] and total[2, program]."""
    e, i, j, row, column, at, mask = _tile(R, C, ROWS, COLUMNS)
    g = tl.load(grad_ptr + at, mask, 0.0).to(tl.float32) * scale_or_one(scale_ptr)
    w = tl.load(w_ptr + at, mask, 0.0).to(tl.float32)
    square = g * g
    row_sum = tl.sum(square, 1)
    tl.store(row_ptr + (j * E + e) * R + row, row_sum, row < R)
    tl.store(col_ptr + i.to(tl.int64) * C + column, tl.sum(square, 0), column < C)
    tl.store(total_ptr + tl.program_id(0), tl.sum(row_sum))
    tl.store(total_ptr + tl.num_programs(0) + tl.program_id(0), tl.sum(tl.sum(w * w, 1)))


@jit(do_not_specialize=["beta", "eps1"])
def _moment_kernel(
    state_ptr, partial_ptr, total_ptr,
    n, parts, group_stride, part_stride, length, beta, eps1, SPAN: tl.constexpr, ON_DEVICE: tl.constexpr,
):  # fmt: skip
    """state[group, i] = beta state + (1 - beta) (sum of its parts / length + eps1), unless the gradient is bad.
    ON_DEVICE: beta is a pointer."""
    if ON_DEVICE:
        beta = tl.load(beta)
    group, i = tl.program_id(1).to(tl.int64), tl.program_id(0) * SPAN + tl.arange(0, SPAN)
    mask = i < n
    total = tl.zeros([SPAN], tl.float32)
    for part in range(parts):
        total += tl.load(partial_ptr + group * group_stride + part * part_stride + i, mask, 0.0)
    old = tl.load(state_ptr + group * n + i, mask, 0.0)
    new = beta * old + (1 - beta) * (total / length + eps1)
    tl.store(state_ptr + group * n + i, new, i < if_finite(tl.load(total_ptr), n))


@jit()
def _factors(row, row_mean, col):
    """rsqrt(row / mean(row)) and rsqrt(col)."""
    return tl.rsqrt(row / row_mean), tl.rsqrt(col)


@jit()
def _update_rms_kernel(
    grad_ptr, scale_ptr, row_ptr, mean_ptr, col_ptr, partial_ptr,
    R, C, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Pass 2, one program per tile: its sum of u^2 to partial[program]."""
    e, i, j, row, column, at, mask = _tile(R, C, ROWS, COLUMNS)
    g = tl.load(grad_ptr + at, mask, 0.0).to(tl.float32) * scale_or_one(scale_ptr)
    row_moment = tl.load(row_ptr + e * R + row, row < R, 1.0)
    col_moment = tl.load(col_ptr + e * C + column, column < C, 1.0)
    r, c = _factors(row_moment, tl.load(mean_ptr + e), col_moment)
    u = g * r[:, None] * c[None, :]
    tl.store(partial_ptr + tl.program_id(0), tl.sum(tl.sum(u * u, 1)))


@jit(do_not_specialize=["tile_0", "lead", "n", "step", "k0", "k1", "lr", "wd", "eps2", "clip_threshold"])
def _update_kernel(
    w_ptr, c_ptr, grad_ptr, scale_ptr, row_ptr, mean_ptr, col_ptr, total_ptr, u_ptr, bad_ptr, changed_ptr,
    R, C, tile_0, lead, n, step, k0, k1, lr, wd, eps2, clip_threshold,
    STACKED: tl.constexpr, STOCHASTIC: tl.constexpr, MULTIPLE: tl.constexpr, ON_DEVICE: tl.constexpr,
):  # fmt: skip
    """Pass 3, one program per tile of the index space: 8192 elements in a row, so that 8 share a Philox call.
    ON_DEVICE: lr and step are pointers."""
    if ON_DEVICE:
        lr, step = tl.load(lr), tl.load(step)
    tile, start, lo, hi = program_span(tile_0, lead, n, _TILE, MULTIPLE)
    first = tl.maximum(start, 0)
    row_0, column_0 = (first // C).to(tl.int32), (first % C + start - first).to(tl.int32)  # of lane 0, if it exists
    stop = if_finite(tl.load(total_ptr), hi)
    if MULTIPLE > 1:
        column_0, stop = tl.multiple_of(column_0, MULTIPLE), tl.multiple_of(stop, MULTIPLE)
    a, divisor = step_size(tl.load(total_ptr + 1), tl.load(u_ptr), n.to(tl.float32), lr, eps2, clip_threshold)
    scale = scale_or_one(scale_ptr)
    words = tile_bits(tile, unsigned(step, k0, k1), STOCHASTIC)
    changed = lanes() * 0
    for v in tl.static_range(8):
        i = v * _WIDTH + lanes()
        mask = (i >= lo) & (i < hi)
        row, column, e = row_0 + (column_0 + i) // C, (column_0 + i) % C, i * 0
        if STACKED:
            e = row // R
        row_moment = tl.load(row_ptr + row, mask, 1.0)
        col_moment = tl.load(col_ptr + e * C + column, mask, 1.0)
        r, c = _factors(row_moment, tl.load(mean_ptr + e, mask, 1.0), col_moment)
        g = tl.load(grad_ptr + start + i, mask, 0.0).to(tl.float32) * scale
        w = tl.load(w_ptr + start + i, mask, 0.0)
        at_c = c_ptr
        if c_ptr is not None:
            at_c = c_ptr + start + i
        x = moved(w.to(tl.float32), at_c, mask, g * r * c / divisor, a, wd)
        bits = vector_bits(words, v)
        changed += store_weight(w_ptr + start + i, at_c, mask & (i < stop), mask, w, x, bits, STOCHASTIC)
    if bad_ptr is not None:
        tl.store(bad_ptr, 1, mask=stop == 0)
    if changed_ptr is not None:
        tl.atomic_add(changed_ptr, tl.sum(changed).to(tl.int64))


def matrix_triton_(w: torch.Tensor, grad: torch.Tensor, state: State, rule: Rule, how: Store) -> None:
    (R, C), n, row, col = w.shape[-2:], w.numel(), state["row"], state["col"]
    E, tiles_R, tiles_C = n // (R * C), -(-R // ROWS), -(-C // COLUMNS)
    tiles = E * tiles_R * tiles_C
    sizes = [tiles_C * E * R, E * tiles_R * C, 2 * tiles, tiles]
    row_sums, col_sums, totals, u_sums = torch.empty(sum(sizes), device=w.device).split(sizes)
    options = {"num_warps": NUM_WARPS, "enable_fp_fusion": False}
    tile, moment = {"ROWS": ROWS, "COLUMNS": COLUMNS, **options}, {"SPAN": SPAN, **options}
    programs, place = span(how.offset, n, TILE)
    aligned = how.offset % VECTOR == 0 and C % VECTOR == 0
    moment["ON_DEVICE"] = there = is_on_device(rule.lr, rule.beta, how.step)
    flags = {
        "ON_DEVICE": there,
        "STACKED": E > 1,
        "STOCHASTIC": how.is_stochastic(w.dtype),
        "MULTIPLE": VECTOR if aligned else 1,
    }
    rates = (rule.lr, rule.weight_decay, rule.eps2, rule.clip_threshold)
    with on_device(w):
        _statistics_kernel[(tiles,)](w, grad, rule.scale, row_sums, col_sums, totals, E, R, C, **tile)
        total_2, decay = totals.view(2, -1).sum(1), (rule.beta, rule.eps1)
        _moment_kernel[(-(-R // SPAN), E)](row, row_sums, total_2, R, tiles_C, R, E * R, C, *decay, **moment)
        _moment_kernel[(-(-C // SPAN), E)](col, col_sums, total_2, C, tiles_R, tiles_R * C, C, R, *decay, **moment)
        mean_E = row.mean(-1).view(-1)
        _update_rms_kernel[(tiles,)](grad, rule.scale, row, mean_E, col, u_sums, R, C, **tile)
        seen = (row, mean_E, col, total_2, u_sums.sum(), rule.bad, how.changed)
        numbers = (R, C, *place, *key(how.seed, how.step), *rates)
        _update_kernel[(programs,)](w, how.compensation, grad, rule.scale, *seen, *numbers, **flags, **options)
    if rule.sum_squares is not None:
        rule.sum_squares.add_(total_2[0])


def moment_decay(t: int, decay_rate: float = -0.8) -> float:
    """beta for step t."""
    share: float = t**decay_rate
    return 1 - share


def adalomo_update_(
    w: torch.Tensor,
    grad: torch.Tensor,
    state: State,
    *,
    lr: Number,
    t: int,
    beta: Number | None = None,
    weight_decay: float = 0.0,
    decay_rate: float = -0.8,
    eps1: float = 1e-30,
    eps2: float = 1e-3,
    clip_threshold: float = 1.0,
    scale: Scalar = None,
    rounding: str = "nearest",
    compensation: torch.Tensor | None = None,
    offset: int = 0,
    seed: int = 0,
    step: Count = 0,
    sum_squares: Scalar = None,
    bad: Scalar = None,
    changed: Scalar = None,
) -> None:
    """One AdaLOMO step of w, in place; state (adalomo_state) is updated too. t = 1 at the first step.

    lr, beta and step: values, or all three as tensors on the device; beta None: from t.
    The other arguments are those of sgd_update_. If grad * scale has an inf or a nan, bad is set to 1 and weights,
    compensation and state stay unchanged; sum_squares is then inf or nan.
    """
    how = Store(rounding, compensation, offset, seed, step, changed)
    how.check(w, grad)
    assert all(s.dtype == torch.float32 and s.is_contiguous() and s.device == w.device for s in state.values())
    check_scalars(w.device, torch.float32, scale, sum_squares)
    check_scalars(w.device, torch.int32, bad)
    if w.numel() == 0:
        return
    beta = moment_decay(t, decay_rate) if beta is None else beta
    decay, eps1, eps2, threshold = (float32(x) for x in (weight_decay, eps1, eps2, clip_threshold))
    rule = Rule(number(lr), decay, number(beta), eps1, eps2, threshold, scale, sum_squares, bad)
    reference, triton = (matrix_reference_, matrix_triton_) if w.dim() > 1 else (vector_reference_, vector_triton_)
    (triton if use_kernel(w.device) else reference)(w, grad, state, rule, how)
