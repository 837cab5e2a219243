"""A batch on its way to the device: the inputs of the decoder, and the positions that predict a trained token.

A batch is any mapping of names to tensors: a dict, or the output of a Hugging Face collator (BatchEncoding). Unknown
names raise an error, because a model that ignores an input would train on something else.
Labels follow the Hugging Face convention: not shifted, -100 where nothing is trained. Position t predicts token
t + 1, so the trained positions are those whose *next* label is a token. They are found on the host, so that selecting
them on the device needs no synchronization; logits are computed for them only. A batch with `question` and `answer` is
trained by candidates, any other batch by tokens (objective.py).

On a GPU a batch is copied on a stream of its own. The host is usually far ahead of the kernels, so the batch has
arrived when they need it; on the compute stream the copy would queue behind waits for uploads of weights.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

import torch

from keyhole.errors import UserError, warn
from keyhole.machine.gpu import ACCELERATOR, accelerator
from keyhole.model.objective import PER_ROW, Tokens, loss_of
from keyhole.model.rows import IGNORED, find_shared, is_on_host, is_packed, join, separate

Batch = Mapping[str, torch.Tensor]
PER_TOKEN = ("input_ids", "labels", "attention_mask", "position_ids")


@dataclass
class DeviceBatch:
    """Inputs of the decoder, and for the N trained tokens their positions, targets and loss. Inputs may
    have fewer rows than the batch (rows.py); a position then has several targets."""

    inputs: dict[str, torch.Tensor]
    index_N: torch.Tensor  # into the flattened [B * T] positions
    target_N: torch.Tensor
    loss: Tokens
    token_count: int  # N, known on the host
    packed: bool = False  # samples share rows; they must not attend to each other


def repeated(batch: DeviceBatch, count: int) -> DeviceBatch:
    """The batch with its rows repeated `count` times, for a pass that returns only hidden states: targets and counts
    stay those of one copy."""
    if count == 1:
        return batch
    positions = batch.inputs["input_ids"].numel()
    starts = torch.arange(count, device=batch.index_N.device)[:, None] * positions
    inputs = {name: x.repeat(count, *[1] * (x.dim() - 1)) for name, x in batch.inputs.items()}
    return replace(batch, inputs=inputs, index_N=(starts + batch.index_N).flatten())


def split(batch: Batch, rows: int) -> list[Batch]:
    """The batch in passes of at most so many rows, about equally many in each. Rows that belong together (the
    candidates of a question) stay together, however many they are."""
    loss, count = loss_of(batch), len(batch["labels"])
    if count <= rows:
        return [batch]
    most, begin, last = -(-count // -(-count // rows)), 0, 0
    parts: list[Batch] = []
    for end in loss.ends(batch):
        if end - begin > most and last > begin:
            parts.append(loss.part(batch, begin, last))
            begin = last
        last = end
    return [*parts, loss.part(batch, begin, count)]


def split_all(batches: list[Batch], rows: int | str, tokens: int | None) -> list[Batch]:
    """Batches in passes of at most so many rows; auto: of at most so many tokens, if there is a limit. So a split
    depends on the shape of a batch and the plan alone."""
    if rows == "auto" and tokens is None:
        return batches
    widths = [one["input_ids"].shape[1] for one in batches]
    counts = [max(1, (tokens or 0) // width) if rows == "auto" else int(rows) for width in widths]
    return [part for one, count in zip(batches, counts, strict=True) for part in split(one, count)]


def as_list(batch: Batch | Sequence[Batch]) -> list[Batch]:
    """A step takes one batch or the list of its micro-batches."""
    if not isinstance(batch, Mapping | Iterable):
        raise UserError(f"batch: found a {type(batch).__name__}, expected a dict of tensors, or a list of them")
    batches = [batch] if isinstance(batch, Mapping) else list(batch)
    if not batches:
        raise UserError("batch: the list is empty; a step needs at least one micro-batch")
    return batches


def check_entries(
    batch: Batch, row_count: int, per_token: Sequence[str], others: Sequence[str], user: str, may_hold: str
) -> None:
    """UserError if the batch has other entries than these, if those per token have no common shape, or if a token is
    not in the embedding, which has row_count rows. user, may_hold: what the error says."""
    if not isinstance(batch, Mapping) or not {"input_ids", "labels"} <= batch.keys():
        found = ", ".join(map(str, batch)) if isinstance(batch, Mapping) else type(batch).__name__
        raise UserError(f"batch: a dict of tensors with input_ids and labels is needed, found {found}")
    if unknown := [str(name) for name in batch if name not in (*per_token, *others)]:
        raise UserError(
            f"batch: {', '.join(unknown)}: not used {user}, and nothing is left out in silence; a batch may hold "
            f"{may_hold}. Remove what you do not need (of a tokenizer: return_token_type_ids=False)"
        )
    ids = batch["input_ids"]
    shape = tuple(ids.shape) if isinstance(ids, torch.Tensor) else ()
    for name, x in ((name, batch[name]) for name in per_token if name in batch):
        if not isinstance(x, torch.Tensor) or x.ndim != 2 or tuple(x.shape) != shape or x.numel() == 0:
            shown = tuple(x.shape) if isinstance(x, torch.Tensor) else type(x).__name__
            raise UserError(f"batch: {name} is {shown}; all must be tensors of one shape [rows, length], as input_ids")
        if x.is_floating_point():
            raise UserError(f"batch: {name} is {x.dtype}; integers are needed")
    mask_BT = batch.get("attention_mask")  # GPU tensors are not checked: reading them would synchronize
    if mask_BT is not None and mask_BT.device.type == "cpu" and not bool(((mask_BT == 0) | (mask_BT == 1)).all()):
        raise UserError(
            f"batch: attention_mask holds {int(mask_BT.min())} to {int(mask_BT.max())}; 0 and 1 are needed (samples "
            "that share a row are told apart by position_ids that restart at 0)"
        )
    check_tokens("input_ids", batch["input_ids"], row_count)


def check(batch: Batch, row_count: int) -> None:
    """UserError if the batch cannot be trained on. row_count: of the embedding."""
    may_hold = f"{', '.join(PER_TOKEN)}, and for a choice between candidates {' and '.join(PER_ROW)}"
    check_entries(batch, row_count, PER_TOKEN, PER_ROW, "here", may_hold)
    check_tokens("labels", batch["labels"], row_count, f", or {IGNORED} where nothing is trained")
    loss = loss_of(batch)
    if any(name not in batch for name in loss.entries):
        given = next(name for name in loss.entries if name in batch)
        raise UserError(f"batch: {given} alone; what is trained {loss.trains} needs {' and '.join(loss.entries)}")
    if loss.entries and "position_ids" in batch and is_packed(batch["position_ids"], batch.get("attention_mask")):
        raise UserError(f"batch: position_ids restart within a row, which is one sample {loss.trains}")
    loss.check(batch, (batch["labels"][:, 1:] != IGNORED).sum(dim=1))


def check_alike(batches: list[Batch]) -> None:
    """UserError if the micro-batches of one step have different losses."""
    if len(found := list(dict.fromkeys(map(loss_of, batches)))) > 1:
        first, other = found[:2]
        raise UserError(
            f"batch: some of {len(batches)} micro-batches are trained {first.trains}, others {other.trains}; a step "
            "has one loss: give all of them its entries, or none"
        )


def warn_if_untrained(batches: list[Batch]) -> None:
    """Warns of a step without a trained token. GPU tensors are not looked at: reading them would synchronize."""
    labels = [batch["labels"] for batch in batches]
    if labels and all(x.device.type == "cpu" and bool((x[:, 1:] == IGNORED).all()) for x in labels):
        warn(
            f"batch: no token is trained (all labels after the first are {IGNORED}): its loss of 0 means nothing, and "
            "a step on it learns nothing; were the answers cut off, or all labels masked?",
        )


def check_tokens(name: str, x_BT: torch.Tensor, row_count: int, or_else: str = "", has: str = "tokens") -> None:
    """Refuses tokens outside of the vocabulary. GPU tensors are not checked: reading them would synchronize."""
    tokens = x_BT[x_BT != IGNORED] if or_else and x_BT.device.type == "cpu" else x_BT
    if tokens.device.type == "cpu" and tokens.numel():
        low, high = (int(value) for value in torch.aminmax(tokens))
        if low < 0 or high >= row_count:
            raise UserError(f"batch: {name} holds {low} to {high}; the model has {has} 0 to {row_count - 1}{or_else}")


def hides_tokens(mask: torch.Tensor | None) -> bool:
    """Whether this attention mask hides a token."""
    return mask is not None and not bool(mask.all())


def to_device(batch: Batch, device: torch.device, shares: bool = False, most: int = 0) -> DeviceBatch:
    """Copies a checked batch to the device. shares: rows that differ in their last token become one
    (rows.py), for passes without a backward pass; most: rows may also be joined to rows of as many tokens
    (rows.py)."""
    labels_BT = batch["labels"].long()  # collators also return 32 bits
    next_BT = torch.full_like(labels_BT, IGNORED)
    next_BT[:, :-1] = labels_BT[:, 1:]
    flat = next_BT.flatten()
    trained_N = index_N = (flat != IGNORED).nonzero()[:, 0]
    row_N = index_N // labels_BT.shape[1]
    ids, mask, positions = batch["input_ids"].long(), batch.get("attention_mask"), batch.get("position_ids")
    if shares and (found := find_shared(batch)) is not None:
        stays_K, place_B = found
        index_N = place_B[row_N] * labels_BT.shape[1] + trained_N % labels_BT.shape[1]
        ids, mask = ids[stays_K], None if mask is None else mask[stays_K]
    if most and positions is None and is_on_host(batch):
        place_N, column_N = index_N // ids.shape[1], index_N % ids.shape[1]
        length_K = torch.zeros(len(ids), dtype=torch.int64).scatter_reduce_(0, place_N, column_N + 1, "amax")
        if (joined := join(ids, mask, length_K, most)) is not None:
            index_N = joined.begin_K[place_N] + column_N
            ids, mask, positions = joined.ids_RW, None, joined.positions_RW
    inputs = {"input_ids": ids}
    packed = positions is not None and is_packed(positions, mask)
    hides = hides_tokens(mask)  # an all-ones mask is dropped: it changes nothing, costs kernels
    if hides and not packed and mask is not None:
        inputs["attention_mask"] = mask
    if positions is not None:
        inputs["position_ids"] = separate(positions, mask) if mask is not None and hides and packed else positions
    return DeviceBatch(
        inputs={name: move(x, device) for name, x in inputs.items()},
        index_N=move(index_N, device),
        target_N=move(flat[trained_N], device),
        loss=loss_of(batch).of(batch, row_N).moved(lambda x: move(x, device)),
        token_count=index_N.numel(),
        packed=packed,
    )


@cache
def _stream(device: torch.device) -> accelerator.Stream:
    """The stream on which batches are copied to this device."""
    return accelerator.Stream(device)


def move(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    """x on the device, ready for kernels launched from here on."""
    if device.type != ACCELERATOR or x.device.type != "cpu":
        moved = x.to(device)
        return moved.clone() if moved.is_inference() else moved  # autograd refuses tensors of inference mode
    stream, kernels = _stream(device), accelerator.current_stream(device)
    with accelerator.stream(stream):
        moved = x.pin_memory().to(device, non_blocking=True)
    kernels.wait_stream(stream)
    moved.record_stream(kernels)
    return moved
