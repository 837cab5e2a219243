"""Flat memory of exactly the size that is needed: on the host, page-locked, or on the device.

A DMA engine reads page-locked ("pinned") memory at the full speed of the link; ordinary ("pageable") memory is
first copied by the driver, several times slower. PyTorch's own pinned allocator rounds each request up to a power
of two, and a second copy exists while weights move in. Here memory is reserved first (the kernel gives pages only
when they are touched, so a checkpoint moving in costs no second copy) and pinned in place afterwards, to the byte.
The kernel is asked for huge pages: touching and pinning 2 MiB at a time instead of 4 KiB is several times faster.
"""

import mmap
import warnings

import torch


def host_memory(size_bytes: int) -> torch.Tensor:
    """Unpinned flat bytes of host memory; pages are committed as they are written, and freed with the tensor."""
    if size_bytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    pages = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # shared memory has no huge pages
    if hasattr(mmap, "MADV_HUGEPAGE"):
        try:
            pages.madvise(mmap.MADV_HUGEPAGE)
        except OSError:  # a kernel without huge pages: slower to touch, otherwise the same
            pass
    return torch.frombuffer(pages, dtype=torch.uint8)


def whole(piece: torch.Tensor) -> torch.Tensor:
    """All bytes of the memory that a piece was cut from."""
    return torch.empty(0, dtype=torch.uint8).set_(piece.untyped_storage())


def pin(flat: torch.Tensor) -> bool:
    """Page-locks existing host memory in place. False, with a warning, when the system refuses."""
    if flat.numel() == 0 or not torch.cuda.is_available():
        return False
    size_bytes = flat.numel() * flat.element_size()
    error = torch.cuda.cudart().cudaHostRegister(flat.data_ptr(), size_bytes, 0)
    if int(error) == 0:
        return True
    warnings.warn(
        f"the system refused to pin {size_bytes / 2**30:.2f} GiB of host memory (CUDA error {int(error)}): "
        "transfers will run at the pageable rate, several times slower. Raise the locked-memory limit "
        "(`ulimit -l unlimited`) or free host memory.",
        stacklevel=2,
    )
    return False


def unpin(flat: torch.Tensor) -> None:
    """Undoes pin()."""
    torch.cuda.cudart().cudaHostUnregister(flat.data_ptr())


def split(flat: torch.Tensor, sizes: list[int]) -> list[torch.Tensor]:
    """Consecutive pieces of flat memory, by their number of elements."""
    pieces, start = [], 0
    for size in sizes:
        pieces.append(flat[start : start + size])
        start += size
    return pieces
