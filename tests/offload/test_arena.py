"""Flat memory: exact sizes, pieces side by side, and a refusal to pin that is survived."""

import subprocess
import sys

import pytest
import torch

from keyhole.offload import arena
from tests.training.children import server


def test_pieces_lie_side_by_side() -> None:
    flat = arena.host_memory(12)
    pieces = flat.split([5, 0, 3, 4])
    assert [piece.numel() for piece in pieces] == [5, 0, 3, 4]
    for i, piece in enumerate(pieces):
        piece.fill_(i)
    assert flat.tolist() == [0] * 5 + [2] * 3 + [3] * 4
    whole = arena.storage_of(pieces[3])
    assert whole.data_ptr() == flat.data_ptr() and whole.numel() == 12


class Cudart:
    """Registers ranges as CUDA does: an address twice is refused, and the refusal waits for the next launch."""

    def __init__(self) -> None:
        self.registered: set[int] = set()
        self.calls: list[str] = []

    def cudaHostRegister(self, pointer: int, size_bytes: int, flags: int) -> int:
        self.calls.append("register")
        if pointer in self.registered:
            return 712
        self.registered.add(pointer)
        return 0

    def cudaHostUnregister(self, pointer: int) -> int:
        self.calls.append("unregister")
        self.registered.remove(pointer)
        return 0


@pytest.fixture
def cudart(monkeypatch: pytest.MonkeyPatch) -> Cudart:
    """A machine with a GPU, as far as this file can tell."""
    fake = Cudart()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: fake)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: fake.calls.append("wait"))
    monkeypatch.setattr(arena, "_forget_error", lambda device: fake.calls.append("forget"))
    return fake


def test_a_refusal_to_pin_is_a_warning(cudart: Cudart) -> None:
    """When the system refuses, the run goes on at the pageable rate, says what to change, and the next kernel does not
    inherit the error."""
    flat = arena.host_memory(8)
    cudart.registered.add(flat.data_ptr())
    with pytest.warns(UserWarning, match="712.*ulimit -l unlimited"):
        assert arena.pin(flat) is False
    assert cudart.calls == ["register", "forget"]
    del flat
    assert cudart.calls == ["register", "forget"]  # what was not pinned is not unpinned


def test_memory_is_unpinned_before_it_is_freed(cudart: Cudart) -> None:
    """The last view decides, after every copy has arrived; the same address can then be pinned again."""
    flat = arena.host_memory(4096)
    assert arena.pin(flat)
    piece = flat.split([1024, 3072])[1].view(torch.float32)
    del flat
    assert cudart.calls == ["register"]
    del piece
    assert cudart.calls == ["register", "wait", "unregister"] and not cudart.registered


def test_pinned_memory_at_the_end_of_the_process() -> None:
    program = """
import torch
from keyhole.offload import arena
class Cudart:
    cudaHostRegister = lambda self, *args: 0
    cudaHostUnregister = lambda self, pointer: print("unregistered", flush=True)
torch.cuda.is_available, torch.cuda.cudart, torch.cuda.synchronize = lambda: True, Cudart, lambda device: None
kept, gone = arena.host_memory(64), arena.host_memory(64)
assert arena.pin(kept) and arena.pin(gone)
del gone
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("unregistered\n", "")


FORKS = """
import os, torch
from keyhole.offload import arena
{cuda}
pinned, plain, unpinned = (arena.host_memory(1 << 21) for _ in range(3))
for flat in (pinned, plain, unpinned):
    flat.fill_(7)
assert arena.pin(pinned) and arena.pin(unpinned)
arena.unpin(unpinned)
address = pinned.data_ptr()
def mapped(at):
    ranges = [line.split()[0].split("-") for line in open("/proc/self/maps")]
    return any(int(begin, 16) <= at < int(end, 16) for begin, end in ranges)
assert mapped(address)
if (child := os.fork()) == 0:
    fine = not mapped(address) and plain[0] == 7 and unpinned[0] == 7
    arena.unpin(pinned)  # as when a model is dropped in the child: CUDA, which is the parent's, is left alone
    del pinned
    os._exit(0 if fine else 1)
assert os.waitpid(child, 0)[1] == 0, "the child"
assert pinned[0] == 7
pinned.fill_(9)
{after}
"""
PRETENDED = """
class Cudart:
    cudaHostRegister = lambda self, *args: 0
    def cudaHostUnregister(self, pointer):
        assert os.getpid() == parent, "CUDA was called in the child"
parent = os.getpid()
torch.cuda.is_available, torch.cuda.cudart, torch.cuda.synchronize = lambda: True, Cudart, lambda device: None
"""


def forks(cuda: str, after: str) -> None:
    """In a process of its own: pytest's has threads."""
    process = server.Process(target=exec, args=(FORKS.format(cuda=cuda, after=after), {}))
    process.start()
    process.join()
    assert process.exitcode == 0


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs /proc and madvise")
def test_pinned_memory_is_not_inherited_by_a_fork() -> None:
    forks(PRETENDED, "")


@pytest.mark.gpu
def test_the_gpu_sees_what_is_written_after_a_fork() -> None:
    """Pages that were shared with a child would be replaced by the first write, behind the GPU's back."""
    forks("", 'assert torch.equal(pinned.to("cuda", non_blocking=True).cpu(), pinned)')


@pytest.mark.gpu
def test_memory_is_pinned_in_place() -> None:
    """Existing memory becomes page-locked where it lies, and ordinary again; pinned twice is refused, and no more."""
    flat = arena.host_memory(1 << 22).view(torch.float32)
    flat.copy_(torch.arange(1 << 20))
    pointer = flat.data_ptr()
    assert arena.pin(flat) and flat.data_ptr() == pointer and flat.is_pinned()
    assert torch.equal(flat.to("cuda", non_blocking=True).cpu(), flat)
    with pytest.warns(UserWarning, match="CUDA error 712"):
        assert arena.pin(flat) is False
    assert torch.ones(3, device="cuda").add_(1).tolist() == [2, 2, 2]
    arena.unpin(flat)
    assert not flat.is_pinned()
