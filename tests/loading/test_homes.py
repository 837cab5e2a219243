"""Homes that ranks share or share out, and what all ranks must have alike."""

import pytest

import keyhole
from keyhole.errors import UserError
from keyhole.ranks import Ranks
from tests.model.decoders import config
from tests.ranks.threads import assert_as_alone


@pytest.mark.parametrize("case", ["lomo, clipped", "lora, int4, dropout", "adam-offload"])
def test_ranks_are_one_process(case: str) -> None:
    """Losses, norms and weights, of tensors that ranks share out and of those that all of them have."""
    assert_as_alone(case)


class Two(Ranks):
    """Two ranks of a machine, of whom nothing is asked."""

    size = local_size = 2
    has_neighbours = True


def test_ranks_that_would_stream_different_units_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """They share one copy of them."""
    monkeypatch.setattr(Two, "objects", lambda self, x: [x, (self.machine, x[1], frozenset())])
    how = {"init": "random", "device": "cpu", "placement": "stream", "workload": keyhole.Workload("zo", tokens=8)}
    with pytest.raises(UserError, match="gpu_memory: ranks 0 and 1 would stream different units"):
        keyhole.load(config("llama"), ranks=Two(), **how)


def test_machines_that_would_not_all_share_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is shared is changed by all ranks together, so all of them must have something to share; a rank alone on its
    machine has."""
    how = {"init": "random", "device": "cpu", "placement": "stream", "workload": keyhole.Workload("zo", tokens=8)}
    monkeypatch.setattr(Two, "size", 3)
    monkeypatch.setattr(Two, "objects", lambda self, x: [x, ("0", *x[1:]), ("1", x[1], frozenset())])
    with pytest.raises(UserError, match="ranks 0 and 2 would stream different units.*set gpu_memory"):
        keyhole.load(config("llama"), ranks=Two(), **how)


def test_ranks_that_shard_have_equally_many_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    """An upload takes all ranks: one with more slots than others would ask for it earlier than they do."""
    monkeypatch.setattr(Two, "objects", lambda self, x: [x, x - 1 if isinstance(x, int) else x])
    how = {"init": "random", "device": "cpu", "placement": "stream", "workload": keyhole.Workload("lomo", tokens=8)}
    assert keyhole.load(config("llama"), ranks=Two(), slot_count=4, **how).engine.slot_count == 3


def test_ranks_that_would_cut_other_units_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """They exchange them whole."""
    monkeypatch.setattr(Two, "objects", lambda self, x: [x, (x[0], x[1][:-1], x[2]) if isinstance(x, tuple) else x])
    how = {"init": "random", "device": "cpu", "placement": "stream", "workload": keyhole.Workload("lomo", tokens=8)}
    with pytest.raises(UserError, match="gpu_memory: ranks would cut the model into different units"):
        keyhole.load(config("llama"), ranks=Two(), **how)
