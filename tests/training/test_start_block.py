"""The start block, and the schedule that it names."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import TrainingArguments, get_scheduler

import keyhole
from keyhole.config import TrainConfig
from keyhole.data.run import load_data
from keyhole.data.settings import data_settings
from keyhole.training import model_and_method as start
from keyhole.training.model_and_method import workload
from keyhole.training.schedule import Schedule


def config(**changes: object) -> TrainConfig:
    base = {"model": "m", "method": "zo", "train_data": "d", "output_dir": "out", "learning_rate": 1e-6}
    return TrainConfig(**base | {"max_steps": 100, "warmup_ratio": 0.1} | changes)


def test_says_what_is_trained_and_what_is_frozen(tiny_model: Path) -> None:
    """Counts add up to the model's, and tensors of the repeated blocks share a row."""
    model = keyhole.load(tiny_model, device="cpu")
    model.module.model.embed_tokens.weight.requires_grad_(False)
    text = "\n".join(start.model_lines(model.module, model.layout, model.dtype))
    assert "LlamaForCausalLM, 35,296 parameters" in text
    assert "parameters: 26,944 trained, 8,352 frozen" in text
    assert "frozen     1 x model.embed_tokens.weight" in text and "trained    2 x model.layers.*.mlp.up_proj" in text
    assert text.count("\n") == 13


@pytest.mark.parametrize("fold", [True, False])
def test_matrices_with_kept_factors_are_not_trained(tiny_model: Path, fold: bool) -> None:
    """They never change; folded into them, factors are only a way to train them. What is frozen has none."""
    model = keyhole.load(tiny_model, device="cpu", freeze="model.layers.0.mlp.up_proj")
    method = keyhole.ZO(model, 1e-3, rank=2, fold=fold)
    text = "\n".join(start.model_lines(model.module, model.layout, model.dtype, method.keeps_base))
    frozen = 35_296 - sum(t.shape.numel() for t in model.layout.tensors if t.param.requires_grad)
    kept = sum(matrix.tensor.shape.numel() for matrix in method.factors.parts.matrices)
    if fold:
        assert f"parameters: {35_296 - frozen:,} trained, {frozen:,} frozen" in text and "factors" not in text
        return
    beside = f"low-rank factors beside {kept:,} that stay as they are"
    assert f"parameters: {35_296 - frozen - kept:,} trained, {beside}, {frozen:,} frozen" in text
    assert "factors    2 x model.layers.*.mlp.down_proj" in text and "frozen     1 x model.layers.*.mlp.up_proj" in text


def test_says_how_long_and_how_fast() -> None:
    """Steps with where they come from, the accumulation, the warm-up, and what is kept."""
    asked = config(gradient_accumulation_steps=4, save_steps=50)
    lines = start.plan_lines(asked, 20, Schedule("linear", 1e-6, 100, 0.1), 10)
    assert lines[0] == ("steps: 100 (max_steps), 20 done; an epoch is 10 steps of 32 samples (4 micro-batches of 8)")
    assert lines[1] == "learning rate: linear, peak 1e-06, 10 steps of warm-up"
    assert lines[2] == "output: out; a checkpoint every 50 steps and at the end, the newest 2 are kept"
    unsaved = [
        start.plan_lines(config(save_model=False, save_steps=n), 0, Schedule("linear", 1, 9), 1)[2] for n in (5, None)
    ]
    ends = ("a checkpoint every 5 steps, the newest 2 are kept", "no checkpoint")
    assert unsaved == [f"output: out; {end}; no model is saved (save_model=false)" for end in ends]
    one = start.plan_lines(asked, 0, Schedule("linear", 1e-6, 4, warmup_asked=4), 1)
    assert "an epoch is 1 step of 32" in one[0] and one[1].endswith("4 steps of warm-up: the run ends before the peak")
    over = start.plan_lines(asked, 9, Schedule("linear", 1e-6, 5), 10)
    assert over[1] == "nothing is left to train: 9 steps done of 5; to go on, raise max_steps"
    asked = config(max_steps=None, num_train_epochs=2.5, packing=True)
    epochs = start.plan_lines(asked, 0, Schedule("linear", 1e-6, 25, 0.1), 10)
    assert epochs[0].startswith("steps: 25 (num_train_epochs=2.5); an epoch is 10 steps of 8 rows of packed samples")


def test_memory_is_planned_for_the_longest_sample_of_the_data(tiny_model: Path, tiny_data: Path) -> None:
    """Not for max_length: 24 rows of at most 20 tokens are no 8 x 4096."""
    made = config(model=str(tiny_model), train_data=str(tiny_data), eval_data=str(tiny_data), max_length=4096)
    for batch_size, rows in ((8, 8), (100, 24)):
        sized = replace(made, batch_size=batch_size)
        data = load_data(data_settings(sized, None))
        longest = max(data.train.dataset.lengths)
        assert workload(sized, data).tokens == rows * -(-longest // 8) * 8 < 1000
    unlimited = replace(made, max_length=None)
    assert workload(unlimited, load_data(data_settings(unlimited, None))).tokens < 1000


FLOOR = 0.1


@pytest.mark.parametrize("kind", ["constant", "linear", "cosine", "cosine_with_min_lr"])
@pytest.mark.parametrize(("total", "ratio"), [(1, 0.0), (10, 0.0), (37, 0.1), (100, 0.25), (8, 1.0)])
def test_equals_transformers(kind: str, total: int, ratio: float) -> None:
    """Every rate of a run is the one transformers' scheduler gives, to the last bit."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=3e-4)
    name, more = kind.replace("constant", "constant_with_warmup"), {"min_lr_rate": FLOOR} if "min_lr" in kind else {}
    theirs = get_scheduler(name, optimizer, math.ceil(total * ratio), total, more)
    for step in range(total):
        assert Schedule(kind, 3e-4, total, ratio, FLOOR).rate(step) == theirs.get_last_lr()[0]
        optimizer.step()
        theirs.step()


@pytest.mark.parametrize(("total", "asked"), [(10, 3), (10, 0.25), (10, 0), (5, 8), (37, 0.1)])
def test_warmup_steps_are_those_of_the_trainer(total: int, asked: float, tmp_path: Path) -> None:
    """Hugging Face's warmup_steps: a number of steps, below 1 a share; it decides where warmup_ratio is set too."""
    theirs = TrainingArguments(str(tmp_path), warmup_steps=asked, use_cpu=True).get_warmup_steps(total)
    assert Schedule("linear", 3e-4, total, warmup_asked=asked).warmup_steps == theirs
    both = Schedule("linear", 3e-4, total, 0.5, warmup_asked=asked)
    assert both.warmup_steps == (theirs if asked else math.ceil(total * 0.5))
    assert both.warmed_up_by(0.5) == Schedule("linear", 3e-4, total, 0.5)
