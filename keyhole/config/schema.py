"""Every setting of a run: its name, type, default, and one line of documentation.

A field's line is its only documentation: `keyhole config show` and docs/config.md are generated from it (docs.py).
Names follow Hugging Face where it has one. The classes only hold values; a method's section
is the settings class of its row (methods/<name>/traits.py), loader.py reads YAML, and rules.py has the rules between
fields.

`None` (`null` in YAML) always means "not set", and the doc line says what happens then.

Relative paths in a config are relative to the directory the command is run in, not to the config file.
"""

from dataclasses import dataclass, field, make_dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from keyhole.limits import (
    MOST,
    BatchSize,
    BelowOne,
    Count,
    Fraction,
    Limit,
    NotNegative,
    Positive,
    Seed,
    Threads,
    required,
    setting,
)
from keyhole.machine.sizes import Bytes
from keyhole.methods import METHODS

if TYPE_CHECKING:
    MethodName = str
else:
    MethodName = Literal[*METHODS]
TrackerName = Literal["tensorboard", "wandb", "mlflow", "trackio"]
DataFormat = Literal["messages", "conversations", "alpaca", "prompt_completion", "text"]


@dataclass(frozen=True, kw_only=True)
class OffloadConfig:
    """How blocks are launched; it changes no result."""

    # fmt: off
    graphs: bool = setting(True,
        "Launch small blocks as CUDA graphs, if the GPU would otherwise wait for the host; with `gpu_memory` where it "
        "has room.")
    # fmt: on


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """All settings of `keyhole train`, except the sections of the methods."""

    # fmt: off
    model: str = required("Hugging Face model directory or hub id, or `demo` for the embedded model.")
    method: MethodName = required("How the weights are updated; its settings are in the section of the same name.")
    output_dir: str = required(
        "Where the trained model goes (a Hugging Face directory), with checkpoint-N/ and run/ inside.")

    train_data: str | list[str] | None = setting(None,
        "File, glob or hub id, or a list of them (JSON, JSONL, CSV, Parquet); `demo` is the embedded task.")
    eval_data: str | list[str] | None = setting(None, "Held-out data, same forms as train_data; null = no evaluation.")
    task: str | list[str] | None = setting(None,
        "Public task by name (sst2, rte, ...), or a task file, or a list: instead of train_data. See docs/tasks.md.")
    test_task: str | list[str] | None = setting(None,
        "Further tasks on which the trained model is tested, such as humaneval, without training on them; null = none.")
    task_data: str | None = setting(None,
        "Directory with a folder of files for each task; null = the hub, through `datasets`.")
    task_splits: dict[str, str] | None = setting(None,
        'Files of the splits, such as {train: "val[:2270]", test: "val[2270:]"} or {boolq.train: ...}; null = as '
        "usual.")
    num_train: Count | None = setting(1000, "Questions of each task to train on, drawn by seed; null = all.")
    num_dev: Annotated[int, Limit(0, MOST)] = setting(500,
        "Questions of each task's training split that are held out to select the best step (at most two fifths).")
    num_eval: Count | None = setting(1000, "Test questions of each task, the same for every seed; null = all.")
    loss: Literal["tokens", "candidates"] = setting("tokens",
        "tokens = NLL of the right answer; candidates = cross-entropy over mean log-likelihoods of candidates (MeZO).")
    head: Literal["classification"] | None = setting(None,
        "classification = a head on an encoder or decoder predicts the label of each text; null = as the model has it.")
    num_labels: Count | None = setting(None,
        "Number of labels of the head, or 1 for a regression; null = as many as the task has.")
    dtype: Literal["float32", "bfloat16", "float16"] | None = setting(None,
        "Dtype of the weights and of the arithmetic; null = that of the model's files, if method and device can use "
        "it.")
    wire: Literal["fp32", "bf16", "fp16", "fp8", "int8", "int4", "nf4"] | None = setting(None,
        "Storage format of the weights, also on the link; int8, int4, nf4 = frozen blocks (docs/base.md); null = "
        "dtype.")
    tf32: bool = setting(False,
        "Compute float32 products in TF32 on the GPU: several times faster, with 10 bits of mantissa instead of 23.")
    freeze: str | list[str] | None = setting(None,
        "Not trained, and without adapters: embeddings (with the head), names with *, or modules; null = nothing.")
    expert_units: bool = setting(True,
        "Compute and move large stacks of experts one expert at a time; false = whole stacks, with a grouped product.")
    device: str | None = setting(None, "cpu, cuda or cuda:N; null = the first GPU, or the CPU if there is none.")
    placement: Literal["resident", "stream", "auto"] = setting("resident",
        "Weights on the device, or in host memory and streamed; auto = on the device if everything fits.")
    gpu_memory: Bytes | None = setting(None,
        "Most GPU memory to use, such as 8GiB; as many weights as fit stay on the GPU. null = all free memory.")

    activations: Literal["none", "block", "host", "auto"] | None = setting("auto",
        "Kept on the GPU for the backward pass: everything (none), block inputs (block), nothing, since they wait in "
        "host memory (host), or what fits (auto).")
    compile: bool = setting(False,
        "Run blocks through torch.compile: faster, after a minute; for constant shapes (packing). Rounds differently.")
    rounding: Literal["stochastic", "nearest", "kahan"] = setting("stochastic",
        "Rounding of updated weights to 16 bits (nearest loses most small updates; float32 needs none); kahan keeps "
        "the rounding error, 2 bytes per parameter (lomo, resident only).")
    threads: Threads | None = setting(None,
        "CPU threads of updates in host memory; null = what the method leaves free for the rest.")

    max_steps: Count | None = setting(None, "Number of updates; takes precedence over num_train_epochs.")
    num_train_epochs: Annotated[float, Limit(0, 1e6, above=True)] | None = setting(None,
        "Passes over the training data; set this or max_steps.")
    batch_size: BatchSize = setting(8, "Samples per micro-batch (with packing: rows of packed samples).")
    micro_batch_size: BatchSize | Literal["auto"] = setting("auto",
        "Samples that pass a block at once, at most; a micro-batch is split, which changes sums by rounding alone. "
        "auto = as many as gpu_memory has room for.")
    gradient_accumulation_steps: BatchSize = setting(1,
        "Micro-batches per update; the loss is the mean over all their trained tokens.")
    learning_rate: Annotated[float, Limit(0, 1e30, above=True)] | None = setting(None,
        "Peak of the schedule; null = the default in the method's section.")
    lr_scheduler_type: Literal["constant", "linear", "cosine", "cosine_with_min_lr"] = setting("linear",
        "Learning rate after warm-up: constant, or falling to 0 (or to min_lr_ratio), linearly or along half a cosine.")
    min_lr_ratio: Fraction = setting(0.0, "Share of the peak at which cosine_with_min_lr ends.")
    warmup_ratio: Fraction = setting(0.0,
        "Share of the steps over which the learning rate rises from 0 to its peak (every schedule).")
    warmup_steps: Annotated[int, Limit(0, MOST)] | BelowOne = setting(0,
        "Warm-up steps, or below 1 their share of all steps, as in Hugging Face's Trainer; 0 = warmup_ratio applies.")
    weight_decay: NotNegative = setting(0.0,
        "Decoupled weight decay: weights shrink by learning_rate * weight_decay per step (sgd: torch's L2 term).")
    weight_decay_on: Literal["matrices", "all"] = setting("matrices",
        "Which weights decay: matrices (all but norms and biases, as in Hugging Face's Trainer), or all.")
    max_grad_norm: Positive | None = setting(None,
        "Clips the norm of the whole gradient; null = no clipping. For zo use zo.clip.")
    adam_beta1: BelowOne = setting(0.9, "Decay of the running mean of the gradient, for methods with Adam's rule.")
    adam_beta2: BelowOne = setting(0.999, "Decay of the running mean of the squared gradient.")
    adam_epsilon: Positive = setting(1e-8, "Added to the root of the second moment before dividing.")
    model_dropout: bool = setting(True,
        "Apply the dropout in the model's config, as Hugging Face's Trainer does (zo never applies dropout).")

    deterministic: bool = setting(True,
        "Attention whose gradient has the same bits every time; false = torch's fastest (4 % of a step), and no "
        "promise about bits.")

    max_length: Annotated[int, Limit(2, MOST)] | None = setting(1024, "Longest sample in tokens; null = no limit.")
    overlong: Literal["truncate", "split", "drop", "error"] = setting("truncate",
        "What happens to samples longer than max_length (.txt files are always split, unless dropped or refused).")
    pad_to_multiple_of: Annotated[int, Limit(1, MOST)] | Literal["auto"] | None = setting("auto",
        "Pad batches to a multiple of this many tokens; auto = few widths for short rows, 8 for others; null = 1.")
    stratify: bool | Literal["auto"] = setting("auto",
        "Give every batch the shares of labels of the whole data set; auto = for tasks with labels, and for mixtures.")
    packing: bool = setting(False,
        "Put several samples in one row of max_length tokens; they do not attend to each other.")
    data_format: DataFormat | None = setting(None,
        "Layout of the data files; null = found from the columns and printed.")
    columns: dict[str, str] | None = setting(None,
        "Columns of the data, by keyhole's names, such as {prompt: question, completion: answer}; null = unchanged.")
    prompt: str | None = setting(None,
        'Prompt made from columns, such as "{sentence} It was"; null = the column prompt, if the layout has one.')
    completion: str | None = setting(None,
        'Answer made from columns, such as " {label}"; null = the column completion.')
    train_on: Literal["answers", "all"] = setting("answers", "Which tokens the loss is taken over.")
    train_end_token: bool | None = setting(None,
        "Train on the token that ends an answer, so that the model learns to stop; null = yes.")
    chat_template: str | None = setting(None,
        "Path of a Jinja chat template, or its text, saved with the model; null = the tokenizer's.")
    chat_template_kwargs: dict[str, object] | None = setting(None,
        "Variables for the chat template, such as {enable_thinking: false}; null = none.")
    template_date: str | None = setting(None,
        "Date that chat templates print, such as 2025-01-31; null = the day the run began, also after --resume.")
    train_weights: list[NotNegative] | None = setting(None,
        "How often each source of train_data is used per epoch, such as [1, 0.5, 3]; null = once each.")
    dedup: bool = setting(False, "Leave out training samples whose tokens equal those of an earlier one.")
    data_cache: str | None = setting("auto",
        "Directory that keeps tokenised data for the next run on the same files; auto = ~/.cache/keyhole; null = none.")

    seed: Seed = setting(0, "Seed of everything random: order of the data, noise, rounding.")
    logging_steps: Count = setting(1, "Steps between printed lines (run/metrics.jsonl has every step).")
    eval_steps: Count | None = setting(None, "Steps between evaluations; null = only at the end.")
    sample_answers: Annotated[int, Limit(0, 20)] = setting(3,
        "Answers to dev questions of tasks on the run's page (run/report.html) per evaluation; 0 = none.")
    load_best_model_at_end: bool = setting(False,
        "Publish the weights of the best evaluation instead of the last ones; each new best is saved, and kept.")
    metric_for_best_model: str | None = setting(None,
        "Metric that selects the best step: loss, perplexity, or that of the task; null = the task's metric, or loss.")
    greater_is_better: bool | None = setting(None,
        "Whether a larger value of that metric is better; null = no for loss and perplexity, yes for others.")
    early_stopping_patience: Count | None = setting(None,
        "End the run after this many evaluations in a row without a new best; null = never.")
    max_minutes: Annotated[float, Limit(0, 1e7, above=True)] | None = setting(None,
        "End the run after this many minutes, with evaluations and saves (resumed: plus earlier steps); null = never.")
    save_model: bool = setting(True,
        "Save the trained model; false = save only metrics, and test each new best at once, as comparisons do.")
    save_steps: Count | None = setting(None, "Steps between checkpoints; null = only at the end.")
    save_total_limit: Count | None = setting(2,
        "Keep only this many of the newest checkpoints (until the end at least 2: the newest may turn out broken); "
        "null = keep all.")
    background_save: bool = setting(True, "Write checkpoints in the background; false = training waits for each.")
    journal_sync: Count = setting(1,
        "zo: steps between flushes of the journal to the disk (matters for power cuts, not for a killed process).")
    rank_timeout: Annotated[float, Limit(1, 86400)] = setting(60.0,
        "torchrun: seconds without a heartbeat after which a rank counts as dead, and the run ends.")
    report_to: TrackerName | list[TrackerName] | None = setting(None,
        "Trackers that get the metrics, besides run/metrics.jsonl and run/report.html (docs/report.md); null = none.")
    push_to_hub: bool = setting(False,
        "Publish the model on the hub at the end, with a card (token: hf auth login, or HF_TOKEN).")
    hub_model_id: str | None = setting(None,
        "Name of the hub repository, such as you/model; null = the name of output_dir, under your account.")
    hub_private_repo: bool | None = setting(None,
        "Whether a new repository is private; null = the default of your account.")

    offload: OffloadConfig = field(default_factory=OffloadConfig)
    # fmt: on


if TYPE_CHECKING:

    class TrainConfig(RunConfig):
        """The sections of the methods are read by name (fields.py: own_settings)."""

else:
    TrainConfig = make_dataclass(
        "TrainConfig",
        [(row.section, row.settings, field(default_factory=row.settings)) for row in METHODS.values()],
        bases=(RunConfig,),
        frozen=True,
        kw_only=True,
    )
    TrainConfig.__module__ = __name__
    TrainConfig.__doc__ = "Everything `keyhole train` needs to know."
