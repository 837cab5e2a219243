"""What every page is made of: its frame, its look, and the elements that pages share.

A page is one file without scripts or external files. A choice of the reader (curves over steps or over time) is made
with form inputs and rules of the style sheet. `th`, `td`, `tr` and `tick` escape text; what is called `body` or comes
from another element is HTML. Control characters are removed from the whole page, and what has no UTF-8 form (names of
files may be any bytes) becomes a question mark.
"""

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from keyhole.machine.text import without_controls


def page(title: str, parts: Iterable[str], style: str = "", refresh_s: int | None = None) -> str:
    """The page. refresh_s: a browser reloads it after this many seconds."""
    rules = "".join(f".c{i}{{stroke:{c}}}.f{i}{{fill:{c}}}.b{i}{{background:{c}}}" for i, c in enumerate(COLOURS))
    view = '<meta name="viewport" content="width=device-width,initial-scale=1">'
    again = "" if refresh_s is None else f'<meta http-equiv="refresh" content="{refresh_s}">'
    text = without_controls(
        f'<!doctype html><html lang="en"><head><meta charset="utf-8">{view}{again}<title>{escape(title)}</title>'
        f"<style>{STYLE}{rules}{style}</style></head>"
        f"<body><main>{''.join(parts)}</main></body></html>\n"
    )
    return text.encode("utf-8", "replace").decode("utf-8")


def header(eyebrow: str, title: str, lead: str, chips: Iterable[str]) -> str:
    """The top of a page. lead: HTML; the rest is escaped here."""
    items = "".join(f"<li>{escape(chip)}</li>" for chip in chips)
    return (
        f"<header><p class='eyebrow'>{escape(eyebrow)}</p><h1>{escape(title)}</h1><p class='lead'>{lead}</p>"
        f"<ul class='chips'>{items}</ul></header>"
    )


def section(title: str, body: str, note: str = "", level: int = 2) -> str:
    """A part of a page under its title; "" if it has no body. note: a line in small print, as HTML."""
    small = f"<p class='note'>{note}</p>" if note else ""
    return f"<section><h{level}>{escape(title)}</h{level}>{body}{small}</section>" if body else ""


def details(summary: str, body: str) -> str:
    return f"<details><summary>{escape(summary)}</summary>{body}</details>"


def table(head: Iterable[str], rows: Iterable[str], kind: str = "small") -> str:
    """A table that scrolls sideways where it is too wide. head: of `th`; rows: of `tr`."""
    cells = "".join(head)
    top = f"<thead><tr>{cells}</tr></thead>" if cells else ""
    return f"<div class='scroll'><table{_class(kind)}>{top}<tbody>{''.join(rows)}</tbody></table></div>"


def th(text: str, kind: str = "", unit: str | None = None) -> str:
    """The head of a column. unit: in small print below."""
    return f"<th{_class(kind)}>{escape(text)}{'' if unit is None else f'<small>{escape(unit)}</small>'}</th>"


def td(text: str, kind: str = "") -> str:
    return f"<td{_class(kind)}>{escape(text)}</td>"


def tr(name: str, cells: Iterable[str], colour: int | None = None, kind: str = "", link: str = "") -> str:
    """A row with its name, a dot of its colour before it. cells: of `td`; link: where the name leads to."""
    shown = f"<a href='{escape(link)}'>{escape(name)}</a>" if link else escape(name)
    mark = "" if colour is None else dot(colour)
    return f"<tr{_class(kind)}><th scope='row'>{mark}{shown}</th>{''.join(cells)}</tr>"


def dot(colour: int) -> str:
    """A dot; a negative colour is none."""
    return f"<span class='dot{f' b{colour}' if colour >= 0 else ''}'></span>"


def bar(colour: int, percent: float, more: str = "") -> str:
    fill = f"<span class='fill b{colour}' style='width:{percent:.1f}%'></span>"
    return f"<td><span class='wide'>{fill}{more}</span></td>"


def charts(figures: Iterable[str]) -> str:
    """Charts side by side, as many as the screen is wide."""
    return f"<div class='charts'>{''.join(f'<figure>{each}</figure>' for each in figures)}</div>"


def choice(name: str, panels: Sequence[tuple[str, str]]) -> str:
    """Panels of which one is visible, with buttons to choose it; initially the first. name: of the form's inputs,
    unique per page."""
    inputs, shown = [], []
    for i, (label, body) in enumerate(panels):
        checked = " checked" if i == 0 else ""
        inputs.append(
            f"<input type='radio' name='{escape(name)}' id='{escape(name)}-{i}' class='pick p{i}'{checked}>"
            f"<label for='{escape(name)}-{i}'>{escape(label)}</label>"
        )
        shown.append(f"<div class='panel q{i}'>{body}</div>")
    return f"<div class='choice'>{''.join(inputs)}{''.join(shown)}</div>"


def colour_of(names: Iterable[str]) -> dict[str, int]:
    """The index of the colour of each name; colours repeat if there are too many names."""
    return {name: i % len(COLOURS) for i, name in enumerate(names)}


def machine_text(environment: Mapping[str, Any]) -> str:
    """Processor, GPUs, system and versions in a paragraph, from the data of machine/probe.py."""
    versions = ", ".join(f"{name} {version}" for name, version in environment["versions"].items() if version)
    gpus = ", ".join(gpu["name"] for gpu in environment["gpus"]) or "no GPU"
    cpu = environment["cpu"]
    machine = f"{cpu['name']}, {cpu['cores']} cores; {gpus}; {environment['os']}"
    return f"<p class='note'>{escape(machine)}.<br>{escape(versions)}.</p>"


def _class(kind: str) -> str:
    return f" class='{kind}'" if kind else ""


COLOURS = "#3b6fe0 #e0702f #14957d #b0479f #c0941a #cc3f55 #3fa5cf #73821f #7f60d0 #5b6472 #a8633a #2f9e44".split()
# For light and dark, screens and phones
STYLE = """
:root{--ink:#182031;--soft:#5c677b;--line:#e2e7ef;--card:#fff;--page:#f3f6fa;--glow:#3b6fe0;color-scheme:light dark}
@media (prefers-color-scheme:dark){
:root{--ink:#e8ecf4;--soft:#9aa6ba;--line:#2a3343;--card:#161d29;--page:#0e131b;--glow:#7aa2ff}}
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--ink);
font:15px/1.55 system-ui,-apple-system,"Segoe UI",Roboto,"DejaVu Sans",sans-serif}
main{max-width:1240px;margin:0 auto;padding:44px 22px 64px}
.eyebrow{margin:0;color:var(--glow);font-size:13px;font-weight:600;letter-spacing:.06em;text-transform:uppercase}
h1{font-size:clamp(24px,4vw,36px);line-height:1.15;margin:4px 0 10px;letter-spacing:-.02em;overflow-wrap:anywhere}
h2{font-size:22px;margin:42px 0 12px;overflow-wrap:anywhere}h3{font-size:18px;margin:34px 0 10px;overflow-wrap:anywhere}
.lead{font-size:17px;max-width:80ch;margin:0 0 14px;color:var(--soft)}.lead b{color:var(--ink)}
a{color:var(--glow)}p,ul{max-width:86ch}p,li{overflow-wrap:anywhere}
.chips{display:flex;flex-wrap:wrap;gap:8px;list-style:none;padding:0;margin:0 0 18px}
.chips li{background:var(--card);border:1px solid var(--line);border-radius:15px;padding:3px 12px;font-size:13px;
color:var(--soft)}
.note{color:var(--soft);font-size:13px}
.scroll{overflow-x:auto;border:1px solid var(--line);border-radius:12px;background:var(--card)}
table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums}
th,td{padding:10px 14px;text-align:right;border-bottom:1px solid var(--line);white-space:nowrap;vertical-align:top}
tbody tr:last-child>*{border-bottom:0}thead th{font-size:13px;font-weight:600;color:var(--soft)}
thead small,td small{display:block;font-weight:400;font-size:11px}
th:first-child,.left{text-align:left}tbody th{font-weight:600}
.long{white-space:normal;overflow-wrap:anywhere;min-width:12ch;max-width:30ch}
th:first-child{position:sticky;left:0;background:var(--card);min-width:15ch;max-width:min(46vw,40ch);
overflow-wrap:anywhere;white-space:normal}
td b{font-size:16px;font-weight:600}td i{font-style:normal;color:var(--soft);font-size:12px;margin-left:5px}
.best b{color:var(--glow)}.best .bar span{background:var(--glow)}
.mean{font-weight:600}.none{color:var(--soft)}.untrained th,.untrained td{color:var(--soft)}
.warn{display:inline-block;width:16px;height:16px;line-height:16px;border-radius:50%;text-align:center;font-size:11px;
font-weight:700;background:#cc3f55;color:#fff;margin-left:6px}
.bar{display:block;height:4px;border-radius:2px;background:var(--line);margin:6px 0 0 auto;width:100%;
min-width:76px;max-width:150px}
.bar span{display:block;height:100%;border-radius:2px;background:var(--soft)}
.dot{display:inline-block;width:10px;height:10px;border-radius:50%;margin-right:9px;background:var(--line)}
.small th,.small td{padding:6px 12px;font-size:13px}
.small .left{white-space:normal;overflow-wrap:anywhere;min-width:18ch}
.chosen td,.chosen th{font-weight:700}
.charts{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,380px),1fr));gap:16px}
figure{margin:0;background:var(--card);border:1px solid var(--line);border-radius:12px;padding:14px 8px 8px}
svg{display:block;width:100%;height:auto}polyline{fill:none;stroke-linejoin:round}.line{stroke-width:2.4}
.raw{stroke-width:1;opacity:.25}figcaption{padding:4px 10px 6px;color:var(--soft);font-size:13px}
.choice{display:flex;flex-wrap:wrap;gap:6px}.panel{display:none;width:100%;min-width:0;margin-top:8px}
.pick{position:absolute;opacity:0;width:1px;height:1px}
.pick+label{cursor:pointer;border:1px solid var(--line);border-radius:99px;padding:3px 14px;font-size:13px;
color:var(--soft);background:var(--card)}
.pick:checked+label{color:var(--card);background:var(--glow);border-color:var(--glow)}
.pick:focus-visible+label{outline:2px solid var(--ink)}
.p0:checked~.q0,.p1:checked~.q1,.p2:checked~.q2{display:block}
.band{opacity:.14}.grid{stroke:var(--line)}.base{stroke:var(--soft);stroke-dasharray:4 4}
.tick,.axis{fill:var(--soft);font-size:14px}
.legend{display:flex;flex-wrap:wrap;gap:4px 18px;list-style:none;padding:0;margin:10px;font-size:13px;
color:var(--soft);overflow-wrap:anywhere}.legend .dot{margin-right:6px}
.over{paint-order:stroke;stroke:var(--card);stroke-width:4px}
details{margin:14px 0}summary{cursor:pointer;font-weight:600;padding:6px 0}
pre{background:var(--card);border:1px solid var(--line);border-radius:12px;padding:13px 16px;overflow-x:auto;
font-size:13px}
@media (max-width:560px){
main{padding:26px 14px 40px}th,td{padding:8px 10px}}
"""
