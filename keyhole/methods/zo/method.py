"""Zeroth-order fine-tuning (MeZO's estimator), forward passes only, every unit visited once per step.

For directions z_1..z_q, drawn anew every step t, and the loss L over all micro-batches of the step,

    g_i = (L(w + eps z_i) - L(w - eps z_i)) / (2 eps)        w <- w - lr (1/q sum_i g_i z_i + weight_decay w)

What we do differently from the textbook loop (perturb in place by +1, -2, +1, then update: four passes over w):

  - The 2q passes, times the micro-batches, run in lockstep. At each unit one fused pass over w applies the update of
    step t - 1 and writes w + eps z and w - eps z. It reads 2 and writes 6 bytes per element in 16 bit, instead of 16.
  - The update of a step needs g, which is known only at its end; so it is applied when the unit is visited at t + 1
    (update.py). Over the link: each unit once up, and at most once down per step (write_back.py).
  - z is a function of (seed, t, i, element), never stored. Perturbed weights come from the clean ones: nothing drifts.
  - Only the rows of the embedding that the batch needs are perturbed for the input; the pending update is applied to
    these rows on the fly, exactly as the full pass over the table will apply it later in the step.
  - g stays on the device. A non-finite g gives an update of exactly zero.

Memory beside the weights: two units and 2q spines in the compute dtype, and the hidden states of the passes.
Legend: q directions, m micro-batches; pass index = (2 i + sign) m + micro-batch.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch

from keyhole import ops
from keyhole.errors import UserError
from keyhole.methods.base import Method, Shared, checked_rate
from keyhole.methods.dropout import dropout_rates
from keyhole.methods.weight_decay import weight_decay_of
from keyhole.methods.zo.update import Pending, Update
from keyhole.model.batch import Batch, DeviceBatch, as_list
from keyhole.model.forward.compile import compile_forward
from keyhole.model.model import Model
from keyhole.model.objective import loss_sum
from keyhole.model.structure.layout import Unit
from keyhole.ops.loss import RunningNLL


class ZO(Method):
    """MeZO's estimator with fused, deferred updates. `lr` may be changed between steps."""

    name = "zo"

    def __init__(
        self,
        model: Model,
        lr: float = 1e-6,
        *,
        eps: float = 1e-3,
        directions: int = 1,
        distribution: str = "gaussian",
        weight_decay: float = 0.0,
        weight_decay_on: str = "matrices",
        rounding: str = "stochastic",
        clip: float | None = None,
        seed: int = 0,
        deferred_update: bool = True,
        write_back_every: int | None = None,
        compile: bool | str = False,
    ) -> None:
        if not eps > 0 or directions < 1:
            raise UserError(f"zo: eps {eps} must be above 0 (1e-3 is usual), and directions {directions} at least 1")
        self.block_at_once = bool(compile)  # compiled code cannot stop inside a block
        if compile:
            compile_forward(model, compile if isinstance(compile, str) else "inductor")
        self.model, self.lr, self.eps, self.directions = model, checked_rate(lr), eps, directions
        self.weight_decay, self.clip, self.deferred_update = weight_decay, clip, deferred_update
        self.noise = {"seed": seed, "distribution": distribution}
        self.decay = {"weight_decay": weight_decay, "rounding": rounding}
        self.step_count = 0
        spared = weight_decay_of(model.module, weight_decay, weight_decay_on).spared
        self.update = Update(model, self.noise, self.decay, spared, write_back_every if deferred_update else 1)
        model.attach(self)
        self.latest: Pending | None = None  # the update of the last step, applied or not: what a journal records
        self.projected: torch.Tensor | None = None
        model.binding.forget()
        layout, device, dtype = model.layout, model.device, model.dtype
        self.plus, self.minus = (torch.empty(layout.largest_unit_numel, dtype=dtype, device=device) for _ in range(2))
        self.spines = torch.empty((directions, 2, layout.spine.numel), dtype=dtype, device=device)

    @classmethod
    def make(cls, model: Model, shared: Shared, own: Any) -> "ZO":
        """As a config asks for it; there is no gradient whose norm could be clipped."""
        rules = {"weight_decay": shared.weight_decay, "weight_decay_on": shared.weight_decay_on, "seed": shared.seed}
        return cls(model, shared.learning_rate, **rules, **vars(own))

    # -- one step --------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, batch: Batch | list[Batch]) -> torch.Tensor:
        """One step on one batch or its micro-batches. Returns the mean loss of the perturbed passes, unread."""
        batches, loss_count = self.model.share_to_device(batch)
        self.model.apply_deferred(before_step_of=self)
        self.update.begin()
        with self.model.sweep("train"):
            self._perturb_spine()
            serve, passes = self._server(len(batches)), batches * (2 * self.directions)
            rows, at_once = self._rows(batches), self.block_at_once
            hidden = self.model.lockstep(passes, serve, rows, steady=True, block_at_once=at_once)
            losses_q2 = self._losses(hidden, batches, len(as_list(batch)), loss_count)
            self.update.apply_to_rest()
        self._defer(losses_q2)
        if not self.deferred_update:
            self.flush()
        return losses_q2.mean()

    def _perturb_spine(self) -> None:
        spine = self.model.layout.spine
        w = self.model.engine.acquire(spine.index)
        for i in range(self.directions):
            self.update.perturb(spine, w, self.spines[i, 0], self.spines[i, 1], self._perturbation(i))

    def _server(self, micro: int) -> Callable[[Unit | None, Callable[[int], None]], None]:
        """What happens at each unit: arrive, update, perturb, and let every pass through."""

        def serve(unit: Unit | None, resume: Callable[[int], None]) -> None:
            for i, sign, weights in self._arrive(unit):
                self.model.binding.bind(unit, weights, self.spines[i, sign])
                for k in range(micro):
                    resume((2 * i + sign) * micro + k)

        return serve

    def _arrive(self, unit: Unit | None) -> Any:
        """Yields (direction, sign, perturbed weights) of a unit; its slot is given back as early as possible."""
        engine = self.model.engine
        w = None if unit is None else engine.acquire(unit.index)
        for i in range(self.directions):
            if unit is not None:
                plus, minus = self.plus[: unit.numel], self.minus[: unit.numel]
                self.update.perturb(unit, w, plus, minus, self._perturbation(i))
                if i == self.directions - 1:
                    engine.release(unit.index)
            for sign in (0, 1):
                yield i, sign, None if unit is None else (plus, minus)[sign]

    def _perturbation(self, direction: int) -> dict[str, Any]:
        return {"step": self.step_count, "eps": self.eps, "direction": direction}

    def _rows(self, batches: list[DeviceBatch]) -> Callable[[int, torch.Tensor], torch.Tensor]:
        """Rows of the table for a pass: both signs are made at once, the minus rows wait for their pass."""
        table = self.model.layout.table
        waiting: dict[tuple[int, int], torch.Tensor] = {}

        def rows(index: int, ids_M: torch.Tensor) -> torch.Tensor:
            sign_and_direction, k = divmod(index, len(batches))
            i, sign = divmod(sign_and_direction, 2)
            if sign == 1:
                return waiting.pop((i, k))
            stale_MH = self.model.table_rows(ids_M)
            if not table.param.requires_grad:
                waiting[i, k] = stale_MH.to(self.model.dtype)
                return waiting[i, k]
            decays = id(table.param) not in self.update.spared
            update = self.update.fused(self.pending, decays) if self.pending else {}
            step = ops.ZOStep(table.start, **self.noise, **self._perturbation(i), **update)
            plus_MH, waiting[i, k] = ops.zo_rows(stale_MH, ids_M, step, self.model.dtype)
            return plus_MH

        return rows

    def _losses(
        self, hidden: list[torch.Tensor], batches: list[DeviceBatch], all_micro: int, loss_count: int
    ) -> torch.Tensor:
        """[q, 2] mean losses of the passes, over the micro-batches of all ranks, added up in their order."""
        micro, head = len(batches), self.model.head
        if self.model.classifies:
            nll = [head.nll(x, batches[p % micro].target_N) for p, x in enumerate(hidden)]
            self.model.binding.bind_homes()
        else:
            nll = self._visit_head(hidden, batches)
        parts = [loss_sum(nll_N, batches[p % micro].candidates) for p, nll_N in enumerate(nll)]
        sums = torch.stack(parts) if parts else self.plus.new_zeros(0, dtype=torch.float32)
        sums = self.model.ranks.side_by_side(sums.view(self.directions, 2, micro), all_micro)
        return sums.sum(dim=2) / max(1, loss_count)

    def _visit_head(self, hidden: list[torch.Tensor], batches: list[DeviceBatch]) -> list[torch.Tensor]:
        """The nll of every trained token, per pass: the head's chunks are visited once, all passes use each."""
        micro = len(batches)
        running = [RunningNLL(batches[p % micro].target_N) for p in range(len(hidden))]
        for unit in self.model.layout.head_units:
            for i, sign, weights in self._arrive(unit):
                self.model.binding.bind_head(unit, weights, self.spines[i, sign])
                for p in range((2 * i + sign) * micro, (2 * i + sign + 1) * micro):
                    self.model.head.add_nll(running[p], hidden[p], unit.rows[0])
        self.model.binding.bind_homes()
        return [state.nll_N() for state in running]

    def _defer(self, losses_q2: torch.Tensor) -> None:
        """Turns losses into the pending update, on the device. Non-finite losses give no update."""
        projected = (losses_q2[:, 0] - losses_q2[:, 1]) / (2 * self.eps)
        if self.clip is not None:
            projected = projected.clamp(-self.clip, self.clip)
        lr = torch.full((1,), self.lr, device=projected.device)
        coef = torch.cat([lr, projected / self.directions])
        coef = torch.where(torch.isfinite(losses_q2).all(), coef, torch.zeros_like(coef))
        self.projected = projected
        self.latest = self.update.defer(Pending(coef, self.step_count))
        self.step_count += 1

    # -- between steps ---------------------------------------------------------------------------------------------

    @property
    def pending(self) -> Pending | None:
        """The update that the weights at home do not have yet. Saving, evaluating and generating apply it."""
        return self.update.pending

    @property
    def changed(self) -> torch.Tensor:
        """How many weights the last update moved."""
        return self.update.changed

    @property
    def deferred(self) -> Callable[[], None]:
        """Of the update, which outlives the method."""
        return self.update.flush

    def owes(self, unit: Unit) -> bool:
        """Whether the unit's home lacks an update."""
        return bool(self.update.owed(unit))

    def describe(self) -> list[str]:
        """For the start block: what was decided."""
        drops = dropout_rates(self.model.module)
        off = ["dropout of the model: off, since zo compares losses of the same function"] if drops else []
        return self.update.write_back.describe() + off

    def flush(self) -> None:
        """Applies the deferred update, so that the weights at home are the weights after the last step."""
        self.update.flush()

    def replay(self, updates: list[tuple[Pending, float]]) -> Iterator[Unit]:
        """Applies known updates, each with its weight decay, and yields every unit that has had them all."""
        return self.update.replay(updates)

    def metrics(self) -> dict[str, torch.Tensor]:
        """Of the last step, unread: scalars on the device. `changed`: share of weights moved by the update before."""
        if self.projected is None:
            return {}
        return {"projected_grad": self.projected.abs().mean(), "changed": self.changed / self.update.trained_numel}

    def state_dict(self) -> dict[str, Any]:
        """The noise needs no state: the step count says it all. Flush first."""
        self.flush()
        return self._counts() | {"changed": int(self.changed)}

    def deferred_state(self) -> dict[str, Any] | None:
        """The same without a flush, while an update waits for the next step to visit the weights."""
        return None if self.pending is None else self._counts()

    def _counts(self) -> dict[str, Any]:
        return {"step_count": self.step_count, "seed": self.noise["seed"]}

    def journal_update(self) -> torch.Tensor | None:
        """[lr, g_1/q .. g_q/q] of the last step, applied or not."""
        return None if self.latest is None else self.latest.coef

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["seed"] != self.noise["seed"]:
            raise UserError(f"seed: the checkpoint was made with {state['seed']}, this run has {self.noise['seed']}")
        self.step_count = int(state["step_count"])
        self.changed.fill_(state.get("changed", 0))
