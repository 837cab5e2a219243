"""A transformers.Trainer whose step is a keyhole method, on a model that may be streamed.

    trainer = KeyholeTrainer("path-or-hub-id", args, train_dataset=..., method="lomo", placement="stream",
                             gpu_memory="8GiB")
    trainer.train(resume_from_checkpoint=True)

The loop is the Trainer's. What differs:

    training_step     micro-batches are collected; at the last one of a step the method makes its update, at the
                      scheduler's rate. The logged loss is that of the whole step: the mean over all its trained
                      tokens. The calls before the last return 0.
    optimizer         a shell (methods/torch_optimizer.py): its param_group has the method's rate, its step does nothing
    grad_norm         the method's own: the norm of the whole gradient before clipping
    evaluation        the loss in chunks of the vocabulary, with each unit uploaded once per batch; full logits only if
                      compute_metrics needs them
    saving, resuming  keyhole writes the model, tensor by tensor, and the method's state beside it (checkpoints.py).
                      Between the update and the Trainer's count of it (on_pre_optimizer_step), nothing is saved: a
                      checkpoint that is asked for there is written when the step is counted
    the model         is neither wrapped nor moved: `trainer.model` is the Hugging Face module, whose parameters stay
                      where keyhole placed them, and `trainer.keyhole` is keyhole's model

Steps equal those of `keyhole train` on the same batches, to the bit (tests/hf/test_trainer.py). KeyholeMixin works with
any other Trainer, as the first base: `class MyTrainer(KeyholeMixin, SFTTrainer): ...`.
"""

import pickle
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedTokenizerBase, Trainer, TrainingArguments
from transformers.trainer import TRAINING_ARGS_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, TrainOutput

from keyhole.checkpoint.state import State
from keyhole.errors import Mixed, UserError, warn
from keyhole.hf import checkpoints, refusals
from keyhole.hf.arguments import KeyholeArguments, load_model, make_method, wanted
from keyhole.methods.base import Method
from keyhole.model.model import Model
from keyhole.model.structure.config_files import MULTI_LABEL, REGRESSION, problem_of
from keyhole.plan.dtype import NAMES

if TYPE_CHECKING:
    from transformers import Trainer as Base
else:
    Base = object
# Redundant for packed samples: position_ids say the same
PACKED = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")
SWITCHES = ("use_cache", "return_dict", "output_attentions", "output_hidden_states")  # they change no loss
OWN = ("method", "settings", "placement", "gpu_memory", "dtype", "wire", "weight_decay_on", "max_length")


class KeyholeMixin(Base):
    """Makes a Trainer train with a keyhole method. Must be the first base class."""

    keyhole: Model
    method: Method
    optimizer: torch.optim.Optimizer | None

    def __init__(self, model: object = None, args: TrainingArguments | None = None, **options: Any) -> None:
        """model: a directory, a hub id, a config, or the result of keyhole.load. method, settings, placement,
        gpu_memory, dtype, wire, weight_decay_on and max_length (for the plan) may be given here or in
        KeyholeArguments; everything else is the Trainer's."""
        args = KeyholeArguments(output_dir="tmp_trainer") if args is None else args
        given = {name: options.pop(name, None) for name in OWN}
        if isinstance(model, Model):
            refusals.check_loaded(args, given)
        refusals.check_class(type(self), KeyholeMixin)
        asked = self._wanted = wanted(args, given)
        refusals.check(args, asked.row, asked.own, options, wire=asked.wire, placement=asked.placement)
        refusals.warn_of_rate(args, asked.row, asked.own, model)
        args._n_gpu = min(1, args.n_gpu)  # one GPU, even if several are visible: nothing is replicated
        self.keyhole = load_model(model, asked, args)
        refusals.check_bf16(args, NAMES[self.keyhole.dtype])
        if options.get("processing_class") is None and "tokenizer" not in options:
            options["processing_class"] = self.keyhole.tokenizer
        self._collected: list[dict[str, torch.Tensor]] = []
        self._uncounted: int | None = None  # steps counted at the last update
        self._skips: torch.Tensor | bool = False  # whether the loss of the last step is not finite
        self._skipped: torch.Tensor | int = 0  # steps whose loss was not finite, and that nobody was told of
        self._trained: list[str] = []  # what was trained when the method was made
        self._checkpoint: State | None = None  # of the checkpoint that is being loaded
        super().__init__(model=self.keyhole.module, args=args, **options)
        rows = len(self.keyhole.module.get_input_embeddings().weight)
        if self.model is not self.keyhole.module or rows != self.keyhole.layout.table.shape[0]:
            raise UserError(
                "model: the Trainer has replaced or resized it, and keyhole would not train the new weights; save a "
                "model with the tokens it needs first, and leave out what wraps it"
            )

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **options: Any) -> TrainOutput:
        """The Trainer's; micro-batches of a step that an earlier call did not finish are dropped. True: from the newest
        checkpoint that is complete. Mixed, with its name, if a step was applied in part."""
        self._collected, self._uncounted, root = [], None, Path(str(self.args.output_dir))
        if resume_from_checkpoint is True and self.args.output_dir is not None:
            found = checkpoints.newest_complete(root)
            resume_from_checkpoint = True if found is None else str(found)
        try:
            done = super().train(resume_from_checkpoint, *args, **options)
            self.method.flush()
            return done
        except Mixed as error:
            checkpoints.drop_begun(root / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}")
            newest = checkpoints.newest_complete(root) or "none was written before it"
            raise Mixed(f"{error}\n  the newest (if its weights lead to the same, an older one): {newest}") from error

    # -- the model is not moved ------------------------------------------------------------------------------------

    def create_accelerator_and_postprocess(self) -> None:
        """Leaves batches on the host: keyhole checks and sends them."""
        super().create_accelerator_and_postprocess()
        self.accelerator.device_placement = False

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Does nothing: the parameters stay where keyhole placed them."""

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: object = None) -> nn.Module:
        """A shell without parameters, so that accelerate does not prepare, cast or replicate the model."""
        return model if isinstance(model, Shell) else Shell(self.keyhole.module)

    # -- steps -----------------------------------------------------------------------------------------------------

    def create_optimizer(self, model: object = None) -> torch.optim.Optimizer:
        """Creates the method, and returns its shell as the Trainer's optimizer."""
        if self.optimizer is None:
            self._trained = checkpoints.trained_names(self.keyhole)
            self.method = make_method(self.keyhole, self._wanted, self.args)
            self.optimizer = self.method.torch_optimizer
        return self.optimizer

    def training_step(self, model: nn.Module, inputs: object, num_items_in_batch: object = None) -> torch.Tensor:
        """Collects a micro-batch; at the last one of the step, makes the update."""
        self._collected.append(tensors_of(inputs))
        if not self.accelerator.sync_gradients:
            return torch.zeros((), device=self.args.device)
        batches, self._collected = self._collected, []
        self._uncounted = self.state.global_step
        loss = self.method.step(batches).detach()
        self._skips = ~torch.isfinite(loss)  # on the device: nothing waits for it
        self._skipped = self._skipped + self._skips
        return loss.to(self.args.device)

    def _clip_grad_norm(self, model: nn.Module) -> torch.Tensor | float | None:
        """The norm before clipping; the step has already clipped."""
        return self._get_grad_norm(model)

    def _get_grad_norm(self, model: nn.Module, grad_norm: object = None) -> torch.Tensor | float | None:
        found = self.method.metrics().get("grad_norm")
        return found.detach() if isinstance(found, torch.Tensor) else found

    def log(self, logs: dict[str, float], *more: object, **options: object) -> None:
        """Logs, with the method's numbers of its last step; Mixed if that was applied in part. Warns of losses that
        were not finite."""
        self.keyhole.methods.check_whole()
        skipped, self._skipped = int(self._skipped), 0
        if skipped:
            warn(
                f"loss: NaN or infinite in {skipped} of the steps up to {self.state.global_step}, whose updates are "
                "left out; likely: a learning_rate that is too high (try a third of it), float16, or the batches"
            )
        if "loss" in logs and hasattr(self, "method"):
            logs |= {name: float(value) for name, value in self.method.metrics().items() if name not in logs}
        super().log(logs, *more, **options)

    # -- evaluation ------------------------------------------------------------------------------------------------

    def prediction_step(
        self, model: nn.Module, inputs: object, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
        """Loss, logits and labels of a batch; logits only if needed."""
        batch, device = tensors_of(inputs), self.args.device
        labels, logits, loss = batch.get("labels"), None, None
        if self.keyhole.classifies:
            any_labels = no_labels(self.keyhole.config, len(batch["input_ids"])) if labels is None else labels
            ((logits, nll_B),) = self.keyhole.logits([batch | {"labels": any_labels}])
            loss = None if labels is None else nll_B.mean().to(device)
        elif labels is not None:
            nll_B, count_B = self.keyhole.nll(batch)
            loss = (nll_B.sum() / count_B.sum().clamp(min=1)).to(device)
        if prediction_loss_only:
            return loss, None, None
        logits = self.keyhole.logits(batch) if logits is None else logits
        return loss, logits.to(device), None if labels is None else labels.to(device)

    # -- files -----------------------------------------------------------------------------------------------------

    def _save(self, output_dir: str | None = None, state_dict: object = None) -> None:
        """Saves the model (by keyhole), the tokenizer, and the arguments."""
        directory = Path(output_dir or self.args.output_dir)
        self.keyhole.save_pretrained(directory, self._tokenizer)  # makes the directory, if it may write
        if self._tokenizer is None and hasattr(self.processing_class, "save_pretrained"):
            self.processing_class.save_pretrained(directory)  # a processor
        torch.save(self.args, directory / TRAINING_ARGS_NAME)

    @property
    def _tokenizer(self) -> PreTrainedTokenizerBase | None:
        given = self.processing_class or getattr(self.data_collator, "tokenizer", None)
        return given if isinstance(given, PreTrainedTokenizerBase) else None

    def create_model_card(self, *args: object, **options: object) -> None:
        """The Trainer's, with the method in place of the Trainer's optimizer."""
        super().create_model_card(*args, **options)
        card = Path(self.args.output_dir) / "README.md"
        if card.is_file():
            checkpoints.state_method(card, self._wanted, self.keyhole)

    def _save_checkpoint(self, model: nn.Module, trial: object) -> None:
        """The Trainer's; once the step is counted, if its update is made already: resuming would repeat it."""
        if self._uncounted == self.state.global_step:
            self.control.should_save = True
            checkpoints.drop_begun(Path(self._get_output_dir(trial), f"{PREFIX_CHECKPOINT_DIR}-{self._uncounted}"))
            return
        if bool(self._skips):
            warn(f"step {self.state.global_step}: its loss is NaN or infinite, so it is not saved, and none is deleted")
            return
        super()._save_checkpoint(model, trial)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        step, place, wanted, trained = self.state.global_step, Path(output_dir), self._wanted, self._trained
        checkpoints.save(place, self.method, self.lr_scheduler, step, wanted, trained, self._tokenizer)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: object = None) -> None:
        trained = self._trained or checkpoints.trained_names(self.keyhole)
        self._checkpoint = checkpoints.verified(Path(resume_from_checkpoint), self._wanted, trained, self.keyhole)
        if not self._wanted.row.keeps_base:  # adapters are completely in the method's state
            checkpoints.load_weights(Path(resume_from_checkpoint), self.keyhole)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None and self._checkpoint is not None:
            path, rate = Path(checkpoint), self.args.learning_rate
            checkpoints.load_method(path, self._checkpoint, self.method)
            checkpoints.load_rate(path, self._checkpoint, self.method, self.lr_scheduler, rate)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        try:
            super()._load_rng_state(checkpoint)
        except (OSError, RuntimeError, ValueError, EOFError, pickle.UnpicklingError) as error:
            raise UserError(
                f"resume_from_checkpoint: {checkpoint}: rng_state.pth cannot be read: {error}; go on from an older one"
            ) from error

    def _load_best_model(self) -> None:
        """Loads the weights of the best checkpoint, and what the method has learned beside them."""
        best = str(self.state.best_model_checkpoint)
        try:
            state = checkpoints.verified(Path(best), self._wanted, self._trained, self.keyhole)
        except UserError as fault:
            warnings.warn(
                f"load_best_model_at_end: the best checkpoint, {best}, is not loaded: {fault}; the weights stay those "
                f"of step {self.state.global_step}",
                stacklevel=2,
            )
            return
        self.method.flush()
        if not self._wanted.row.keeps_base:
            checkpoints.load_weights(Path(best), self.keyhole)
        checkpoints.load_method(Path(best), state, self.method)


def tensors_of(inputs: object) -> dict[str, torch.Tensor]:
    """The inputs of the model; keyhole refuses unknown ones."""
    if not isinstance(inputs, Mapping):
        raise UserError(f"batch: found a {type(inputs).__name__}; data_collator must return a dict of tensors")
    said = PACKED if "position_ids" in inputs else ()
    given = {name: x for name, x in inputs.items() if x is not None and name not in said and name not in SWITCHES}
    if other := [f"{name} is a {type(x).__name__}" for name, x in given.items() if not isinstance(x, torch.Tensor)]:
        raise UserError(f"batch: {', '.join(other)}; data_collator must return tensors, of what the model is given")
    return {name: x.cpu() for name, x in given.items()}


def no_labels(config: PretrainedConfig, rows: int) -> torch.Tensor:
    """Labels for rows that have none, in the form that a classifier's loss needs; the loss is not used."""
    problem = problem_of(config)
    if problem == MULTI_LABEL or (problem == REGRESSION and config.num_labels > 1):
        return torch.zeros(rows, config.num_labels)
    return torch.zeros(rows, dtype=torch.long)


class Shell(nn.Module):
    """Replaces the model where the Trainer would wrap it: no parameters, nothing to move."""

    module_: Any

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        object.__setattr__(self, "module_", module)

    @property
    def config(self) -> PretrainedConfig:
        return self.module_.config

    def forward(self, *args: object, **options: object) -> None:
        raise UserError(
            "the model cannot be called by itself while keyhole streams it; trainer.keyhole.nll(batch) gives losses"
        )


class KeyholeTrainer(KeyholeMixin, Trainer):
    """transformers.Trainer with a keyhole method."""
