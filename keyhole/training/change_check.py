"""Checks on a sample of every trained tensor that it really changes.

"Full" tuning can silently freeze parts: a tensor left out of the optimizer, a module that is never reached, or 16-bit
weights rounded to nearest, where a step below half the distance to the next number is lost (a bfloat16 weight near 1
needs a step of 0.002). Comparing whole tensors would need a second copy of the model, so up to SAMPLE elements of each,
evenly spaced, are kept on the host (8 KiB per tensor in 16 bit) and compared bit by bit after CHECK_STEPS steps with a
rate above 0. Gradient methods change only the rows of the embedding that a batch uses, so its sample is taken from rows
of the first batch. A tensor whose sample has not changed may have changed elsewhere: hence a warning, not an error.

The bias of the keys in attention is a special case. It adds the same number, q b, to every score of a query, and the
softmax cancels it: its gradient is 0 up to rounding. With rotary embeddings, which rotate keys by position, it does
not cancel.
"""

from collections.abc import Iterable

import torch

from keyhole.model.model import Model

SAMPLE = 4096
CHECK_STEPS = 3
NAMED = 5
KEY_BIASES = (".key.bias", ".k_proj.bias", ".k_lin.bias", ".k.bias")  # BERT-like models, OPT, DistilBERT, MPNet


class ChangeCheck:
    """Samples of every trained tensor, taken when the object is created."""

    def __init__(self, model: Model, first_ids: torch.Tensor) -> None:
        self.model = model
        self.rows_R = first_ids.unique()
        self.before = dict(self._samples())

    def _samples(self) -> Iterable[tuple[str, torch.Tensor]]:
        self.model.engine.wait_for_homes()
        table = self.model.layout.table
        for tensor in self.model.layout.tensors:
            if tensor.param.requires_grad and self.model.homes.unit_of(tensor).index in self.model.homes.parts:
                for _, part in list(self.model.homes.own_parts(tensor))[:1]:
                    yield tensor.name, sample(part)
            elif tensor.param.requires_grad:
                found = sample(self.model.home(tensor), self.rows_R if tensor is table else None)
                beside = None if self.model.low_rank is None else self.model.low_rank.sample(tensor)
                yield tensor.name, found if beside is None else torch.cat([found.long(), sample(beside).long()])
        for name, param in ({} if self.model.addon is None else self.model.addon.params).items():
            yield name, sample(param.data)

    def unchanged(self) -> tuple[list[str], float]:
        """(tensors whose sample has not changed, share of all sampled elements that have changed)."""
        names, changed, total = [], 0, 0
        for name, after in self._samples():
            count = int((after != self.before[name]).sum())
            changed, total = changed + count, total + after.numel()
            names += [] if count else [name]
        return names, changed / max(1, total)

    def verdict(self, steps: int) -> str:
        """The line for the user after `steps` steps."""
        (still, share), count, dtype = self.unchanged(), len(self.before), self.model.dtype
        percent = f"{100 * share:.1f} % of the sampled weights changed"
        without = [] if _turns_keys(self.model) else [name for name in still if name.endswith(KEY_BIASES)]
        unchanged = [name for name in still if name not in without]
        if not unchanged:
            end = f" within {steps} steps ({percent})"
            if not without:
                return f"check: all {count} trained tensors changed{end}"
            biases = "bias" if len(without) == 1 else f"{len(without)} biases"
            return (
                f"check: all trained tensors changed{end}, but for the {biases} of keys, which no attention depends on"
            )
        names = ", ".join(unchanged[:NAMED]) + (
            f", and {len(unchanged) - NAMED} more" if len(unchanged) > NAMED else ""
        )
        why = "they get no gradient, or their steps are too small"
        if torch.finfo(dtype).bits == 16:
            why = f"rounding to nearest {dtype} loses small steps, stochastic rounding takes few of them"
            why += "; raise learning_rate, or set dtype=float32"
        head = f"warning: {len(unchanged)} of {count} trained tensors did not change in {steps} steps"
        return f"{head} ({names}): {why}. {percent}"


def _turns_keys(model: Model) -> bool:
    """Whether the model has rotary embeddings."""
    return any("rotary" in name.lower() for name, _ in model.module.named_modules())


def sample(tensor: torch.Tensor, rows_R: torch.Tensor | None = None) -> torch.Tensor:
    """Up to SAMPLE evenly spaced elements (of these rows) on the host, as integers of the same width."""
    if rows_R is None:
        flat = tensor.reshape(-1)
        picked = flat[:: max(1, -(-flat.numel() // SAMPLE))]
    else:
        rows_R = rows_R[: max(1, SAMPLE // min(SAMPLE, tensor.shape[1]))].to(tensor.device)
        picked = tensor[rows_R].reshape(-1)[:SAMPLE]
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    return picked.contiguous().view(integer).cpu().clone()
