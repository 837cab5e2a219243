"""A KeyholeTrainer over batches in their order, and what its run left: losses and weights."""

from pathlib import Path
from typing import Any

import torch

from keyhole.hf import KeyholeArguments, KeyholeTrainer

STEPS = 6


def trainer(model_dir: Path, out: Path, batches: list[Any], **options: Any) -> KeyholeTrainer:
    """A Trainer (a subclass of base) on batches that are made already, in their order."""
    named = {"method": options.pop("method", "lomo"), "settings": options.pop("settings", None)}
    named |= {name: options.pop(name) for name in ("placement", "gpu_memory") if name in options}
    extra = {name: options.pop(name) for name in ("callbacks", "eval_dataset", "compute_metrics") if name in options}
    base = options.pop("base", KeyholeTrainer)
    args = KeyholeArguments(
        output_dir=str(out), use_cpu=True, per_device_train_batch_size=1, per_device_eval_batch_size=1,
        report_to=[], logging_steps=1, disable_tqdm=True, save_strategy=options.pop("save_strategy", "no"),
        max_steps=options.pop("max_steps", STEPS), learning_rate=options.pop("learning_rate", 1e-2),
        remove_unused_columns=False, **options,
    )  # fmt: skip

    class InOrder(base):
        def _get_train_sampler(self, *args: Any) -> Any:
            return torch.utils.data.SequentialSampler(self.train_dataset)

    return InOrder(
        str(model_dir), args, train_dataset=batches, data_collator=lambda rows: dict(rows[0]), **named, **extra
    )


def losses_of(made: KeyholeTrainer) -> list[float]:
    return [entry["loss"] for entry in made.state.log_history if "loss" in entry]
