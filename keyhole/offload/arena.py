"""Flat host memory of exactly the size that is needed, page-locked in place.

The GPU reads page-locked ("pinned") memory at the full speed of the link; ordinary ("pageable") memory is first copied
by the driver, several times slower. PyTorch's own pinned allocator rounds each request up to a power of two, and needs
a second copy of the weights while they are loaded. Here memory is reserved first (the kernel commits pages only when
they are touched, so loading a checkpoint needs no second copy) and pinned in place afterwards, to the byte. The kernel
is asked for huge pages: touching and pinning 2 MiB at a time instead of 4 KiB is several times faster.

Pages must be unpinned before they are unmapped; otherwise the driver takes the next mapping at the same address for
pinned. So the mapping unpins itself when its last tensor is gone, whether or not anyone called `unpin`.

Pinned pages stay out of processes that are forked (a DataLoader's workers, multiprocessing). After a fork, parent and
child share their pages, and the first to write gets a new one. If that is the parent, the GPU goes on copying to and
from the old page, and the two drift apart without an error; or the kernel, which knows that pages are pinned, copies
all of them for the child at once, and memory for the weights is needed twice. Therefore MADV_DONTFORK while memory is
pinned: the child does not have these pages at all. It would crash if it read the weights, so it must not; workers that
prepare data do not. Memory that is not pinned is inherited as usual.

Ranks of one machine may have memory in common (`shared_memory`): an anonymous file that each of them maps and pins. It
has no name that could outlive them, and is not part of /dev/shm, which containers keep small.
"""

import mmap
import os
import sys
import warnings
import weakref
from collections.abc import Callable

import torch

from keyhole.machine.gpu import ACCELERATOR, accelerator
from keyhole.ranks import Ranks

_pinned: dict[int, torch.device | None] = {}  # address of pinned memory -> the device that copies to and from it
_mappings: "weakref.WeakValueDictionary[int, _Pages]" = weakref.WeakValueDictionary()  # by address
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_pinned.clear)  # pinned memory and the CUDA context belong to the parent


class _Pages(mmap.mmap):
    """A mapping that is unpinned before it is unmapped."""

    address = 0

    def __del__(self, exiting: Callable[[], bool] = sys.is_finalizing) -> None:
        if not exiting():  # the end of the process frees everything, and CUDA may be gone
            _unpin(self.address)


def host_memory(size_bytes: int) -> torch.Tensor:
    """Unpinned flat bytes of host memory; pages are committed as they are written, and freed with the tensor."""
    if size_bytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    return _as_tensor(_Pages(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))


def _as_tensor(pages: "_Pages") -> torch.Tensor:
    if hasattr(mmap, "MADV_HUGEPAGE"):
        try:
            pages.madvise(mmap.MADV_HUGEPAGE)
        except OSError:  # a kernel without huge pages, or without those of shared memory: slower to touch
            pass
    flat = torch.frombuffer(pages, dtype=torch.uint8)
    pages.address = flat.data_ptr()
    _mappings[pages.address] = pages
    return flat


def shared_memory(size_bytes: int, ranks: Ranks) -> torch.Tensor:
    """Flat bytes that all ranks of a machine map; called by every rank. The ranks must agree on who writes which."""
    own = ranks.local_rank == 0
    file = os.memfd_create("keyhole") if own else -1
    if own:
        os.ftruncate(file, size_bytes)
    said = ranks.objects((ranks.machine, f"/proc/{os.getpid()}/fd/{file}" if own else None))
    if not own:
        file = os.open(next(path for machine, path in said if machine == ranks.machine and path), os.O_RDWR)
    pages = _Pages(file, size_bytes, flags=mmap.MAP_SHARED)
    ranks.barrier()  # every rank has opened the file
    os.close(file)
    return _as_tensor(pages)


def storage_of(piece: torch.Tensor) -> torch.Tensor:
    """All bytes of the memory that a piece was cut from."""
    return torch.empty(0, dtype=torch.uint8).set_(piece.untyped_storage())


def pin(flat: torch.Tensor, device: torch.device | None = None) -> bool:
    """Pins memory of host_memory() in place, for copies to and from `device` (None: the current one), until unpin() is
    called or the memory is freed. Returns False, with a warning, when the system refuses."""
    if flat.numel() == 0 or not accelerator.is_available():
        return False
    size_bytes = flat.numel() * flat.element_size()
    _inherited(flat.data_ptr(), False)  # before pinning, because another thread may fork
    error = int(accelerator.cudart().cudaHostRegister(flat.data_ptr(), size_bytes, 0))
    if error == 0:
        _pinned[flat.data_ptr()] = device
        return True
    _inherited(flat.data_ptr(), flat.data_ptr() not in _pinned)  # memory that was pinned before stays out of forks
    _forget_error(device)
    warnings.warn(
        f"the system refused to pin {size_bytes / 2**30:.2f} GiB of host memory (CUDA error {error}): "
        "transfers will run at the pageable rate, several times slower. Raise the locked-memory limit "
        "(`ulimit -l unlimited`) or free host memory.",
        stacklevel=2,
    )
    return False


def unpin(flat: torch.Tensor) -> None:
    """Undoes pin() after all copies have finished; does nothing to memory that is not pinned."""
    _unpin(flat.data_ptr())


def _unpin(address: int) -> None:
    if address in _pinned:
        accelerator.synchronize(_pinned.pop(address))
        accelerator.cudart().cudaHostUnregister(address)
        _inherited(address, True)


def _inherited(address: int, inherited: bool) -> None:
    """Sets whether processes that are forked from now on inherit the mapping."""
    pages = _mappings.get(address)
    if pages is not None and hasattr(mmap, "MADV_DONTFORK"):
        pages.madvise(mmap.MADV_DOFORK if inherited else mmap.MADV_DONTFORK)


def _forget_error(device: torch.device | None) -> None:
    """CUDA keeps the error code of a refused call, and PyTorch would report it as the failure of its next kernel. The
    code is cleared by a launch whose check fails; PyTorch offers no other way."""
    for _ in range(2):  # the allocator's own check may be the first to fail
        try:
            torch.empty(1, device=device or ACCELERATOR).fill_(1.0)
        except RuntimeError:
            continue
        return
