"""What a method cannot honour is told at once, without a model."""

import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("accelerate")

from keyhole.errors import UserError
from keyhole.hf import KeyholeArguments, KeyholeTrainer, refusals
from keyhole.methods import METHODS


def told(tmp_path: Path, method: str = "lomo", options: dict[str, Any] | None = None, **arguments: Any) -> str:
    row = METHODS[method]
    args = KeyholeArguments(str(tmp_path), use_cpu=True, report_to=[], **arguments)
    try:
        refusals.check(args, row, row.settings(), options or {})
    except UserError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("method", list(METHODS))
def test_the_defaults_are_honoured(tmp_path: Path, method: str) -> None:
    """Every method trains with KeyholeArguments as they are."""
    assert told(tmp_path, method) == ""


def test_everything_in_the_way_is_told_at_once(tmp_path: Path) -> None:
    """Each with its name."""
    text = told(
        tmp_path, "zo", {"compute_loss_func": print, "optimizers": (object(), None)}, max_grad_norm=1.0,
        gradient_checkpointing=True, adam_beta2=0.9,
    )  # fmt: skip
    names = [line.split(":")[0].strip() for line in text.splitlines()[1:]]
    assert set(names) == {
        "max_grad_norm", "gradient_checkpointing", "adam_beta2", "compute_loss_func", "optimizers",
    }  # fmt: skip


def test_a_module_is_answered_with_its_name(tmp_path: Path) -> None:
    """As in a script that has made its model for the Trainer already."""
    args = KeyholeArguments(str(tmp_path), use_cpu=True, report_to=[], method="sgd", learning_rate=1e-2)
    module = SimpleNamespace(name_or_path="some/model")
    with pytest.raises(UserError, match="give its name, 'some/model', or what keyhole.load returns"):
        KeyholeTrainer(module, args)


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
