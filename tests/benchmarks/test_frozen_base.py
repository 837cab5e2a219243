"""benchmarks/frozen_base.py: its table, from records with known numbers, and its smallest case."""

from benchmarks.frozen_base import main, table

CASE = {"case": "lora", "tokens": (4, 1024), "gpu": 2**31, "host": 2**32, "bytes_up": 0, "losses": [1.0]}


def test_a_streamed_step_is_held_against_compute_and_link() -> None:
    """The larger of the resident step and of the bytes at the rate of the link; and against peft."""
    rows = [
        CASE | {"name": "peft, bf16, resident", "step_s": 1.0},
        CASE | {"name": "int4, resident, blocks run twice", "step_s": 0.5},
        CASE | {"name": "int4, streamed in 4GiB", "step_s": 0.6, "bytes_up": 10e9},
    ]
    ends = [[cell.strip() for cell in line.split("|")[-3:-1]] for line in table(rows, {"up": 50.0}) if "lora" in line]
    assert ends == [["", "1.00"], ["", "2.00"], ["1.20", "1.67"]]
    ends = [line.split("|")[-3].strip() for line in table(rows, {"up": 10.0}) if "streamed" in line]
    assert ends == ["0.60"]


def test_a_whole_model_is_held_against_its_own_compute() -> None:
    """Not against that of the adapters' model, when both are measured in one run."""
    rows = [
        CASE | {"name": "int4, resident, blocks run twice", "step_s": 0.5},
        CASE | {"case": "70B", "name": "int4, rank 2, 8GiB", "step_s": 1.1, "compute_s": 1.0},
    ]
    assert [line.split("|")[-3].strip() for line in table(rows, {"up": 50.0}) if "| 70B |" in line] == ["1.10"]


def test_losses_of_two_budgets_are_compared() -> None:
    rows = [CASE | {"case": "175B", "name": f"int4, {b}", "step_s": 1.0, "losses": [b]} for b in (1.0, 2.0)]
    assert "DIFFERENT" in table(rows, {})[-1] and "equal" in table([rows[0], rows[0]], {})[-1]


def test_unpacking_is_timed() -> None:
    rows = main(["--quick", "--only", "unpack"])
    assert [row["name"] for row in rows] == ["int4", "nf4", "int8"] and all(row["step_s"] > 0 for row in rows)
