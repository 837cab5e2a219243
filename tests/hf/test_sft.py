"""TRL's SFTTrainer with the mixin; skipped where trl is not installed."""

from pathlib import Path
from typing import Any

import pytest

trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")

from keyhole.errors import UserError  # noqa: E402
from keyhole.hf import KeyholeMixin  # noqa: E402


class KeyholeSFTTrainer(KeyholeMixin, trl.SFTTrainer):
    """As a user would write it."""


ROWS = [
    {"messages": [{"role": "user", "content": f"{a} + {a * a}"}, {"role": "assistant", "content": f"{a + a * a}"}]}
    for a in range(24)
]


def arguments(out: Path, **more: Any) -> Any:
    usual = {
        "use_cpu": True, "max_steps": 3, "per_device_train_batch_size": 2, "logging_steps": 1, "report_to": [],
        "disable_tqdm": True, "bf16": False, "learning_rate": 1e-2, "gradient_checkpointing": False, "loss_type": "nll",
        "max_grad_norm": 0.0, "max_length": 64, "save_strategy": "no", "lr_scheduler_type": "constant",
    }  # fmt: skip
    return trl.SFTConfig(output_dir=str(out), **(usual | more))


def losses_of(made: Any) -> list[float]:
    made.train()
    return [entry["loss"] for entry in made.state.log_history if "loss" in entry]


@pytest.mark.parametrize("packing", [False, True])
def test_chats_train_as_by_sgd(tiny_model: Path, tmp_path: Path, packing: bool) -> None:
    """LOMO in float32, streamed, is gradient descent: the losses are those of SFTTrainer with torch's SGD."""
    data = datasets.Dataset.from_list(ROWS)
    ours = KeyholeSFTTrainer(
        str(tiny_model), arguments(tmp_path / "ours", packing=packing), train_dataset=data, method="lomo",
        placement="stream",
    )  # fmt: skip
    theirs = trl.SFTTrainer(
        str(tiny_model), arguments(tmp_path / "theirs", optim="sgd", packing=packing), train_dataset=data
    )
    assert losses_of(ours) == pytest.approx(losses_of(theirs), rel=1e-4)


def test_a_loss_that_replaces_the_models_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="loss_type: dft replaces the model's loss"):
        KeyholeSFTTrainer(
            str(tiny_model), arguments(tmp_path, loss_type="dft"),
            train_dataset=datasets.Dataset.from_list(ROWS), method="lomo",
        )  # fmt: skip
