"""The frame of every page: head, style sheet, colours, and a body of parts; and small elements that several pages
share.

A page is one file without scripts or external files. A choice of the reader (curves over steps or over time) is made
with form inputs and rules of the style sheet. Callers must escape text from files; control characters are removed here,
and what has no UTF-8 form (names of files may be any bytes) becomes a question mark.
"""

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from keyhole.machine.text import without_controls
from keyhole.pages.style import COLOURS, STYLE


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
