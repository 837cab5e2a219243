"""The ranks of a run over torch.distributed.

There are two groups: gloo carries small numbers and objects between the hosts; NCCL carries tensors between GPUs, if
every rank has a GPU of its own (two ranks on one GPU use gloo, through host memory). Nothing is reduced in the network:
every rank computes sums itself, in the order of ranks.

Collectives have no time limit of their own (DAY): a leader may save for an hour while the others wait. Dead ranks are
detected in other ways: a closed connection, or no heartbeat for limit_s (failures.py).
"""

import os
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, TypeAlias, TypeVar

import torch
import torch.distributed as dist

from keyhole.errors import UserError
from keyhole.machine.gpu import ACCELERATOR, accelerator
from keyhole.ranks.failures import POLL_S, Failures, RankFailed, told
from keyhole.ranks.single import Ranks

T = TypeVar("T")
Peers: TypeAlias = dist.ProcessGroup | None  # None: all ranks
DAY = timedelta(days=1)
START = timedelta(minutes=10)
SLOW_S = 20.0  # after this long, the leader prints which ranks are missing
GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # the name before torch 2.13


class Group(Ranks):
    """This process among the other ranks; `connect` opens a connection to their store."""

    def __init__(
        self, rank: int, size: int, local_rank: int, local_size: int, machine: str, connect: Callable[[], dist.Store]
    ) -> None:
        self.rank, self.size, self.local_rank, self.local_size = rank, size, local_rank, local_size
        self.machine = machine
        self.failures = Failures(connect, rank, size, self.limit_s)
        self.store = self.failures.store
        self.store.set_timeout(START)
        self.nccl: Peers = None
        self.bytes_received = 0  # of weights and gradients

    def meet(self) -> None:
        """Returns when all ranks have started and are connected."""
        self._wait_for_all()
        with self._together():
            dist.init_process_group("gloo", store=self.store, rank=self.rank, world_size=self.size, timeout=DAY)
        machines = self.objects(self.machine)
        self.neighbours = [rank for rank, machine in enumerate(machines) if machine == self.machine]
        self.has_neighbours = len(set(machines)) < self.size
        has_gpu = accelerator.is_available() and accelerator.device_count() >= self.local_size
        everyone = self.objects((socket.gethostname(), os.getpid(), self.local_rank if has_gpu else None))
        self.failures.learn([(host, pid) for host, pid, _ in everyone])
        own_gpus = all(gpu is not None for _, _, gpu in everyone)
        if own_gpus and len({(host, gpu) for host, _, gpu in everyone}) == self.size and dist.is_nccl_available():
            accelerator.set_device(self.local_rank)
            self.nccl = dist.new_group(backend="nccl", timeout=DAY)
            self.failures.always = True

    def _wait_for_all(self) -> None:
        """Waits until all ranks have started; names those that have not in time. (A collective would wait for them
        without a limit.)"""
        self.store.set(f"here/{self.rank}", "1")
        begin_s, said = time.monotonic(), False
        missing = [rank for rank in range(self.size) if rank != self.rank]
        while missing := [rank for rank in missing if not self.store.check([f"here/{rank}"])]:
            failed, waited_s = self.failures.read(), time.monotonic() - begin_s
            if failed is not None or waited_s > START.total_seconds():
                raise failed or RankFailed(
                    f"{_names(missing)} of {self.size} did not start within {START.total_seconds():g} s: is torchrun "
                    "started on all machines, with the same --nnodes and --rdzv-endpoint?",
                    1,
                )
            if waited_s > SLOW_S and self.is_leader and not said:
                said = True
                print(f"keyhole: waiting for {_names(missing)} of {self.size} to start", file=sys.stderr, flush=True)
            time.sleep(POLL_S)

    @contextmanager
    def _together(self) -> Iterator[None]:
        """A context for a collective: a connection that closes within it means that another rank has ended."""
        self.failures.waiting_since = time.monotonic()
        try:
            yield
        except RuntimeError as error:
            raise self.failures.found() from error
        finally:
            self.failures.waiting_since = None

    def set_limit(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self.failures.set_limit(limit_s)

    @property
    def orphaned(self) -> bool:
        return self.failures.orphaned

    # -- operations between ranks ----------------------------------------------------------------------------------

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        sent, group = self._carried(x)
        found = [torch.empty_like(sent) for _ in range(self.size)]
        with self._together():
            dist.all_gather(found, sent, group=group)
        return torch.stack(found).to(x.device)

    def in_order(self, x: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        widths = [[(r + 1) * count // self.size - r * count // self.size for count in counts] for r in range(self.size)]
        most = max(map(sum, widths))
        rows = self.gather(torch.cat([x, x.new_zeros(most - x.numel())]))
        pieces = [iter(row[: sum(own)].split(own)) for row, own in zip(rows, widths, strict=True)]
        return torch.cat([next(piece) for _ in counts for piece in pieces])

    def gather_into(self, out: torch.Tensor, part: torch.Tensor) -> None:
        sent, group = self._carried(part)
        self.bytes_received += part.nbytes * (self.size - 1)
        target = out if sent.device == out.device else torch.empty(out.shape, dtype=out.dtype)
        with self._together():
            if group is None:
                dist.all_gather(list(target.chunk(self.size)), sent)
            else:
                GATHER(target, sent, group=group)
        if target is not out:
            out.copy_(target)

    def sum_of_parts(self, x: torch.Tensor) -> torch.Tensor:
        sent, group = self._carried(x)
        self.bytes_received += x.nbytes * (self.size - 1) // self.size
        found = torch.empty_like(sent)
        with self._together():
            dist.all_to_all_single(found, sent, group=group)
        total, *others = found.to(x.device).chunk(self.size)
        total = total.to(torch.float32, copy=True)
        for other in others:
            total += other
        return total

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        padded = x.new_zeros(-(-x.numel() // self.size) * self.size)
        padded[: x.numel()] = x.reshape(-1)
        out = torch.empty(padded.shape, device=x.device)
        self.gather_into(out, self.sum_of_parts(padded))
        return out[: x.numel()].view(x.shape)

    def _carried(self, x: torch.Tensor) -> tuple[torch.Tensor, Peers]:
        """A tensor where it is exchanged, and between whom: GPUs over NCCL, or hosts over gloo (None)."""
        over_host = self.nccl is None or x.device.type == "cpu"
        return (x.cpu() if over_host else x).contiguous(), None if over_host else self.nccl

    def total(self, count: int) -> int:
        return int(self.gather(torch.tensor([count])).sum())

    def objects(self, x: T) -> list[T]:
        found: list[Any] = [None] * self.size
        with self._together():
            dist.all_gather_object(found, x)
        return found

    def from_rank(self, rank: int, make: Callable[[], T]) -> T:
        sent: list[Any] = [make() if self.rank == rank else None]
        with self._together():
            dist.broadcast_object_list(sent, src=rank)
        made: T = sent[0]
        return made

    def barrier(self) -> None:
        self.total(0)

    def device(self, asked: str | None) -> str | None:
        """`cuda` or None means the GPU with this rank's number on its machine; a number means exactly that GPU."""
        if self.nccl is not None and asked not in (None, "cuda"):
            raise UserError(f"device={asked}: every rank has a GPU of its own here; leave device out")
        if asked not in (None, "cuda") or not accelerator.is_available():
            return asked
        return f"cuda:{self.local_rank % accelerator.device_count()}"

    def describe(self, device: torch.device) -> list[str]:
        name = accelerator.get_device_name(device) if device.type == ACCELERATOR else "CPU"
        all_of = self.objects((socket.gethostname(), str(device), name))
        hosts = list(dict.fromkeys(host for host, _, _ in all_of))
        carried = "NCCL between GPUs, gloo between hosts" if self.nccl is not None else "gloo"
        shown = [f"{rank}: {device} ({name}) on {host}" for rank, (host, device, name) in enumerate(all_of)]
        return [
            f"ranks: {self.size} on {len(hosts)} machine{'s' if len(hosts) > 1 else ''}; {carried}; a rank without a "
            f"sign of life for {self.limit_s:g} s ends the run",
            *(f"  rank {line}" for line in shown),
        ]

    # -- the end ---------------------------------------------------------------------------------------------------

    def explain(self, error: BaseException) -> BaseException:
        """What this process ends with after `error`: the leader says it; the others are silent, but for the first to
        fail, if the leader does not hear of it."""
        code_of_first = self.failures.publish(error)
        self._leave()
        if self.is_leader:
            with suppress(Exception):
                self.failures.read()  # those that ended too need not say it
            return error
        if code_of_first is None and not self.failures.heard():
            return error
        return SystemExit(told(error)[0] if code_of_first is None else code_of_first)

    def _leave(self) -> None:
        """Closes the connections, which wakes ranks that wait for this one."""
        self.failures.waiting_since = None
        with suppress(Exception):
            dist.destroy_process_group()

    def close(self) -> None:
        """The end of a successful run: closes the connections when no rank needs them any more."""
        self.failures.close()
        if dist.is_initialized() and not self.orphaned:  # torchrun took its store along
            end_s = time.monotonic() + self.limit_s
            with suppress(Exception):
                self.store.set(f"done/{self.rank}", "1")
                while not self.store.check([f"done/{rank}" for rank in range(self.size)]):
                    if time.monotonic() > end_s or self.failures.read() is not None:
                        break
                    time.sleep(POLL_S)
        if dist.is_initialized():
            self._leave()


def _names(ranks: list[int]) -> str:
    return ", ".join(f"rank {rank}" for rank in ranks[:8]) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
