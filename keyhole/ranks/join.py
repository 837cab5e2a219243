"""Joins the other ranks, if torchrun has started several processes, from the variables that it sets:

    RANK, WORLD_SIZE                 of all processes
    LOCAL_RANK, LOCAL_WORLD_SIZE     of those on this machine, whose number is GROUP_RANK
    MASTER_ADDR, MASTER_PORT         address of the store: torchrun's own, or that of rank 0 (with other launchers)

With WORLD_SIZE 1, or without these variables, nothing is joined, and torch.distributed is not imported. Variables that
contradict each other, or of which some are missing, are refused: N processes would each train alone, or wait for ever.
"""

import logging
import os
import socket
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from keyhole.errors import UserError
from keyhole.ranks.single import Ranks

NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def size() -> int:
    missing = [name for name in NEEDED if name not in os.environ]
    if missing:
        if "RANK" in os.environ and "WORLD_SIZE" in os.environ and _number("WORLD_SIZE") > 1:
            raise UserError(
                f"WORLD_SIZE={os.environ['WORLD_SIZE']} and RANK={os.environ['RANK']} are set, {' and '.join(missing)} "
                "not: start with torchrun, which sets all of them, or unset them to train in one process"
            )
        return 1
    count, rank = _number("WORLD_SIZE"), _number("RANK")
    if not 0 <= rank < count:
        raise UserError(
            f"RANK={rank}, WORLD_SIZE={count}: ranks count from 0 to WORLD_SIZE - 1; start with torchrun, or unset both"
        )
    return count


def follows() -> bool:
    """Whether another process of the same run, the leader, prints."""
    return size() > 1 and os.environ["RANK"] != "0"


def refuse_several(verb: str) -> None:
    if size() > 1:
        raise UserError(f"{verb} runs in one process: start it without torchrun (WORLD_SIZE is {size()})")


@contextmanager
def joined() -> Iterator[Ranks]:
    """A context with the ranks of this run. An error in it ends all ranks."""
    if size() == 1:
        yield Ranks()
        return
    ranks = _join()
    if not ranks.is_leader:
        logging.disable(logging.WARNING)
        warnings.simplefilter("ignore")  # the leader shows the same warnings
    try:
        ranks.meet()
        yield ranks
    except BaseException as error:
        ended = ranks.explain(error)
        if ended is error:
            raise
        raise ended from error
    finally:
        ranks.close()


def _join() -> Any:
    import torch.distributed as dist

    from keyhole.ranks.group import START, Group

    rank, count = _number("RANK"), size()
    of_torchrun = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    where, port = os.environ["MASTER_ADDR"], _number("MASTER_PORT")
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    served: list[bool] = []

    if not 0 <= port < 65536:
        raise UserError(
            f"MASTER_PORT={port}: a port is a number from 0 to 65535; start with torchrun, or choose another"
        )

    def connect() -> Any:
        serves = not of_torchrun and rank == 0 and not served
        served.append(True)
        try:
            store = dist.TCPStore(where, port, None, is_master=serves, timeout=START, wait_for_workers=False)
        except (dist.DistNetworkError, dist.DistStoreError) as error:
            does = "cannot listen there" if serves else "cannot reach it"
            raise UserError(
                f"MASTER_ADDR={where}, MASTER_PORT={port}: rank {rank} of {count} {does} "
                f"({str(error).splitlines()[0].rstrip('.')}); name the machine of rank 0, and a port that is free "
                "there and that the others can reach"
            ) from error
        return dist.PrefixStore(f"keyhole/{attempt}", store)

    local = _number("LOCAL_RANK", 0), _number("LOCAL_WORLD_SIZE", 1)
    return Group(rank, count, *local, os.environ.get("GROUP_RANK", socket.gethostname()), connect)


def _number(name: str, default: int | None = None) -> int:
    text = os.environ.get(name)
    if text is None and default is not None:
        return default
    try:
        return int(text or "")
    except ValueError:
        raise UserError(f"{name}={text}: torchrun sets it to a number; unset it, or start with torchrun") from None
