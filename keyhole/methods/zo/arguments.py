"""The settings of an op on weights (ops/zo/element.py: ZOStep), in the parts from which a step puts them together."""

from typing import TypedDict

import torch

from keyhole.ops.arguments import Count, Scalar


class Noise(TypedDict):
    """What all noise of a run has in common."""

    seed: int
    distribution: str


class Perturbation(TypedDict):
    """A pair of looks: its step and direction, the size of its perturbation, and what is beside w + eps z."""

    step: Count
    eps: float
    direction: int
    beside: str


class Decay(TypedDict):
    """What an update does beside its directions."""

    weight_decay: float
    rounding: str


class Applied(TypedDict, total=False):
    """An update: its coefficients, the step of its noise, the counter of changed weights, and its decay."""

    coef: torch.Tensor
    update_step: Count
    changed: Scalar
    weight_decay: float
    rounding: str
