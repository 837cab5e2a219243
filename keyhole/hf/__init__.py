"""keyhole inside Hugging Face's Trainer, for existing training scripts.

trainer.py     KeyholeTrainer, a transformers.Trainer whose step is a keyhole method; KeyholeMixin, the same for any
               other subclass of Trainer (TRL's SFTTrainer)
arguments.py   KeyholeArguments: TrainingArguments with method, placement and budget; loads the model and creates the
               method that they ask for
refusals.py    unsupported arguments, with the reasons
checkpoints.py the method's state in a Trainer's checkpoint, and its name in the model card
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from keyhole.hf.arguments import KeyholeArguments
    from keyhole.hf.trainer import KeyholeMixin, KeyholeTrainer

__all__ = ["KeyholeArguments", "KeyholeMixin", "KeyholeTrainer"]


def __getattr__(name: str) -> Any:
    """Imports on first use: the Trainer needs accelerate, which keyhole itself does not."""
    if name not in __all__:
        raise AttributeError(f"module 'keyhole.hf' has no attribute {name!r}")
    from importlib import import_module, util

    if util.find_spec("accelerate") is None:  # Transformers itself says so only when arguments are made
        from keyhole.errors import UserError

        raise UserError("keyhole.hf: Hugging Face's Trainer needs accelerate: pip install accelerate")
    return getattr(import_module("keyhole.hf." + ("arguments" if "Arguments" in name else "trainer")), name)
