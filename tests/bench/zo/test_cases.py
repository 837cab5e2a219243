"""Cases: names are unique, tables share them, groups keep what belongs together."""

from pathlib import Path

import pytest

from keyhole.bench.shapes import SHAPES, fitting_blocks
from keyhole.bench.zo.cases import SYSTEMS, Case, cut, for_models, grouped, read_tables, select
from keyhole.bench.zo.floors import companion
from keyhole.errors import UserError
from keyhole.machine.sizes import GIB
from keyhole.model.weights.format import CODECS, PLAIN

TABLES = read_tables()


def test_names_tell_cases_apart() -> None:
    """One name, one case, over all tables."""
    cases = [case for table in TABLES.values() for case in table.cases]
    assert len({case.name for case in cases}) == len(set(cases))


@pytest.mark.parametrize("table", TABLES)
def test_streamed_cases_come_with_their_companions(table: str) -> None:
    """Compute alone is in the same table as every streamed case, so a floor can be given."""
    names = {case.name for case in TABLES[table].cases}
    assert all(companion(case, "resident") in names for case in TABLES[table].cases if case.system == "streamed")


def test_every_format_is_in_its_table() -> None:
    """A new format of weights on the link is timed too."""
    assert {case.wire for case in TABLES["wire"].cases} == {None, *PLAIN, *CODECS}


def test_a_list_stands_for_one_case_per_item(tmp_path: Path) -> None:
    """Every combination, the last list varying fastest."""
    path = tmp_path / "own.yaml"
    path.write_text("mine: {cases: [{model: 13B, batch: [1, 4], system: [resident, streamed], wire: fp8}]}")
    cases = read_tables(path)["mine"].cases
    assert [(c.batch, c.system) for c in cases] == [(b, s) for b in (1, 4) for s in ("resident", "streamed")]
    assert cases[3] == Case("13B", "streamed", batch=4, wire="fp8")


def test_groups_hold_every_case_once_and_one_load_after_the_other() -> None:
    """Nothing is loaded twice within a group, and zo is timed before textbook changes the weights."""
    chosen = select(["all"], TABLES)
    groups = grouped(chosen)
    assert chosen == TABLES
    names = [case.name for group in groups for case in group]
    assert sorted(names) == sorted({case.name for table in TABLES.values() for case in table.cases})
    for group in groups:
        assert len({case.group for case in group}) == 1
        loads = [case.load for case in group]
        changes = sum(a != b for a, b in zip(loads, loads[1:], strict=False))
        assert changes == len(set(loads)) - 1
        systems = [case.system for case in group]
        assert systems == sorted(systems, key=SYSTEMS.index)


def test_judged_comes_in_the_order_of_importance() -> None:
    """The first groups are those that decide: 1.3B, 6.7B, 13B in bf16."""
    order = [group[0].group[:2] for group in grouped(select(["judged"], TABLES))]
    assert order[:3] == [("1.3B", "bf16"), ("6.7B", "bf16"), ("13B", "bf16")]


def test_selection_by_pattern_and_slip() -> None:
    """Patterns choose cases; a name that is nothing is the user's mistake."""
    chosen = select(["13B-bf16-b1-streamed*", "giant"], TABLES)
    assert list(chosen) == ["judged", "giant"]
    assert Case("13B", "streamed", gpu_memory="16GiB") in chosen["judged"].cases
    assert all(case.model in ("13B", "175B") for table in chosen.values() for case in table.cases)
    with pytest.raises(UserError, match="gaint"):
        select(["gaint"], TABLES)


def test_the_sizes_are_all_of_them() -> None:
    """Every OPT in every dtype, by every system."""
    cases = {(c.model, c.dtype, c.system) for c in TABLES["sizes"].cases}
    assert cases == {(m, d, s) for m in SHAPES for d in ("fp32", "fp16", "bf16") for s in SYSTEMS}


@pytest.mark.parametrize("table", ["ablation", "wire", "batches", "lengths", "short"])
def test_a_table_runs_on_other_models(table: str) -> None:
    """The cases of the table once for each, and their floors with them; a slip is told."""
    found = for_models(TABLES, ["2.7B", "BLOOM-176B"])[table].cases
    assert len(found) == len(set(found)) == 2 * len(TABLES[table].cases)
    assert {c.model for c in found} == {"2.7B", "BLOOM-176B"}
    names = {c.name for c in found}
    assert all(companion(c, "resident") in names for c in found if c.system == "streamed")
    with pytest.raises(UserError, match="3B"):
        for_models(TABLES, ["3B"])


def test_a_model_is_cut_alike_for_all_its_cases() -> None:
    """By the widest format that one of them keeps it in; small models and stated blocks stay, and the cut is said."""
    tables = for_models({"wire": TABLES["wire"]}, ["1.3B", "66B"]) | {"giant": TABLES["giant"]}
    found, said = cut(tables, 60 * GIB)
    blocks = {(c.model, c.dtype): c.blocks for c in found["wire"].cases}
    assert blocks["66B", "bf16"] == blocks["66B", "fp16"] == fitting_blocks("66B", 4, 60 * GIB)  # wire: fp32
    assert blocks["1.3B", "bf16"] is None and {c.blocks for c in found["giant"].cases} == {4}
    assert len({c.blocks for c in found["wire"].cases if c.model == "66B"}) == 1
    assert len(said) == 2 and all(f"66B in {d}: " in line for d, line in zip(("bf16", "fp16"), said, strict=True))
