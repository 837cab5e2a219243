"""Which row of the table to choose, and why.

Rows that fit are compared by the hours to learn as much as AdamW learns in the given number of steps:

    hours = seconds per step x steps x (steps that the method needs for one of AdamW)

The last factor is the method's own (`steps` of its row): a rule of thumb, since no formula knows the task. Methods that
train all parameters come first: adapters are recommended only if nothing else fits. Of the rows within NEAR of the
fastest, the one with the least GPU memory is chosen, since it leaves room for longer samples. A row that `keyhole
train` would refuse for this number of steps (fp8, whose rounding noise accumulates) is chosen only if nothing else
fits.
"""

from collections.abc import Sequence

from keyhole.machine.sizes import about
from keyhole.plan.table import Question, Row

NEAR = 1.05


def recommended(rows: Sequence[Row]) -> Row | None:
    """The recommended row; None if none fits."""
    fitting = _candidates(rows)
    fitting = [row for row in fitting if row.full] or fitting
    if not fitting:
        return None
    least = min(row.hours for row in fitting)
    near = [row for row in fitting if row.hours <= NEAR * least]
    return min(near, key=lambda row: (row.gpu_bytes, row.hours))


def _candidates(rows: Sequence[Row]) -> list[Row]:
    """Rows that fit and would not be refused; if there are none, all rows that fit."""
    return [row for row in rows if row.fits and not row.refused] or [row for row in rows if row.fits]


def settings_of(row: Row, question: Question) -> str:
    """The settings of the row, as arguments of `keyhole train`."""
    words = [f"method={row.method}", f"placement={row.placement}"]
    if row.placement == "auto" and question.gpu_bytes is not None:
        words.append(f"gpu_memory={about(question.gpu_bytes)}")
    return " ".join(words + ([f"wire={row.wire}"] if row.wire else []))


def reason(row: Row, rows: Sequence[Row], question: Question) -> str:
    """The reason for the choice, in one sentence."""
    rows = _candidates(rows)
    fitting = len(rows)
    if not row.full:
        return f"nothing that trains all parameters fits; {row.method} trains adapters beside them"
    fastest = min((other for other in rows if other.full), key=lambda other: other.hours)
    count = f"the {fitting} rows that fit" if fitting != 1 else "the one row that fits"
    learns = f"learns what {question.steps:,.0f} steps of AdamW learn in {row.hours:.2g} h"
    if fastest is row:
        others = [other for other in rows if other.full and other.method != row.method]
        next_best = min(others, key=lambda other: other.hours, default=None)
        against = "" if next_best is None else f" (next {next_best.method}, {next_best.hours:.2g} h)"
        which = f"the fastest of {count}" if fitting != 1 else count
        return f"{which}: {learns}{against}; bound by {row.bound_by}"
    near = f"{fastest.method} {fastest.placement}, {fastest.hours:.2g} h, {about(fastest.gpu_bytes)}"
    nearly = f"within {NEAR - 1:.0%} of the fastest of {count} ({near})"
    return f"{learns}, {nearly}, with less GPU memory; bound by {row.bound_by}"
