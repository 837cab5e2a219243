"""Every setting of a run: its name, type, default, and one line of documentation.

The string under a field is that field's only documentation: `keyhole config show` and docs/config.md are made
from it (keyhole/config/docs.py). Names are Hugging Face's where Hugging Face has one. The classes hold values
and nothing else; a method's section is the settings class of its row (methods/<name>/traits.py), reading YAML is
loader.py, rules between fields are rules.py.

`None` (`null` in YAML) always means "not set", and the doc line says what happens then.

Relative paths in a config are relative to the directory the command is run in, not to the config file.
"""

from dataclasses import dataclass, field, make_dataclass
from typing import Annotated, Any, Literal

from keyhole.limits import MOST, BatchSize, BelowOne, Count, Fraction, Limit, NotNegative, Positive, Seed
from keyhole.machine.sizes import Bytes
from keyhole.methods import METHODS

MethodName = Literal[*METHODS]
TrackerName = Literal["tensorboard", "wandb", "mlflow", "trackio"]
DataFormat = Literal["messages", "conversations", "alpaca", "prompt_completion", "text"]


@dataclass(frozen=True, kw_only=True)
class OffloadConfig:
    """The streaming engine. Switched off, a part costs time and changes no number: for ablations."""

    overlap: bool = True
    """Copy weights while others are in use; false = wait for every copy."""
    reuse_slots: bool = True
    """Copy into the same device buffers again and again; false = a new buffer for every visit."""
    graphs: bool = True
    """Launch small blocks as CUDA graphs, where the GPU would otherwise wait for the host."""
    reverse_graphs: bool = True
    """The same for the reverse and the updates of first-order methods, where no `gpu_memory` is set."""
    gather: Literal["auto", "always", "never"] = "auto"
    """zo, several GPUs of a machine: each uploads a part of a unit, the rest is gathered; auto = if that is faster."""


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Everything `keyhole train` needs to know, but for the sections of the methods."""

    model: str
    """Hugging Face model directory or hub id, or `demo` for the embedded model."""
    method: MethodName
    """How the weights are updated; its settings are in the section of the same name."""
    output_dir: str
    """Where the trained model goes (a Hugging Face directory), with checkpoint-N/ and run/ inside."""

    train_data: str | list[str] | None = None
    """File, glob or hub id, or a list of them (JSON, JSONL, CSV, Parquet); `demo` is the embedded task."""
    eval_data: str | list[str] | None = None
    """Held-out data, same forms as train_data; null = no evaluation."""
    task: str | list[str] | None = None
    """Public task by name (sst2, rte, ...), or a task file, or a list: instead of train_data. See docs/tasks.md."""
    test_task: str | list[str] | None = None
    """Further tasks that judge the trained model, such as humaneval, without rows to train on; null = none."""
    task_data: str | None = None
    """Directory with a folder of files for each task; null = the hub, through `datasets`."""
    task_splits: dict[str, str] | None = None
    """Files of the splits, such as {train: "val[:2270]", test: "val[2270:]"} or {boolq.train: ...}; null = as usual."""
    num_train: Count | None = 1000
    """Questions of each task to train on, drawn by seed; null = all."""
    num_dev: Annotated[int, Limit(0, MOST)] = 500
    """Questions of each task's training split that are held out to choose a model (two of five at most)."""
    num_eval: Count | None = 1000
    """Questions of each task to be judged by, the same for every seed; null = all."""
    loss: Literal["tokens", "candidates"] = "tokens"
    """tokens = of the right answer; candidates = choosing it, by mean log-likelihood (MeZO's; tasks with a choice)."""
    head: Literal["classification"] | None = None
    """classification = each text of a task gets a label, by a head on an encoder or decoder; null = as the model."""
    num_labels: Count | None = None
    """Labels of the head, or 1 for a number (regression); null = as many as the task has."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Type of the weights and of the arithmetic; null = that of the model's files, if method and device can use it."""
    wire: Literal["fp32", "bf16", "fp16", "fp8", "int8", "int4", "nf4"] | None = None
    """Format of the weights at rest and on the link; int8, int4, nf4 = blocks frozen (docs/base.md); null = dtype."""
    tf32: bool = False
    """Products of float32 in TF32 on the GPU: several times faster, with 10 bits of mantissa instead of 23."""
    expert_units: bool = True
    """Large stacks of experts are computed and moved one expert at a time; false = as whole stacks, by one product."""
    device: str | None = None
    """cpu, cuda or cuda:N; null = the first GPU, or the CPU where there is none."""
    placement: Literal["resident", "stream", "auto"] = "resident"
    """Weights on the device, or in host memory and streamed; auto = on the device if everything fits."""
    gpu_memory: Bytes | None = None
    """Most GPU memory to use, such as 8GiB; streaming keeps resident what fits. null = all that is free."""

    max_steps: Count | None = None
    """Number of updates; where num_train_epochs is set too, max_steps decides."""
    num_train_epochs: Annotated[float, Limit(0, 1e6, above=True)] | None = None
    """Passes over the training data; set this or max_steps."""
    batch_size: BatchSize = 8
    """Samples in a micro-batch (rows of packed samples when packing)."""
    gradient_accumulation_steps: BatchSize = 1
    """Micro-batches per update; the loss is the mean over all their trained tokens."""
    learning_rate: Annotated[float, Limit(0, 1e30, above=True)] | Literal["auto"] | None = None
    """Peak of the schedule; null = the rate that the method's section names; auto = found in the first steps (zo)."""
    lr_scheduler_type: Literal["constant", "linear", "cosine", "cosine_with_min_lr"] = "linear"
    """Course of the learning rate after warm-up: stays, or falls to 0 (to min_lr_ratio) in a line or half a cosine."""
    min_lr_ratio: Fraction = 0.0
    """Share of the peak at which cosine_with_min_lr ends."""
    warmup_ratio: Fraction = 0.0
    """Share of the steps over which the learning rate rises from 0 to its peak (every schedule)."""
    warmup_steps: Annotated[int, Limit(0, MOST)] | BelowOne = 0
    """Steps of warm-up, or below 1 their share, as in Hugging Face's Trainer; decides unless 0 (then: warmup_ratio)."""
    weight_decay: NotNegative = 0.0
    """Weights shrink by learning_rate * weight_decay per step (sgd: torch's L2 term in the gradient)."""
    weight_decay_on: Literal["matrices", "all"] = "matrices"
    """Which weights shrink: all but norms and biases, as in Hugging Face's Trainer (matrices), or all."""
    max_grad_norm: Positive | None = None
    """Clips the norm of the whole gradient; null = no clipping. For zo use zo.clip."""
    model_dropout: bool = True
    """Apply the dropout that the model's config asks for, as Hugging Face's Trainer does (zo never does)."""

    max_length: Annotated[int, Limit(2, MOST)] | None = 1024
    """Longest sample in tokens; null = no limit."""
    overlong: Literal["truncate", "drop", "error"] = "truncate"
    """What happens to samples longer than max_length; what is cut is reported."""
    pad_to_multiple_of: Annotated[int, Limit(1, MOST)] | Literal["auto"] | None = "auto"
    """Batches are padded to a multiple of so many tokens; auto = few widths for short rows, 8 for others; null = 1."""
    packing: bool = False
    """Put several samples in one row of max_length tokens; they do not see each other."""
    data_format: DataFormat | None = None
    """Layout of the data files; null = found from the columns and printed."""
    columns: dict[str, str] | None = None
    """Names of the data's columns by ours, such as {prompt: question, completion: answer}; null = as they are."""
    prompt: str | None = None
    """Prompt made from columns, such as "{sentence} It was"; null = the column prompt, where the layout has one."""
    completion: str | None = None
    """Answer made from columns, such as " {label}"; null = the column completion."""
    train_on: Literal["answers", "all"] = "answers"
    """Which tokens the loss is taken over."""
    train_end_token: bool | None = None
    """Train on the token that ends an answer, which is how a model learns to stop; null = yes."""
    chat_template: str | None = None
    """Path of a Jinja chat template, or its text, saved with the model; null = the tokenizer's."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Variables for the chat template, such as {enable_thinking: false}; null = none."""
    template_date: str | None = None
    """Date that chat templates print, such as 2025-01-31; null = the day the run began, also after --resume."""
    train_weights: list[NotNegative] | None = None
    """Passes over each source of train_data per epoch, such as [1, 0.5, 3]; null = one over each."""
    dedup: bool = False
    """Leave out training samples that are the same, token by token, as an earlier one."""
    data_cache: str | None = "auto"
    """Directory that keeps tokenised data for the next run on the same files; auto = ~/.cache/keyhole; null = none."""

    seed: Seed = 0
    """Seed of everything random: order of the data, noise, rounding."""
    logging_steps: Count = 1
    """Print a line every so many steps (run/metrics.jsonl has every step)."""
    eval_steps: Count | None = None
    """Evaluate every so many steps; null = at the end only."""
    sample_answers: Annotated[int, Limit(0, 20)] = 3
    """Answers of the model on the run's page (run/report.html) at every evaluation, where they are cheap; 0 = none."""
    load_best_model_at_end: bool = False
    """Publish the weights of the best evaluation instead of the last ones; each new best is saved, and kept."""
    metric_for_best_model: str | None = None
    """What is best: loss, perplexity, or the metric of the task; null = the task's metric, or loss."""
    greater_is_better: bool | None = None
    """Whether more of that metric is better; null = less of loss and perplexity, more of anything else."""
    early_stopping_patience: Count | None = None
    """End the run after so many evaluations in a row without a new best; null = never."""
    max_minutes: Annotated[float, Limit(0, 1e7, above=True)] | None = None
    """End the run after so many minutes of training, evaluations and saves (resumed runs add up); null = never."""
    save_model: bool = True
    """Save the trained model; false = only its numbers, and of each new best its test, as comparisons want it."""
    save_steps: Count | None = None
    """Write a checkpoint every so many steps; null = at the end only."""
    save_total_limit: Count | None = 2
    """Keep only the newest so many checkpoints; null = keep all."""
    background_save: bool = True
    """Write checkpoints while training goes on; false = wait for each."""
    journal_sync: Count = 1
    """zo: flush the journal of steps to the disk every so many steps (a killed process loses none either way)."""
    rank_timeout: Annotated[float, Limit(1, 86400)] = 60.0
    """torchrun: seconds without a sign of life after which a rank counts as dead, and the run ends."""
    report_to: TrackerName | list[TrackerName] | None = None
    """Metrics go here too, besides run/metrics.jsonl and run/report.html (docs/report.md); null = nowhere else."""
    push_to_hub: bool = False
    """Publish the model on the hub at the end, with a card (token: hf auth login, or HF_TOKEN)."""
    hub_model_id: str | None = None
    """Its name there, such as you/model; null = the name of output_dir, under your account."""
    hub_private_repo: bool | None = None
    """Whether a new repository is private; null = as your account has it."""

    offload: OffloadConfig = field(default_factory=OffloadConfig)


TrainConfig = make_dataclass(
    "TrainConfig",
    [(row.section, row.settings, field(default_factory=row.settings)) for row in METHODS.values()],
    bases=(RunConfig,),
    frozen=True,
    kw_only=True,
)
TrainConfig.__module__ = __name__
TrainConfig.__doc__ = "Everything `keyhole train` needs to know."
