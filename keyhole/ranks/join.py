"""Joins the other ranks, if torchrun has started several processes, from the variables that it sets:

    RANK, WORLD_SIZE                 of all processes
    LOCAL_RANK, LOCAL_WORLD_SIZE     of those on this machine, whose number is GROUP_RANK
    MASTER_ADDR, MASTER_PORT         address of the store: torchrun's own, or that of rank 0 (with other launchers)

With WORLD_SIZE 1, or without these variables, there is nothing to join, and torch.distributed is not imported.
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
    """The number of processes that were started together."""
    if not all(name in os.environ for name in NEEDED):
        return 1
    return _number("WORLD_SIZE")


def follows() -> bool:
    """Whether another process of the same run, the leader, prints."""
    return size() > 1 and os.environ["RANK"] != "0"


def refuse_several(verb: str) -> None:
    """UserError for commands that need a single process."""
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
    served = []

    def connect() -> Any:
        serves = not of_torchrun and rank == 0 and not served
        served.append(True)
        store = dist.TCPStore(where, port, None, is_master=serves, timeout=START, wait_for_workers=False)
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
