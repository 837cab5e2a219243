"""Runs whose ranks keep a part of the weights and of the state: saved whole, resumed on any number of ranks."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from keyhole.methods.lsp.traits import LSPConfig
from keyhole.training.start import train as train_alone
from tests.matrix import in_every_run
from tests.ranks.test_training import run
from tests.training.runs import Make, metrics, weights

SETTINGS = {"batch_size": 2, "gradient_accumulation_steps": 4}
SETTINGS |= {"lr_scheduler_type": "constant", "warmup_ratio": 0.0, "max_grad_norm": 1.0, "save_steps": 1}


SIZES = {"lomo": (2, 4), "adalomo": (2,), "lomo-lora": (2,), "adam-offload": (2,), "lsp": (4,)}


@in_every_run(lambda method: method == "lomo")
@pytest.mark.parametrize("method", SIZES)
def test_a_run_on_parts_is_saved_whole_and_resumed_on_any_number(
    make: Make, tiny_data: Path, tmp_path: Path, method: str
) -> None:
    """Two steps on some ranks, one on others, streamed; one more in one process, resident: weights and losses are those
    of one process; every checkpoint is an ordinary model directory."""
    rate = {"lomo": 0.05, "adalomo": 1e-3, "lomo-lora": 0.05, "adam-offload": 1e-3, "lsp": 1e-3}[method]
    settings = SETTINGS | {"method": method, "learning_rate": rate, "eval_data": str(tiny_data), "eval_steps": 1}
    settings |= {"adam_epsilon": 1e-3, "lsp": LSPConfig(d=16, r=4, check_freq=2)}
    sizes = SIZES[method]
    alone, some = (make(name, **settings, max_steps=2 + len(sizes)) for name in ("alone", "some"))
    assert train_alone(alone) == 0
    for step, size in enumerate(sizes, 2):
        placement = "stream" if size == sizes[-1] else some.placement
        run(size, replace(some, max_steps=step, placement=placement), tmp_path, *(["--resume"] if step > 2 else []))
    assert train_alone(some, resume="last") == 0
    ours, theirs = weights(some.output_dir), weights(alone.output_dir)
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        torch.testing.assert_close(ours[name], tensor, rtol=1e-5, atol=1e-6)
    pairs = [[(e["step"], e.get("loss", e.get("eval_loss"))) for e in metrics(c)] for c in (some, alone)]
    assert [step for step, _ in pairs[0]] == [step for step, _ in pairs[1]]
    torch.testing.assert_close(*(torch.tensor([loss for _, loss in each]) for each in pairs), rtol=1e-5, atol=1e-5)
