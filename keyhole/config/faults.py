"""Messages about faults in a config, one line each: place, key, value found, expected value, nearest name.

All faults of a config are collected and shown together, so that a file can be corrected at once. For an unknown key the
message suggests, in this order: keyhole's name for a key of another trainer, the same key in its right section, and the
nearest spelling.
"""

import difflib
import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from keyhole.config.fields import settings
from keyhole.errors import UserError
from keyhole.limits import SPELLINGS

ELSEWHERE = {
    "model_name_or_path": "model", "base_model": "model", "optim": "method", "optimizer": "method",
    "dataset": "train_data", "datasets": "train_data", "train_file": "train_data", "data": "train_data",
    "per_device_train_batch_size": "batch_size", "train_batch_size": "batch_size",
    "gradient_accumulation": "gradient_accumulation_steps",
    "lr": "learning_rate", "lr_scheduler": "lr_scheduler_type", "scheduler": "lr_scheduler_type",
    "num_warmup_steps": "warmup_steps", "epochs": "num_train_epochs", "num_epochs": "num_train_epochs",
    "steps": "max_steps", "max_seq_length": "max_length", "max_seq_len": "max_length",
    "chat_template_path": "chat_template", "interleave_probs": "train_weights", "dataset_prepared_path": "data_cache",
    "sequence_len": "max_length", "cutoff_len": "max_length", "sample_packing": "packing",
    "bf16": "dtype", "fp16": "dtype", "torch_dtype": "dtype", "precision": "dtype",
    "grad_clip": "max_grad_norm", "gradient_clipping": "max_grad_norm", "random_seed": "seed",
    "beta1": "adam_beta1", "beta2": "adam_beta2",
    "hub_private": "hub_private_repo", "hub_repo_id": "hub_model_id",
    "zo_eps": "zo.eps", "num_directions": "zo.directions",
}  # fmt: skip


MOST_SHOWN = 30


@dataclass(frozen=True)
class Finding:
    """A fault or a warning about one key, and where the key was set ("line 3", "command line", or "")."""

    key: str
    message: str
    where: str = ""

    def __str__(self) -> str:
        return ": ".join(part for part in (self.where, self.key, self.message) if part)


def refuse(source: str, faults: list[Finding]) -> None:
    """Raises one UserError with all faults, if there are any."""
    if faults:
        count = "1 problem" if len(faults) == 1 else f"{len(faults):,} problems"
        more = [f"  ... and {len(faults) - MOST_SHOWN:,} more"] if len(faults) > MOST_SHOWN else []
        raise UserError("\n".join([f"{source}: {count}"] + [f"  {fault}" for fault in faults[:MOST_SHOWN]] + more))


def nearest(word: object, known: Iterable[str]) -> str:
    """`; did you mean ...?`, or nothing if no known word is similar."""
    close = difflib.get_close_matches(word, list(known), n=1) if isinstance(word, str) else []
    return f"; did you mean `{close[0]}`?" if close else ""


def suggest_value(found: object, words: Collection[str]) -> str:
    """A suggestion for a value that is not one of `words` (or not a size): `found` is the text, or a list."""
    if isinstance(found, list):
        alone = [item for item in found if item in words]
        if len(found) == len(alone):
            return f"; one word is enough here: write {alone[0]}" if len(alone) == 1 else ""
        return next((suggest_value(item, words) for item in found if item not in words), "") if words else ""
    size = re.fullmatch(r"([0-9.]+)\s*([KMGT])i?", str(found), re.IGNORECASE)
    if size and not words:
        number, letter = size[1], size[2].upper()
        return f"; write {number}{letter}iB (of 1024) or {number}{letter}B (of 1000)"
    other = SPELLINGS.get(str(found).lower())
    return f"; did you mean `{other}`?" if other in words else nearest(found, words)


def suggest_key(key: str) -> str:
    """A suggestion for an unknown key."""
    table = settings()
    parent, _, tail = key.rpartition(".")
    if key.lower() in ELSEWHERE:
        return f"; here it is `{ELSEWHERE[key.lower()]}`"
    if parent in table:
        return f"; `{parent}` is a value, not a section"
    inside = [name.removeprefix(f"{parent}.") for name in table if parent and name.startswith(f"{parent}.")]
    if inside and tail not in table:
        close = difflib.get_close_matches(tail.replace("-", "_"), inside, n=1)
        return f"; did you mean `{parent}.{close[0]}`?" if close else f"; `{parent}` has {', '.join(inside)}"
    same = [name for name in table if name.rpartition(".")[2] == tail]
    if same:
        return "; did you mean " + " or ".join(f"`{name}`" for name in same) + "?"
    return nearest(key.replace("-", "_"), table) or nearest(tail, table) or "; all keys: keyhole config show"
