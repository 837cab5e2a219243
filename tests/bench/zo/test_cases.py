"""Cases: names are unique, tables share them, groups keep what belongs together."""

import pytest

from keyhole.bench.cases import TABLES, Case, grouped, select
from keyhole.bench.floors import companion
from keyhole.errors import UserError


def test_names_tell_cases_apart() -> None:
    """One name, one case, over all tables."""
    cases = [case for make in TABLES.values() for case in make()]
    assert len({case.name for case in cases}) == len(set(cases))


@pytest.mark.parametrize("table", TABLES)
def test_streamed_cases_come_with_their_companions(table: str) -> None:
    """Compute alone is in the same table as every streamed case, so a floor can be given."""
    names = {case.name for case in TABLES[table]()}
    assert all(companion(case, "resident") in names for case in TABLES[table]() if case.system == "streamed")


def test_groups_hold_every_case_once_and_one_load_after_the_other() -> None:
    """Nothing is loaded twice within a group, and zo is timed before textbook changes the weights."""
    tables, cases = select(["all"])
    groups = grouped(cases)
    assert tables == list(TABLES)
    assert sorted(c.name for group in groups for c in group) == sorted({c.name for c in cases})
    for group in groups:
        assert len({case.group for case in group}) == 1
        loads = [case.load for case in group]
        changes = sum(a != b for a, b in zip(loads, loads[1:], strict=False))
        assert changes == len(set(loads)) - 1
        systems = [case.system for case in group]
        assert systems == sorted(systems, key=["resident", "textbook", "streamed"].index)


def test_judged_comes_in_the_order_of_importance() -> None:
    """The first groups are those that decide: 1.3B, 6.7B, 13B in bf16."""
    _, cases = select(["judged"])
    order = [group[0].group[:2] for group in grouped(cases)]
    assert order[:3] == [("1.3B", "bf16"), ("6.7B", "bf16"), ("13B", "bf16")]


def test_selection_by_pattern_and_slip() -> None:
    """Patterns choose cases; a name that is nothing is the user's mistake."""
    tables, cases = select(["13B-bf16-b1-streamed*", "giant"])
    assert tables == ["judged", "giant"]
    assert Case("13B", "streamed", gpu_memory="16GiB") in cases
    assert all(case.model in ("13B", "175B") for case in cases)
    with pytest.raises(UserError, match="gaint"):
        select(["gaint"])
