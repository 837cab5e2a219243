"""Which tensors weight decay applies to: one rule for all methods.

    matrices    all but biases and the weights of norms, as Hugging Face's Trainer does. A norm's weight is a gain
                near 1 and a bias an offset; shrinking them towards 0 changes what a layer computes and regularises
                nothing.
    all         every trained tensor, as `torch.optim.AdamW(model.parameters(), ..)` does

Hugging Face decides by name (NOT_DECAYED), and by class for nn.LayerNorm, which some models call ln_1 or ln_f. Stacks
of experts, position tables and embeddings count as matrices. Each method defines how it decays (decoupled from the
gradient, or added to it as in torch's SGD).
"""

import re
from dataclasses import dataclass

from torch import nn

from keyhole.methods.settings import MethodSettings

NOT_DECAYED = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)")


@dataclass(frozen=True)
class WeightDecay:
    """The rate of decay of each parameter. spared: ids of parameters without decay."""

    rate: float = 0.0
    spared: frozenset[int] = frozenset()

    def of(self, param: nn.Parameter) -> float:
        return 0.0 if id(param) in self.spared else self.rate


def weight_decay_of(module: nn.Module, own: MethodSettings) -> WeightDecay:
    """The rule for a module's parameters."""
    if own.weight_decay_on == "all":
        return WeightDecay(own.weight_decay)
    by_name = {id(p) for name, p in module.named_parameters() if NOT_DECAYED.search(name.lower())}
    by_class = {id(p) for norm in module.modules() if isinstance(norm, nn.LayerNorm) for p in norm.parameters()}
    return WeightDecay(own.weight_decay, frozenset(by_name | by_class))
