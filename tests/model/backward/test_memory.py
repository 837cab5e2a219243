"""Bytes of methods that differentiate block by block, as the planner adds them up."""

from tests.planned import check


def test_every_number_of_the_plan() -> None:
    """Those of tests/planned.txt."""
    check("lomo", "lora")
