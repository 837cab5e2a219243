"""The choice between kernel and reference."""

import pytest
import torch

from keyhole import ops
from keyhole.ops import backend


def test_cpu_tensors_use_the_reference_but_where_a_kernel_is_forced() -> None:
    assert not backend.use_kernel(torch.device("cpu"))
    assert backend.use_kernel(torch.device("cuda")) == (not backend.TRITON_MISSING)
    with pytest.raises(KeyError), backend.force("kernel"):
        assert backend.use_kernel(torch.device("cpu"))
        raise KeyError
    assert not backend.use_kernel(torch.device("cpu"))


def test_describe_gives_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    with backend.force("reference"):
        assert ops.describe() == "ops: reference, forced"
    monkeypatch.setattr(backend, "TRITON_MISSING", "No module named 'triton'")
    assert "No module named 'triton'" in ops.describe()
    assert not backend.use_kernel(torch.device("cuda"))
