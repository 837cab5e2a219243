"""Pages of which each rank has a part, with ranks as threads."""

import pytest

from tests.ranks.threads import assert_as_alone


@pytest.mark.parametrize("case", ["lomo, clipped", "lomo, bf16 at home"])
def test_ranks_are_one_process(case: str) -> None:
    """Losses, norms and weights, of tensors that ranks share out and of those that all of them have."""
    assert_as_alone(case)
