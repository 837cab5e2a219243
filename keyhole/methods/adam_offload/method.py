"""AdamW whose master weights and moments live in host memory, updated there while the GPU works.

The rule is torch's AdamW, exactly, on fp32 masters (ops/adam.py). Bytes per parameter:

    host     12 (master, two moments) + 2 (16-bit weight, or the gradient in its place: exchange.py) = 14
    device   2 if the model is resident; about two blocks if it is streamed. Gradients: one block's, temporarily.
    link     2 down (gradient), 4 up (master; the GPU rounds it) per step; streamed 4 up (forward and backward). More
             for parameters that the GPU updates: updates.py

One step, layer by layer:

    reverse     the sweep (model/backward/reverse.py) computes the complete gradient of each tensor, over all
                micro-batches; it is copied to the host on its own stream while the blocks below are differentiated
    update      a worker updates a unit as soon as its gradients have arrived, first the unit that the next forward
                pass needs first; the GPU, whose link is idle, updates some too (updates.py), with the same bits
    return      the worker sends a resident unit's weights back; a streamed unit's are already at home
    forward     the next forward pass waits at each unit only for the weights of that unit

max_grad_norm needs the norm of the whole gradient, which is known at the end of the backward pass: the GPU computes the
norms of tensors as they leave, and the updates overlap with the next forward pass. Nothing is stale or approximate.

If a gradient is not finite: with max_grad_norm the step changes nothing. Without, the units above may already have been
updated; if any was, the run stops at once, since the weights then mix two steps. (A non-finite loss makes every
gradient non-finite, and then nothing has changed.)

The masters were made from the weights. If another method or the caller's own code changes the weights, the masters take
over the new values before the next step (`_follow`). The model notices such changes (model/attached.py), except one
through `.data`, which torch does not count; so after a flush, when a caller may make one, all weights are compared with
their masters.

On several ranks each keeps and updates its part of blocks and head, 12 / N bytes of state, and all of the embedding and
the shared parameters. Its part of a unit's summed gradient (methods/shards.py) goes the same way; the next forward pass
gathers the new weights into a slot. Norms of pieces are gathered, so that all ranks clip by the same norm.
"""

import weakref

import torch

from keyhole import ops
from keyhole.errors import UserError
from keyhole.methods import shards
from keyhole.methods.adam_offload.traits import ADAM_OFFLOAD, AdamOffloadConfig
from keyhole.methods.adam_offload.updates import AdamStep, Updates
from keyhole.methods.base import Saved, State
from keyhole.methods.frame import Backward, GradientMethod
from keyhole.model.backward.sink import Found, Sink, runs_of
from keyhole.model.structure.layout import FlatTensor, Unit


class AdamOffload(GradientMethod, Sink):
    """Exact AdamW with its state in host memory. `lr` may be changed between steps."""

    row = ADAM_OFFLOAD
    settings: AdamOffloadConfig
    _end: weakref.finalize

    def _setup(self) -> None:
        model, own = self.model, self.settings
        if any(home.dtype != model.dtype for home in model.engine.homes):
            raise UserError("wire: adam-offload keeps its own fp32 weights; set wire=null and choose dtype")
        if not any(t.param.requires_grad for t in model.layout.tensors):
            raise UserError("every parameter is frozen: there is nothing to train")
        model.methods.attach(self)
        self._differentiate(fused=not own.compile)
        self.updates = Updates(model, own)
        self.exchange = self.updates.exchange
        self._end = weakref.finalize(self, self.exchange.finish)
        self.slots = {start: k for k, start in enumerate(self.updates.trained)}  # of norms; a unit's are adjacent
        self.current = self._new_step()
        self.norm: torch.Tensor | None = None  # of the last step's gradient
        self.parts = AdamParts(self) if model.sharded else None
        self._took_weights()

    # -- one step --------------------------------------------------------------------------------------------------

    def _begin(self, own: shards.Share) -> None:
        self._follow()

    def _backward(self, loss: torch.Tensor) -> None:
        """As in every method with gradients, but it waits for the updates, since your forward would not. (After
        step(batch), call flush() before such a forward.)"""
        self._land()
        self._follow()
        super()._backward(loss)
        self._land()

    def _took_weights(self) -> None:
        """Masters and weights agree, and from now on the caller may change these."""
        methods = self.model.methods
        self.as_of, self.taken = methods.steps, methods.changes  # steps of all methods, and changes by hand
        self.is_open = not self.model.ranks.several  # no caller changes weights there

    def _follow(self, others: bool = True) -> None:
        """If weights may have changed since, by hand or (others) by a step of another method, the masters take them
        over; and the engine waits for this method's updates again."""
        engine, methods = self.model.engine, self.model.methods
        by_others = others and (self.as_of != methods.steps or engine.gate is not self.exchange)
        if by_others or self.is_open or self.taken != methods.changes:
            engine.wait_for_homes()
            self._land()
            self.updates.follow()
            engine.invalidate()
        if by_others:
            engine.gate = self.exchange
        self.is_open, self.taken = False, methods.changes

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
        return AdamStep(self.lr, norms_K, numbers, self.slots, waits_for_norm=self.settings.max_grad_norm is not None)

    def gradient(self, tensor: FlatTensor, w: torch.Tensor, grad: torch.Tensor) -> None:
        """Computes the norm and sends the gradient to the host."""
        recorded = self.reverse.tape.recorded is not None  # then the next replay may overwrite it during the copy
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
            ops.norm(grad, out=self.current.norms_K[self.slots[start]])
        unit = self.updates.trained[starts[0]].unit
        self.exchange.put(unit.index, starts[0] - unit.start, together)
        self.current.starts[unit.index] += starts

    def finished(self, unit: Unit) -> bool:
        """The unit's gradients are being sent; its update is submitted now, or after the backward pass."""
        starts = sorted(self.current.starts[unit.index])
        if starts and self.current.waits_for_norm:
            self.current.waiting.append((unit, starts))
        elif starts:
            self.exchange.down.send(*self.current.norms(starts))
            self.updates.submit(self.current, unit, starts, self.exchange.sent())
        return False

    def _end_reverse(self, step: AdamStep) -> None:
        """The norm of the whole gradient is known: sends clip factor and norm, and submits the waiting updates."""
        self.norm = torch.linalg.vector_norm(step.norms_K)
        limit = self.settings.max_grad_norm
        if limit is None:
            return
        clip = (limit / (self.norm + 1e-6)).clamp(max=1.0)
        self.exchange.down.send(torch.stack([clip, self.norm]), step.numbers[-2:])
        after = self.exchange.sent()
        for unit, starts in step.waiting:
            self.updates.submit(step, unit, starts, after)

    # -- between steps ---------------------------------------------------------------------------------------------

    def _settle(self) -> None:
        self.updates.settle()
        if self.current.bad and self.current.applied:
            self.model.methods.check_whole()

    def _flush(self) -> None:
        """Waits for all updates: the weights at home are those after the last step."""
        self._land()
        self._follow(others=False)
        self.is_open = not self.model.ranks.several

    def _land(self) -> None:
        self.exchange.drain()
        self._settle()

    @property
    def is_whole(self) -> bool:
        """Waits for all updates."""
        if not self.is_settled and self._end.alive:
            self.exchange.drain()
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
        updates, clips = self.updates, self.settings.max_grad_norm is not None
        when = "at the end of the reverse, under the next forward" if clips else "as gradients arrive"
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
        self._took_weights()


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
                        ops.norm(part[begin:end], out=own_K[step.slots[start] - first])
                        method.exchange.put(unit.index, begin, part[begin:end])
                torch.linalg.vector_norm(self.ranks.gather(own_K), dim=0, out=norms_K)
                step.starts[unit.index] = starts
        return method.finished(unit)
