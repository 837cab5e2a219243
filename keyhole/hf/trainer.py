"""A transformers.Trainer whose step is a keyhole method, on a model that may be streamed.

    trainer = KeyholeTrainer("path-or-hub-id", args, train_dataset=..., method="lomo", placement="stream",
                             gpu_memory="8GiB")
    trainer.train(resume_from_checkpoint=True)

The loop is the Trainer's. What differs:

    training_step     micro-batches are collected; with the last one of a step the method makes its update, at the rate
                      that the scheduler has set. The loss that is logged is that of the whole step: the mean over all
                      its trained tokens. The others return 0.
    optimizer         a shell (methods/torch_optimizer.py): its group's rate is the method's, its step does nothing
    grad_norm         the method's own: of the whole, unclipped gradient
    evaluation        the loss from chunks of the vocabulary, each unit across the link once per batch; full logits only
                      where compute_metrics wants them
    saving, resuming  the model by keyhole, tensor by tensor; the method's state beside it (checkpoints.py)
    the model         is neither wrapped nor moved: `trainer.model` is the Hugging Face module, whose parameters live
                      where keyhole put them, and `trainer.keyhole` the model itself

Steps are those of `keyhole train` on the same batches, to the bit (tests/hf/test_trainer.py). KeyholeMixin stands
before any other Trainer: `class MyTrainer(KeyholeMixin, SFTTrainer): ...`.
"""

import os
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase, Trainer, TrainingArguments
from transformers.trainer import SCHEDULER_NAME, TRAINING_ARGS_NAME

from keyhole.errors import UserError
from keyhole.hf import checkpoints, refusals
from keyhole.hf.arguments import KeyholeArguments
from keyhole.hf.loading import Wanted, load_model, make_method, own_settings, wanted
from keyhole.methods.base import Method
from keyhole.model.model import Model
from keyhole.plan.dtype import NAMES

OWN = ("method", "settings", "placement", "gpu_memory", "dtype", "wire", "weight_decay_on", "max_length")
PACKED = ("cu_seq_lens_q", "cu_seq_lens_k", "seq_idx")  # say of packed samples what position_ids say


class KeyholeMixin:
    """What turns a Trainer into one that trains by a keyhole method. Stands first among the bases."""

    keyhole: Model
    method: Method

    def __init__(self, model: Any = None, args: TrainingArguments | None = None, *rest: Any, **options: Any) -> None:
        """model: a directory, a hub id, a config, or what keyhole.load returns. method, settings, placement,
        gpu_memory, dtype, wire, weight_decay_on and max_length (for the plan) may be given here or in
        KeyholeArguments; everything else is the Trainer's."""
        args = KeyholeArguments(output_dir="tmp_trainer") if args is None else args
        given = {name: options.pop(name, None) for name in OWN}
        if rest:
            raise UserError("KeyholeTrainer: give everything after model and args by name")
        if isinstance(model, Model) and any(
            given[name] is not None for name in ("placement", "gpu_memory", "dtype", "wire")
        ):
            raise UserError(
                "placement, gpu_memory, dtype, wire: the model is loaded already; give them to keyhole.load"
            )
        self._wanted: Wanted = wanted(args, given)
        self._own = own_settings(self._wanted, args)
        refusals.check(args, self._wanted.row, self._own, options)
        refusals.warn_of_rate(args, self._wanted.row, self._own, model)
        args._n_gpu = min(1, args.n_gpu)  # one GPU, also where several are visible: nothing is replicated
        if model is None:
            raise UserError("model: give a directory, a hub id, a config, or what keyhole.load returns")
        self.keyhole = load_model(model, self._wanted, self._own, args)
        refusals.check_bf16(args, NAMES[self.keyhole.dtype])
        if (
            options.get("processing_class") is None
            and "tokenizer" not in options
            and self.keyhole.tokenizer is not None
        ):
            options["processing_class"] = self.keyhole.tokenizer
        self._collected: list[Any] = []
        super().__init__(model=self.keyhole.module, args=args, **options)  # type: ignore[call-arg]

    # -- the model stays where it is -------------------------------------------------------------------------------

    def create_accelerator_and_postprocess(self) -> None:
        """Batches are checked on the host and sent by keyhole."""
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        self.accelerator.device_placement = False

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Its parameters live where keyhole put them."""

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> nn.Module:
        """A shell without parameters, so that nothing prepares, casts or replicates the model."""
        return model if isinstance(model, Shell) else Shell(self.keyhole.module)

    # -- steps -----------------------------------------------------------------------------------------------------

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """The method, and its shell as the Trainer's optimizer."""
        if self.optimizer is None:
            self.method = make_method(self.keyhole, self._wanted, self._own, self.args)
            self.optimizer = self.method.torch_optimizer
        return self.optimizer

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """Collects a micro-batch; with the last one of the step, updates."""
        self._collected.append(self._batch(inputs))
        if not self.accelerator.sync_gradients:
            return torch.zeros((), device=self.args.device)
        batches, self._collected = self._collected, []
        self.method.torch_optimizer.param_groups[0]["lr"] = float(self._get_learning_rate())
        return self.method.step(batches).detach().to(self.args.device)

    def _batch(self, inputs: Any) -> dict[str, torch.Tensor]:
        """What the model is given; keyhole refuses what it does not know."""
        said = PACKED if "position_ids" in inputs else ()
        return {name: x.cpu() for name, x in inputs.items() if isinstance(x, torch.Tensor) and name not in said}

    def _clip_grad_norm(self, model: nn.Module) -> torch.Tensor | float | None:
        """The step has clipped; this is the norm before."""
        return self._get_grad_norm(model)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> torch.Tensor | float | None:
        found = self.method.metrics().get("grad_norm")
        return found.detach() if isinstance(found, torch.Tensor) else found

    def log(self, logs: dict[str, float], *more: Any, **options: Any) -> None:
        """With the numbers that the method has of its last step."""
        if "loss" in logs and hasattr(self, "method"):
            logs |= {name: float(value) for name, value in self.method.metrics().items() if name not in logs}
        super().log(logs, *more, **options)  # type: ignore[misc]

    # -- evaluation ------------------------------------------------------------------------------------------------

    def prediction_step(
        self, model: nn.Module, inputs: Any, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
        """Loss, logits and labels of a batch, logits only where they are wanted."""
        batch = self._batch(inputs)
        device, labels = self.args.device, batch.get("labels")
        if self.keyhole.classifies:
            ((logits, nll_B),) = self.keyhole.logits([batch])
            loss = nll_B.mean().to(device)
            return (loss, None, None) if prediction_loss_only else (loss, logits.to(device), labels.to(device))
        loss = None
        if labels is not None:
            nll_B, count_B = self.keyhole.nll(batch)
            loss = (nll_B.sum() / count_B.sum().clamp(min=1)).to(device)
        if prediction_loss_only:
            return loss, None, None
        return loss, self.keyhole.logits(batch).to(device), None if labels is None else labels.to(device)

    # -- files -----------------------------------------------------------------------------------------------------

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        """The model as keyhole writes it, the tokenizer, and the arguments."""
        directory = Path(output_dir or self.args.output_dir)
        directory.mkdir(parents=True, exist_ok=True)
        self.keyhole.save_pretrained(directory)
        if isinstance(self.processing_class, PreTrainedTokenizerBase):
            self.processing_class.save_pretrained(directory)
        torch.save(self.args, directory / TRAINING_ARGS_NAME)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        checkpoints.save_method(Path(output_dir), self.method, self.state.global_step)
        checkpoints.save_scheduler(Path(output_dir), self.lr_scheduler, SCHEDULER_NAME)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        if not self._wanted.row.keeps_base:  # of adapters, the method's state is all
            checkpoints.load_weights(Path(resume_from_checkpoint), self.keyhole)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            checkpoints.load_method(Path(checkpoint), self.method)
            checkpoints.load_scheduler(Path(checkpoint), self.lr_scheduler, SCHEDULER_NAME)

    def _load_best_model(self) -> None:
        """The weights of the best checkpoint; of adapters, their state."""
        best = self.state.best_model_checkpoint
        if best is None or not os.path.isdir(best):
            return
        self.method.flush()
        if self._wanted.row.keeps_base:
            checkpoints.load_method(Path(best), self.method)
        else:
            checkpoints.load_weights(Path(best), self.keyhole)
            if self.keyhole.factors is not None:
                checkpoints.load_method(Path(best), self.method)


class Shell(nn.Module):
    """Stands for the model where the Trainer would wrap it: no parameters, nothing to move."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        object.__setattr__(self, "module_", module)

    @property
    def config(self) -> Any:
        return self.module_.config

    def forward(self, *args: Any, **options: Any) -> Any:
        raise UserError(
            "the model cannot be called by itself while keyhole streams it; trainer.keyhole.nll(batch) gives losses"
        )


class KeyholeTrainer(KeyholeMixin, Trainer):
    """transformers.Trainer by a keyhole method."""
