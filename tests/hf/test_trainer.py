"""KeyholeTrainer: the Trainer's loop with keyhole's steps."""

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("accelerate")

from safetensors.torch import load_file
from transformers import AutoConfig, LlamaConfig, LlamaForSequenceClassification, Trainer, TrainerCallback

import keyhole
from keyhole.checkpoint.state import dump
from keyhole.errors import UserError
from keyhole.hf import KeyholeArguments, KeyholeMixin, KeyholeTrainer
from keyhole.training.schedule import Schedule
from tests.matrix import in_every_run

STEPS = 6


@pytest.fixture(scope="module")
def batches() -> list[dict[str, torch.Tensor]]:
    made = torch.Generator().manual_seed(3)
    ids = [torch.randint(5, 200, (2, 12), generator=made) for _ in range(2 * STEPS)]
    return [{"input_ids": x, "labels": x.clone(), "attention_mask": torch.ones_like(x)} for x in ids]


def trainer(model_dir: Path, out: Path, batches: list[Any], **options: Any) -> KeyholeTrainer:
    """A Trainer on batches that are made already, in their order."""
    named = {"method": options.pop("method", "lomo"), "settings": options.pop("settings", None)}
    named |= {name: options.pop(name) for name in ("placement", "gpu_memory") if name in options}
    extra = {name: options.pop(name) for name in ("callbacks", "eval_dataset", "compute_metrics") if name in options}
    args = KeyholeArguments(
        output_dir=str(out), use_cpu=True, per_device_train_batch_size=1, per_device_eval_batch_size=1,
        report_to=[], logging_steps=1, disable_tqdm=True, save_strategy=options.pop("save_strategy", "no"),
        max_steps=options.pop("max_steps", STEPS), learning_rate=options.pop("learning_rate", 1e-2),
        remove_unused_columns=False, **options,
    )  # fmt: skip

    class InOrder(KeyholeTrainer):
        def _get_train_sampler(self, *args: Any) -> Any:
            return torch.utils.data.SequentialSampler(self.train_dataset)

    return InOrder(
        str(model_dir), args, train_dataset=batches, data_collator=lambda rows: dict(rows[0]), **named, **extra
    )


def losses_of(made: KeyholeTrainer) -> list[float]:
    return [entry["loss"] for entry in made.state.log_history if "loss" in entry]


def weights_of(model: keyhole.Model) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.named_tensors()}


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
    from keyhole.config.data import data_settings
    from keyhole.config.loader import parse_config
    from keyhole.data.run import load_data
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


@in_every_run(lambda name, settings: name == "adam-offload" or bool(settings))
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("zo", {}),
        ("zo", {"rank": 2, "refresh": 2}),
        ("zo", {"rank": 1, "refresh": 2, "guide": 4}),
        ("lomo", {}),
        ("adam-offload", {}),
    ],
)
def test_a_resumed_run_is_the_same_run(
    tiny_model: Path, tmp_path: Path, batches: list[Any], name: str, settings: dict[str, Any]
) -> None:
    """Stopped at a checkpoint (of low rank: within a period) and resumed by another trainer: the losses of one run, to
    the bit."""
    rate = 1e-4 if name == "zo" else 1e-3
    whole = trainer(tiny_model, tmp_path / "whole", batches, method=name, learning_rate=rate, settings=settings)
    whole.train()
    how = {"method": name, "learning_rate": rate, "save_strategy": "steps", "save_steps": 3, "settings": settings}
    trainer(tiny_model, tmp_path / "parts", batches, **how).train()
    again = trainer(tiny_model, tmp_path / "parts", batches, **how)
    again.train(resume_from_checkpoint=str(tmp_path / "parts" / "checkpoint-3"))
    assert losses_of(again) == losses_of(whole)
    a, b = weights_of(whole.keyhole), weights_of(again.keyhole)
    assert all(torch.equal(a[key], b[key]) for key in a)


def test_a_saved_model_loads_in_transformers(tiny_model: Path, tmp_path: Path, batches: list[Any]) -> None:
    """save_model writes an ordinary directory with the weights of the last step, deferred ones included."""
    from transformers import AutoModelForCausalLM

    made = trainer(tiny_model, tmp_path, batches, method="zo", learning_rate=1e-3, max_steps=2)
    made.train()
    made.save_model(str(tmp_path / "saved"))
    loaded = dict(AutoModelForCausalLM.from_pretrained(tmp_path / "saved").named_parameters())
    ours = weights_of(made.keyhole)
    assert all(torch.equal(loaded[name], ours[name]) for name in ours)


def test_clipping_means_what_it_says(tiny_model: Path, tmp_path: Path, batches: list[Any]) -> None:
    """max_grad_norm clips the norm of the whole gradient, and the logged norm is that before: as LOMO by hand."""
    made = trainer(tiny_model, tmp_path, batches, max_grad_norm=0.1, max_steps=3, lr_scheduler_type="constant")
    made.train()
    model = keyhole.load(str(tiny_model), device="cpu", dtype="float32")
    opt = keyhole.LOMO(model, 1e-2, max_grad_norm=0.1, seed=42)
    expected = [(float(opt.step(batch)), float(opt.metrics()["grad_norm"])) for batch in batches[:3]]
    logged = [(entry["loss"], entry["grad_norm"]) for entry in made.state.log_history if "loss" in entry]
    assert logged == expected and logged[0][1] > 0.1


def test_callbacks_evaluation_and_early_stopping_work(tiny_model: Path, tmp_path: Path, batches: list[Any]) -> None:
    """Hugging Face's own early stopping ends the run, the best checkpoint is loaded, and compute_metrics has logits."""
    from transformers import EarlyStoppingCallback

    shapes = []

    def metrics(found: Any) -> dict[str, float]:
        shapes.append(found.predictions.shape)
        return {"wrong": float((found.predictions[:, :-1].argmax(-1) != found.label_ids[:, 1:]).mean())}

    made = trainer(
        tiny_model, tmp_path, batches, placement="stream", learning_rate=30.0, lr_scheduler_type="constant",
        eval_dataset=batches[:2], compute_metrics=metrics, eval_strategy="steps", eval_steps=1, max_steps=6,
        save_strategy="steps", save_steps=1, load_best_model_at_end=True, metric_for_best_model="loss",
        callbacks=[EarlyStoppingCallback(early_stopping_patience=2)],
    )  # fmt: skip
    made.train()
    evaluated = [entry["eval_loss"] for entry in made.state.log_history if "eval_loss" in entry]
    assert len(evaluated) < 6 and shapes[0][:2] == (4, 12)
    best = made.state.best_model_checkpoint
    assert made.evaluate()["eval_loss"] == min(evaluated) and Path(best).is_dir()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"fp16": True}, "fp16: keyhole scales no loss"),
        ({"gradient_checkpointing": True}, "gradient_checkpointing: the method decides"),
        ({"label_smoothing_factor": 0.1}, "label_smoothing_factor: losses are taken"),
        ({"method": "zo", "max_grad_norm": 1.0}, "max_grad_norm: zo has no gradient to clip"),
        ({"optim": "adafactor"}, "optim: .*adafactor.* is not used"),
        ({"adam_beta1": 0.5}, "adam_beta1: lomo has no such number"),
        ({"method": "sngd"}, "method: found 'sngd', expected one of zo"),
        ({"settings": {"rnk": 3}}, "settings: lomo has no rnk; it takes"),
        ({"bf16": True}, "bf16: the model computes in float32"),
        ({"neftune_noise_alpha": 5.0}, "neftune_noise_alpha: noise on embeddings"),
    ],
)
def test_what_cannot_work_is_refused(
    tiny_model: Path, tmp_path: Path, batches: list[Any], options: dict[str, Any], says: str
) -> None:
    """By a message that names the setting and the reason."""
    with pytest.raises(UserError, match=says):
        trainer(tiny_model, tmp_path, batches, **options)


def test_a_checkpoint_of_another_method_is_refused(tiny_model: Path, tmp_path: Path, batches: list[Any]) -> None:
    """So is a damaged one."""
    how = {"save_strategy": "steps", "save_steps": 1, "max_steps": 1}
    trainer(tiny_model, tmp_path, batches, **how).train()
    other = trainer(tiny_model, tmp_path, batches, method="adalomo", max_steps=2)
    with pytest.raises(UserError, match="was made by method=lomo, this run has adalomo"):
        other.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))


def test_a_checkpoint_of_other_settings_or_another_model_is_refused(
    tiny_model: Path, tmp_path: Path, batches: list[Any]
) -> None:
    """Without `rank` the factors of the checkpoint would be left out, in silence. What may change, may."""
    how = {"method": "zo", "learning_rate": 1e-4, "save_strategy": "steps", "save_steps": 1, "max_steps": 1}
    trainer(tiny_model, tmp_path, batches, settings={"rank": 2}, **how).train()
    goes_on = {**how, "max_steps": 2}
    with pytest.raises(UserError, match="was made with rank=2 of zo, this run has None"):
        trainer(tiny_model, tmp_path, batches, **goes_on).train(resume_from_checkpoint=True)
    again = trainer(tiny_model, tmp_path, batches, settings={"rank": 2, "clip": 5.0}, **goes_on)
    again.train(resume_from_checkpoint=True)
    assert again.state.global_step == 2
    narrow = AutoConfig.from_pretrained(tiny_model, intermediate_size=16)
    args = KeyholeArguments(str(tmp_path), method="zo", method_settings={"rank": 2}, use_cpu=True, report_to=[])
    with pytest.raises(UserError, match="gate_proj.weight with shape .*64, 32"):
        KeyholeTrainer(narrow, args, train_dataset=batches).train(resume_from_checkpoint=True)


@in_every_run(lambda name: name not in ("adalomo", "apollo-mini"))  # they sweep as lomo does
@pytest.mark.parametrize("name", ["lomo", "zo", "adalomo", "apollo-mini", "sgd", "lomo-lora"])
def test_a_checkpoint_of_other_trained_parameters_is_refused(
    tiny_model: Path, tmp_path: Path, batches: list[Any], name: str
) -> None:
    """It went on in silence. The weights stay as they were; a checkpoint that does not say is resumed as before."""
    args = KeyholeArguments(
        str(tmp_path), method=name, max_steps=1, save_steps=1, learning_rate=1e-4, max_grad_norm=0.0, use_cpu=True,
        report_to=[], remove_unused_columns=False,
    )  # fmt: skip

    def made(freeze: str | list[str] | None) -> KeyholeTrainer:
        model = keyhole.load(str(tiny_model), device="cpu", freeze=freeze)
        return KeyholeTrainer(model, args, train_dataset=batches, data_collator=lambda rows: dict(rows[0]))

    made("embeddings").train()
    args.max_steps = 2
    other = made(None)
    before = weights_of(other.keyhole)
    with pytest.raises(UserError, match=r"lm_head.weight was frozen and is trained now. .*freeze=.*requires_grad"):
        other.train(resume_from_checkpoint=True)
    assert all(torch.equal(tensor, before[key]) for key, tensor in weights_of(other.keyhole).items())
    with pytest.raises(UserError, match=r"layers.0.\S+ was trained and is frozen now"):
        made(["embeddings", "model.layers.0"]).train(resume_from_checkpoint=True)
    again = made("embeddings")
    again.train(resume_from_checkpoint=True)
    assert again.state.global_step == 2
    file = tmp_path / "checkpoint-1" / "keyhole_state.json"
    state = json.loads(file.read_text())
    del state["config"]["trained"]
    file.write_text(dump({key: value for key, value in state.items() if key != "crc32"}))
    other.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert other.state.global_step == 2


@pytest.mark.parametrize("key", ["gpu_memory", "wire", "model_dtype", "placement"])
def test_a_loaded_model_is_not_placed_again(tiny_model: Path, tmp_path: Path, key: str) -> None:
    """By arguments of either kind."""
    value = {"gpu_memory": "1GiB", "wire": "bf16", "model_dtype": "bfloat16", "placement": "stream"}[key]
    args = KeyholeArguments(str(tmp_path), method="lomo", use_cpu=True, report_to=[], **{key: value})
    with pytest.raises(UserError, match=f"{key}: the model is loaded already"):
        KeyholeTrainer(keyhole.load(str(tiny_model), device="cpu"), args)


def test_a_trainer_that_resizes_the_model_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    """As TRL does for a chat template with tokens of its own: the new rows would not be trained."""

    class Resizes(Trainer):
        def __init__(self, model: Any, **options: Any) -> None:
            model.resize_token_embeddings(model.config.vocab_size + 2, mean_resizing=False)
            super().__init__(model=model, **options)

    args = KeyholeArguments(str(tmp_path), method="lomo", use_cpu=True, report_to=[], learning_rate=1e-2)
    with pytest.raises(UserError, match="the Trainer has replaced or resized it"):
        type("Both", (KeyholeMixin, Resizes), {})(str(tiny_model), args)


class SetsRate(TrainerCallback):
    """A schedule of the user's own: half of the rate from the third step on."""

    def on_step_begin(self, args: Any, state: Any, control: Any, optimizer: Any = None, **more: Any) -> None:
        optimizer.param_groups[0]["lr"] = 1e-2 if state.global_step < 2 else 5e-3


def test_a_callback_sets_the_rate(tiny_model: Path, tmp_path: Path, batches: list[Any]) -> None:
    """What it writes into the optimizer's group is the rate of the step, as in the Trainer."""
    made = trainer(
        tiny_model,
        tmp_path,
        batches,
        max_steps=4,
        callbacks=[SetsRate],
        lr_scheduler_type="constant",
        learning_rate=1.0,
    )
    made.train()
    model = keyhole.load(str(tiny_model), device="cpu", dtype="float32")
    opt = keyhole.LOMO(model, 1e-2, seed=42)
    for step, batch in enumerate(batches[:4]):
        opt.lr = 1e-2 if step < 2 else 5e-3
        opt.step(batch)
    a, b = weights_of(model), weights_of(made.keyhole)
    assert all(torch.equal(a[key], b[key]) for key in a)


def test_a_rate_that_was_lowered_on_a_plateau_is_resumed(tiny_model: Path, tmp_path: Path, batches: list[Any]) -> None:
    """It is in no scheduler's state, only in the optimizer's group."""
    how = {
        "lr_scheduler_type": "reduce_lr_on_plateau", "metric_for_best_model": "loss", "max_steps": 4, "save_steps": 2,
        "lr_scheduler_kwargs": {"patience": 0, "threshold": 100.0}, "eval_dataset": batches[:1], "eval_steps": 1,
        "eval_strategy": "steps", "save_strategy": "steps",
    }  # fmt: skip
    whole = trainer(tiny_model, tmp_path, batches, **how)
    whole.train()
    again = trainer(tiny_model, tmp_path, batches, **how)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    rates = [entry["learning_rate"] for entry in whole.state.log_history if "loss" in entry]
    assert rates[2] < rates[0] and losses_of(again) == losses_of(whole)


@pytest.mark.parametrize("tf32", [None, True])
def test_tf32_of_the_arguments_is_honoured(
    tiny_model: Path, tmp_path: Path, batches: list[Any], tf32: bool | None
) -> None:
    """The Trainer's own switch; loading turned it off again."""
    args = KeyholeArguments(str(tmp_path), method="lomo", use_cpu=True, report_to=[], learning_rate=1e-2)
    args.tf32 = tf32  # on a machine without a GPU the constructor refuses it
    made = KeyholeTrainer(str(tiny_model), args, train_dataset=batches)
    assert torch.get_float32_matmul_precision() == ("high" if tf32 else "highest")
    made.keyhole.close()


@pytest.mark.parametrize(("rate", "warns"), [(1e-2, False), (1e-3, True)])
def test_another_rate_is_not_ignored_in_silence(
    tiny_model: Path, tmp_path: Path, batches: list[Any], rate: float, warns: bool
) -> None:
    """The Trainer goes on with the checkpoint's; a script that says another one is told so."""
    how = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    whole = trainer(tiny_model, tmp_path, batches, **how)
    whole.train()
    again = trainer(tiny_model, tmp_path, batches, learning_rate=rate, **how)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    told = [str(one.message) for one in found if "learning_rate" in str(one.message)]
    assert [line.startswith("learning_rate: 0.001 is not used") for line in told] == [True] * warns
    assert losses_of(again) == losses_of(whole)


def test_a_norm_below_zero_clips_nothing(tiny_model: Path, tmp_path: Path, batches: list[Any]) -> None:
    """As in the Trainer; it once turned the gradient round."""
    made = [trainer(tiny_model, tmp_path, batches, max_steps=2, max_grad_norm=norm) for norm in (-1.0, 0.0)]
    assert [one.train() and losses_of(one) for one in made][0] == losses_of(made[1])


class FirstIsBest(KeyholeTrainer):
    """Evaluates to the number of evaluations so far."""

    count = 0

    def evaluate(self, *args: Any, **options: Any) -> dict[str, float]:
        self.count += 1
        return super().evaluate(*args, **options) | {"eval_count": float(self.count)}


@pytest.mark.parametrize("only_model", [False, True])
def test_the_best_model_has_the_adapters_of_its_step(
    tiny_model: Path, tmp_path: Path, batches: list[Any], only_model: bool
) -> None:
    """Weights and adapters of one checkpoint; refused if the adapters are not kept."""
    args = KeyholeArguments(
        str(tmp_path), method="lomo-lora", use_cpu=True, report_to=[], disable_tqdm=True, max_steps=4,
        learning_rate=1e-2, eval_strategy="steps", eval_steps=2, save_strategy="steps", save_steps=2,
        load_best_model_at_end=True, metric_for_best_model="count", greater_is_better=False,
        remove_unused_columns=False, per_device_train_batch_size=1, per_device_eval_batch_size=1,
        save_only_model=only_model,
    )  # fmt: skip
    made = FirstIsBest(
        str(tiny_model), args, train_dataset=batches, eval_dataset=batches[:2], data_collator=lambda rows: dict(rows[0])
    )
    if only_model:
        with pytest.raises(UserError, match="save_only_model: load_best_model_at_end needs the state of lomo-lora"):
            made.train()
        made.args.save_only_model = False  # as the message says: the same trainer goes on
    made.train()
    first = next(entry["eval_loss"] for entry in made.state.log_history if "eval_loss" in entry)
    assert made.evaluate()["eval_loss"] == first


@pytest.mark.parametrize("method", ["adam-offload", "adamw"])
def test_training_goes_on_from_the_best_model(
    tiny_model: Path, tmp_path: Path, batches: list[Any], method: str
) -> None:
    """Also if the method has a copy of the weights of its own: a step at no rate leaves the best weights."""
    args = KeyholeArguments(
        str(tmp_path), method=method, use_cpu=True, report_to=[], disable_tqdm=True, max_steps=4, learning_rate=5e-4,
        eval_strategy="steps", eval_steps=2, save_strategy="steps", save_steps=2, load_best_model_at_end=True,
        metric_for_best_model="count", greater_is_better=False, remove_unused_columns=False,
        per_device_train_batch_size=1, per_device_eval_batch_size=1, model_dtype="bfloat16",
    )  # fmt: skip
    made = FirstIsBest(
        str(tiny_model), args, train_dataset=batches, eval_dataset=batches[:2], data_collator=lambda rows: dict(rows[0])
    )
    made.train()
    best = weights_of(made.keyhole)
    made.method.param_groups[0]["lr"] = 1e-30
    made.method.step([batches[0]])
    made.method.flush()
    after = weights_of(made.keyhole)
    assert all(torch.equal(best[name], after[name]) for name in best)


def test_a_best_checkpoint_that_is_gone_is_told(tiny_model: Path, tmp_path: Path, batches: list[Any]) -> None:
    """The weights stay those of the last step, which is not what was asked for."""

    class Deletes(TrainerCallback):
        def on_save(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            shutil.rmtree(tmp_path / f"checkpoint-{state.global_step}")

    made = trainer(
        tiny_model, tmp_path, batches, eval_dataset=batches[:1], eval_strategy="steps", eval_steps=1, max_steps=1,
        save_strategy="steps", save_steps=1, load_best_model_at_end=True, callbacks=[Deletes],
    )  # fmt: skip
    with pytest.warns(UserWarning, match="load_best_model_at_end: the best checkpoint, .*checkpoint-1, is gone"):
        made.train()


def test_a_damaged_best_checkpoint_is_not_loaded(tiny_model: Path, tmp_path: Path, batches: list[Any]) -> None:
    """A bit of its weights flips: this is told, and the weights stay those of the last step."""

    class Damages(TrainerCallback):
        def on_save(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            file = tmp_path / "checkpoint-1" / "model.safetensors"
            if state.global_step == 2:
                file.write_bytes(file.read_bytes()[:-1] + bytes([file.read_bytes()[-1] ^ 1]))

    class Worse(KeyholeTrainer):
        def evaluate(self, *args: Any, **options: Any) -> dict[str, float]:
            found = {"eval_loss": float(self.state.global_step)}
            self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, found)
            return found

    args = KeyholeArguments(
        output_dir=str(tmp_path), use_cpu=True, per_device_train_batch_size=1, report_to=[], max_steps=2,
        eval_strategy="steps", eval_steps=1, save_strategy="steps", save_steps=1, load_best_model_at_end=True,
        disable_tqdm=True, learning_rate=1e-2, remove_unused_columns=False, method="lomo",
    )  # fmt: skip
    made = Worse(
        str(tiny_model), args, train_dataset=batches, eval_dataset=batches[:1], callbacks=[Damages],
        data_collator=lambda rows: dict(rows[0]),
    )  # fmt: skip
    with pytest.warns(UserWarning, match=r"checkpoint-1, is damaged and not loaded: model.safetensors was changed"):
        made.train()
    last = load_file(tmp_path / "checkpoint-2" / "model.safetensors")
    assert all(torch.equal(weight, last[name]) for name, weight in weights_of(made.keyhole).items() if name in last)


@pytest.mark.parametrize(
    ("labels", "problem"), [(1, None), (3, None), (3, "regression"), (3, "multi_label_classification")]
)
def test_predictions_need_no_labels(tmp_path: Path, batches: list[Any], labels: int, problem: str | None) -> None:
    """Logits of every kind of classifier are the module's own."""
    module = LlamaForSequenceClassification(
        LlamaConfig(
            vocab_size=256,
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_labels=labels,
            problem_type=problem,
            pad_token_id=0,
        )  # fmt: skip
    ).eval()
    module.save_pretrained(tmp_path / "model")
    asked = {name: x for name, x in batches[0].items() if name != "labels"}
    found = trainer(tmp_path / "model", tmp_path, batches).predict([asked]).predictions
    with torch.no_grad():
        torch.testing.assert_close(torch.tensor(found), module(**asked).logits, rtol=1e-5, atol=1e-6)


@in_every_run(lambda name, half: half or name == "scheduler.pt")
@pytest.mark.parametrize("name", ["scheduler.pt", "rng_state.pth", "trainer_state.json", "keyhole_state.json"])
@pytest.mark.parametrize("half", [False, True])
def test_an_incomplete_checkpoint_is_refused(
    tiny_model: Path, tmp_path: Path, batches: list[Any], name: str, half: bool
) -> None:
    """A file that is missing or cut off, as a kill leaves it: by its name, with the model as it was."""
    how = {"save_strategy": "steps", "save_steps": 1, "max_steps": 1}
    trainer(tiny_model, tmp_path, batches, **how).train()
    file = tmp_path / "checkpoint-1" / name
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2]) if half else file.unlink()
    again = trainer(tiny_model, tmp_path, batches, **(how | {"max_steps": 2}))
    with pytest.raises(UserError, match=f"resume_from_checkpoint: .*{name}"):
        again.train(resume_from_checkpoint=True)


def test_an_incomplete_checkpoint_is_passed_over(tiny_model: Path, tmp_path: Path, batches: list[Any]) -> None:
    """A kill in the middle of a save: the run goes on from the checkpoint before, and ends as it would have."""
    how = {"save_strategy": "steps", "save_steps": 1, "max_steps": 3}
    whole = trainer(tiny_model, tmp_path, batches, **how)
    whole.train()
    shutil.rmtree(tmp_path / "checkpoint-3")
    (tmp_path / "checkpoint-2" / "trainer_state.json").unlink()
    again = trainer(tiny_model, tmp_path, batches, **how)
    with pytest.warns(UserWarning, match=r"checkpoint-2 is incomplete and passed over: trainer_state.json is missing"):
        again.train(resume_from_checkpoint=True)
    before = weights_of(whole.keyhole)
    assert all(torch.equal(before[name], weight) for name, weight in weights_of(again.keyhole).items())


def test_a_checkpoint_that_was_written_twice_is_resumed(tiny_model: Path, tmp_path: Path, batches: list[Any]) -> None:
    """A script that is run again in its directory replaces the checkpoint of each step, and can go on from them."""
    how = {"save_strategy": "steps", "save_steps": 2}
    for method in ("adamw", "lomo"):  # the first leaves a file that the second does not write
        full = trainer(tiny_model, tmp_path, batches, method=method, **how)
        full.train()
    again = trainer(tiny_model, tmp_path, batches, **how)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert not (tmp_path / "checkpoint-2" / "optimizer.safetensors").exists()
    ours, theirs = weights_of(full.keyhole), weights_of(again.keyhole)
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)


@pytest.mark.parametrize("moment", ["on_step_begin", "on_pre_optimizer_step", "on_step_end"])
def test_a_checkpoint_on_a_signal_is_resumed(tiny_model: Path, tmp_path: Path, batches: list[Any], moment: str) -> None:
    """enable_jit_checkpoint: at none of its moments is a step lost or repeated."""

    class Asks(TrainerCallback):
        """Asks as the signal's timer does; it comes before the Trainer's own callback."""

    def ask(self: Any, args: Any, state: Any, control: Any, **more: Any) -> None:
        if state.global_step == 2:
            manager.is_checkpoint_requested = True

    setattr(Asks, moment, ask)
    made = trainer(tiny_model, tmp_path / "out", batches, enable_jit_checkpoint=True)
    manager = next(each.jit_manager for each in made.callback_handler.callbacks if hasattr(each, "jit_manager"))
    made.callback_handler.callbacks.insert(0, Asks())
    made.train()
    assert 2 <= made.state.global_step < STEPS
    again, full = (trainer(tiny_model, tmp_path / name, batches) for name in ("out", "full"))
    again.train(resume_from_checkpoint=True)
    full.train()
    assert losses_of(again)[-2:] == losses_of(full)[-2:]
    ours, theirs = weights_of(full.keyhole), weights_of(again.keyhole)
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)


def test_a_callback_sees_the_weights_after_the_step(tiny_model: Path, tmp_path: Path, batches: list[Any]) -> None:
    """zo defers its update; a callback that calls the module must not see weights from before it."""
    seen: list[tuple[float, float]] = []

    class Looks(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **more: Any) -> None:
            with torch.no_grad():
                nll_B, count_B = made.keyhole.nll(batches[0])
                seen.append((float(model(**batches[0]).loss), float(nll_B.sum() / count_B.sum())))

    made = trainer(tiny_model, tmp_path, batches, method="zo", learning_rate=1e-3, max_steps=2, callbacks=[Looks])
    made.train()
    assert [a for a, _ in seen] == pytest.approx([b for _, b in seen], abs=1e-5) and abs(seen[0][0] - seen[1][0]) > 1e-4


def test_a_step_that_a_callback_cut_off_is_dropped(tiny_model: Path, tmp_path: Path, batches: list[Any]) -> None:
    """Its micro-batches do not join the first step of the next call of train."""

    class Stops(TrainerCallback):
        def on_substep_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            control.should_training_stop = True

    made = trainer(tiny_model, tmp_path, batches, gradient_accumulation_steps=2, max_steps=1, callbacks=[Stops])
    made.train()
    made.remove_callback(Stops)
    made.train()
    fresh = trainer(tiny_model, tmp_path, batches, gradient_accumulation_steps=2, max_steps=1)
    fresh.train()
    assert losses_of(made) == losses_of(fresh)


@pytest.mark.parametrize(("value", "says"), [(["a"], "meta is a list"), (torch.ones(2), "meta: not used here")])
def test_inputs_that_nothing_reads_are_refused(
    tiny_model: Path, tmp_path: Path, batches: list[Any], value: Any, says: str
) -> None:
    """The model would not have got them."""
    made = trainer(tiny_model, tmp_path, [dict(batch, meta=value) for batch in batches], max_steps=1)
    with pytest.raises(UserError, match=says):
        made.train()


def test_the_model_card_states_the_method(tiny_model: Path, tmp_path: Path, batches: list[Any]) -> None:
    """Not the Trainer's optimizer, which was not used."""
    made = trainer(tiny_model, tmp_path, batches, max_steps=1, settings={"rounding": "nearest"}, placement="stream")
    made.train()
    made.create_model_card()
    card = (tmp_path / "README.md").read_text()
    assert "- method: lomo (keyhole" in card and 'streamed from host memory), settings {"rounding": "nearest"}' in card
    assert "optimizer" not in card.lower()


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


def test_steps_that_train_nothing_are_said_once(tiny_model: Path, tmp_path: Path, batches: list[Any]) -> None:
    """Every label is -100: the loss is 0 and looks like success. A step with one trained token is no such step."""
    empty = [batch | {"labels": torch.full_like(batch["labels"], -100)} for batch in batches]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer(tiny_model, tmp_path / "a", [batches[0], *empty], max_steps=4).train()
        empty[1]["labels"][0, 3] = 7
        trainer(tiny_model, tmp_path / "b", empty, max_steps=1, gradient_accumulation_steps=2).train()
    told = [str(each.message) for each in caught if "every label is -100" in str(each.message)]
    assert len(told) == 1 and told[0].startswith("step 2: ")


def test_a_batch_that_is_no_dict_is_refused(tiny_model: Path, tmp_path: Path, batches: list[Any]) -> None:
    made = trainer(tiny_model, tmp_path, batches)
    made.data_collator = lambda rows: [rows[0]["input_ids"]]
    with pytest.raises(UserError, match="batch: found a list; data_collator must return a dict of tensors"):
        made.train()


@pytest.mark.parametrize("name", ["adamw", "sgd", "galore"])
def test_a_rate_below_zero_is_refused(tiny_model: Path, name: str) -> None:
    """By name, as with all methods."""
    model = keyhole.load(str(tiny_model), device="cpu")
    with pytest.raises(UserError, match=r"lr: -1\.0 is no learning rate"):
        keyhole.methods.METHODS[name].load()(model, -1.0)
