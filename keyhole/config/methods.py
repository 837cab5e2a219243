"""The settings of each method: one section of a config a method, of the method's name (`lomo-lora`: `lomo_lora`).

A method reads its own section and no other; sections of all methods may stand in one file. The string under a field is
its only documentation (schema.py). A new setting of a method is a field here and an argument of its constructor.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

from keyhole.limits import BelowOne, Count, Limit, Positive


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
    write_back_every: Count | None = None
    """Steps between two write-backs of a streamed block (same results); null = 4 while the GPU waits for the link, else 1."""  # noqa: E501
    compile: bool = False
    """Run blocks through torch.compile: faster where the GPU is the bound; streams whole blocks. Rounds differently."""


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
    """AdamW, exact, with fp32 weights and moments in host memory (14 bytes a parameter), updated by CPU and GPU."""

    beta1: BelowOne = 0.9
    """Decay of the running mean of the gradient."""
    beta2: BelowOne = 0.999
    """Decay of the running mean of the squared gradient."""
    eps: Positive = 1e-8
    """Added to the root of the second moment before dividing."""
    schedule: Literal["layerwise", "monolithic"] = "layerwise"
    """Updates layer by layer beside the GPU's work, or all between two steps (to compare); same results."""
    threads: Count | None = None
    """CPU threads of the updates; null = all cores but one, or but two where the GPU helps."""
    gpu_updates: bool | None = None
    """The GPU updates a part of the parameters too, their state crossing the link; same bits. null = on a GPU, layer by layer."""  # noqa: E501
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
    """CPU threads of the updates (cpu); null = three of four cores."""
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
