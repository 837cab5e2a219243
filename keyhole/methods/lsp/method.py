"""LSP-Offload: Adam in a learned sparse subspace of every matrix.

    S = P^T G Q     delta = Adam(S)     W <- W - lr (scale P delta Q^T + weight_decay W)

P [m, d] and Q [n, d] have r numbers a row (ops/lsp/projector.py). The gradient G = dY^T X never exists: the reverse sweep
(model/backward/reverse.py) offers dY and X, both are compressed, and their product is S (piece.py). Micro-batches add up in
S. All that is no matrix of a block (`others`) is trained by plain Adam or stays as it is, by a setting.

Where Adam's moments are (`optimizer_on`), unit by unit (update.py):

    gpu    device.py. The weights move at once, in the reverse. 8 d^2 bytes a matrix.
    cpu    host.py. Gradients leave and steps come back beside the GPU's work. 12 d^2 bytes a matrix in host memory.
    auto   on the GPU as far as gpu_memory allows, in the order in which the next forward needs them: embedding, first
           layers, ...; the rest on the CPU, which has longest for the last layers (methods/lsp/memory.py has the arithmetic)

max_grad_norm clips the norm of what the optimizer sees: S of all matrices, and the gradients of the others (the norm of
the whole gradient is not known, that being the point).

A streamed unit goes home with its update, once a step. (To leave the host's weights as they are and add up all deltas
since the last change of projectors would save that way down, but the other way is the busy one, and each use of the
unit would need the sum of the deltas up as well; and weights that move by in-place rounding could not follow its bits.)

What is exact: streamed equals resident to the bit, and a run stopped and resumed one that was not, each with every
unit's moments in the same place (auto: in the same budget). Between the places it is the same sum, by two kernels.

Projectors are learned on the gradients of the first batch, one matrix at a time, in a reverse of its own; every
check_freq steps a sample of the matrices is looked at again (learn.py).
"""

import weakref
from collections.abc import Callable
from typing import Any

import torch

from keyhole.errors import UserError
from keyhole.methods.base import Method, checked_rate
from keyhole.methods.lsp import learn as lsp_learn
from keyhole.methods.lsp.setup import check_settings, find_pieces, place_moments, say_pieces
from keyhole.methods.lsp.update import Updates
from keyhole.methods.weight_decay import weight_decay_of
from keyhole.model.backward.reverse import Reverse
from keyhole.model.batch import Batch
from keyhole.model.model import Model
from keyhole.weak import weakly


class LSP(Method):
    """See the top of this file. `lr` may be changed between steps."""

    name = "lsp"

    def __init__(
        self,
        model: Model,
        lr: float = 1e-4,
        *,
        d: int = 1024,
        r: int = 4,
        kind: str = "blocks",
        alpha: float = 0.5,
        check_freq: int = 1000,
        check_share: float = 0.25,
        fit_steps: int = 50,
        learn: bool = True,
        others: str = "adam",
        optimizer_on: str = "auto",
        threads: int | None = None,
        beta1: float = 0.9,
        beta2: float = 0.999,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        weight_decay_on: str = "matrices",
        max_grad_norm: float | None = None,
        rounding: str = "stochastic",
        activations: str = "block",
        compile: bool | str = False,
        seed: int = 0,
    ) -> None:
        check_settings(model, d, r, kind, others, optimizer_on, rounding, activations)
        self.model, self.lr, self.seed = model, checked_rate(lr), seed
        self.d, self.r, self.kind, self.rounding, self.others = d, r, kind, rounding, others
        self.alpha, self.check_freq, self.check_share = alpha, check_freq, check_share
        self.fit_steps, self.learn, self.max_grad_norm = fit_steps, learn, max_grad_norm
        self.units = find_pieces(model, d, r, kind, others, seed)
        self.pieces = {piece.tensor.start: piece for members in self.units.values() for piece in members}
        self.reverse = Reverse(model, activations=activations, compiled=compile)
        self.optimizer = Updates(
            model,
            self.units,
            place_moments(model, self.units, optimizer_on, max_grad_norm is not None),
            {"beta1": beta1, "beta2": beta2, "eps": eps},
            max_grad_norm=max_grad_norm,
            weight_decay=weight_decay_of(model.module, weight_decay, weight_decay_on),
            how={"rounding": rounding, "seed": seed},
            threads=threads,
        )
        self.step_count, self.biases = 0, {}  # biases: of the matrices that this step looked at
        arrival = weakly(self.optimizer.arrived) if self.optimizer.waits else None
        model.engine.arrival = arrival or model.engine.arrival
        self._end = weakref.finalize(self, _end, self.optimizer.host, model.engine, arrival)
        model.attach(self)

    # -- one step --------------------------------------------------------------------------------------------------

    def step(self, batch: Batch | list[Batch]) -> torch.Tensor:
        """One update from one batch or the micro-batches of one step. Returns the loss, unread."""
        self.model.apply_deferred(before_step_of=self)
        batches = self.model.to_device(batch)
        looks = self.learn and self.step_count % self.check_freq == 0
        self.biases, optimizer = {}, self.optimizer
        optimizer.outcomes.check()
        if looks:
            self.flush()
        if optimizer.host is not None:
            optimizer.host.wait_s = 0.0
        with optimizer.spans.of("forward"):
            optimizer.move(lambda unit: unit.kind == "table")  # its rows are gathered without acquiring it
        with self.reverse.sweep(2 if looks else 1):
            with optimizer.spans.of("forward"):
                loss = self.reverse.forward(batches)
            optimizer.outcomes.check()
            if looks:
                self.reverse.reverse(lsp_learn.Learner(self), last=False)
            self.step_count += 1
            optimizer.begin(self.step_count, self.lr)
            with optimizer.spans.of("reverse"):
                try:
                    self.reverse.reverse(optimizer)
                    optimizer.end()
                except BaseException:  # out of memory, an interrupt: what has been updated stays so
                    optimizer.outcomes.broken = bool(optimizer.now.norms)
                    raise
        return loss

    # -- between steps ---------------------------------------------------------------------------------------------

    def flush(self) -> None:
        """Applies everything that is due: the weights at home are those after the last step."""
        self.optimizer.outcomes.check()
        self.optimizer.move(lambda unit: True)
        self.optimizer.drain()
        self.optimizer.outcomes.check(wait=True)

    @property
    def deferred(self) -> Callable[[], None]:
        """While the method lives: what is due dies with it."""
        return weakly(self.flush)

    @property
    def norm(self) -> torch.Tensor | None:
        """Of what the optimizer saw in the last step, unclipped."""
        return self.optimizer.norm

    def metrics(self) -> dict[str, Any]:
        """Of the last step. grad_norm: of what the optimizer sees, unclipped; bias: mean of the matrices looked at;
        host_wait_s: launches waited for updates on the host."""
        found: dict[str, Any] = {} if self.norm is None else {"grad_norm": self.norm}
        found |= {"bias": sum(self.biases.values()) / len(self.biases)} if self.biases else {}
        host = self.optimizer.host
        return found if host is None else found | {"host_wait_s": host.wait_s}

    def describe(self) -> list[str]:
        """For the start block."""
        return say_pieces(self)

    def state_dict(self) -> dict[str, Any]:
        """Flush first. Projectors are their numbers; where these stand is drawn again from the seed."""
        self.flush()
        state: dict[str, Any] = {"step_count": self.step_count, "seed": self.seed}
        for piece in self.pieces.values():
            place = self.optimizer.where(piece.unit)
            m, v = place.moments(piece)
            state |= {f"{piece.name}/exp_avg": m, f"{piece.name}/exp_avg_sq": v}
            state[f"{piece.name}/step"] = place.count(piece)
            if piece.p is not None:
                state |= {f"{piece.name}/p": piece.p.values_Rr, f"{piece.name}/q": piece.q.values_Rr}
                state[f"{piece.name}/generation"] = piece.generation
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """From wherever the moments were to where they are."""
        if state["seed"] != self.seed:
            raise UserError(f"seed: the checkpoint was made with {state['seed']}, this run has {self.seed}")
        self.flush()
        self.step_count = int(state["step_count"])
        for piece in self.pieces.values():
            if f"{piece.name}/exp_avg" not in state:
                raise UserError(f"the optimizer state has no {piece.name}, which this run trains")
            if piece.p is not None:
                lsp_learn.restore(self, piece, state)
            place = self.optimizer.where(piece.unit)
            for moment, key in zip(place.moments(piece), ("exp_avg", "exp_avg_sq"), strict=True):
                moment.copy_(state[f"{piece.name}/{key}"])
            place.set_count(piece, int(state[f"{piece.name}/step"]))

    def close(self) -> None:
        """Ends the worker. Flush first."""
        self._end()


def _end(host: Any, engine: Any, arrival: Any) -> None:
    if host is not None:
        host.close()
    if arrival is not None and engine.arrival is arrival:  # and not that of a method that came later
        engine.arrival = None
