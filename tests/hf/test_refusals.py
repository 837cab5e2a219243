"""What a method cannot honour is told at once, without a model."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("accelerate")

from keyhole.errors import UserError
from keyhole.hf import KeyholeArguments, refusals
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
