"""All methods: what the planner says of them, and their steps on several ranks, which are threads here."""

import pytest

from keyhole.methods import METHODS
from tests.planned import check
from tests.ranks.cases import CASES
from tests.ranks.threads import assert_as_alone


@pytest.mark.parametrize("name", METHODS)
def test_every_number_of_the_plan(name: str) -> None:
    """Those of tests/planned.txt."""
    check(name)


@pytest.mark.parametrize("case", CASES)
def test_ranks_are_one_process(case: str) -> None:
    """Losses, norms and weights, of tensors that ranks share out and of those that all of them have."""
    assert_as_alone(case)
