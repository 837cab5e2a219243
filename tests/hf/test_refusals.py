"""What a method cannot honour is told at once, without a model."""

import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("accelerate")

from transformers import HfArgumentParser, Trainer, TrainingArguments

from keyhole import hf
from keyhole.errors import UserError
from keyhole.hf import KeyholeArguments, KeyholeMixin, KeyholeTrainer, refusals
from keyhole.hf.arguments import wanted
from keyhole.methods import METHODS

EVERY_STEP = {"eval_strategy": "steps", "save_strategy": "steps"}


def told(tmp_path: Path, method: str = "lomo", options: dict[str, Any] | None = None, **arguments: Any) -> str:
    row = METHODS[method]
    args = KeyholeArguments(str(tmp_path), use_cpu=True, report_to=[], **arguments)
    try:
        refusals.check(args, row, row.settings(), options or {})
    except UserError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", hf.__all__)
def test_without_accelerate_the_extra_is_named(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Transformers imports without it, and says so only when arguments are made, with its own extra."""
    monkeypatch.setitem(sys.modules, "accelerate", None)
    with pytest.raises(UserError, match=r"pip install accelerate"):
        getattr(hf, name)


@pytest.mark.parametrize("method", list(METHODS))
def test_the_defaults_are_honoured(tmp_path: Path, method: str) -> None:
    assert told(tmp_path, method) == ""


def test_everything_in_the_way_is_told_at_once(tmp_path: Path) -> None:
    text = told(
        tmp_path, "zo", {"compute_loss_func": print, "optimizers": (object(), None), "peft_config": object()},
        max_grad_norm=1.0, gradient_checkpointing=True, adam_beta2=0.9,
    )  # fmt: skip
    assert "max_grad_norm: zo has no gradient to clip" in text and "gradient_checkpointing: the method decides" in text
    names = [line.split(":")[0].strip() for line in text.splitlines()[1:]]
    assert len(names) == 6 and set(names) == {  # each once
        "max_grad_norm", "gradient_checkpointing", "adam_beta2", "compute_loss_func", "optimizers", "peft_config",
    }  # fmt: skip


def test_a_missing_method_is_told_with_where_to_set_it(tmp_path: Path) -> None:
    args = TrainingArguments(str(tmp_path), use_cpu=True, report_to=[])
    with pytest.raises(UserError, match=r"method: none is given; set it by KeyholeArguments\(\.\.\., method="):
        KeyholeTrainer("demo", args)


@pytest.mark.parametrize(("rate", "model", "warns"), [(5e-5, "x", True), (1e-7, "x", False), (5e-5, "demo", False)])
def test_a_rate_of_another_method_is_warned_of(tmp_path: Path, rate: float, model: str, warns: bool) -> None:
    """5e-5 is the Trainer's default: a run of zo forgets everything with it. The demo model learns by other rates."""
    args, row = KeyholeArguments(str(tmp_path), use_cpu=True, report_to=[], learning_rate=rate), METHODS["zo"]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        refusals.warn_of_rate(args, row, row.settings(), model)
    assert [f"learning_rate: {rate:g} is an unusual value for zo" in str(each.message) for each in caught] == [
        True
    ] * warns


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"optim_args": "a=1"}, "optim_args: they belong to optim"),
        ({"debug": "underflow_overflow"}, "debug: its hooks"),
        ({"save_only_model": True, "load_best_model_at_end": True, **EVERY_STEP}, "save_only_model: load_best"),
        ({"max_grad_norm": None}, "max_grad_norm: None is not possible"),
        ({"accelerator_config": {"dispatch_batches": True}}, "accelerator_config: dispatch_batches"),
    ],
)
def test_what_would_be_ignored_or_break_later_is_told(tmp_path: Path, arguments: dict[str, Any], says: str) -> None:
    """Arguments that the loop would not read, or only after the model is loaded."""
    assert says in told(tmp_path, **arguments)


@pytest.mark.parametrize("name", ["compute_loss", "_prepare_inputs", "get_decay_parameter_names"])
def test_a_subclass_with_a_loss_of_its_own_is_refused(tmp_path: Path, name: str) -> None:
    """It would train with the model's loss, in silence."""
    own = type("Own", (KeyholeTrainer,), {name: lambda self, *args, **options: None})
    with pytest.raises(UserError, match=f"Own.{name} would never be called"):
        own("model", KeyholeArguments(str(tmp_path), use_cpu=True, report_to=[], method="lomo"))


def test_a_trainer_behind_the_mixin_with_a_step_of_its_own_is_refused(tmp_path: Path) -> None:
    """A subclass of both may have one, which can call keyhole's."""
    theirs = type("Theirs", (Trainer,), {"training_step": lambda self, *args: None})
    with pytest.raises(UserError, match="Theirs.training_step would never be called"):
        refusals.check_class(type("Both", (KeyholeMixin, theirs), {}), KeyholeMixin)
    refusals.check_class(type("Both", (KeyholeTrainer,), {"training_step": lambda self, *args: None}), KeyholeMixin)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"clip_value": "x"}, "lomo.clip_value: found 'x', expected number > 0"),
        ({"activations": "hots"}, "lomo.activations: found 'hots', expected none"),
        (["activations"], "settings: found a list, expected a dict"),
        ("{activations", "method_settings: found '{activations', expected JSON"),
        ({"clip_value": object()}, "lomo.clip_value: found <object"),
    ],
)
def test_settings_are_checked_as_in_a_config(tmp_path: Path, settings: Any, says: str) -> None:
    args = KeyholeArguments(str(tmp_path), use_cpu=True, report_to=[], method="lomo")
    with pytest.raises(UserError, match=says):
        wanted(args, {"settings": settings})


def test_settings_contradict_arguments_before_the_model_is_loaded(tmp_path: Path) -> None:
    args = KeyholeArguments(
        str(tmp_path), use_cpu=True, report_to=[], method="lomo", learning_rate=1e-2, max_grad_norm=1.0,
        method_settings={"clip_value": 1.0},
    )  # fmt: skip
    with pytest.raises(UserError, match="clip_value: contradicts max_grad_norm"):
        KeyholeTrainer("no such model", args)


def test_arguments_can_be_parsed_from_a_command_line() -> None:
    line = ["--output_dir", "x", "--method", "zo", "--method_settings", '{"rank": 2}', "--use_cpu"]
    (args,) = HfArgumentParser((KeyholeArguments,)).parse_args_into_dataclasses(line)
    assert wanted(args, {}).settings == {"rank": 2}
