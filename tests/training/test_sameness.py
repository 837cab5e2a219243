"""Ranks whose config, data or weights differ from the leader's are refused, with what differs."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from keyhole.data.run import Data, load_data
from keyhole.data.settings import data_settings
from keyhole.errors import UserError
from keyhole.ranks import Ranks
from keyhole.training import start as sameness
from keyhole.training.start import same_directory, same_everywhere, same_weights, sampled
from tests.training.runs import Make


class Two(Ranks):
    """The second of two ranks; `first` answers like the leader: what it has instead of what this rank has."""

    rank, size = 1, 2

    def __init__(self, **first: Any) -> None:
        self.first = first

    def set_limit(self, limit_s: float) -> None:
        self.limit_s = limit_s

    def from_rank(self, rank: int, make: Any) -> Any:
        return self.first["from_rank"]

    def objects(self, x: Any) -> list[Any]:
        if not isinstance(x, dict):
            return [True, x]
        return [x | {key: value for key, value in self.first.items() if key in x}, x]


@pytest.fixture
def data(make: Make) -> Data:
    return load_data(data_settings(make(), None))


def test_equal_ranks_go_on(make: Make, data: Data, tiny_model: Path) -> None:
    """Where the data are cached is each machine's own business."""
    config = make()
    ranks = Two(data_cache=None)
    same_everywhere(ranks, replace(config, data_cache="elsewhere"), data)
    same_weights(ranks, str(tiny_model))
    assert ranks.limit_s == config.rank_timeout


@pytest.mark.parametrize("key", ["learning_rate", "seed", "train_data", "eval_data", "task"])
def test_what_differs_is_named(make: Make, data: Data, key: str) -> None:
    """A setting, one of a section, and the content of files under the same name."""
    with pytest.raises(UserError, match=rf"{key} differs between ranks, .* on rank 1 and other on rank 0"):
        same_everywhere(Two(**{key: "other"}), make(), data)


def test_other_weights_are_noticed(tiny_model: Path, tmp_path: Path) -> None:
    """The same shapes with other numbers, as a copy of another revision has them."""
    copy = tmp_path / "copy"
    shutil.copytree(tiny_model, copy)
    assert sampled(copy) == sampled(tiny_model)
    weights = load_file(copy / "model.safetensors")
    save_file({name: w + 0.01 for name, w in weights.items()}, copy / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match="model differs between ranks"):
        same_weights(Two(model=sampled(tiny_model)), str(copy))


def test_a_directory_that_the_leader_does_not_have_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two machines without a common file system: parts of a model could not be saved, which is said before training."""
    monkeypatch.setattr(sameness, "SHOWS_S", 0.0)
    lock = tmp_path / "run" / "lock"
    with pytest.raises(UserError, match="output_dir: rank 1 does not see what the leader has written into"):
        same_directory(Two(from_rank=b"12\n"), lock)
    lock.parent.mkdir()
    lock.write_bytes(b"11\n")
    with pytest.raises(UserError, match="output_dir: rank 1 does not see"):
        same_directory(Two(from_rank=b"12\n"), lock)
    lock.write_bytes(b"12\n")
    same_directory(Two(from_rank=b"12\n"), lock)
