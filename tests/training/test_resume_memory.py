"""Going on from a checkpoint takes no more host memory than the run had."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

CHILD = """
import os, sys
from pathlib import Path
import torch
from transformers.models.llama import modeling_llama
torch.set_num_threads(1)
from keyhole.config import TrainConfig, resolve
from keyhole.training import reports
from keyhole.training.start import train
reports.plot_loss = lambda *about: False  # a library that would be loaded in both
model, data, out = sys.argv[1:]

def peak(steps, resume):
    config = TrainConfig(model=model, train_data=data, output_dir=out, method="adamw", max_steps=steps, batch_size=1,
                         max_length=32, device="cpu", learning_rate=1e-4)
    assert train(resolve(config)[0], resume=resume) == 0
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            print("PEAK", int(line.split()[1]) * 1024, flush=True)

for run in ((2, None), (4, "last")):  # each in a fork, whose peak is its own
    if os.fork() == 0:
        peak(*run)
        os._exit(0)
    assert os.wait()[1] == 0
"""


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_the_peak_of_a_resumed_run(tiny_model: Path, tiny_data: Path, tmp_path: Path) -> None:
    """Weights and moments are read tensor by tensor: no second copy of either (here 52 and 104 MB) is ever there."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    config = AutoConfig.from_pretrained(tiny_model)
    config.hidden_size, config.intermediate_size, config.num_hidden_layers = 512, 2048, 4
    model = AutoModelForCausalLM.from_config(config)
    weights = sum(p.numel() * 4 for p in model.parameters())
    model.save_pretrained(tmp_path / "model")
    AutoTokenizer.from_pretrained(tiny_model).save_pretrained(tmp_path / "model")

    command = [sys.executable, "-c", CHILD, str(tmp_path / "model"), str(tiny_data), str(tmp_path / "out")]
    env = os.environ | {"OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "65536"}  # freed memory goes back at once
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=env)
    assert done.returncode == 0, done.stderr
    first, resumed = (int(line.split()[1]) for line in done.stdout.splitlines() if line.startswith("PEAK"))
    assert weights > 50e6 and resumed < first + 0.9 * weights, (first, resumed, weights)
