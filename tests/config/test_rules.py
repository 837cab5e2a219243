"""Rules between fields: what is refused, what is warned about, what is filled in."""

from pathlib import Path
from typing import Any

import pytest

from keyhole import assets
from keyhole.config import OffloadConfig, TrainConfig, resolve, to_yaml
from keyhole.config.fields import sections
from keyhole.config.loader import parse_config
from keyhole.errors import UserError
from keyhole.methods import METHODS
from keyhole.methods.baselines.traits import SGDConfig
from keyhole.methods.lomo.traits import LOMOConfig
from keyhole.methods.zo.traits import ZOConfig

BASE: dict[str, Any] = {
    "model": "some/model", "method": "adamw", "train_data": "d", "output_dir": "out", "max_steps": 5,
}  # fmt: skip

CLASSES = {"head": "classification", "task": "sst2", "train_data": None}

TASK = {"task": "sst2", "train_data": None}

REFUSED = [
    ({"max_steps": None}, "max_steps or num_train_epochs"),
    ({"eval_steps": 5}, "eval_data"),
    ({"train_data": None}, "set train_data (files) or task"),
    ({"task": "sst2"}, "train_data: is set and so is task"),
    ({"loss": "candidates"}, "loss: candidates needs a task"),
    ({"task": "sst2", "train_data": None, "loss": "candidates", "packing": True}, "packing: does not go with loss"),
    ({"packing": True, "max_length": None}, "needs max_length"),
    ({"head": "classification"}, "head: classification needs the labels of a task"),
    ({"num_labels": 2}, "num_labels: is set but head is not"),
    (CLASSES | {"loss": "candidates"}, "loss: has no meaning with head=classification"),
    (CLASSES | {"packing": True}, "packing: has no meaning with head=classification"),
    (CLASSES | {"train_end_token": False}, "train_end_token: has no meaning with head=classification"),
    (CLASSES | {"metric_for_best_model": "eval_perplexity"}, "has no perplexity; use loss"),
    (TASK | {"num_dev": 0, "load_best_model_at_end": True}, "load_best_model_at_end: is set but num_dev=0"),
    (TASK | {"num_dev": 0, "early_stopping_patience": 2}, "early_stopping_patience: is set but num_dev=0"),
    (TASK | {"num_dev": 0, "metric_for_best_model": "loss"}, "metric_for_best_model: is set but num_dev=0"),
    ({"device": "gpu"}, "cpu, cuda or cuda:N"),
    ({"output_dir": "./some/model"}, "overwrite"),
    ({"output_dir": "out\udcff"}, "output_dir: `out\\udcff` is not UTF-8"),
    ({"train_data": ["a", "b\udcff"]}, "train_data: `b\\udcff` is not UTF-8"),
    ({"method": "zo", "max_grad_norm": 1.0}, "zo.clip"),
    ({"method": "adamw", "placement": "stream"}, "placement=resident"),
    ({"method": "sgd", "wire": "bf16"}, "wire=null"),
    ({"method": "lsp", "activations": "none"}, "activations: found `none`; lsp has block | host | auto"),
    ({"method": "zo", "rounding": "kahan"}, "rounding: found `kahan`; zo has stochastic | nearest"),
    ({"method": "lomo", "lomo": LOMOConfig(activations="host")}, "lomo.activations: is `activations` now"),
    ({"method": "lomo", "lomo": LOMOConfig(fused=False)}, "keyhole.LOMO(model, fused=...)"),
    ({"method": "zo", "wire": "fp8", "max_steps": 1001}, "accept it with zo.fp8_steps=1001"),
    ({"method": "zo", "wire": "int4"}, "zo with zo.rank=2 zo.fold=false, lora"),
    ({"dtype": "float16"}, "adamw has no loss scaling, and float16 gradients underflow without"),
    ({"method": "lsp", "dtype": "float16"}, "lsp has no loss scaling"),
    ({"batch_size": 0}, ">= 1"),
    ({"gpu_memory": "lots"}, "8GiB"),
    ({"adam_beta2": 1.0}, "adam_beta2"),
]

WARNED = [
    ({"warmup_ratio": 0.1, "warmup_steps": 5}, "warmup_ratio: has no effect: warmup_steps is set"),
    (TASK | {"num_dev": 0, "eval_steps": 5}, "eval_steps: has no effect: num_dev=0"),
    ({"zo": ZOConfig(eps=1.0)}, "zo.eps: has no effect: the method is adamw"),
    ({"method": "zo", "activations": "host"}, "activations: has no effect: zo has no such setting"),
    ({"method": "sgd", "adam_beta1": 0.5}, "adam_beta1: has no effect: sgd has no such setting"),
    ({"method": "zo", "zo": ZOConfig(refresh=7)}, "zo.refresh: has no effect: zo.rank is not set"),
    ({"method": "zo", "zo": ZOConfig(fp8_steps=7)}, "zo.fp8_steps: has no effect: wire is not fp8"),
    ({"greater_is_better": False}, "greater_is_better: has no effect: eval_data is not set"),
    (
        {"eval_data": "x.jsonl", "early_stopping_patience": 2},
        "early_stopping_patience: has no effect: the only evaluation is at the end",
    ),
    (
        {"eval_data": "x.jsonl", "eval_steps": 2, "early_stopping_patience": 3},
        "early_stopping_patience: has no effect: 5 steps have 3 evaluations, and it needs more than 3",
    ),
    ({"sgd": SGDConfig(momentum=0.5)}, "sgd.momentum: has no effect"),
    ({"offload": OffloadConfig(graphs=False)}, "offload.graphs: has no effect: placement is resident"),
    ({"num_dev": 7}, "num_dev: has no effect: no task is set"),
    ({"task": "sst2", "train_data": None, "train_on": "all"}, "train_on: has no effect: task is set"),
    ({"num_train_epochs": 2}, "num_train_epochs: has no effect"),
    ({"learning_rate": 1.0}, "learning_rate: 1 is an unusual value"),
    ({"method": "zo", "learning_rate": 1e-3}, "zo is known to work from 1e-08 to 4e-05"),
    ({"method": "zo", "learning_rate": 1e-3, "zo": ZOConfig(clip=3.0)}, "zo is known to work from 1e-08 to 0.0003"),
]


@pytest.mark.parametrize(("change", "says"), REFUSED)
def test_combinations_that_cannot_work_are_refused(change: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match="1 problem") as caught:
        resolve(TrainConfig(**BASE | change))
    assert says in str(caught.value)


@pytest.mark.parametrize(("change", "says"), WARNED)
def test_settings_without_effect_are_warned_about(change: dict[str, Any], says: str) -> None:
    config, warnings = resolve(TrainConfig(**BASE | change))
    assert len(warnings) == 1 and says in warnings[0]
    assert config.max_steps is None or config.num_train_epochs is None, "the loop has one rule"


@pytest.mark.parametrize("method", METHODS)
def test_every_method_has_a_sane_default_rate_and_a_section(method: str) -> None:
    """A null learning rate becomes the method's own, without a warning."""
    config, warnings = resolve(TrainConfig(**BASE | {"method": method}))
    low, high = METHODS[method].sane_rates
    assert config.learning_rate == METHODS[method].learning_rate and low <= config.learning_rate <= high
    assert not warnings and METHODS[method].section in sections()
    assert parse_config(to_yaml(config)) == (config, []), "what a run stores runs again, and means the same"


def test_demo_stands_for_the_embedded_files() -> None:
    """The word demo becomes the packaged path, and its learning rate is not judged."""
    words = {"model": "demo", "train_data": ["demo", "x.jsonl"], "eval_data": "demo", "learning_rate": 0.3}
    config, warnings = resolve(TrainConfig(**BASE | words))
    assert (config.model, config.train_data) == (str(assets.MODEL), [str(assets.TRAIN), "x.jsonl"])
    assert config.eval_data == str(assets.TEST) and not warnings
    assert resolve(config) == (config, [])


def test_paths_made_in_python_are_read() -> None:
    config, _ = resolve(TrainConfig(**BASE | {"output_dir": Path("a/b"), "gpu_memory": 2**33}))
    assert config.output_dir == "a/b" and str(config.gpu_memory) == "8GiB"
