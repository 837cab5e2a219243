"""One process by itself: nothing of torch.distributed, and trivial answers."""

import ast
import socket
from pathlib import Path

import pytest
import torch

import keyhole
from keyhole.errors import UserError
from keyhole.ranks import Ranks, join
from keyhole.training.rundir import locked
from tests.training.children import server
from tests.training.runs import Make

PACKAGE = Path(keyhole.__file__).parent
USERS = {"ranks/group.py", "ranks/join.py"}


def test_shares_are_consecutive_and_complete() -> None:
    """Every item is one rank's, in order; sizes differ by one at most."""
    for size in range(1, 6):
        for count in range(12):
            shares = []
            for rank in range(size):
                ranks = Ranks()
                ranks.rank, ranks.size = rank, size
                shares.append(ranks.share(range(count)))
            assert [i for share in shares for i in share] == list(range(count))
            assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_one_process_answers_itself() -> None:
    x = torch.arange(6.0).view(2, 3)
    assert Ranks().in_order(x[0], [1, 2]) is not None and Ranks().gather(x).shape == (1, 2, 3)
    assert Ranks().total(3) == 3 and Ranks().objects("a") == ["a"] and Ranks().from_leader(lambda: 7) == 7


def test_only_the_ranks_touch_torch_distributed() -> None:
    """No other file of the package imports it, or uses it by way of torch."""
    found = set()
    for path in [path for path in PACKAGE.rglob("*.py") if "distributed" in path.read_text()]:
        for node in ast.walk(ast.parse(path.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [f"{node.module}.{a.name}" for a in node.names] if isinstance(node, ast.ImportFrom) else []
            named = ast.unparse(node).startswith("torch.distributed") if isinstance(node, ast.Attribute) else False
            if named or any(name.startswith("torch.distributed") for name in names):
                found.add(path.relative_to(PACKAGE).as_posix())
    assert found == USERS


def _lonely(config: object) -> None:
    import sys

    from keyhole.training.start import train

    sys.modules.pop("keyhole.ranks.group", None)  # the server has it, for the children that are ranks
    assert train(config) == 0
    sys.exit(3 if "keyhole.ranks.group" in sys.modules or torch.distributed.is_initialized() else 0)


def test_a_run_in_one_process_does_not_load_the_group(make: Make) -> None:
    process = server.Process(target=_lonely, args=(make(max_steps=1, method="zo"),))
    process.start()
    process.join()
    assert process.exitcode == 0


def test_who_this_process_is_comes_from_torchruns_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without all of them, or with one process, nothing is joined; other verbs than train are refused; nonsense is
    said."""
    for name in join.NEEDED:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert join.size() == 1 and not join.follows()
    with join.joined() as ranks:
        assert type(ranks) is Ranks
    for name, value in zip(join.NEEDED, ("1", "4", "127.0.0.1", "29500"), strict=True):
        monkeypatch.setenv(name, value)
    assert join.size() == 4 and join.follows()
    with pytest.raises(UserError, match="keyhole eval runs in one process: start it without torchrun"):
        join.refuse_several("keyhole eval")
    monkeypatch.setenv("WORLD_SIZE", "many")
    with pytest.raises(UserError, match="WORLD_SIZE=many"):
        join.size()


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"RANK": "4"}, "RANK=4, WORLD_SIZE=4: ranks count from 0"),
        ({"WORLD_SIZE": "0"}, "RANK=1, WORLD_SIZE=0"),
        ({"MASTER_PORT": None}, "WORLD_SIZE=4 and RANK=1 are set, MASTER_PORT not"),
        ({"MASTER_PORT": "99999"}, "MASTER_PORT=99999: a port is a number"),
    ],
)
def test_variables_that_cannot_be_are_refused(
    changed: dict[str, str | None], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They would have four processes train apart, or wait for each other for ever."""
    values = dict(zip(join.NEEDED, ("1", "4", "127.0.0.1", "29500"), strict=True)) | changed
    for name, value in values.items():
        monkeypatch.delenv(name, raising=False) if value is None else monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=said), join.joined():
        pass


def test_a_port_in_use_is_the_users_to_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """Started by other means than torchrun, rank 0 serves the store itself."""
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    with socket.create_server(("127.0.0.1", 0)) as server_socket:
        port = str(server_socket.getsockname()[1])
        for name, value in zip(join.NEEDED, ("0", "2", "127.0.0.1", port), strict=True):
            monkeypatch.setenv(name, value)
        with pytest.raises(UserError, match=f"MASTER_PORT={port}: rank 0 of 2 cannot listen there"), join.joined():
            pass


def test_processes_of_another_launcher_hear_of_torchrun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """mpirun and srun start processes that do not know each other: the second finds the directory taken."""
    for name in join.NEEDED:
        monkeypatch.delenv(name, raising=False)
    with locked(tmp_path / "lock") as first, locked(tmp_path / "lock") as second:
        first.take()
        with pytest.raises(UserError, match=r"is training into .* already; wait .* torchrun"):
            second.take()
