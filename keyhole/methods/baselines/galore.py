"""Baseline: GaLore. Adam in a low-rank subspace of each matrix's gradient, found by SVD every update_proj_gap steps.

For a matrix with gradient G [O, I] and the shorter side I (the other case is the mirror image):

    every update_proj_gap steps:   G = U S V^T,   P = the first `rank` columns of V        [I, rank]
    R = G P                        Adam's moments m, v of R, giving N = m' / (sqrt(v') + eps)        [O, rank]
    W <- W - lr (scale N P^T + weight_decay W)

Two details follow torch's AdamW and not galore-torch: eps is added to the root after its bias correction (in
galore-torch before, so that it weighs 1 / sqrt(1 - beta2^t) as much), and weights decay before the step, from W (there
after it, from the new W). Moments do not change when the subspace changes, as in the published code. Matrices of the
blocks whose shorter side is larger than `rank` are projected; other matrices, embeddings, head and vectors get plain
AdamW (the same rule with P = 1 and scale = 1). Weights are rounded to nearest, moments are fp32.

Bytes on the device: weights and gradients of b bytes each, and for a projected matrix 4 (2 O rank + I rank) for moments
and projector instead of Adam's 8 O I. The gradient and the model are held whole: GaLore saves only optimizer state. The
SVD takes seconds per matrix at width 4096, for all matrices in one step out of update_proj_gap.
"""

from typing import Any

import torch

from keyhole.methods.baselines.first_order import TorchMethod
from keyhole.methods.baselines.traits import GALORE, GaLoreConfig


class GaLoreAdamW(torch.optim.Optimizer):
    """The rule above. A group with rank=None is plain AdamW."""

    def __init__(self, groups: list[dict], lr: float, **rule: Any) -> None:
        super().__init__(groups, {"lr": lr, "rank": None, **rule})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]  # no closure
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self._update(param, group)

    def _update(self, param: torch.Tensor, rule: dict[str, Any]) -> None:
        assert param.grad is not None
        state, grad = self.state[param], param.grad.float()
        step = state.get("step", 0)
        if rule["rank"] is not None:
            if step % rule["update_proj_gap"] == 0:
                state["projector"] = projector(grad, rule["rank"])
            grad = project(grad, state["projector"])
        if step == 0:
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(grad), torch.zeros_like(grad)
        state["step"] = step = step + 1
        exp_avg = state["exp_avg"].lerp_(grad, 1 - rule["beta1"])
        exp_avg_sq = state["exp_avg_sq"].mul_(rule["beta2"]).addcmul_(grad, grad, value=1 - rule["beta2"])
        root = exp_avg_sq.sqrt().div_((1 - rule["beta2"] ** step) ** 0.5).add_(rule["eps"])
        delta = (exp_avg / root).div_(1 - rule["beta1"] ** step)
        if rule["rank"] is not None:
            delta = project_back(delta, state["projector"], param.shape).mul_(rule["scale"])
        weight = param.data.float() * (1 - rule["lr"] * rule["weight_decay"])
        param.data.copy_(weight.sub_(delta, alpha=rule["lr"]))


def projector(grad: torch.Tensor, rank: int) -> torch.Tensor:
    """Orthonormal columns that span the gradient's strongest directions on its shorter side. [..., side, rank]"""
    u, _, vh = torch.linalg.svd(grad, full_matrices=False)
    tall = grad.shape[-2] >= grad.shape[-1]
    return (vh[..., :rank, :].mT if tall else u[..., :rank]).contiguous()


def project(grad: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    return grad @ p if grad.shape[-2] >= grad.shape[-1] else p.mT @ grad


def project_back(low: torch.Tensor, p: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    return low @ p.mT if shape[-2] >= shape[-1] else p @ low


class GaLore(TorchMethod):
    """GaLore on the matrices of blocks, plain AdamW on the rest."""

    row = GALORE
    settings: GaLoreConfig

    def _optimizer(self, groups: list[dict]) -> torch.optim.Optimizer:
        own = self.settings
        low = {"rank": own.rank, "update_proj_gap": own.update_proj_gap, "scale": own.scale}
        inside = [t for t in self.model.layout.tensors if t.block is not None and len(t.shape) >= 2]
        names = {t.name for t in inside if min(t.shape[-2:]) > own.rank}  # matrices, or stacks, that become smaller
        self.projected = [name for name in self.params if name in names]
        projected = {id(self.params[name]) for name in self.projected}
        parts = [
            group | {"params": members, **(low if kind else {})}
            for group in groups
            for kind in (True, False)
            if (members := [p for p in group["params"] if (id(p) in projected) == kind])
        ]
        return GaLoreAdamW(parts, self.lr, beta1=own.beta1, beta2=own.beta2, eps=own.eps)

    def describe(self) -> list[str]:
        """Lines for the start block."""
        low, rest = len(self.projected), len(self.params) - len(self.projected)
        own = f"galore: {low} matrices projected to rank {self.settings.rank}; {rest} other tensors by plain AdamW"
        return [own, *super().describe()]
