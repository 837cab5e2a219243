"""Models that classify a text: an encoder (BERT, RoBERTa, MPNet, MiniLM) or a decoder with a small head per text.

    logits = module(input_ids, ...)                     [B, L], through the module's own code, head and pooling too
    nll_b  = cross entropy of row b with its label      by `problem_type` of the config, as in Hugging Face:
             mean over l of (logits - label)^2          regression, the default where L = 1
             mean over l of binary cross entropy        multi_label_classification
    loss   = 1/B sum_b nll_b                            B: rows of all micro-batches of a step

The head is small: it belongs to the common unit (structure/layout.py), and there are no vocabulary units. Passes return
logits instead of hidden states, and rows take the place of trained tokens; everything else is as for a decoder: blocks
are streamed, perturbed, recomputed and updated. A batch has `labels` with one number per row ([B, L] for several
labels), and may have token_type_ids if the model uses them.

If the weight files have no head (a pretrained encoder), it is initialised: matrices from N(0, initializer_range^2) by
the seed, the same on every device; vectors by the module's own code.
Legend: B rows, T positions, L labels.
"""

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from keyhole.errors import UserError
from keyhole.model.batch import Batch, DeviceBatch, check_entries, check_tokens, move
from keyhole.model.objective import Tokens
from keyhole.model.structure.config_files import MULTI_LABEL, REGRESSION, problem_of, setting

PER_TOKEN = ("input_ids", "attention_mask", "token_type_ids")


def text_positions(module: nn.Module) -> int | None:
    """The longest text that the module's position table can hold; None if it has no such table."""
    named = [m for name, m in module.named_modules() if name.endswith("position_embeddings")]
    tables = [m for m in named if isinstance(m, nn.Embedding)]
    first = [0 if m.padding_idx is None else m.padding_idx + 1 for m in tables]  # RoBERTa's start after the padding's
    return min((m.num_embeddings - k for m, k in zip(tables, first, strict=True)), default=None)


def name_labels(config: Any, names: Sequence[str], pad_token_id: int) -> None:
    """Sets the names of the labels, and the padding id if the config has none: a decoder's head reads the last token
    before the padding."""
    config.id2label = dict(enumerate(names))
    config.label2id = {name: i for i, name in enumerate(names)}
    if config.pad_token_id is None:
        config.pad_token_id = pad_token_id


class ClassificationHead:
    """The logits of a whole module, their loss, and the checks of its batches: the counterpart of forward/head.py. It
    has no units: `linear` is None."""

    linear = None

    def __init__(self, module: nn.Module) -> None:
        self.module, self.problem = module, problem_of(module.config)
        self.config: Any = module.config
        takes = inspect.signature(module.forward).parameters
        self.takes = PER_TOKEN if "token_type_ids" in takes else PER_TOKEN[:2]
        self.options = {"use_cache": False} if "use_cache" in takes else {}  # recomputing a block would append to it
        configs = {id(own): own for part in module.modules() if (own := getattr(part, "config", None)) is not None}
        self.caching = [own for own in configs.values() if setting(own, "use_cache") and not self.options]
        self.type_count = setting(module.config, "type_vocab_size") or 1
        self.longest = text_positions(module)

    def states(self, batch: DeviceBatch) -> torch.Tensor:
        """[B, L]: the logits."""
        with self._without_cache():
            return self.module(**batch.inputs, **self.options).logits

    @contextmanager
    def _without_cache(self) -> Iterator[None]:
        """A context without use_cache, for a forward that has no such argument and reads it from the config."""
        for config in self.caching:
            config.use_cache = False
        try:
            yield
        finally:
            for config in self.caching:
                config.use_cache = True

    def nll(self, logits_BL: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """The loss of each row [B], in float32, differentiable."""
        logits_BL = logits_BL.float()
        if self.problem == REGRESSION:
            return (logits_BL - labels.view(logits_BL.shape)).square().mean(dim=1)
        if self.problem == MULTI_LABEL:
            return F.binary_cross_entropy_with_logits(logits_BL, labels, reduction="none").mean(dim=1)
        return F.cross_entropy(logits_BL, labels, reduction="none")

    def nll_grad(self, logits_BL: torch.Tensor, labels: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        """[B, L]: the gradient of scale * sum(nll) with respect to the logits."""
        leaf = logits_BL.detach().requires_grad_()
        with torch.enable_grad():
            total = self.nll(leaf, labels).sum()
        return torch.autograd.grad(total, leaf, scale)[0]

    # -- batches ---------------------------------------------------------------------------------------------------

    def check(self, batches: list[Batch], row_count: int) -> None:
        """UserError if the batches cannot be trained on. row_count: of the embedding."""
        name = type(self.module).__name__
        for batch in batches:
            may_hold = f"{', '.join(self.takes)} and labels"
            check_entries(batch, row_count, self.takes, ("labels",), f"by {name}", may_hold)
            rows, length = batch["input_ids"].shape
            if self.longest is not None and length > self.longest:
                raise UserError(f"batch: rows have {length} tokens; the model has positions for {self.longest}")
            if "token_type_ids" in batch:
                check_tokens("token_type_ids", batch["token_type_ids"], self.type_count, has="types")
            self._check_labels(batch["labels"], rows)

    def _check_labels(self, labels: object, rows: int) -> None:
        count, kind = self.config.num_labels, self.problem
        wide = kind == MULTI_LABEL or (kind == REGRESSION and count > 1)
        shape = (rows, count) if wide else (rows,)
        if not isinstance(labels, torch.Tensor) or tuple(labels.shape) != shape:
            found = tuple(labels.shape) if isinstance(labels, torch.Tensor) else type(labels).__name__
            raise UserError(f"batch: labels is {found}; {shape} is needed: one label per row ({kind}, {count} labels)")
        if labels.device.type != "cpu":  # reading it would synchronize
            return
        if kind == REGRESSION or kind == MULTI_LABEL:
            if not bool(torch.isfinite(labels).all()):
                raise UserError("batch: labels holds NaN or infinity; finite numbers are needed")
        elif labels.is_floating_point():
            raise UserError(f"batch: labels is {labels.dtype}; integers are needed ({kind}, {count} labels)")
        else:
            check_tokens("labels", labels, count, has="labels")

    def to_device(self, batch: Batch, device: torch.device, shares: bool = False, most: int = 0) -> DeviceBatch:
        """Rows take the place of trained tokens; there are no candidates whose rows could be shared or joined
        (`shares`, `most`). An all-ones mask is dropped: it changes nothing and costs kernels."""
        labels, mask = batch["labels"], batch.get("attention_mask")
        labels = labels.long() if self.problem not in (REGRESSION, MULTI_LABEL) else labels.float()
        inputs = {name: batch[name] for name in self.takes if name in batch and name != "attention_mask"}
        if mask is not None and not bool(mask.all()):
            inputs["attention_mask"] = mask
        row_N = torch.arange(labels.shape[0], device=labels.device)
        return DeviceBatch(
            inputs={name: move(x, device) for name, x in inputs.items()},
            index_N=move(row_N, device),
            target_N=move(labels, device),
            loss=Tokens.of(batch, move(row_N, device)),
            token_count=labels.shape[0],
        )
