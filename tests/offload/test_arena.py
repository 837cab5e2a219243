"""Flat memory: exact sizes, pieces side by side, and a refusal to pin that is survived."""

import pytest
import torch

from keyhole.offload import arena


def test_pieces_lie_side_by_side() -> None:
    """Pieces share the memory they are cut from, without gap or overlap; from any piece the whole is found."""
    flat = arena.host_memory(12)
    pieces = arena.split(flat, [5, 0, 3, 4])
    assert [piece.numel() for piece in pieces] == [5, 0, 3, 4]
    for i, piece in enumerate(pieces):
        piece.fill_(i)
    assert flat.tolist() == [0] * 5 + [2] * 3 + [3] * 4
    whole = arena.whole(pieces[3])
    assert whole.data_ptr() == flat.data_ptr() and whole.numel() == 12


def test_without_a_gpu_nothing_is_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU path has no page-locked memory and says so by False, not by an error."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert arena.pin(torch.empty(8)) is False


def test_a_refusal_to_pin_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    """When the system refuses, the run goes on at the pageable rate and says what to change."""

    class Refusing:
        def cudaHostRegister(self, pointer: int, size_bytes: int, flags: int) -> int:
            return 2

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", Refusing)
    with pytest.warns(UserWarning, match="ulimit -l unlimited"):
        assert arena.pin(torch.empty(8)) is False


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_memory_is_pinned_in_place() -> None:
    """Existing memory becomes page-locked where it lies, and ordinary again."""
    flat = torch.arange(1 << 20, dtype=torch.float32)
    pointer = flat.data_ptr()
    assert arena.pin(flat) and flat.data_ptr() == pointer and flat.is_pinned()
    assert torch.equal(flat.to("cuda", non_blocking=True).cpu(), flat)
    arena.unpin(flat)
