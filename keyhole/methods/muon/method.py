"""Muon inside the reverse sweep: the orthogonalised momentum of every matrix of a block, AdamW for everything else.

    M <- M + (1 - momentum) (G - M)             G: the whole gradient, accumulated and clipped
    U  = G + momentum (M - G)                   nesterov; else U = M
    O  = Newton-Schulz(U)                       about the nearest orthogonal matrix, in bfloat16
    W <- W - lr (a O + weight_decay W)          a = 0.2 sqrt(max(m, n)), or sqrt(max(1, m / n)) (adjust_lr_fn)

The rule and the names of its settings are torch.optim.Muon's (Jordan et al., 2024). It needs whole matrices: one is
orthogonalised while its unit is on the device, whoever keeps it otherwise, so a streamed run has the bits of a resident
one. Embedding, head, vectors, and what else is no matrix of a block get AdamW, at the same rate: with match_rms_adamw a
step of a matrix is as long as AdamW's.

State: one momentum per element of a matrix, two moments per element of the rest, in host memory (lomo/adam_pages.py),
16 bits each by default (methods/states.py: rounded stochastically). Bytes per parameter: 2 in host memory, 2 up and 2
down the link per step; on the device a few units' worth. Everything else is LOMO's: no gradient is kept, exact clipping
takes a second backward pass, and each expert of a stack is a matrix.
"""

from collections.abc import Sequence

import torch

from keyhole.errors import UserError
from keyhole.methods.lomo.adam_pages import AdamPages
from keyhole.methods.lomo.method import LOMO
from keyhole.methods.muon.memory import PAGING
from keyhole.methods.muon.traits import MUON, MuonConfig
from keyhole.methods.states import PLACES
from keyhole.model.structure.layout import FlatTensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def newton_schulz(update_MN: torch.Tensor, coefficients: Sequence[float], steps: int, eps: float) -> torch.Tensor:
    """About U V^T of the singular value decomposition U S V^T, as torch.optim.Muon computes it: bfloat16."""
    a, b, c = coefficients
    tall = update_MN.shape[0] > update_MN.shape[1]
    x = update_MN.bfloat16()
    x = x.T if tall else x
    x = x / x.norm().clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x


class MuonUpdate(AdamPages):
    """The rule with its state."""

    own: MuonConfig
    paging = PAGING

    def of_a_matrix(self, tensor: FlatTensor, grad: torch.Tensor, count: int) -> tuple[torch.Tensor, float, None]:
        own, (m,) = self.own, self.paged(tensor).values()
        self.format.lerp_(m, grad, 1 - own.momentum, (tensor.start + PLACES, own.seed, self.now.step), self.scale)
        update = (grad.float() * self.scale).lerp(m.float(), own.momentum) if own.nesterov else m.float()
        step = newton_schulz(update, own.ns_coefficients or COEFFICIENTS, own.ns_steps, own.ns_eps).contiguous()
        rows, columns = tensor.shape
        adamw = own.adjust_lr_fn == "match_rms_adamw"
        return step, 0.2 * max(rows, columns) ** 0.5 if adamw else max(1.0, rows / columns) ** 0.5, None


class Muon(LOMO):
    """LOMO whose matrices move along their orthogonalised momentum. `lr` may be changed between steps."""

    row = MUON
    rule = MuonUpdate
    waits = True  # its state must not include a step that is skipped

    def _setup(self) -> None:
        if self.model.dtype == torch.float16:
            raise UserError("dtype: muon has no use for float16, whose gradients underflow; use bfloat16")
        super()._setup()
