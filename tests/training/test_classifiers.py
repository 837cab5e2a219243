"""Encoders with a fresh head by `keyhole train`: they learn, to the same bits in any placement and after a stop, and
Transformers reads them with the task's labels."""

import json
from collections.abc import Callable
from dataclasses import replace
from math import isfinite
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

import keyhole
from keyhole.checkpoint.replay import replay
from keyhole.config import TrainConfig, resolve
from keyhole.errors import UserError
from keyhole.eval.evaluate import evaluate
from keyhole.methods import METHODS
from keyhole.methods.lora.traits import LoRAConfig
from keyhole.methods.lsp.traits import LSPConfig
from keyhole.methods.zo.traits import ZOConfig
from keyhole.training.start import train
from tests.matrix import in_every_run
from tests.training.classifiers import save_encoder, write_task
from tests.training.runs import Make, metrics, same, weights

HOW = {
    "adamw": {"learning_rate": 3e-3},
    "lomo": {"learning_rate": 0.05},
    "lsp": {"learning_rate": 5e-3, "lsp": LSPConfig(d=16, r=4, check_freq=8)},
    "zo": {"learning_rate": 3e-3, "zo": ZOConfig(directions=2)},
}
DROPOUT = {"hidden_dropout_prob": 0.1}


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """Builds the config of a run on the crafted task, on a base encoder of this family."""
    task, models = write_task(tmp_path), {}

    def build(name: str, method: str, family: str = "bert", model: dict | None = None, **changes: Any) -> TrainConfig:
        if family not in models:
            models[family] = save_encoder(family, tmp_path / family, **model or {})
        base = {"model": str(models[family]), "method": method, "output_dir": str(tmp_path / name), **task}
        return resolve(TrainConfig(**base | {"lr_scheduler_type": "constant"} | HOW.get(method, {}) | changes))[0]

    return build


@in_every_run(lambda method: method == "lomo")
@pytest.mark.parametrize(("method", "steps"), [("adamw", 12), ("lomo", 12), ("lsp", 12), ("zo", 30)])
def test_accuracy_rises(make: Make, method: str, steps: int) -> None:
    """From chance to most of the dev questions, from a head that was drawn."""
    config = make("out", method, max_steps=steps)
    assert train(config) == 0
    (dev,) = [entry for entry in metrics(config) if "eval_accuracy" in entry]
    assert dev["eval_accuracy"] > 0.8 and dev["eval_loss"] < 0.5 and dev["eval_rows"] == dev["eval_questions"] == 40


@in_every_run(lambda method: method in ("lora", "galore", "adalomo", "lomo-lora"))
@pytest.mark.parametrize("method", [name for name in METHODS if name not in HOW])
def test_every_other_method_trains(make: Make, method: str) -> None:
    config = make("out", method, max_steps=2, num_dev=4, num_eval=4)
    assert train(config) == 0
    assert all(isfinite(entry["loss"]) for entry in metrics(config) if "loss" in entry)
    keyhole.load(config.output_dir, device="cpu").close()


# zo: streamed in methods/test_encoders.py, stopped in test_data_of_runs.py; its journal of a head below
@in_every_run(lambda family, method: family == "bert" and method == "lsp")
@pytest.mark.parametrize(("family", "method"), [*(("bert", method) for method in HOW), ("roberta", "lomo")])
def test_streamed_and_stopped_is_resident_and_whole(
    make: Make, stopped_is_whole: Callable, family: str, method: str
) -> None:
    """Steps, evaluations, test and weights, to the bit, with dropout and micro-batches."""
    shared = {"family": family, "model": DROPOUT, "max_steps": 4, "eval_steps": 2}
    shared |= {"batch_size": 4, "gradient_accumulation_steps": 2}
    whole = make("whole", method, **shared)
    stopped = make("stopped", method, placement="stream" if METHODS[method].streams else "resident", **shared)
    stopped_is_whole(whole, stopped, 3)


@in_every_run(lambda family: family == "bert")
@pytest.mark.parametrize("family", ["bert", "roberta"])
def test_transformers_reads_the_trained_model(make: Make, family: str) -> None:
    """The same logits, the task's names of labels; `keyhole eval` finds the run's own number."""
    config = make("out", "adamw", family=family, max_steps=6)
    assert train(config) == 0
    out = config.output_dir
    theirs = AutoModelForSequenceClassification.from_pretrained(out).eval()
    assert theirs.config.id2label == {0: "bad", 1: "good"} and theirs.config.label2id == {"bad": 0, "good": 1}
    batch = dict(
        AutoTokenizer.from_pretrained(out)(["w5 w6", "w7"], ["w0 w1", "w2 w2"], padding=True, return_tensors="pt")
    )
    with torch.no_grad():
        expected = theirs(**batch).logits
    ((logits, _),) = keyhole.load(out, device="cpu").logits([batch | {"labels": torch.tensor([0, 1])}])
    assert torch.equal(logits, expected)
    (test,) = [entry for entry in metrics(config) if "test_accuracy" in entry]
    evaluate(out, [config.task], task_data=config.task_data, device="cpu", json_path=f"{out}/found.json")
    (found,) = json.loads(Path(out, "found.json").read_text())["results"]
    assert found["metrics"] == {name: test[f"test_{name}"] for name in ("accuracy", "f1")}


@pytest.mark.parametrize("own", [ZOConfig(directions=2), ZOConfig(rank=1, refresh=2, fold=False)], ids=["", "kept"])
def test_a_journal_rebuilds_a_fresh_head(make: Make, tmp_path: Path, own: ZOConfig) -> None:
    """The base has no head: replay draws the run's own again, and names its labels; a light checkpoint has it."""
    config = make("out", "zo", max_steps=3, seed=7, zo=own)
    assert train(config) == 0
    replay(config.model, Path(config.output_dir), tmp_path / "rebuilt", device="cpu", say=lambda line: None)
    assert same(weights(tmp_path / "rebuilt"), weights(config.output_dir))
    configs = [
        json.loads((Path(place) / "config.json").read_text()) for place in (tmp_path / "rebuilt", config.output_dir)
    ]
    assert configs[0] == configs[1]
    batch = {"input_ids": torch.tensor([[5, 6, 7]]), "labels": torch.tensor([1])}
    checkpoint = Path(config.output_dir) / "checkpoint-3"
    assert bool(list(checkpoint.glob("model*.safetensors"))) is own.fold
    logits = [keyhole.load(place, device="cpu").logits(batch) for place in (checkpoint, config.output_dir)]
    torch.testing.assert_close(*logits, rtol=1e-5, atol=1e-5)


def test_a_saved_classifier_needs_no_head(make: Make, tmp_path: Path) -> None:
    """As its own config says; a setting that has no meaning for it is refused."""
    first = make("first", "adamw", max_steps=2)
    assert train(first) == 0
    again = {"model": first.output_dir, "method": "adamw", "learning_rate": 1e-3, "max_steps": 2, "device": "cpu"}
    again |= {"task": first.task, "task_data": first.task_data, "num_train": 20, "num_dev": 4}
    assert train(resolve(TrainConfig(**again, output_dir=str(tmp_path / "again")))[0]) == 0
    with pytest.raises(UserError, match="loss: candidates has no meaning for a classifier"):
        train(resolve(TrainConfig(**again, output_dir=str(tmp_path / "third"), loss="candidates"))[0])


def test_a_head_for_other_labels_is_drawn_anew(make: Make, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """A model that was trained on three labels is a start too, if a head is asked for; replay draws the same one."""
    config = make("out", "zo", max_steps=3, seed=7)
    three = AutoModelForSequenceClassification.from_pretrained(config.model, num_labels=3)
    three.save_pretrained(tmp_path / "three")
    AutoTokenizer.from_pretrained(config.model).save_pretrained(tmp_path / "three")
    config = replace(config, model=str(tmp_path / "three"))
    with pytest.raises(UserError, match="its head is for 3 labels .* but task own has 2 labels"):
        train(replace(config, head=None))
    assert train(config, dry_run=True) == 0 and train(config) == 0
    said = capsys.readouterr().out
    assert "complete but for classifier.weight, classifier.bias, drawn by the seed" in said and "bad, " in said
    assert "head: classifier.weight, classifier.bias are not in the files, or not for 2 labels: drawn from" in said
    replay(config.model, Path(config.output_dir), tmp_path / "rebuilt", device="cpu", say=lambda line: None)
    assert same(weights(tmp_path / "rebuilt"), weights(config.output_dir))
    found = AutoModelForSequenceClassification.from_pretrained(config.output_dir)
    assert found.config.id2label == {0: "bad", 1: "good"} and found.classifier.weight.shape[0] == 2


@pytest.mark.parametrize(
    ("method", "changes", "instead"),
    [
        ("lora", {}, None),
        ("lora", {"lora": LoRAConfig(target_modules=["query"])}, "leave lora.target_modules out, or add classifier"),
        ("lora", {"lora": LoRAConfig(target_modules=["query", "classifier"])}, None),
        ("lora", {"freeze": "classifier"}, "(classifier not in `freeze`)"),
        ("adamw", {"freeze": "classifier"}, "take classifier out of `freeze`"),
        ("lomo-lora", {}, None),
    ],
)
def test_a_drawn_head_that_is_not_trained(
    make: Make, method: str, changes: dict, instead: str | None, capsys: pytest.CaptureFixture
) -> None:
    """Nobody ever trained it, so the run says it, and what to set. Adapters of `lora` train a head."""
    config = make("out", method, max_steps=1, **changes)
    assert train(config) == 0
    said = capsys.readouterr().out
    drawn = keyhole.load(config.model, device="cpu", head="classification", num_labels=2, seed=config.seed)
    saved = keyhole.load(config.output_dir, device="cpu")
    before, after = (dict(model.named_tensors())["classifier.weight"] for model in (drawn, saved))
    assert torch.equal(before, after) is (instead is not None)
    assert ("warning: head: classifier.weight, classifier.bias: drawn from the seed, and not trained" in said) is (
        instead is not None
    )
    assert (instead or "") in said and ("warning: head" in said) is (instead is not None)
