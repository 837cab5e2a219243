"""Documentation of the settings, from the line of each field of schema.py and of a method's settings.

keyhole config show              every key, its type, default and line
keyhole config show CONFIG       the values of a run, each with its line
python -m keyhole.config.docs    the Markdown of docs/config.md (a test checks that it is up to date)
"""

import sys
from collections.abc import Iterator
from dataclasses import MISSING, fields

from keyhole.config.fields import Setting, sections, settings
from keyhole.config.schema import TrainConfig
from keyhole.config.types import dump, to_dict
from keyhole.limits import describe
from keyhole.methods import METHODS
from keyhole.methods.settings import kinds
from keyhole.methods.traits import Traits

HEAD = """# Settings

A config is a YAML file with the keys below: `keyhole train config.yaml`. Any key can be overridden on the
command line as `key=value`, with a dot for sections: `keyhole train config.yaml learning_rate=1e-5
zo.directions=4`. Lists are written `train_data=[a.jsonl,b.jsonl]`, no value is `null`. Relative paths are
relative to the directory the command is run in. Sections of all methods may stand in one file; only the one
of `method` is used. In Python the same names are arguments of the method (`keyhole.LOMO(model, lr=1e-3,
activations="host")`; `adam_beta1`, `adam_beta2`, `adam_epsilon` are `beta1`, `beta2`, `eps` there).

This page is made by `python -m keyhole.config.docs` from keyhole/config/schema.py and keyhole/methods/*/traits.py.
"""


def default_text(setting: Setting) -> str:
    """The default as typed after `key=`; `required` if there is none."""
    if setting.default is MISSING:
        return "required"
    value = setting.default
    return f"{value:g}" if isinstance(value, float) else dump(value).removesuffix("\n").removesuffix("\n...")


def by_section() -> Iterator[tuple[str, str, list[Setting]]]:
    """(section, "" at the top level; what it is; its settings), the top level first."""
    rates = {row.section: f" Default learning_rate: {row.learning_rate:g}." for row in METHODS.values()}
    for name, cls in {"": TrainConfig, **sections()}.items():
        group = [s for s in settings().values() if s.key.rpartition(".")[0] == name]
        yield name, (cls.__doc__ or "") + rates.get(name, ""), group


def markdown() -> str:
    """The text of docs/config.md."""
    lines = [HEAD]
    for name, about, group in by_section():
        lines += [f"## {f'`{name}`' if name else 'Top level'}", "", about, ""]
        lines += ["| key | type | default | |", "|---|---|---|---|"] if group else ["(No keys of its own.)"]
        for s in group:
            kind = "a section below" if s.key == "method" else describe(s.type).replace("|", "\\|")
            lines.append(f"| `{s.key}` | {kind} | `{default_text(s)}` | {s.doc} |")
        lines.append("")
    return "\n".join(lines)


def constructor(row: Traits) -> str:
    """The settings that the class of a method takes, for `help(keyhole.LOMO)`."""
    cls: type = row.settings
    usual, (low, high) = row.rates(row.settings())
    lines = [
        f"{each.name}: {describe(kinds(cls)[each.name])}, default {each.default!r}\n        "
        + str(each.metadata.get("doc") or settings()[each.metadata.get("key", each.name)].doc)
        for each in fields(cls)
    ]
    rate = f"lr: number, default {usual:g}; known to work from {low:g} to {high:g}"
    return "\n    ".join(["\n\nSettings, beside the model that keyhole.load returns:\n", rate, *lines])


def explain() -> str:
    lines = []
    for name, about, group in by_section():
        lines += [f"[{name or 'top level'}] {about}", ""]
        for s in group:
            lines += [f"  {s.key} = {default_text(s)}    ({describe(s.type)})", f"      {s.doc}"]
        lines.append("")
    return "\n".join(lines).rstrip()


def annotated(config: TrainConfig) -> str:
    """The config as YAML with each key's line as a comment above it; only with the section of the chosen method."""
    values, lines = to_dict(config), []
    others = {row.section for row in METHODS.values() if row.name != config.method}
    for name, about, group in by_section():
        if name in others:
            continue
        indent, own = ("  ", values[name]) if name else ("", values)
        lines += [f"# {about}", f"{name}:"] if name and group else []
        for s in group:
            key = s.key.rpartition(".")[2]
            lines += [f"{indent}{line}" for line in (f"# {s.doc}", *dump({key: own[key]}).rstrip("\n").split("\n"))]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.stdout.write(markdown())
