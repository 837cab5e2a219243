"""Every setting of a run: its name, type, default, and one line of documentation.

The string under a field is that field's only documentation: `keyhole config show` and docs/config.md are made
from it (keyhole/config/docs.py). Names are Hugging Face's where Hugging Face has one. The classes hold values
and nothing else; reading YAML is loader.py, rules between fields are rules.py.

`None` (`null` in YAML) always means "not set", and the doc line says what happens then. A method reads its
own section and no other; sections of all methods may stand in one file.

Relative paths in a config are relative to the directory the command is run in, not to the config file.
"""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from keyhole.config.sizes import Bytes


@dataclass(frozen=True)
class Limit:
    """Bounds of a number: low <= x <= high, or low < x where `above` is set."""

    low: float | None = None
    high: float | None = None
    above: bool = False

    def holds(self, value: float) -> bool:
        """Whether the value lies inside."""
        if self.low is not None and (value <= self.low if self.above else value < self.low):
            return False
        return self.high is None or value <= self.high

    def __str__(self) -> str:
        low = "" if self.low is None else f"{'> ' if self.above else '>= '}{self.low:g}"
        high = "" if self.high is None else f"<= {self.high:g}"
        return " and ".join(part for part in (low, high) if part)


Count = Annotated[int, Limit(1)]
Seed = Annotated[int, Limit(0, 2**63 - 1)]
Positive = Annotated[float, Limit(0, above=True)]
NotNegative = Annotated[float, Limit(0)]
Fraction = Annotated[float, Limit(0, 1)]
BelowOne = Annotated[float, Limit(0, 0.999999)]

Method = Literal["adamw", "sgd", "zo", "lomo", "adalomo", "lomo-lora", "lora", "galore", "adam-offload", "lsp"]
DataFormat = Literal["messages", "conversations", "alpaca", "prompt_completion", "text"]


@dataclass(frozen=True, kw_only=True)
class ZOConfig:
    """Zeroth-order (MeZO): the gradient is estimated from loss differences, forward passes only."""

    eps: Positive = 1e-3
    """Size of the perturbation: losses are measured at w + eps z and w - eps z."""
    directions: Count = 1
    """Number of random directions z per step; each costs two forward passes, their estimates are averaged."""
    distribution: Literal["gaussian", "rademacher"] = "gaussian"
    """What z is drawn from: N(0, 1), or -1 and +1 with equal chance."""
    rounding: Literal["stochastic", "nearest"] = "stochastic"
    """How updated weights go back to 16 bits (nearest loses most small steps); float32 needs none."""
    clip: Positive | None = None
    """Bound on the absolute value of each projected gradient; null = no bound."""
    deferred_update: bool = True
    """Apply a step's update when the weights are next visited: one pass over them less; same results."""


@dataclass(frozen=True, kw_only=True)
class AdamWConfig:
    """AdamW, torch's own: two moments per parameter, weight decay apart from the gradient."""

    beta1: BelowOne = 0.9
    """Decay of the running mean of the gradient."""
    beta2: BelowOne = 0.999
    """Decay of the running mean of the squared gradient."""
    eps: Positive = 1e-8
    """Added to the root of the second moment before dividing."""


@dataclass(frozen=True, kw_only=True)
class SGDConfig:
    """Stochastic gradient descent, torch's own."""

    momentum: BelowOne = 0.0
    """Share of the last update that is kept; 0 needs no state."""


@dataclass(frozen=True, kw_only=True)
class LoRAConfig:
    """LoRA, by peft: the model is frozen, low-rank matrices beside its linear layers are trained by AdamW."""

    r: Count = 8
    """Rank of the adapters."""
    alpha: Positive = 16.0
    """Adapters are scaled by alpha / r."""
    dropout: BelowOne = 0.0
    """Share of an adapter's inputs that is dropped in training."""
    target_modules: str | list[str] | None = None
    """Names of the linear layers to adapt, such as [q_proj, v_proj]; null = all linear layers of the blocks."""
    activations: Literal["none", "block"] = "none"
    """What the forward keeps: everything, or the inputs of blocks, which are then run twice (less memory)."""
    merge: bool = True
    """Save the model with its adapters added; false = the model as it was, and the adapters in adapter/."""


@dataclass(frozen=True, kw_only=True)
class GaLoreConfig:
    """GaLore: Adam on gradients projected to a low rank by SVD; plain AdamW for all that is no matrix of a block."""

    rank: Count = 128
    """Rank of the projection; a matrix whose shorter side is not larger is not projected."""
    update_proj_gap: Count = 200
    """Steps between two SVDs."""
    scale: Positive = 0.25
    """Factor of the update of projected matrices."""
    activations: Literal["none", "block"] = "none"
    """What the forward keeps: everything, or the inputs of blocks, which are then run twice (less memory)."""


@dataclass(frozen=True, kw_only=True)
class LOMOConfig:
    """LOMO: gradient descent with the update inside the backward pass; no gradient is kept. Streams."""

    rounding: Literal["stochastic", "nearest", "kahan"] = "stochastic"
    """How updated weights go back to 16 bits; kahan keeps what was lost, 2 bytes a parameter (resident only)."""
    activations: Literal["none", "block", "host"] = "block"
    """What is kept for backward: everything, the inputs of blocks (which then run twice), or these in host memory."""
    clip_value: Positive | None = None
    """Bound on the absolute value of each element of the gradient; null = no bound."""
    clip_group_norm: Positive | None = None
    """Bound on the norm of each tensor's gradient; null = no bound. For the whole gradient: max_grad_norm."""
    grad_norm: bool = True
    """Measure the norm of the gradient; false lets float32 or nearest updates be added by the product itself."""
    fused: bool = True
    """Make the gradients of linear layers in one buffer, or right in the weight; false = torch's own backward."""
    compile: bool = False
    """Run blocks through torch.compile: faster, after a minute; for constant shapes (packing). Rounds differently."""


@dataclass(frozen=True, kw_only=True)
class AdaLOMOConfig(LOMOConfig):
    """AdaLOMO: LOMO with a step size for every weight, from a second moment kept by rows and columns. Streams."""


@dataclass(frozen=True, kw_only=True)
class LOMOLoRAConfig(LOMOConfig):
    """LoRA + LOMO: the model by LOMO, low-rank adapters beside it (by peft) by AdamW. Streams."""

    adapter_lr: Positive = 2e-4
    """Peak rate of the adapters; follows the schedule of learning_rate."""
    r: Count = 8
    """Rank of the adapters."""
    alpha: Positive = 16.0
    """Adapters are scaled by alpha / r."""
    target_modules: str | list[str] | None = None
    """Names of the linear layers to adapt, such as [q_proj, v_proj]; null = all linear layers of the blocks."""


@dataclass(frozen=True, kw_only=True)
class AdamOffloadConfig:
    """AdamW, exact, with fp32 weights and moments in host memory (14 bytes a parameter), updated there by the CPU."""

    beta1: BelowOne = 0.9
    """Decay of the running mean of the gradient."""
    beta2: BelowOne = 0.999
    """Decay of the running mean of the squared gradient."""
    eps: Positive = 1e-8
    """Added to the root of the second moment before dividing."""
    schedule: Literal["layerwise", "monolithic"] = "layerwise"
    """Updates layer by layer beside the GPU's work, or all between two steps (to compare); same results."""
    threads: Count | None = None
    """CPU threads of the updates; null = all cores but one."""
    activations: Literal["block", "host", "none"] = "block"
    """What the forward keeps: block inputs on the device, or in host memory, or everything (no second run)."""
    compile: bool = False
    """Run blocks through torch.compile: faster, after a minute; for constant shapes (packing). Rounds differently."""


@dataclass(frozen=True, kw_only=True)
class LSPConfig:
    """LSP-Offload: Adam in a learned sparse subspace of every matrix, its state on the GPU or the CPU. Streams."""

    d: Count = 1024
    """Size of the subspace: the optimizer sees d x d numbers a matrix; a side that is shorter is left as it is."""
    r: Count = 4
    """Numbers in a row of a projector; at most d."""
    kind: Literal["blocks", "runs", "free"] = "blocks"
    """Where they stand: orthonormal blocks (fitted in closed form), runs of 64 columns, anywhere (the paper's)."""
    alpha: Positive = 0.5
    """A matrix gets new projectors when a check finds the bias of its compressed gradient above this (0 is perfect)."""
    check_freq: Count = 1000
    """Steps between two checks; the first step fits all projectors."""
    check_share: Annotated[float, Limit(0, 1, above=True)] = 0.25
    """Share of the matrices that a check looks at, drawn anew each time."""
    fit_steps: Count = 50
    """Most steps of Adam in which projectors of kind runs and free are fitted."""
    learn: bool = True
    """Fit projectors to gradients; false = random ones for ever (to compare)."""
    others: Literal["adam", "frozen"] = "adam"
    """What is no matrix of a block (embeddings, head, vectors): trained by plain Adam, or not at all."""
    optimizer_on: Literal["auto", "gpu", "cpu"] = "auto"
    """Where Adam's moments are and its arithmetic runs; auto = on the GPU what fits gpu_memory, embedding and first layers first, the rest on the CPU."""  # noqa: E501
    threads: Count | None = None
    """CPU threads of the updates (cpu); null = all cores but one."""
    beta1: BelowOne = 0.9
    """Decay of the running mean of the gradient."""
    beta2: BelowOne = 0.999
    """Decay of the running mean of the squared gradient."""
    eps: Positive = 1e-8
    """Added to the root of the second moment before dividing."""
    rounding: Literal["stochastic", "nearest"] = "stochastic"
    """How updated weights go back to 16 bits (nearest loses most small steps); float32 needs none."""
    activations: Literal["block", "host"] = "block"
    """What the forward keeps: block inputs on the device, or in host memory; blocks run twice."""
    compile: bool = False
    """Run blocks through torch.compile: faster, after a minute; for constant shapes (packing). Rounds differently."""


@dataclass(frozen=True, kw_only=True)
class OffloadConfig:
    """The streaming engine. Switched off, a part costs time and changes no number: for ablations."""

    overlap: bool = True
    """Copy weights while others are in use; false = wait for every copy."""
    reuse_slots: bool = True
    """Copy into the same device buffers again and again; false = a new buffer for every visit."""
    graphs: bool = True
    """Launch small blocks as CUDA graphs, where the GPU would otherwise wait for the host."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Everything `keyhole train` needs to know."""

    model: str
    """Hugging Face model directory or hub id, or `demo` for the embedded model."""
    method: Method
    """How the weights are updated; its settings are in the section of the same name."""
    train_data: str | list[str]
    """File, glob or hub id, or a list of them (JSON, JSONL, CSV, Parquet); `demo` is the embedded task."""
    output_dir: str
    """Where the trained model goes (a Hugging Face directory), with checkpoint-N/ and run/ inside."""

    eval_data: str | list[str] | None = None
    """Held-out data, same forms as train_data; null = no evaluation."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Type of the weights and of the arithmetic on them; null = as stored in the model's files."""
    wire: Literal["fp32", "bf16", "fp16", "fp8"] | None = None
    """Format of the weights at rest and on the link, if not dtype (methods that stream); null = dtype."""
    tf32: bool = False
    """Products of float32 in TF32 on the GPU: several times faster, with 10 bits of mantissa instead of 23."""
    device: str | None = None
    """cpu, cuda or cuda:N; null = the first GPU, or the CPU where there is none."""
    placement: Literal["resident", "stream", "auto"] = "resident"
    """Weights on the device, or in host memory and streamed; auto = on the device if everything fits."""
    gpu_memory: Bytes | None = None
    """Most GPU memory to use, such as 8GiB; streaming keeps resident what fits. null = all that is free."""

    max_steps: Count | None = None
    """Number of updates; where num_train_epochs is set too, max_steps decides."""
    num_train_epochs: Positive | None = None
    """Passes over the training data; set this or max_steps."""
    batch_size: Count = 8
    """Samples in a micro-batch (rows of packed samples when packing)."""
    gradient_accumulation_steps: Count = 1
    """Micro-batches per update; the loss is the mean over all their trained tokens."""
    learning_rate: Positive | None = None
    """Peak; null: adamw 2e-5, adam-offload 2e-5, lsp 2e-5, sgd 5e-3, zo 1e-6, lomo 5e-3, adalomo 5e-4, lomo-lora 5e-3, lora 2e-4, galore 1e-4."""  # noqa: E501
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = "linear"
    """Course of the learning rate after warm-up: stays, or falls to 0 in a line or half a cosine."""
    warmup_ratio: Fraction = 0.0
    """Share of the steps over which the learning rate rises from 0 to its peak (every schedule)."""
    weight_decay: NotNegative = 0.0
    """All weights shrink by learning_rate * weight_decay a step (sgd: torch's L2 term in the gradient)."""
    max_grad_norm: Positive | None = None
    """Clips the norm of the whole gradient; null = no clipping. For zo use zo.clip."""

    max_length: Annotated[int, Limit(2)] | None = 1024
    """Longest sample in tokens; null = no limit."""
    overlong: Literal["truncate", "drop", "error"] = "truncate"
    """What happens to samples longer than max_length; what is cut is reported."""
    packing: bool = False
    """Put several samples in one row of max_length tokens; they do not see each other."""
    data_format: DataFormat | None = None
    """Layout of the data files; null = found from the columns and printed."""
    train_on: Literal["answers", "all"] = "answers"
    """Which tokens the loss is taken over."""

    seed: Seed = 0
    """Seed of everything random: order of the data, noise, rounding."""
    logging_steps: Count = 1
    """Print a line every so many steps (run/metrics.jsonl has every step)."""
    eval_steps: Count | None = None
    """Evaluate every so many steps; null = at the end only."""
    save_steps: Count | None = None
    """Write a checkpoint every so many steps; null = at the end only."""
    save_total_limit: Count | None = 2
    """Keep only the newest so many checkpoints; null = keep all."""
    background_save: bool = True
    """Write checkpoints while training goes on; false = wait for each."""
    journal_sync: Count = 1
    """zo: flush the journal of steps to the disk every so many steps (a killed process loses none either way)."""
    report_to: Literal["tensorboard"] | None = None
    """Metrics go here besides run/metrics.jsonl; null = nowhere else."""

    offload: OffloadConfig = field(default_factory=OffloadConfig)
    zo: ZOConfig = field(default_factory=ZOConfig)
    adamw: AdamWConfig = field(default_factory=AdamWConfig)
    sgd: SGDConfig = field(default_factory=SGDConfig)
    lomo: LOMOConfig = field(default_factory=LOMOConfig)
    adalomo: AdaLOMOConfig = field(default_factory=AdaLOMOConfig)
    lomo_lora: LOMOLoRAConfig = field(default_factory=LOMOLoRAConfig)
    lora: LoRAConfig = field(default_factory=LoRAConfig)
    galore: GaLoreConfig = field(default_factory=GaLoreConfig)
    adam_offload: AdamOffloadConfig = field(default_factory=AdamOffloadConfig)
    lsp: LSPConfig = field(default_factory=LSPConfig)
