"""LoRA: the model is frozen; small matrices beside its linear layers are trained by AdamW.

    y = W x + (alpha / r) B A x        A [r, I] random, B [O, r] zero at the start; only A and B are trained

Forward and backward pass run block by block (model/backward/reverse.py), so the frozen weights may live anywhere: on
the device, or in host memory, in 16 bits or in a packed format that is unpacked for each visit. A block's weights are
needed for its products and for the gradient of its inputs, but get no gradient of their own: nothing is written back.
Autograd accumulates the gradients of the adapters over all micro-batches in one order, whatever the placement. All of
them exist after the backward pass, so clipping by their exact global norm costs nothing.

Bytes on the device: the resident weights; 16 per parameter of the adapters (fp32 weight, gradient, two moments), about
r (I + O) / (I O) of the model; the block inputs, or all activations of as many blocks as fit (activations=auto). Over
the link per step: each streamed unit twice H2D, nothing D2H.

LoRA can learn a change of rank r. adapters.py describes what is saved. To resume from a checkpoint, load the
*original* model and pass the state to the method.

On several ranks each has all weights (streamed blocks once per machine) and its share of the micro-batches; gradients
of the adapters are summed in the order of ranks, and every rank makes the same update.

Dropout of the adapters' inputs is drawn like the model's own (methods/dropout.py), from (seed, step, micro-batch).
"""

from typing import Any

import torch

from keyhole.disk.weight_files import tensors_hash
from keyhole.errors import UserError
from keyhole.methods.base import Method, Saved, State
from keyhole.methods.by_torch import ByTorch, parameter_groups
from keyhole.methods.dropout import ModelDropout
from keyhole.methods.frame import Backward, GradientMethod
from keyhole.methods.lora.adapted_linear import AdapterRecompute
from keyhole.methods.lora.adapters import Adapters, Base, adapt, whole_or_none
from keyhole.methods.lora.traits import LORA, LoRAConfig
from keyhole.methods.shards import sum_gradients
from keyhole.methods.weight_decay import weight_decay_of
from keyhole.model.backward.reverse import Reverse
from keyhole.model.backward.sink import Sink


class LoRA(GradientMethod, ByTorch):
    """Adapters beside a frozen model. `params`: the adapters, by name."""

    row = LORA
    settings: LoRAConfig
    keeps_base = True

    def _setup(self) -> None:
        model, own = self.model, self.settings
        self.step_count = 0
        self._base: str | None = None
        self._base_as_of = 0  # changes by hand
        self.dropout = ModelDropout(model, own.seed, own.model_dropout)  # before adapters, which have their own
        how: dict[str, Any] = {"r": own.r, "alpha": own.alpha, "dropout": own.dropout}
        with whole_or_none(model):
            self.adapters = adapt(model, own.seed, **how, target_modules=own.target_modules, freezes=True)
            self.adapters.merges, self.adapters.base = own.merge, model.original
            self.params = self.adapters.weights
            if own.dropout:
                self.dropout.parts = [layer.lora_dropout for layer in self.adapters.layers.values()]
            model.methods.attach(self)
            self.reverse = Reverse(
                model, activations=own.activations, second_run=AdapterRecompute, deterministic=own.deterministic
            )
            groups = parameter_groups(list(self.params.values()), weight_decay_of(model.module, own))
            self.optimizer = torch.optim.AdamW(groups, lr=self.lr)

    @classmethod
    def outline(cls, base: Base, own: LoRAConfig) -> None:
        adapt(base, 0, r=own.r, alpha=own.alpha, target_modules=own.target_modules, freezes=True)

    def _update(self, loss: torch.Tensor, backward: Backward) -> None:
        """One update of the adapters: autograd leaves their gradients in `.grad`."""
        try:
            backward(Sink())
            if self.model.ranks.several:
                sum_gradients(self.model.ranks, list(self.params.values()))
            self._clip_and_step()
        finally:
            self.optimizer.zero_grad(set_to_none=True)
        self.step_count += 1

    def _backward(self, loss: torch.Tensor) -> None:
        Method._backward(self, loss)  # refused

    # -- interface to the model (model/attached.py) ----------------------------------------------------------------

    @property
    def addon(self) -> Adapters:
        return self.adapters

    def describe(self) -> list[str]:
        """Lines for the start block."""
        count, own = sum(p.numel() for p in self.params.values()), self.settings
        kind = f"{len(self.adapters.layers)} adapters of rank {own.r}, alpha {own.alpha:g}"
        return [f"lora: {kind}: {count:,} trained parameters; the model is frozen", *self.dropout.describe()]

    # -- state -----------------------------------------------------------------------------------------------------

    def _state(self) -> State:
        self.flush()
        own: State = {"step_count": self.step_count, "base": self._base_hash()}
        return own | self.adapters.state(self.optimizer) | self.dropout.state_dict()

    def _load(self, state: Saved) -> None:
        if state["base"] != self._base_hash():
            raise UserError(
                "model: these are not the weights that the adapters were trained on (a checkpoint holds them with the "
                "adapters added, another wire rounds them differently); load the original model as before, then the "
                "state"
            )
        self.adapters.load(self.optimizer, state, self.name)
        self.step_count = int(state["step_count"])
        self.dropout.load_state_dict(state)

    def _base_hash(self) -> str:
        """A hash of the bits of the frozen weights. They change only by hand, so it is computed once."""
        changes = self.model.methods.changes
        if self._base is None or self._base_as_of != changes:
            self.model.engine.wait_for_homes()
            self._base_as_of = changes
            self._base = tensors_hash((t.name, self.model.home(t)) for t in self.model.layout.tensors)
        return self._base
