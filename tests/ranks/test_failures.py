"""However a rank ends, all of them end, soon; the leader says why, and the run can go on."""

import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.ranks.launch import Launch, train, written
from tests.ranks.test_training import ZO, assert_same_run
from tests.training.runs import Make

ENDLESS = ZO | {"max_steps": 10_000, "save_steps": None, "gradient_accumulation_steps": 2, "batch_size": 1}
ENDLESS |= {"lr_scheduler_type": "constant", "warmup_ratio": 0.0}


def resumed(make: Make, launch: Launch, tmp_path: Path) -> None:
    """Goes on for two steps on two ranks after whatever happened, and compares with a run that was left alone."""
    from keyhole.checkpoint.journal import read
    from keyhole.training.start import train as train_alone

    config = make("out", **ENDLESS)
    done = read(Path(config.output_dir) / "run" / "journal").last
    short = replace(config, max_steps=done + 2)
    again = Launch(2, train, [written(tmp_path, short), "--resume"])
    assert again.end() == [0, 0], again.printed
    alone = replace(short, output_dir=str(tmp_path / "alone"))
    assert train_alone(alone) == 0
    assert_same_run(short, alone)


def test_a_dead_rank_ends_the_run_and_it_goes_on(make: Make, tmp_path: Path) -> None:
    """kill -9 of a rank in the middle of training: the leader names it at once, and nothing is lost."""
    launch = Launch(2, train, [written(tmp_path, make("out", **ENDLESS))])
    launch.wait_for("step     2/")
    launch.send(signal.SIGKILL, rank=1)
    assert launch.end() == [1, -signal.SIGKILL], launch.printed
    assert "rank 1 (" in launch.printed[0] and "has died" in launch.printed[0]
    resumed(make, launch, tmp_path)


def test_a_rank_that_hangs_ends_the_run_after_the_limit(make: Make, tmp_path: Path) -> None:
    """A stopped process closes no connection: it is known by its silence, and named."""
    launch = Launch(2, train, [written(tmp_path, make("out", **ENDLESS, rank_timeout=1.0))])
    launch.wait_for("step     1/")
    launch.send(signal.SIGSTOP, rank=1)
    launch.processes[0].join()
    launch.kill_all()
    assert launch.end()[0] == 1
    assert "rank 1 (" in launch.printed[0] and "no sign of life for 1 s" in launch.printed[0], launch.printed


def test_a_signal_on_any_rank_saves_and_ends_all(make: Make, tmp_path: Path) -> None:
    """SIGTERM to a rank that is not the leader: the leader names it, saves, and all end with 130."""
    launch = Launch(2, train, [written(tmp_path, make("out", **ENDLESS))])
    launch.wait_for("step     1/")
    launch.send(signal.SIGTERM, rank=1)
    assert launch.end() == [130, 130], launch.printed
    assert "stopped by SIGTERM on rank 1 after step" in launch.printed[0] and "; saved " in launch.printed[0]
    assert launch.printed[1] == ""


def orphaned_train(words: list[str], gone: Path) -> int:
    """`keyhole train`, started by torchrun, which ends when the file is there."""
    import os

    from keyhole.ranks import failures

    parent = os.getppid()
    os.environ["TORCHELASTIC_RUN_ID"] = "a run"
    failures.os.getppid = lambda: 1 if gone.exists() else parent
    return train(words)


def test_ranks_without_torchrun_save_and_end(make: Make, tmp_path: Path) -> None:
    """kill -9 of torchrun: nobody would end its ranks any more."""
    gone = tmp_path / "gone"
    launch = Launch(2, orphaned_train, [written(tmp_path, make("out", **ENDLESS, rank_timeout=1.0))], gone)
    launch.wait_for("step     1/")
    gone.touch()
    assert launch.end() == [130, 130], launch.printed
    assert "stopped by the end of torchrun" in launch.printed[0] and "; saved " in launch.printed[0], launch.printed
    assert launch.printed[1] == ""


def broken_train(words: list[str], what: str) -> int:
    """`keyhole train` in which the third step fails on rank 1."""
    import os

    from keyhole.errors import UserError
    from keyhole.methods.zo.method import ZO

    real, calls = ZO._losses, []

    def fail(self: ZO, batches: list) -> torch.Tensor:
        calls.append(1)
        if len(calls) == 3 and os.environ["RANK"] == "1":
            if what == "nan":
                self.model.home(self.model.layout.tensors[-1]).fill_(torch.nan)
            elif what == "user":
                raise UserError("a message of rank 1")
            else:
                raise ZeroDivisionError("a bug of rank 1")
        return real(self, batches)

    ZO._losses = fail
    return train(words)


@pytest.mark.parametrize("what", ["user", "bug", "nan"])
def test_an_error_on_one_rank_is_said_once_with_its_rank(make: Make, tmp_path: Path, what: str) -> None:
    """A mistake of the user, one of ours, a loss that is not finite."""
    launch = Launch(2, broken_train, [written(tmp_path, make("out", **ENDLESS))], what)
    code = 1 if what == "bug" else 2
    assert launch.end() == [code, code], launch.printed
    said, quiet = launch.printed
    assert quiet == "", quiet
    if what == "nan":
        assert "step 3: the loss is nan" in said, said
    else:
        assert "rank 1 (" in said and said.count("rank 1 (") == 1, said
        assert ("a message of rank 1" if what == "user" else "a bug of rank 1") in said
        assert ("ZeroDivisionError" in said) == (what == "bug")


def start_without_rank_1() -> int:
    """A rank that is gone before it joins, and a leader that waits for it for a second."""
    import os
    from datetime import timedelta

    from keyhole.cli import main
    from keyhole.ranks import group

    group.START, group.SLOW_S = timedelta(seconds=1), 0.1
    return 0 if os.environ["RANK"] == "1" else main(["train", "nothing.yaml"])


def test_a_rank_that_never_starts_is_named() -> None:
    """As when torchrun runs on one of two machines: the leader says for whom it waits, and gives up."""
    launch = Launch(2, start_without_rank_1)
    assert launch.end() == [1, 0], launch.printed
    said, quiet = launch.printed
    assert "waiting for rank 1 of 2 to start" in said and "rank 1 of 2 did not start within 1 s" in said, said
    assert quiet == "", quiet


def fail_everywhere() -> int:
    """All ranks find the same mistake; the leader last."""
    from keyhole.errors import UserError
    from keyhole.ranks.failures import FAILED
    from keyhole.ranks.join import joined

    try:
        with joined() as ranks:
            if ranks.is_leader:
                ranks.store.wait([FAILED])
            raise UserError("a mistake of all ranks")
    except UserError as error:
        print(error)
        return 2


def test_an_error_on_all_ranks_is_said_once() -> None:
    """The leader says its own; those that were first neither wait to be heard nor say it again."""
    launch = Launch(3, fail_everywhere)
    assert launch.end() == [2, 2, 2], launch.printed
    assert launch.printed == ["a mistake of all ranks\n", "", ""]


def test_a_dead_leader_ends_the_others(make: Make, tmp_path: Path) -> None:
    """One of them says it then."""
    launch = Launch(3, train, [written(tmp_path, make("out", **ENDLESS | {"gradient_accumulation_steps": 3}))])
    launch.wait_for("step     1/")
    launch.send(signal.SIGKILL, rank=0)
    assert launch.end() == [-signal.SIGKILL, 1, 1], launch.printed
    said, quiet = sorted(launch.printed[1:], reverse=True)
    assert "rank 0 (" in said and "has died" in said and quiet == "", launch.printed
