"""Short runs of zo on several ranks."""

from collections.abc import Iterator

import pytest
import torch

from keyhole.machine.host import cpu_has_bf16
from tests.bf16 import Products
from tests.training.conftest import make  # noqa: F401


@pytest.fixture(autouse=True)
def one_kind_of_product(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Products by BLAS here too, as in the ranks (launch.py): a product in bfloat16 that oneDNN cannot make on this CPU
    has torch give oneDNN up for the rest of the process, and some float32 products then round differently. Those in
    bfloat16, where the CPU has none, by tests/bf16.py, in the ranks and here."""
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)
    products = Products()
    if not cpu_has_bf16():
        products.start()
    yield
    products.end()
