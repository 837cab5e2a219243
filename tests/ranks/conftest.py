"""Short runs of zo on several ranks."""

import pytest
import torch

from tests.training.conftest import make  # noqa: F401


@pytest.fixture(autouse=True)
def one_kind_of_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products by BLAS here too, as in the ranks (launch.py): a product in bfloat16 that oneDNN cannot make on this CPU
    has torch give oneDNN up for the rest of the process, and some float32 products then round differently."""
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)
