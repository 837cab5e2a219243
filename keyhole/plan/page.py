"""The plan as one self-contained page: a chart of memory against speed, and the whole table. No script, no external
files.

The chart has memory to the right and tokens per second upwards (pages/chart.py). All text from files or arguments is
escaped.
"""

from collections.abc import Sequence
from html import escape

from keyhole.machine.sizes import GIB
from keyhole.pages.chart import Series, chart
from keyhole.pages.frame import colour_of, header, page, section, table, td, th, tr
from keyhole.plan.advice import reason, settings_of
from keyhole.plan.table import Question, Row

HEAD = (
    ("method", "", ""), ("placement", "", ""), ("wire", "", ""), ("GPU", "GiB", ""), ("host", "GiB", ""),
    ("disk", "GiB", ""), ("step", "s", ""), ("pace", "tokens/s", ""), ("time", "hours", ""), ("bound by", "", ""),
    ("parts", "", "left"), ("fits", "", "left"),
)  # fmt: skip
EXTRA = """.plan{max-width:680px}.no td,.no th{color:var(--soft)}
.take th,.take td{font-weight:700}.take th{color:var(--glow)}
.parts{display:flex;height:8px;width:110px;border-radius:3px;overflow:hidden;background:var(--line)}
.parts span{display:block;height:100%}thead .left{min-width:0}"""


def make_page(title: str, rows: Sequence[Row], chosen: Row | None, question: Question, about: Sequence[str]) -> str:
    """The page. about: lines about the model, the machine and the batches."""
    colours = colour_of(dict.fromkeys(row.method for row in rows))
    lead = "Nothing fits. See `keyhole plan` for what would."
    if chosen is not None:
        lead = f"<b>{escape(settings_of(chosen, question))}</b>: {escape(reason(chosen, rows, question))}."
    parts = [
        header("keyhole plan", title, lead, about),
        section(
            "GPU memory and pace",
            f"<figure class='plan'>{_chart(rows, colours, question)}</figure>",
            "A dot per placement of a method that fits, in the dtype of compute.",
            level=3,
        ),
        section(
            "Every row",
            table([th(name, kind, unit) for name, unit, kind in HEAD], [_line(r, r is chosen, colours) for r in rows]),
            f"Hours: to learn what {question.steps:,.0f} steps of AdamW learn, by a rule of thumb per method "
            "(docs/plan.md). Bars: seconds of compute, link and CPU, which overlap.",
            level=3,
        ),
    ]
    return page(title, parts, EXTRA)


def _chart(rows: Sequence[Row], colours: dict[str, int], question: Question) -> str:
    """A curve per method, from everything streamed to everything resident: the rows that fit, in the dtype of compute
    (all of them, if none fits)."""
    drawn = [row for row in rows if row.wire is None]
    drawn = [row for row in drawn if row.fits] or drawn
    where = "GPU" if question.gpu_bytes is not None else "host"
    series = []
    for name, colour in colours.items():
        own = [row for row in drawn if row.method == name]
        bytes_ = [row.gpu_bytes if where == "GPU" else row.host_bytes for row in own]
        points = sorted(zip((each / GIB for each in bytes_), (row.tokens_per_second for row in own), strict=True))
        series.append(Series(name, colour, [x for x, _ in points], [y for _, y in points], dots=True))
    return chart(series, "tokens per second over peak memory", f"peak {where} memory, GiB", "tokens per second")


def _line(row: Row, take: bool, colours: dict[str, int]) -> str:
    texts = [
        row.placement, row.stored, f"{row.gpu_bytes / GIB:.2f}", f"{row.host_bytes / GIB:.1f}",
        f"{row.disk_bytes / GIB:.0f}", f"{row.step_seconds:.3g}", f"{row.tokens_per_second:,.0f}", f"{row.hours:.2g}",
        row.bound_by,
    ]  # fmt: skip
    fits = td("yes" if row.fits else f"lacks {row.missing}", "left")
    cells = [*map(td, texts), f"<td>{_bar(row)}</td>", fits]
    return tr(row.method, cells, colours[row.method], "take" if take else "" if row.fits else "no")


def _bar(row: Row) -> str:
    parts = {"compute": (row.seconds.compute, 0), "link": (row.seconds.link, 1), "CPU": (row.seconds.cpu, 2)}
    total = sum(value for value, _ in parts.values()) or 1.0
    spans = "".join(
        f"<span class='b{colour}' style='width:{100 * value / total:.0f}%' title='{name}: {value:.3g} s'></span>"
        for name, (value, colour) in parts.items()
        if value
    )
    return f"<span class='parts'>{spans}</span>"
