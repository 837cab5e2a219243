"""The question behind `keyhole plan`, and the pace that a run is compared with."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch

from keyhole.config.loader import parse_config
from keyhole.errors import UserError
from keyhole.machine.sizes import GIB
from keyhole.methods import METHODS
from keyhole.plan import measure
from keyhole.plan.seconds import PROFILES
from keyhole.training.plan_request import check_plan
from keyhole.training.planning import ask
from keyhole.training.start import train
from tests.disk.published import write_ints
from tests.training.runs import Make


@pytest.fixture
def mixture(tmp_path: Path) -> Path:
    made = {
        "model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "hidden_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96, "vocab_size": 256,
        "num_local_experts": 8, "num_experts_per_tok": 2, "dtype": "bfloat16",
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(made))
    return tmp_path


def test_options_replace_the_numbers_of_a_machine(mixture: Path) -> None:
    """--gpu, --ram, --link and --tokens; a config.json itself is a model too."""
    options = {"gpu": "6GiB", "ram": "20GiB", "link": "10GB/s", "tokens": "2x64", "machine": "4090"}
    question, lines = ask(check_plan(str(mixture / "config.json"), **options))
    assert (question.gpu_bytes, question.host_bytes) == (6 * GIB, 20 * GIB)
    assert (question.batch, question.length, question.tokens_per_step) == (2, 64, 128)
    assert question.rates.up == question.rates.down == 10e9 and not question.rates.measured
    assert question.dtype == torch.bfloat16
    assert "estimates from data sheets" in " ".join(lines)


def test_models_that_were_published_quantised_are_planned_and_tried(
    make: Make, tiny_model: Path, tmp_path: Path
) -> None:
    """As they are trained: their config says that they are quantised, and that does not matter before the load. What
    the config says of plain weights is still refused by a dry run."""
    write_ints(tiny_model, tmp_path / "in", "gptq", sym=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny_model / name, tmp_path / "in")
    assert ask(check_plan(str(tmp_path / "in"), machine="4090"))[0].module is not None
    own = {"method": "zo", "max_steps": 1, "model": str(tmp_path / "in")}
    assert train(make("out", **own), dry_run=True) == 0
    shutil.copy(tiny_model / "model.safetensors", tmp_path / "in")
    with pytest.raises(UserError, match="quantization_config"):
        train(make("out", **own), dry_run=True)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_the_steps_of_a_config_are_those_of_its_method(mixture: Path) -> None:
    """All methods are planned for the steps that were asked for: how many a method needs, nobody knows."""
    words = ["method=zo", "max_steps=700", "train_data=a.jsonl", "output_dir=out"]
    question, _ = ask(check_plan(f"model={mixture}", words, machine="4090"))
    assert question.workload(METHODS["zo"]).steps == 700
    assert question.workload(METHODS["adamw"]).steps == 700
    asked, _ = ask(check_plan(f"model={mixture}", words, steps=50, machine="4090"))
    assert asked.workload(METHODS["zo"]).steps == 50


def test_without_a_gpu_the_smallest_machine_that_is_large_enough_is_taken(mixture: Path) -> None:
    said: list[str] = []
    question, _ = ask(check_plan(str(mixture), gpu="11GiB"), said.append)
    assert question.rates is PROFILES["3060"] and "planned for --machine 3060" in said[0]
    ask(check_plan(str(mixture), gpu="200GiB"), said.append)
    assert said[-1].endswith("--machine h200, the largest that is known")


def test_planned_and_measured_pace_stand_side_by_side(
    tiny_model: Path, tiny_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KEYHOLE_CACHE", str(tmp_path / "cache"))
    cpu = torch.device("cpu")
    measure.keep(cpu, PROFILES["laptop"], print)
    text = {
        "model": str(tiny_model), "method": "lomo", "train_data": str(tiny_data), "output_dir": str(tmp_path / "out"),
        "max_steps": 4, "batch_size": 2, "device": "cpu", "save_model": False,
    }  # fmt: skip
    assert train(parse_config(json.dumps(text), source="test", where="")[0]) == 0
    log = (tmp_path / "out" / "run" / "log.txt").read_text()
    line = re.search(r"check: (\S+) s per step, planned (\S+) s, bound by (\w+) \((\d+) tokens", log)
    assert line is not None and float(line[1]) > 0 and float(line[2]) > 0 and int(line[4]) > 2
