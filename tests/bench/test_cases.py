"""Cases: a file of tables is checked row by row, names are unique, tables share cases, groups keep what belongs
together."""

from pathlib import Path
from typing import Any

import pytest

from keyhole.bench.cases import STREAMED, SYSTEMS, TABLES, Case, case_of, for_models, ordered, read_tables, select
from keyhole.errors import UserError
from keyhole.model.weights.format import CODECS, PLAIN

ZO = read_tables(TABLES / "zo.yaml")
EVERY = [(path, table) for path in sorted(TABLES.glob("*.yaml")) for table in read_tables(path).values()]


def test_names_tell_cases_apart() -> None:
    for path in TABLES.glob("*.yaml"):
        cases = [case for table in read_tables(path).values() for case in table.cases]
        assert all(a == b for a in cases for b in cases if a.name == b.name), path


@pytest.mark.parametrize(("path", "table"), EVERY, ids=lambda x: x.stem if isinstance(x, Path) else x.title[:20])
def test_streamed_cases_come_with_their_companions(path: Path, table: Any) -> None:
    """Compute alone is in the same table as every streamed case whose weights train, so a floor can be given."""
    names = [case.name for case in table.cases]
    for case in (case for case in table.cases if case.system == STREAMED and case.wire != "int4"):
        assert case.compare in names if case.compare else path.stem != "zo" or case.companion("resident") in names


def test_every_format_is_in_its_table() -> None:
    """A new format of weights on the link is timed too."""
    assert {case.wire for case in ZO["wire"].cases} == {None, *PLAIN, *CODECS}


def test_rows_of_a_file_of_the_user_s_own(tmp_path: Path) -> None:
    """A list stands for one case per item, every combination, the last list varying fastest; `each` fills in what a row
    does not say; a quick run changes only options that a case has."""
    path = tmp_path / "own.yaml"
    path.write_text(
        "mine: {each: {wire: fp8}, quick: {dtype: fp32, options: {d: 16, r: 2}}, cases: ["
        "{model: 13B, batch: [1, 4], system: [resident, streamed]}, {model: Llama-7B, system: resident, wire: null, "
        "method: lsp, options: {d: 512}}]}"
    )
    cases = read_tables(path)["mine"].cases
    assert [(c.batch, c.system) for c in cases[:4]] == [(b, s) for b in (1, 4) for s in ("resident", "streamed")]
    assert cases[3] == Case("13B", "streamed", batch=4, wire="fp8") and cases[4].options == {"d": 512}
    quick = read_tables(path, quick=True)["mine"].cases
    assert quick[4] == Case("Llama-7B", "resident", "lsp", dtype="fp32", options={"d": 16}) and quick[3].options == {}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"a row": "a"}, "'a row' is not one of model, system"),
        ({"model": "13B"}, "here: 'system' is missing"),
        ({"model": "13B", "system": "reside"}, "system: found 'reside', expected native . resident"),
        ({"model": "13B", "system": "resident", "colour": 1}, "'colour' is not one of model, system"),
        ({"model": "13B", "system": "resident", "batch": "2"}, "batch: found '2', expected whole number"),
        ({"model": "13B", "system": "resident", "batch": True}, "batch: found True, expected whole number"),
        ({"model": "13B", "system": "resident", "gpu_memory": 8}, "gpu_memory: found 8, expected text or null"),
        ({"model": "13B", "system": "resident", "options": 1}, "options: found 1, expected mapping of names to values"),
    ],
)
def test_a_mistake_is_told_with_place_key_and_choice(row: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        case_of(row, "here")


@pytest.mark.parametrize("text", ["[1, 2]", "a: [", "mine: []", "mine: {cases: []}"])
def test_a_file_that_is_no_table_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(UserError, match=r"mine\.yaml"):
        read_tables(path)
    with pytest.raises(UserError, match=r"none\.yaml"):
        read_tables(tmp_path / "none.yaml")


def test_groups_hold_every_case_once_with_floors_and_baselines_first() -> None:
    """In the order of importance: 1.3B, 6.7B, 13B in bf16."""
    chosen = select(ZO, ["all"])
    cases = ordered(chosen)
    assert chosen == ZO
    assert sorted(case.name for case in cases) == sorted({c.name for table in ZO.values() for c in table.cases})
    groups = [case.group for case in cases]
    assert sum(a != b for a, b in zip(groups, groups[1:], strict=False)) == len(set(groups)) - 1
    for group in set(groups):
        systems = [case.system for case in cases if case.group == group]
        assert systems == sorted(systems, key=SYSTEMS.index)
    judged = list(dict.fromkeys(case.group[:2] for case in ordered(select(ZO, ["judged"]))))
    assert judged[:3] == [("1.3B", "bf16"), ("6.7B", "bf16"), ("13B", "bf16")]


def test_selection_by_pattern_name_and_slip() -> None:
    chosen = select(ZO, ["13B-bf16-b1-streamed*", "giant"])
    assert list(chosen) == ["judged", "low-rank", "giant"]
    assert Case("13B", "streamed", gpu_memory="16GiB") in chosen["judged"].cases
    assert all(case.model in ("13B", "175B") for table in chosen.values() for case in table.cases)
    assert {c.name for c in select(ZO, ["judged"], "GiB")["judged"].cases} < {c.name for c in ZO["judged"].cases}
    with pytest.raises(UserError, match="gaint"):
        select(ZO, ["gaint"])
    with pytest.raises(UserError, match="--only"):
        select(ZO, ["all"], "70B")


@pytest.mark.parametrize("table", ["ablation", "wire", "batches", "lengths", "short"])
def test_a_table_runs_on_other_models(table: str) -> None:
    """The cases of the table once for each, and their floors with them; a slip is told."""
    found = for_models(ZO, ["OPT-2.7B", "BLOOM-176B"])[table].cases
    names = {c.name for c in found}
    assert len(found) == len(names) == 2 * len(ZO[table].cases)
    assert {c.model for c in found} == {"2.7B", "BLOOM-176B"}
    assert all(c.companion("resident") in names for c in found if c.system == "streamed")
    with pytest.raises(UserError, match="3B"):
        for_models(ZO, ["3B"])
