"""TrainingArguments with the few settings that keyhole adds.

Two defaults differ from Hugging Face's: no clipping (max_grad_norm=0: clipping by the exact norm costs a second
backward pass in lomo, and zo has no gradient), and losses are not checked after every step
(logging_nan_inf_filter=False: the check would synchronise GPU and host; a loss that is not finite gives no update).
"""

from dataclasses import dataclass, field
from typing import Any

from transformers import TrainingArguments


@dataclass
class KeyholeArguments(TrainingArguments):
    """Arguments of KeyholeTrainer."""

    method: str | None = field(default=None, metadata={"help": "How the weights are updated: zo, lomo, lsp, ..."})
    method_settings: dict[str, Any] | str | None = field(
        default=None,
        metadata={"help": "Settings of the method, as in its section of a config (docs/config.md); or JSON of them."},
    )
    placement: str = field(default="resident", metadata={"help": "resident, stream or auto."})
    gpu_memory: str | None = field(default=None, metadata={"help": "Most GPU memory to use, such as 8GiB."})
    model_dtype: str | None = field(
        default=None, metadata={"help": "float32, bfloat16, float16; None: as stored, if usable."}
    )
    wire: str | None = field(default=None, metadata={"help": "Format of the weights at rest and on the link."})
    weight_decay_on: str = field(default="matrices", metadata={"help": "matrices (as Hugging Face), or all."})
    max_length: int | None = field(default=1024, metadata={"help": "Longest sample, for the plan of memory."})
    max_grad_norm: float = field(
        default=0.0, metadata={"help": "Clips the norm of the whole gradient; 0: no clipping."}
    )
    logging_nan_inf_filter: bool = field(default=False, metadata={"help": "Look at every loss, and wait for it."})
