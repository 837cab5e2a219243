"""Cross entropy over a vocabulary that is visited in chunks.

For one token with logits l over the whole vocabulary and target y,  nll = log(sum_j exp l_j) - l_y. From chunk to chunk
we keep, per token, the largest logit so far m, the sum s of exp(l_j - m), and l_y once its chunk has been seen:

    m' = max(m, max_chunk l)      s' = s exp(m - m') + sum_chunk exp(l_j - m')      nll = m + log s - l_y

so at most [tokens, chunk] logits exist at any time. All arithmetic is fp32, whatever the dtype of the logits. The
kernel reads the logits once, one program per token; the reference makes two fp32 copies. They differ only by rounding.

After all chunks were added, the gradient of  sum scale nll  follows from the same state, chunk by chunk, over the
logits of a second visit:   d l_j = scale exp(l_j - m - log s) - scale [j = y].   One read and one write of the chunk.
The scale is one number, or one per token.
Legend: N tokens, R rows of the vocabulary in this chunk.
"""

import torch

from keyhole.ops.backend import jit, on_device, tl, use_kernel
from keyhole.ops.rounding.round import round_nearest

BLOCK = 4096


class RunningNLL:
    """The state (m, s, l_y) of N tokens, on one device."""

    def __init__(self, targets_N: torch.Tensor) -> None:
        self.targets_N = targets_N
        self.max_N = torch.full(targets_N.shape, float("-inf"), device=targets_N.device)
        self.sum_N = torch.zeros(targets_N.shape, device=targets_N.device)
        self.target_logit_N = torch.full(targets_N.shape, float("nan"), device=targets_N.device)  # until its chunk

    def add(self, logits_NR: torch.Tensor, first_row: int) -> None:
        """Adds the logits of rows first_row, first_row + 1, ... of the vocabulary."""
        if logits_NR.numel() == 0:
            return
        if not use_kernel(logits_NR.device):
            return _add_reference(self, logits_NR, first_row)
        assert logits_NR.stride(1) == 1, logits_NR.stride()
        N, R, stride = *logits_NR.shape, logits_NR.stride(0)
        tensors = (logits_NR, self.targets_N, self.max_N, self.sum_N, self.target_logit_N)
        with on_device(logits_NR):
            _nll_kernel[(N,)](*tensors, first_row, R, stride, BLOCK=BLOCK, num_warps=8)

    def grad_(self, logits_NR: torch.Tensor, first_row: int, scale: float | torch.Tensor = 1.0) -> torch.Tensor:
        """Overwrites these logits with the gradient of sum(scale * nll) with respect to them; call after all chunks.

        scale: a number, or float32 on the device, a scalar or [N]. In float32 on the CPU, with one chunk of all rows,
        this is torch's gradient of cross_entropy(reduction="sum") * scale: bit for bit, except in builds of torch with
        two functions exp (MKL), where last bits differ. Several chunks, or the kernel, differ from it by the rounding
        of the sum of exponentials.
        """
        if logits_NR.numel() == 0:
            return logits_NR
        if not use_kernel(logits_NR.device):
            _grad_reference(self, logits_NR, first_row, scale)
            return logits_NR
        assert logits_NR.stride(1) == 1, logits_NR.stride()
        N, R, stride = *logits_NR.shape, logits_NR.stride(0)
        scales = (scale, 0.0) if isinstance(scale, torch.Tensor) else (None, float(scale))
        tensors = (logits_NR, self.targets_N, self.max_N, self.sum_N)
        how = {"PER_TOKEN": isinstance(scale, torch.Tensor) and scale.ndim == 1, "BLOCK": BLOCK, "num_warps": 8}
        with on_device(logits_NR):
            _nll_grad_kernel[(N, -(-R // BLOCK))](*tensors, *scales, first_row, R, stride, **how)
        return logits_NR

    def split(self, tokens: int) -> "list[RunningNLL]":
        """Views of the state in slices of tokens: adding to a slice adds to this state."""
        slices = []
        for first in range(0, max(1, self.targets_N.numel()), tokens):  # one slice of no tokens, like Tensor.split
            part = type(self).__new__(type(self))
            for name, value in vars(self).items():
                setattr(part, name, value[first : first + tokens])
            slices.append(part)
        return slices

    def nll_N(self) -> torch.Tensor:
        """The loss per token, after all chunks were added."""
        return self.max_N + self.sum_N.log() - self.target_logit_N


class RunningChoice(RunningNLL):
    """The same, and the token with the largest logit so far: the first one on a tie, as in torch.argmax."""

    def __init__(self, targets_N: torch.Tensor) -> None:
        super().__init__(targets_N)
        self.best_N = torch.full_like(targets_N, -1)

    def add(self, logits_NR: torch.Tensor, first_row: int) -> None:
        if logits_NR.numel() == 0:
            return
        before_N = self.max_N.clone()
        super().add(logits_NR, first_row)
        top_N, at_N = logits_NR.max(dim=1)
        self.best_N.copy_(torch.where(top_N.float() > before_N, at_N + first_row, self.best_N))


def _add_reference(state: RunningNLL, logits_NR: torch.Tensor, first_row: int) -> None:
    logits_NR = logits_NR.float()
    max_N = torch.maximum(state.max_N, logits_NR.amax(dim=1))
    local_N = state.targets_N - first_row
    here_N = (local_N >= 0) & (local_N < logits_NR.shape[1])
    picked_N = logits_NR.gather(1, local_N.clamp(0, logits_NR.shape[1] - 1)[:, None])[:, 0]
    state.target_logit_N.copy_(torch.where(here_N, picked_N, state.target_logit_N))
    chunk_N = (logits_NR - max_N[:, None]).exp_().sum(dim=1)
    state.sum_N.copy_(state.sum_N * torch.exp(state.max_N - max_N) + chunk_N)
    state.max_N.copy_(max_N)


def _grad_reference(state: RunningNLL, logits_NR: torch.Tensor, first_row: int, scale: float | torch.Tensor) -> None:
    x_NR = logits_NR.detach().float()
    log_sum_N = state.sum_N.log()
    # If this chunk is the only one, the log of the sum comes from torch's own log_softmax (its value at the largest
    # logit is - log s), which sums in another order: only then the last bits of the gradient equal torch's.
    alone_N = state.sum_N == (x_NR - state.max_N[:, None]).exp_().sum(dim=1)
    log_sum_N = torch.where(alone_N, -torch.log_softmax(x_NR, dim=1).amax(dim=1), log_sum_N)
    per_row = scale[:, None] if isinstance(scale, torch.Tensor) and scale.ndim == 1 else scale
    grad_NR = (x_NR - state.max_N[:, None]).sub_(log_sum_N[:, None]).exp_().mul_(per_row)
    local_N = state.targets_N - first_row
    here_N = (local_N >= 0) & (local_N < x_NR.shape[1])
    hit_N = torch.where(here_N, -scale, torch.zeros_like(log_sum_N))
    grad_NR.scatter_add_(1, local_N.clamp(0, x_NR.shape[1] - 1)[:, None], hit_N[:, None])
    logits_NR.copy_(grad_NR)


@jit(do_not_specialize=["first_row"])
def _nll_kernel(
    logits_ptr, target_ptr, max_ptr, sum_ptr, picked_ptr, first_row, row_count, stride, BLOCK: tl.constexpr
):
    """One program: one token."""
    n = tl.program_id(0).to(tl.int64)
    logits_ptr += n * stride
    m, s = tl.load(max_ptr + n), tl.load(sum_ptr + n)
    for start in range(0, row_count, BLOCK):
        row = start + tl.arange(0, BLOCK)
        x = tl.load(logits_ptr + row, row < row_count, float("-inf")).to(tl.float32)
        m_new = tl.maximum(m, tl.max(x, 0))
        s = s * tl.exp(m - m_new) + tl.sum(tl.exp(x - m_new), 0)
        m = m_new
    tl.store(max_ptr + n, m)
    tl.store(sum_ptr + n, s)
    local = tl.load(target_ptr + n) - first_row
    if (local >= 0) & (local < row_count):
        tl.store(picked_ptr + n, tl.load(logits_ptr + local).to(tl.float32))


@jit(do_not_specialize=["first_row", "scale"])
def _nll_grad_kernel(
    logits_ptr,
    target_ptr,
    max_ptr,
    sum_ptr,
    scale_ptr,
    scale,
    first_row,
    row_count,
    stride,
    PER_TOKEN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program: BLOCK logits of one token."""
    n = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if scale_ptr is not None:
        scale = tl.load(scale_ptr + n) if PER_TOKEN else tl.load(scale_ptr)
    shift = tl.load(max_ptr + n) + tl.log(tl.load(sum_ptr + n))
    local = tl.load(target_ptr + n) - first_row
    at = logits_ptr + n * stride + row
    x = tl.load(at, row < row_count, float("-inf")).to(tl.float32)
    grad = tl.exp(x - shift) * scale
    grad = tl.where(row == local, grad - scale, grad)
    tl.store(at, round_nearest(grad, logits_ptr.dtype.element_ty), row < row_count)
