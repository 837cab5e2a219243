"""Going on from a checkpoint takes no more host memory than the run had."""

import ctypes
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from keyhole.config import TrainConfig
from keyhole.training import start
from tests.training.children import Child
from tests.training.runs import Make

M_MMAP_THRESHOLD = -3


def tell_the_peak() -> None:
    """The child goes on from whatever there is, and prints the largest memory that it ever held."""
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 65536)  # freed memory goes back at once
    torch.set_num_threads(1)
    real = start.train

    def train(config: TrainConfig) -> int:
        code = real(config, resume="last")
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM"):
                print("PEAK", int(line.split()[1]) * 1024, flush=True)
        return code

    start.train = train


def peak(config: TrainConfig) -> int:
    code, printed = Child(config, tell_the_peak).end()
    assert code == 0, printed
    return next(int(line.split()[1]) for line in printed.splitlines() if line.startswith("PEAK"))


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_the_peak_of_a_resumed_run(make: Make, tiny_model: Path, tmp_path: Path) -> None:
    """Weights and moments are read tensor by tensor: no second copy of either (here 52 and 104 MB) is ever there."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    shape = AutoConfig.from_pretrained(tiny_model)
    shape.hidden_size, shape.intermediate_size, shape.num_hidden_layers = 512, 2048, 4
    model = AutoModelForCausalLM.from_config(shape)
    weights = sum(p.numel() * 4 for p in model.parameters())
    model.save_pretrained(tmp_path / "model")
    AutoTokenizer.from_pretrained(tiny_model).save_pretrained(tmp_path / "model")

    config = make(model=str(tmp_path / "model"), max_steps=2, batch_size=1, lr_scheduler_type="constant")
    config = replace(config, warmup_ratio=0.0)
    first, resumed = peak(config), peak(replace(config, max_steps=3))
    assert weights > 50e6 and resumed < first + 0.4 * weights, (first, resumed, weights)
