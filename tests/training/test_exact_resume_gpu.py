"""Exact resume where losses are read a step late: on a GPU."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from keyhole.training.start import train
from tests.training.runs import VARIANTS, Make, metrics, same, weights


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_same_on_a_gpu(make: Make, tiny_data: Path, variant: str, stop_after: Callable) -> None:
    """On a GPU, where losses are read a step late, a resumed run is exact too."""
    settings = VARIANTS[variant] | {"device": "cuda", "eval_data": str(tiny_data), "eval_steps": 2}
    through, stopped = make("through", **settings), make("stopped", **settings)
    assert train(through) == 0
    stop_after(3)
    assert train(stopped) == 130
    assert train(stopped, resume="") == 0
    assert same(weights(through.output_dir), weights(stopped.output_dir))
    assert metrics(through) == metrics(stopped)
