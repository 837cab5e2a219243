"""KeyholeTrainer: the Trainer's loop with keyhole's steps."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("accelerate")

from transformers import LlamaConfig, LlamaForSequenceClassification

import keyhole
from keyhole.training.schedule import Schedule
from tests.hf.runs import STEPS, losses_of, trainer
from tests.matrix import in_every_run
from tests.methods.lomo.loops import weights as weights_of


@in_every_run(lambda name, accumulation: accumulation == (1 if name == "zo" else 2))
@pytest.mark.parametrize(("name", "rate"), [("zo", 1e-4), ("lomo", 1e-2)])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_losses_and_weights_are_those_of_the_methods_own_loop(
    tiny_model: Path, tmp_path: Path, batches: list[Any], name: str, rate: float, accumulation: int
) -> None:
    """The same batches, rates and seed by hand: equal to the bit, streamed, with a schedule and accumulation."""
    made = trainer(
        tiny_model, tmp_path, batches, method=name, placement="stream", learning_rate=rate, seed=5,
        gradient_accumulation_steps=accumulation, warmup_steps=2, lr_scheduler_type="cosine",
    )  # fmt: skip
    made.train()
    model = keyhole.load(str(tiny_model), device="cpu", placement="resident", dtype="float32")
    opt = keyhole.methods.METHODS[name].load()(model, rate, seed=5)
    schedule, losses = Schedule("cosine", rate, STEPS, 2 / STEPS), []
    for step in range(STEPS):
        opt.lr = schedule.rate(step)
        losses.append(float(opt.step(batches[step * accumulation : (step + 1) * accumulation])))
    assert losses_of(made) == losses
    opt.flush()
    ours, theirs = weights_of(model), weights_of(made.keyhole)
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in ours)


@in_every_run(lambda name: name == "lomo")
@pytest.mark.parametrize("name", ["zo", "lomo"])
def test_losses_are_those_of_keyhole_train(tiny_model: Path, tiny_data: Path, tmp_path: Path, name: str) -> None:
    """The same run by the command's own loop, on the batches of its loader: equal losses, to the bit."""
    from keyhole.config.loader import parse_config
    from keyhole.data.run import load_data
    from keyhole.data.settings import data_settings
    from keyhole.report.entries import read_metrics
    from keyhole.training.start import train

    rate = 1e-4 if name == "zo" else 1e-2
    text = {
        "model": str(tiny_model), "method": name, "train_data": str(tiny_data), "output_dir": str(tmp_path / "train"),
        "max_steps": 5, "batch_size": 4, "gradient_accumulation_steps": 2, "learning_rate": rate, "seed": 3,
        "lr_scheduler_type": "linear", "placement": "stream", "device": "cpu", "save_model": False,
    }  # fmt: skip
    config, _ = parse_config(json.dumps(text), source="test", where="")
    assert train(config) == 0
    loader = load_data(data_settings(config)).train
    steps = [next(loader) for _ in range(5)]
    made = trainer(
        tiny_model, tmp_path / "hf", [batch for step in steps for batch in step], method=name, placement="stream",
        max_steps=5, gradient_accumulation_steps=2, learning_rate=rate, seed=3, lr_scheduler_type="linear",
    )  # fmt: skip
    made.train()
    expected = [entry["loss"] for entry in read_metrics(tmp_path / "train" / "run" / "metrics.jsonl")]
    assert losses_of(made) == expected[: len(losses_of(made))] and len(losses_of(made)) == 5


def test_clipping_means_what_it_says(tiny_model: Path, tmp_path: Path, batches: list[Any]) -> None:
    """max_grad_norm clips the norm of the whole gradient, and the logged norm is that before: as LOMO by hand."""
    made = trainer(tiny_model, tmp_path, batches, max_grad_norm=0.1, max_steps=3, lr_scheduler_type="constant")
    made.train()
    model = keyhole.load(str(tiny_model), device="cpu", dtype="float32")
    opt = keyhole.LOMO(model, 1e-2, max_grad_norm=0.1, seed=42)
    expected = [(float(opt.step(batch)), float(opt.metrics()["grad_norm"])) for batch in batches[:3]]
    logged = [(entry["loss"], entry["grad_norm"]) for entry in made.state.log_history if "loss" in entry]
    assert logged == expected and logged[0][1] > 0.1
    made = [trainer(tiny_model, tmp_path, batches, max_steps=2, max_grad_norm=norm) for norm in (-1.0, 0.0)]
    assert [one.train() and losses_of(one) for one in made][0] == losses_of(made[1]), "below 0: no clipping either"


def test_torch_schedulers_drive_a_method(tiny_model: Path, batches: list[Any]) -> None:
    """param_groups is real: a scheduler's rate is the next step's, and one that is set on the method stays."""
    model = keyhole.load(str(tiny_model), device="cpu")
    opt = keyhole.LOMO(model, 1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(opt.torch_optimizer, lambda step: 1 / (1 + step))
    rates = []
    for batch in batches[:3]:
        opt.step(batch)
        rates.append(opt.lr)
        scheduler.step()
    assert rates == pytest.approx([1e-2, 5e-3, 1e-2 / 3], rel=1e-12) and len(opt.param_groups[0]["params"]) > 0
    opt.step(batches[0])
    opt.lr = 7e-4
    opt.step(batches[0])
    assert opt.lr == opt.param_groups[0]["lr"] == 7e-4


def test_a_saved_model_loads_in_transformers(tiny_model: Path, tmp_path: Path, batches: list[Any]) -> None:
    """save_model writes an ordinary directory with the weights of the last step, deferred ones included."""
    from transformers import AutoModelForCausalLM

    made = trainer(tiny_model, tmp_path, batches, method="zo", learning_rate=1e-3, max_steps=2)
    made.train()
    made.save_model(str(tmp_path / "saved"))
    loaded = dict(AutoModelForCausalLM.from_pretrained(tmp_path / "saved").named_parameters())
    ours = weights_of(made.keyhole)
    assert all(torch.equal(loaded[name], ours[name]) for name in ours)


def test_the_model_card_states_the_method(tiny_model: Path, tmp_path: Path, batches: list[Any]) -> None:
    """Not the Trainer's optimizer, which was not used."""
    made = trainer(tiny_model, tmp_path, batches, max_steps=1, settings={"rounding": "nearest"}, placement="stream")
    made.train()
    made.create_model_card()
    card = (tmp_path / "README.md").read_text()
    assert "- method: lomo (keyhole" in card and 'streamed from host memory), settings {"rounding": "nearest"}' in card
    assert "optimizer" not in card.lower()


@pytest.mark.parametrize(
    ("labels", "problem"), [(1, None), (3, None), (3, "regression"), (3, "multi_label_classification")]
)
def test_predictions_need_no_labels(tmp_path: Path, batches: list[Any], labels: int, problem: str | None) -> None:
    shape = {"vocab_size": 256, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    head = {"num_attention_heads": 2, "num_labels": labels, "problem_type": problem, "pad_token_id": 0}
    module = LlamaForSequenceClassification(LlamaConfig(**shape, **head)).eval()
    module.save_pretrained(tmp_path / "model")
    asked = {name: x for name, x in batches[0].items() if name != "labels"}
    found = trainer(tmp_path / "model", tmp_path, batches).predict([asked]).predictions
    with torch.no_grad():
        torch.testing.assert_close(torch.tensor(found), module(**asked).logits, rtol=1e-5, atol=1e-6)
