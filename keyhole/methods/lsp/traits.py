"""Settings and row of `lsp`."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Annotated, Literal

from keyhole.limits import Count, Limit, Positive, Threads, setting
from keyhole.methods.settings import AdamSettings, Around, Fault, python
from keyhole.methods.traits import Traits


@dataclass(frozen=True)
class LearningRule:
    """The points in which our way of learning projectors differs from the paper's (LSP-Offload, Algorithm 1)."""

    kind: str = "blocks"
    """Kind of projectors."""
    check_share: float = 0.25
    """Share of the matrices that a check measures, drawn anew each time."""
    scaled: bool = True
    """Steps are scaled, so that a rate means the same as for AdamW (target.py)."""
    slices: int = 4
    """Number of gradients that the sample is cut into."""
    first_check: int = 0
    """Updates before the first check. 0: fits without a measurement; else these updates use random projectors."""
    only_better: bool = True
    """New projectors are used only if their bias is lower."""


RULES = {
    "default": LearningRule(),
    "paper": LearningRule("free", 1.0, scaled=False, slices=1, first_check=1, only_better=False),
}


@dataclass(frozen=True, kw_only=True)
class LSPConfig(AdamSettings):
    """LSP-Offload: Adam in a learned sparse subspace of every matrix, its state on the GPU or the CPU. Streams."""

    # fmt: off
    preset: Literal["default", "paper"] = setting("default",
        "paper: LSP-Offload's Algorithm 1: kind free, every matrix checked, steps not scaled (docs/methods.md).")
    d: Count = setting(1024,
        "Size of the subspace: the optimizer sees d x d numbers per matrix; a side that is shorter is not projected.")
    r: Count = setting(4, "Numbers per row of a projector; at most d.")
    alpha: Positive = setting(0.5,
        "A matrix gets new projectors when a check finds the bias of its compressed gradient above this (0 is "
        "perfect).")
    check_freq: Count = setting(1000, "Steps between two checks; the first step fits all projectors.")
    fit_steps: Count = setting(50, "Maximum number of Adam steps to fit the projectors of preset paper: its Timeout.")
    others: Literal["adam", "frozen"] = setting("adam",
        "Tensors that are not matrices of a block (embeddings, head, vectors): trained by plain Adam, or frozen.")
    optimizer_on: Literal["auto", "gpu", "cpu"] = setting("auto",
        "Where Adam's moments are stored and updated; auto = on the GPU as far as gpu_memory allows, embedding and "
        "first layers first, the rest on the CPU.")
    threads: Threads | None = None
    kind: Literal["blocks", "free"] | None = python(None,
        "Positions of a projector's numbers: orthonormal blocks, or anywhere in a row; None: the preset's.")
    check_share: Annotated[float, Limit(0, 1, above=True)] | None = python(None,
        "Share of the matrices that a check measures; None: the preset's.")
    learn: bool = python(True, "Fit projectors to gradients; False: keep the random ones (baseline).")
    rounding: Literal["stochastic", "nearest"] = "stochastic"
    activations: Literal["block", "host", "auto"] = "auto"
    compile: bool | str = False
    # fmt: on

    @property
    def rule(self) -> LearningRule:
        """How projectors are learned."""
        found = RULES[self.preset]
        return replace(found, kind=self.kind or found.kind, check_share=self.check_share or found.check_share)

    def checks(self, updates: int) -> bool:
        """Whether projectors are checked after so many updates."""
        since = updates - self.rule.first_check
        return self.learn and since >= 0 and since % self.check_freq == 0

    def faults(self, around: Around) -> Iterator[Fault]:
        if self.r > self.d:
            yield "lsp.r", f"{self.r} numbers per row do not fit into lsp.d={self.d} columns; set r <= d"


LSP = Traits(
    name="lsp",
    cls="keyhole.methods.lsp.method:LSP",
    settings=LSPConfig,
    formulas="keyhole.methods.lsp.memory:FORMULAS",
    learning_rate=2e-5,
    sane_rates=(1e-7, 1e-3),
    sweep="reverse",
    wires=("fp32", "bf16", "fp16"),
    ranks="shards",
    may_change=("optimizer_on",),
)
