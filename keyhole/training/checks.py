"""What is checked once while a run trains: that every trained tensor changes, memory and pace against the plan, and
that the loss does not rise far.

"Full" tuning can silently freeze parts: a tensor left out of the optimizer, a module that is never reached, or 16-bit
weights rounded to nearest, where a step below half the distance to the next number is lost (a bfloat16 weight near 1
needs a step of 0.002). Comparing whole tensors would need a second copy of the model, so up to SAMPLE elements of each,
evenly spaced, are kept on the host (8 KiB per tensor in 16 bit) and compared bit by bit after CHECK_STEPS steps with a
rate above 0. A tensor whose sample has not changed may have changed elsewhere: hence a warning, not an error. Two kinds
are not looked at: the embedding, of which gradient methods change only the rows that a batch uses; and the biases of
keys in attention, which add the same number q b to every score of a query, so that without rotary embeddings the
softmax cancels them and their gradient is 0 up to rounding.
"""

import math
from collections import deque
from collections.abc import Callable, Iterable
from statistics import fmean, median, median_low

import torch

from keyhole.disk.json_text import finite
from keyhole.machine.gpu import ACCELERATOR
from keyhole.machine.sizes import GIB
from keyhole.methods import METHODS
from keyhole.model.batch import Batch
from keyhole.model.model import Model
from keyhole.report.entries import Entry
from keyhole.report.story import Story
from keyhole.training.metrics import Reading, memory_gib
from keyhole.training.planning import planned
from keyhole.training.run import Observer, Run

SAMPLE = 4096
CHECK_STEPS = 3
NAMED = 5
KEY_BIASES = (".key.bias", ".k_proj.bias", ".k_lin.bias", ".k.bias")  # BERT-like models, OPT, DistilBERT, MPNet
WINDOW, LEAST, RISE, RISE_AT_LEAST = 32, 5, 2.0, 1.0  # losses; the rise that is a divergence


class FirstSteps(Observer):
    def __init__(self, run: Run, story: Story) -> None:
        self.run, self.story = run, story
        self.before: dict[str, torch.Tensor] = {}
        self.entries: list[Entry] = []
        self.moved, self.is_done = 0, False  # steps with a rate above 0

    def before_step(self, batches: list[Batch]) -> None:
        if not self.before and not self.is_done:
            self.before = dict(samples(self.run.model))

    def note(self, reading: Reading) -> None:
        if not self.is_done and "loss" in reading.entry:
            self.entries.append(reading.entry)

    def after_step(self) -> None:
        run, model, method = self.run, self.run.model, self.run.method.name
        self.moved += run.rate > 0
        if self.is_done or not self.before or not (self.moved == CHECK_STEPS or run.is_last):
            return
        with run.paused():
            if self.moved:
                run.say(verdict(model, self.before, dict(samples(model)), self.moved))
            if model.device.type == ACCELERATOR and METHODS[method].streams:
                assert model.placed is not None
                planned_gib = model.placed.device_bytes.total / GIB
                peak_gib = memory_gib(model.device)["gpu_gib"]
                run.say(f"check: peak GPU memory {peak_gib:.2f} GiB, planned {planned_gib:.2f} GiB")
            if timed := self.entries[1:]:  # the first step compiles
                tokens, seconds = fmean(e["tokens"] for e in timed), median(e["seconds"] for e in timed)
                self.story.planned = plan = planned(model, method, tokens)
                if plan.seconds:
                    run.say(
                        f"check: {seconds:.3g} s per step, planned {plan.seconds['total']:.3g} s, bound by "
                        f"{plan.bound_by} ({tokens:,.0f} tokens; {plan.source})"
                    )
        self.before, self.entries, self.is_done = {}, [], True


def samples(model: Model) -> Iterable[tuple[str, torch.Tensor]]:
    model.engine.wait_for_homes()
    for tensor in model.layout.tensors:
        if not tensor.param.requires_grad or tensor is model.layout.table or tensor.name.endswith(KEY_BIASES):
            continue
        if model.homes.unit_of(tensor).index in model.homes.parts:
            for _, part in list(model.homes.own_parts(tensor))[:1]:
                yield tensor.name, sample(part)
        else:
            found = sample(model.home(tensor))
            beside = None if model.methods.low_rank is None else model.methods.low_rank.sample(tensor)
            yield tensor.name, found if beside is None else torch.cat([found.long(), sample(beside).long()])
    for name, param in ({} if model.methods.addon is None else model.methods.addon.params).items():
        yield name, sample(param.data)


def sample(tensor: torch.Tensor) -> torch.Tensor:
    """Up to SAMPLE evenly spaced elements on the host, as integers of the same width."""
    flat = tensor.reshape(-1)
    picked = flat[:: max(1, -(-flat.numel() // SAMPLE))]
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    return picked.contiguous().view(integer).cpu().clone()


def verdict(model: Model, before: dict[str, torch.Tensor], after: dict[str, torch.Tensor], steps: int) -> str:
    """The line for the user: which samples have not changed in `steps` steps, and the share of elements that have."""
    changed = {name: int((after[name] != before[name]).sum()) for name in before}
    percent = 100 * sum(changed.values()) / max(1, sum(map(torch.numel, before.values())))
    unchanged = [name for name, count in changed.items() if not count]
    said = f"{percent:.1f} % of the sampled weights changed"
    if not unchanged:
        return f"check: all {len(before)} trained tensors that were sampled changed within {steps} steps ({said})"
    names = ", ".join(unchanged[:NAMED]) + (f", and {len(unchanged) - NAMED} more" if len(unchanged) > NAMED else "")
    why = "they get no gradient, or their steps are too small"
    if torch.finfo(model.dtype).bits == 16:
        why = (
            f"rounding to nearest {model.dtype} loses small steps, stochastic rounding takes few of them; raise "
            "learning_rate, or set dtype=float32"
        )
    head = f"warning: {len(unchanged)} of {len(before)} trained tensors did not change in {steps} steps"
    return f"{head} ({names}): {why}. {said}"


class Divergence(Observer):
    """Warns once if the loss has risen far: a run that has diverged to a plateau looks healthy.

    The median of the last WINDOW losses is compared with the lowest one so far: RISE times that, and RISE_AT_LEAST
    above it, is a divergence. A run may diverge in its first steps, so the first loss counts as a median too, and the
    first windows may be shorter. A resumed run reads the losses of earlier steps from run/metrics.jsonl, and warns at
    the same step as one that was not stopped.
    """

    def __init__(self, say: Callable[[str], None], before: Iterable[Entry] = ()) -> None:
        self.say, self.said = say, False
        self.window: deque[float] = deque(maxlen=WINDOW)
        self.best = (math.inf, 0)  # median, step
        for entry in before:
            self.warning(entry)  # it was said then

    def note(self, reading: Reading) -> None:
        if (warning := self.warning(reading.entry)) is not None:
            self.say(warning)

    def warning(self, entry: Entry) -> str | None:
        if (loss := finite(entry.get("loss"))) is None:
            return None
        self.window.append(loss)
        middle, size = median_low(self.window), len(self.window)
        if size in (1, WINDOW) and middle < self.best[0]:
            self.best = middle, entry["step"]
        best, step = self.best
        if self.said or size < LEAST or middle <= max(RISE * best, best + RISE_AT_LEAST):
            return None
        self.said = True
        return (
            f"warning: the loss has risen from {best:.3g} at step {step} to {middle:.3g} at step {entry['step']} "
            f"(median of {size} steps): most likely the run diverges; lower learning_rate, or clip (max_grad_norm=1; "
            "zo: zo.clip)"
        )
