"""kill -9 at any instant: a run that is resumed ends with the bits of one that was never killed."""

import traceback
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from keyhole.machine.host import cpu_has_bf16
from tests.bf16 import Products
from tests.matrix import in_every_run
from tests.noise import draw_once
from tests.training.children import server

KILLS = [("zo", 5), ("adamw", 4), ("zo", 8)]  # `python -m tests.crash DIR` has 200
STEPS, SEED, LIMIT_S = 10, 0, 400.0


def _crash(directory: Path, method: str, kills: int, model: str, data: str, writer: Connection) -> None:
    """In a process that has imported everything and has no threads yet: every life is a fork of it."""
    from tests.crash.__main__ import crash, prepare

    products = Products()  # while they have an owner: all lives, and the one that is not killed, have them
    if not cpu_has_bf16():
        products.start()
    draw_once(setattr)
    try:
        config = prepare(directory, method, STEPS, model, data)
        found = crash(config, kills, SEED, directory / "log", say=lambda line: None)
        writer.send((found.outside, found.inside))
    except BaseException:
        writer.send(traceback.format_exc())


@pytest.mark.slow
@in_every_run(lambda kills: kills < 8)
@pytest.mark.parametrize(("method", "kills"), KILLS)
def test_killed_and_resumed_to_the_bit(
    tiny_model: Path, tiny_data: Path, tmp_path: Path, method: str, kills: int
) -> None:
    reader, writer = server.Pipe(duplex=False)
    process = server.Process(target=_crash, args=(tmp_path, method, kills, str(tiny_model), str(tiny_data), writer))
    process.start()
    writer.close()
    try:
        found = reader.recv() if reader.poll(LIMIT_S) else "it hangs"
    finally:
        process.kill()
        process.join()
    log = (tmp_path / "log").read_text() if (tmp_path / "log").exists() else ""
    assert isinstance(found, tuple), f"{found}\n{log[-3000:]}"
    assert sum(found) == kills and min(found) > 0
    assert "Traceback" not in log
