"""Which row of the table to take, and why.

Rows that fit are compared by the hours to learn what AdamW learns in the steps asked for:

    hours = seconds per step x steps x (steps that the method takes for one of AdamW)

The last factor is the method's own (`steps` of its row): a rule of thumb, since no formula knows a task. Methods that
train every parameter come first: adapters are named only where nothing else fits. Of rows within NEAR of the fastest
the one with the least GPU memory is taken, since it leaves room for longer samples. What a run of so many steps would
be refused for (fp8, whose rounding adds up) is named only where nothing else fits.
"""

from collections.abc import Sequence

from keyhole.machine.sizes import about
from keyhole.plan.table import Question, Row

NEAR = 1.05


def recommended(rows: Sequence[Row]) -> Row | None:
    """The row to take; None where none fits."""
    fitting = _candidates(rows)
    fitting = [row for row in fitting if row.full] or fitting
    if not fitting:
        return None
    least = min(row.hours for row in fitting)
    near = [row for row in fitting if row.hours <= NEAR * least]
    return min(near, key=lambda row: (row.gpu_bytes, row.hours))


def _candidates(rows: Sequence[Row]) -> list[Row]:
    """Rows that fit and can be run as they are; where there are none, those that fit."""
    return [row for row in rows if row.fits and not row.refused] or [row for row in rows if row.fits]


def settings_of(row: Row, question: Question) -> str:
    """The settings of the row, as `keyhole train` takes them."""
    words = [f"method={row.method}", f"placement={row.placement}"]
    if row.placement == "auto" and question.gpu_bytes is not None:
        words.append(f"gpu_memory={about(question.gpu_bytes)}")
    return " ".join(words + ([f"wire={row.wire}"] if row.wire else []))


def reason(row: Row, rows: Sequence[Row], question: Question) -> str:
    """A sentence."""
    rows = _candidates(rows)
    fitting = len(rows)
    if not row.full:
        return f"nothing that trains all parameters fits; {row.method} trains adapters beside them"
    fastest = min((other for other in rows if other.full), key=lambda other: other.hours)
    count = f"{fitting} rows that fit" if fitting != 1 else "the one row that fits"
    learns = f"learns what {question.steps:,} steps of AdamW learn in {row.hours:.2g} h"
    if fastest is row:
        others = [other for other in rows if other.full and other.method != row.method]
        next_best = min(others, key=lambda other: other.hours, default=None)
        against = "" if next_best is None else f" (next {next_best.method}, {next_best.hours:.2g} h)"
        return f"of {count} the fastest: {learns}{against}; bound by {row.bound_by}"
    near = f"{fastest.method} {fastest.placement}, {fastest.hours:.2g} h, {about(fastest.gpu_bytes)}"
    nearly = f"within {NEAR - 1:.0%} of the fastest of {count} ({near})"
    return f"{learns}, {nearly}, with less GPU memory; bound by {row.bound_by}"
