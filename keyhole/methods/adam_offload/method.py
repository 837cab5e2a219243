"""AdamW whose master weights and moments live in host memory, updated there while the GPU works.

The rule is torch's AdamW, exactly, on fp32 masters (ops/adam.py). Bytes per parameter:

    host     12 (master, two moments) + 2 (16-bit weight, or the gradient in its place: exchange.py) = 14
    device   2 if the model is resident; about two blocks if it is streamed. Gradients: one block's, temporarily.
    link     2 down (gradient), 4 up (master; the GPU rounds it) per step; streamed 4 up (forward and backward). More
             for parameters that the GPU updates: updates.py

One step, layer by layer (schedule: layerwise):

    reverse     the sweep (model/backward/reverse.py) computes the complete gradient of each tensor, over all
                micro-batches; it is copied to the host on its own stream while the blocks below are differentiated
    update      a worker updates a unit as soon as its gradients have arrived, first the unit that the next forward
                pass needs first; the GPU, whose link is idle, updates some too (updates.py), with the same bits
    return      the worker sends a resident unit's weights back; a streamed unit's are already at home
    forward     the next forward pass waits at each unit only for the weights of that unit

max_grad_norm needs the norm of the whole gradient, which is known at the end of the backward pass: the GPU computes the
norms of tensors as they leave, and the updates overlap with the next forward pass. Nothing is stale or approximate.
Both orders and schedule: monolithic (for comparison) give the same bits. The latter is ZeRO-Offload's order: gradients
leave during the backward pass, updates begin when all have left, weights return during the updates of other units, and
the next forward pass begins when all have returned,

    step = forward + max(reverse, gradients down) + max(updates, weights up)          (LSP-Offload, Eq. 1)

If a gradient is not finite: with max_grad_norm (or monolithic) the step changes nothing. Without, the units above may
already have been updated; if any was, the run stops at once, since the weights then mix two steps. (A non-finite loss
makes every gradient non-finite, and then nothing has changed.)

The masters were made from the weights. If another method or the caller's own code changes the weights, the masters take
over the new values before the next step (`_follow`). The model notices such changes (model/attached.py), except one
through `.data`, which torch does not count: that one is found by comparing a fingerprint of the weights with the one of
the last flush, or of the time when the masters were made or loaded.

On several ranks each keeps and updates its part of blocks and head, 12 / N bytes of state, and all of table and spine.
Its part of a unit's summed gradient (methods/shards.py) goes the same way as gradients in one process, to the part's
memory on the host; the next forward pass gathers the new weights into a slot. Norms are of whole tensors: each rank
computes those of its pieces, and a few numbers per unit are gathered, so that all ranks clip by the same norm and agree
on what is not finite.
"""

import weakref
from collections.abc import Sequence

import torch

from keyhole.errors import UserError
from keyhole.methods import shards
from keyhole.methods.adam_offload.traits import ADAM_OFFLOAD, AdamOffloadConfig
from keyhole.methods.adam_offload.updates import AdamStep, Updates
from keyhole.methods.base import Saved, State
from keyhole.methods.frame import Backward, GradientMethod
from keyhole.model.backward.sink import Found, Sink, runs_of
from keyhole.model.batch import Batch, DeviceBatch
from keyhole.model.structure.layout import FlatTensor, Unit

WIDTH = 256  # 64-bit integers of a row of a fingerprint


class AdamOffload(GradientMethod, Sink):
    """Exact AdamW with its state in host memory. `lr` may be changed between steps."""

    row = ADAM_OFFLOAD
    settings: AdamOffloadConfig

    def _setup(self) -> None:
        model, own = self.model, self.settings
        if any(home.dtype != model.dtype for home in model.engine.homes):
            raise UserError("wire: adam-offload keeps its own fp32 weights; set wire=null and choose dtype")
        if not any(t.param.requires_grad for t in model.layout.tensors):
            raise UserError("every parameter is frozen: there is nothing to train")
        model.methods.attach(self)
        self._differentiate(fused=not own.compile)
        self.clips_at_end = own.max_grad_norm is not None or own.schedule == "monolithic"
        self.updates = Updates(model, own)
        self.exchange = self.updates.exchange
        self._end = weakref.finalize(self, self.exchange.finish)
        self.slots = {start: k for k, start in enumerate(self.updates.trained)}  # of norms; a unit's are adjacent
        self.current = self._new_step()
        self.norm: torch.Tensor | None = None  # of the last step's gradient
        self.parts = AdamParts(self) if model.sharded else None
        self.as_of = model.methods.steps  # the masters are those of the weights after so many steps of all methods
        self.taken = model.methods.changes  # and after so many changes by hand
        self.left = self._fingerprints()  # of the weights as they were taken, or at the last flush; until a step

    # -- one step --------------------------------------------------------------------------------------------------

    def _begin(self, batch: Batch | Sequence[Batch], batches: list[DeviceBatch]) -> None:
        self._follow()

    def _backward(self, loss: torch.Tensor) -> None:
        """As in every method with gradients, but it waits for the updates, since your forward would not. (After
        step(batch), call flush() before such a forward.)"""
        self._land()
        self._follow()
        super()._backward(loss)
        self._land()
        self.left = self._fingerprints()

    def _follow(self, others: bool = True) -> None:
        """If weights have changed since, by hand or (others) by a step of another method, the masters take them over;
        and the engine waits for this method's updates again."""
        engine, changes, left = self.model.engine, self.model.methods.changes, self.left
        by_hand = self.taken != changes
        if left is not None and not by_hand:
            by_hand = not all(map(torch.equal, left, self._fingerprints() or []))
        by_others = others and not (self.as_of == self.model.methods.steps and engine.gate is self.exchange)
        self.left, self.taken = None, changes
        if not (by_hand or by_others):
            return
        engine.wait_for_homes()
        self._land()
        self.updates.follow()
        if by_others:
            engine.gate = self.exchange
        engine.invalidate()

    def _fingerprints(self) -> list[torch.Tensor] | None:
        """The fingerprint of each trained unit at home; None on several ranks, where no caller changes weights."""
        if self.model.ranks.several:
            return None
        return [fingerprint(self.model.engine.homes[unit.index]) for unit in self.updates.units]

    def _update(self, loss: torch.Tensor, backward: Backward) -> None:
        self._settle()  # the forward has waited for every unit, so the last step is complete
        self.exchange.wait_s = self.updates.host_s = 0.0
        self.current = step = self._new_step()
        if self.parts is not None:
            self.parts.begin()
        try:
            backward(self.parts or self)
            self._end_reverse(step)
        except BaseException:  # sent gradients are dropped; if an update was submitted, it is too late
            for page in self.exchange.take_back():
                self.updates.write(self.model.layout.units[page])
            step.bad = step.applied = step.submitted
            raise
        self.as_of = self.model.methods.steps + 1

    def _new_step(self) -> AdamStep:
        norms_K = torch.zeros(len(self.slots), device=self.model.device)
        numbers = self.exchange.down.numbers(len(self.slots) + 2)
        return AdamStep(self.lr, norms_K, numbers, self.slots, waits_for_norm=self.clips_at_end)

    def gradient(self, tensor: FlatTensor, w: torch.Tensor, grad: torch.Tensor) -> None:
        """Computes the norm and sends the gradient to the host."""
        recorded = self.reverse.keeping.recorded is not None  # then the next replay may overwrite it during the copy
        self._send([tensor], grad.clone() if recorded else grad, [grad])

    def gradients_together(self, found: list[Found]) -> None:
        """Like `gradient`, with one copy for adjacent tensors. (Each costs the host more than a kernel's launch.)"""
        grads = {tensor.start: grad for tensor, _, grad in found}
        for run in runs_of([tensor for tensor, _, _ in found]):
            own = [grads[tensor.start] for tensor in run]
            self._send(run, torch.cat([grad.flatten() for grad in own]), own)

    def _send(self, run: list[FlatTensor], together: torch.Tensor, grads: list[torch.Tensor]) -> None:
        starts = [tensor.start for tensor in run]
        for start, grad in zip(starts, grads, strict=True):
            torch.linalg.vector_norm(grad, dtype=torch.float32, out=self.current.norms_K[self.slots[start]])
        unit = self.updates.trained[starts[0]].unit
        self.exchange.put(unit.index, starts[0] - unit.start, together)
        self.current.starts[unit.index] += starts

    def finished(self, unit: Unit) -> bool:
        """The unit's gradients are being sent; its update is submitted now, or after the backward pass."""
        starts = sorted(self.current.starts[unit.index])
        if starts and self.clips_at_end:
            self.current.waiting.append((unit, starts))
        elif starts:
            self.exchange.down.send(*self.current.norms(starts))
            self.updates.submit(self.current, unit, starts, self.exchange.sent())
        return False

    def _end_reverse(self, step: AdamStep) -> None:
        """The norm of the whole gradient is known: sends clip factor and norm, and submits the waiting updates."""
        self.norm = torch.linalg.vector_norm(step.norms_K)
        if not self.clips_at_end:
            return
        limit = float("inf") if self.settings.max_grad_norm is None else self.settings.max_grad_norm
        clip = (limit / (self.norm + 1e-6)).clamp(max=1.0)
        self.exchange.down.send(torch.stack([clip, self.norm]), step.numbers[-2:])
        after = self.exchange.sent()
        for unit, starts in step.waiting:
            self.updates.submit(step, unit, starts, after)
        if self.settings.schedule == "monolithic":
            self.exchange.drain()

    # -- between steps ---------------------------------------------------------------------------------------------

    def _settle(self) -> None:
        self.updates.settle()
        if not self.is_whole:
            raise UserError(
                "the last step was applied in part: a gradient was not finite, or an error came in between. The "
                "weights in memory are not usable. Go on from the last checkpoint; with max_grad_norm set, nothing "
                "changes before the whole gradient is known"
            )

    def _flush(self) -> None:
        """Waits for all updates: the weights at home are those after the last step."""
        self._land()
        self._follow(others=False)
        self.left = self._fingerprints()

    def _land(self) -> None:
        self.exchange.drain()
        self._settle()

    @property
    def is_whole(self) -> bool:
        """Whether the last step was not applied in part."""
        return not (self.current.bad and self.current.applied)

    @property
    def is_settled(self) -> bool:
        """Whether no update is on its way."""
        return self.exchange.is_drained

    def metrics(self) -> dict[str, torch.Tensor | float]:
        """Numbers of the last step. grad_norm: of the whole gradient, unclipped, on the device; host_wait_s: how long
        launches waited for host updates; gpu_updates: share of parameters that the GPU updated in the last settled
        step."""
        if self.norm is None:
            return {}
        found: dict[str, torch.Tensor | float] = {"grad_norm": self.norm, "host_wait_s": self.exchange.wait_s}
        return found | {"gpu_updates": self.updates.share} if self.updates.helps else found

    def describe(self) -> list[str]:
        """Lines for the start block."""
        updates, when = self.updates, "as gradients arrive"
        if self.clips_at_end:
            layerwise = self.settings.schedule == "layerwise"
            when = "at the end of the reverse, under the next forward" if layerwise else "between reverse and forward"
        return [
            f"adam-offload: {updates.states.bytes / 2**30:.2f} GiB of fp32 state in host memory, "
            f"{updates.pool.threads} threads; updates {when}{updates.who}",
            *self.dropout.describe(),
        ]

    def _state(self) -> State:
        """The state as views, not copies."""
        self.flush()
        return self.updates.state_dict() | self.dropout.state_dict()

    def _load(self, state: Saved) -> None:
        """Sets the weights to the rounded masters, whatever the last step left behind."""
        self.dropout.load_state_dict(state)
        self.exchange.drain()
        self.current, self.norm = self._new_step(), None
        self.updates.load_state_dict(state)
        self.exchange.drain()
        self.model.engine.invalidate()
        self.as_of, self.taken, self.left = self.model.methods.steps, self.model.methods.changes, self._fingerprints()

    def close(self) -> None:
        """Ends the worker, after the updates that are under way; so does deleting the method. (Ranks flush first.)"""
        self._end()


class AdamParts(shards.GradientParts):
    """On several ranks, in front of AdamOffload: sends this rank's part of the gradients."""

    def __init__(self, method: AdamOffload) -> None:
        super().__init__(method.model)
        self.method = method

    def whole(self, tensor: FlatTensor, w: torch.Tensor, grad: torch.Tensor) -> None:
        self.method.gradient(tensor, w, grad)

    def finished(self, unit: Unit) -> bool:
        method, step = self.method, self.method.current
        if unit.index in self.place:
            starts = [tensor.start for tensor in self.with_gradient(unit)]
            part = self.part_of(unit)
            if starts:
                method.model.engine.before_change(unit.index)  # on every rank, also where none of its elements are
                norms_K, first = step.norms(starts)[0], step.slots[starts[0]]
                own_K = torch.zeros_like(norms_K)
                for start in starts:
                    begin, end = method.updates.ours(unit, start, method.updates.trained[start].stop)
                    if begin < end:
                        torch.linalg.vector_norm(part[begin:end], out=own_K[step.slots[start] - first])
                        method.exchange.put(unit.index, begin, part[begin:end])
                torch.linalg.vector_norm(self.ranks.gather(own_K), dim=0, out=norms_K)
                step.starts[unit.index] = starts
        return method.finished(unit)


@torch.no_grad()
def fingerprint(flat: torch.Tensor) -> torch.Tensor:
    """Equal for equal weights, without a copy of them: their bits as 64-bit integers in rows of WIDTH, each row summed
    (modulo 2^64). Another value changes its sum, and so does an exchange of two weights, unless both are in one row and
    in the same place of their integers."""
    flat, row = flat.detach(), WIDTH * 8 // flat.element_size()
    if flat.storage_offset() * flat.element_size() % 8:  # not where an integer may begin
        flat = flat.clone()
    whole = flat.numel() // row * row
    rest = flat[whole:].contiguous().view(torch.uint8).long()
    return torch.cat([flat[:whole].view(torch.int64).view(-1, WIDTH).sum(dim=1), rest])
