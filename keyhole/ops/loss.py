"""Cross entropy over a vocabulary that is looked at in chunks.

For one token with logits l over the whole vocabulary and target y,  nll = log(sum_j exp l_j) - l_y. Chunk after chunk
we keep, per token, the largest logit so far m, the sum s of exp(l_j - m), and l_y once it comes by:

    m' = max(m, max_chunk l)      s' = s exp(m - m') + sum_chunk exp(l_j - m')      nll = m + log s - l_y

so no more than [tokens, chunk] logits exist at any time. All in fp32, whatever the dtype of the logits.
Legend: N tokens, R rows of the vocabulary in this chunk.
"""

import torch


class RunningNLL:
    """The state (m, s, l_y) of N tokens, on one device."""

    def __init__(self, targets_N: torch.Tensor) -> None:
        self.targets_N = targets_N
        self.max_N = torch.full(targets_N.shape, float("-inf"), device=targets_N.device)
        self.sum_N = torch.zeros(targets_N.shape, device=targets_N.device)
        self.target_logit_N = torch.full(targets_N.shape, float("nan"), device=targets_N.device)  # until seen

    def add(self, logits_NR: torch.Tensor, first_row: int) -> None:
        """Takes the logits of rows first_row, first_row + 1, ... of the vocabulary."""
        logits_NR = logits_NR.float()
        max_N = torch.maximum(self.max_N, logits_NR.amax(dim=1))
        local_N = self.targets_N - first_row
        here_N = (local_N >= 0) & (local_N < logits_NR.shape[1])
        picked_N = logits_NR.gather(1, local_N.clamp(0, logits_NR.shape[1] - 1)[:, None])[:, 0]
        self.target_logit_N.copy_(torch.where(here_N, picked_N, self.target_logit_N))
        chunk_N = (logits_NR - max_N[:, None]).exp_().sum(dim=1)
        self.sum_N.copy_(self.sum_N * torch.exp(self.max_N - max_N) + chunk_N)
        self.max_N.copy_(max_N)

    def split(self, tokens: int) -> "list[RunningNLL]":
        """The same state seen in slices of tokens: what is added to a slice is added to the whole."""
        slices = []
        for first in range(0, self.targets_N.numel(), tokens):
            part = RunningNLL.__new__(RunningNLL)
            for name, value in vars(self).items():
                setattr(part, name, value[first : first + tokens])
            slices.append(part)
        return slices

    def nll_N(self) -> torch.Tensor:
        return self.max_N + self.sum_N.log() - self.target_logit_N
