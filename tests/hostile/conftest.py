"""A model directory and a config that a test may harm, beside the only directory that a command may change."""

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, settings

from tests.hostile.harness import Ended, attempt

MANY = settings(
    max_examples=25,
    deadline=None,
    derandomize=True,  # the same cases for everybody
    database=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large],
)


@dataclass(frozen=True)
class Place:
    """A directory with `model/`, `rows.jsonl` and `run.yaml`; `out/` is what commands may write to."""

    root: Path

    @property
    def model(self) -> Path:
        return self.root / "model"

    @property
    def data(self) -> Path:
        return self.root / "rows.jsonl"

    @property
    def config(self) -> Path:
        return self.root / "run.yaml"

    @property
    def out(self) -> Path:
        return self.root / "out"

    def run(self, *args: str, stdin: str = "") -> Ended:
        """Runs a command under the conditions of harness.py."""
        return attempt(args, self.out, self.root, stdin)

    def refused(self, *args: str, stdin: str = "") -> str:
        """The message of a command that must end with exit code 2."""
        ended = self.run(*args, stdin=stdin)
        assert ended.code == 2, f"keyhole {' '.join(args)}: exit code {ended.code}\n{ended.printed[:4000]}"
        return ended.printed

    def checked(self, *overrides: str) -> Ended:
        """`keyhole train --dry-run`: config, data, tokenizer, and the model by its headers."""
        return self.run("train", str(self.config), *overrides, "--dry-run")

    def trained(self, *overrides: str) -> Ended:
        return self.run("train", str(self.config), *overrides)


@pytest.fixture
def new_place(tmp_path: Path, tiny_model: Path, tiny_data: Path) -> Callable[[], Place]:
    """A fresh place each time: for tests that try many cases."""
    count = iter(range(10**6))

    def make() -> Place:
        found = Place(tmp_path / f"place-{next(count)}")
        shutil.copytree(tiny_model, found.model)
        shutil.copy(tiny_data, found.data)
        lines = {"model": found.model, "train_data": found.data, "output_dir": found.out, "method": "zo"}
        lines |= {"learning_rate": 1e-4, "max_steps": 2, "batch_size": 2, "device": "cpu"}
        found.config.write_text("".join(f"{key}: {value}\n" for key, value in lines.items()))
        return found

    return make


@pytest.fixture
def place(new_place: Callable[[], Place]) -> Place:
    return new_place()
