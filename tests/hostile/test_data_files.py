"""Training data, task files and chat templates that are damaged or made to harm."""

import gzip
import json
import os
from collections.abc import Callable
from typing import Any

import pyarrow
import pyarrow.parquet as parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keyhole.machine import worker
from tests.hostile.conftest import MANY, Place
from tests.hostile.values import ESCAPE, odd, places_of, with_value, write_json

ROWS: list[dict[str, Any]] = [
    {"prompt": "a", "completion": "b"},
    {"text": "a b c"},
    {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
    {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b", "weight": 1}], "system": "s"},
    {"instruction": "a", "input": "b", "output": "c", "history": [["d", "e"]]},
    {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "a"}]},
            {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]},
            {"role": "tool", "content": "1", "name": "f"},
            {"role": "assistant", "content": "b", "reasoning_content": "c", "train": True},
        ],
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}],
    },
    {"prompt": "a", "candidates": ["b", "c"], "answer": 1},
]


@settings(parent=MANY, max_examples=40)
@given(data=st.data())
def test_odd_values_in_rows(new_place: Callable[[], Place], data: st.DataObject) -> None:
    """Any value of a row of any layout replaced by one that does not belong there, for training and as a task."""
    place = new_place()
    row = data.draw(st.sampled_from(ROWS))
    write_json(place.data, with_value(row, data.draw(st.sampled_from(places_of(row))), data.draw(odd)))
    place.run("data", str(place.config))
    if "candidates" in row:
        place.run("eval", str(place.model), "--tasks", str(place.data), "device=cpu")


TEXTS: dict[str, bytes] = {
    "b.jsonl": b'{"text": ' + b"[" * 100_000,
    "c.jsonl": b'{"text": ' + b"9" * 5000 + b"}",
    "d.jsonl": b"\xff\xfe{\x00}\x00",
    "e.jsonl": b'{"text": "' + b"x" * 2**24 + b'"}',
    "f.jsonl": b"\n" * 2**20,
    "k.csv": b"text\n" + b'"' + b"x" * 2**24,
    "l.csv": b",".join(f"\x1b]0;{i}\x07".encode() for i in range(50_000)) + b"\n1\n",
    "v.tsv": b"text\tb\n" + b'"' * (2**22 + 1) + b"\t1\t2\n" + b"9" * 2**22 + b"x\n",
    "o.parquet": b"PAR1" + b"\xff" * 100 + b"PAR1",
    "p.arrow": b"ARROW1\0\0" + b"\xff" * 100,
    "q.jsonl.gz": b"\x1f\x8b\x08\x00" + b"\xff" * 100,
    "r.jsonl.gz": b"",  # made by the test: packing it takes half a second
    f"{ESCAPE}.jsonl": b"{",
    "u.jsonl": json.dumps({ESCAPE: 1, **{f"c{i}": 1 for i in range(50_000)}}).encode(),
}


@pytest.mark.parametrize("name", TEXTS, ids=lambda name: ascii(name).strip("'"))
def test_a_damaged_file_is_refused(place: Place, name: str) -> None:
    """By its name, and the line or row where there is one."""
    path = place.root / name
    path.write_bytes(TEXTS[name] or gzip.compress(b'{"text": "' + bytes(2**26) + b'"}'))
    ended = place.checked(f'train_data="{path}"' if ESCAPE not in name else f"train_data={place.root}/*2J.jsonl")
    assert ended.code == 2 and ascii(name).strip("'").split("\\")[0] in ended.printed


def test_sixteen_gibibytes_in_a_kilobyte(place: Place) -> None:
    """Parquet stores a text once and how often it occurs; gzip within it does the rest."""
    path = place.root / "large.parquet"
    text = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * 16384, pyarrow.int32()), ["x" * 2**20])
    parquet.write_table(pyarrow.table({"text": text}), path, compression="gzip")
    assert path.stat().st_size < 2**17
    assert "large.parquet" in place.refused("train", str(place.config), f"train_data={path}", "--dry-run")


@pytest.mark.parametrize("kind", ["pipe.jsonl", "zero.jsonl", "loop.jsonl", "saved", "none.parquet"])
def test_what_is_no_file_is_refused(place: Place, kind: str) -> None:
    """Nobody waits for a pipe, reads a device, or follows a link in a circle; not in a saved data set either."""
    path = place.root / kind
    if kind == "pipe.jsonl":
        os.mkfifo(path)
    elif kind == "saved":
        path.mkdir()
        os.mkfifo(path / "state.json")
        (path / "dataset_dict.json").symlink_to("/dev/zero")
    else:
        path.symlink_to({"zero.jsonl": "/dev/zero", "loop.jsonl": str(path)}.get(kind, "/nowhere"))
    assert kind in place.refused("data", str(place.config), f"train_data={path}")


GROW = "{% set n = namespace(x='x') %}{% for i in range(70) %}{% set n.x = GROWN %}{% endfor %}{{ n.x }}"
TEMPLATES = {
    "loops": "{% for i in range(9999) %}{% for j in range(9999) %}{% endfor %}{% endfor %}",
    "writes in loops": "{% for i in range(99999) %}{% for j in range(99999) %}x{% endfor %}{% endfor %}",
    "writes long texts": "{% for i in range(99999) %}" + "y" * 10_000 + "{% endfor %}",
    "searches": "{% set b = 'x' * 20000000 %}{% for i in range(99999) %}{% if 'yx' in b %}{% endif %}{% endfor %}",
    "multiplies": "{{ 'x' * 10**12 }}",
    "grows": GROW.replace("GROWN", "n.x ~ n.x"),
    "holds itself twice": GROW.replace("GROWN", "[n.x, n.x]"),
    "calls itself twice": "{% macro f(n) %}{{ f(n - 1) ~ f(n - 1) if n }}{% endmacro %}{{ f(50) }}",
    "calls itself": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "reaches for the system": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "reaches by a filter": "{{ messages | attr('__class__') | attr('__init__') | attr('__globals__') }}",
    "reaches by a format": "{{ '{0.__class__.__init__.__globals__}'.format(messages) }}",
    "includes": "{% include '/etc/passwd' %}",
    "imports": "{% import 'os' as os %}{{ os }}",
    "is no template": "{% for",
    "raises an escape": "{{ raise_exception('" + ESCAPE + "') }}",
    "has no end of names": "{{ " + "a." * 5000 + "b }}",
    "is nested": "{% if true %}" * 5000 + "{% endif %}" * 5000,
    "is deep": "{{ " + "(" * 20_000 + "1" + ")" * 20_000 + " }}",
    "has a slow pattern": "{{ ('a' * 5000) | urlize }}" * 50,
    "asks for a number": "{{ 10 ** 10 ** 10 }}",
    "pads": "{{ '%10000000000d' % 1 }}",
    "pads by a format": "{{ '{:10000000000}'.format(1) }}",
    "pads by a filter": "{{ 'x' | center(10000000000) }}",
    "is large": "x" * 2**22,
    "is long": "{{ x }}" * 2**18,
    "changes the chat": "{{ messages.append(1) }}",
    "pads in a format": "{{ '{:{}}'.format('{:{}}'.format(1, 2 * 10**9), 10**9) }}",
    "cuts in pieces": "{% for i in range(99999) %}{% set x = ('y' * 10**7)[1:][::-1] | list %}{% endfor %}",
    "rounds": "{{ 1 | round(30000000) }}{% for i in range(999) %}{{ (10 ** 30000000) | round(-3) }}{% endfor %}",
    "slices": "{{ messages | slice(300000000) | list | length }}",
}
GOOD = "{% for m in messages %}{{ m.content + eos_token }}{% endfor %}"


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_that_harms_is_refused(place: Place, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No time, no memory, no way out of the sandbox; the next template is written as ever."""
    monkeypatch.setattr(worker, "SECONDS", 1)
    write_json(place.data, ROWS[2])
    (place.model / "chat_template.jinja").write_text(TEMPLATES[name])
    ended = place.run("data", str(place.config))
    assert ended.code == 2 and "root:" not in ended.printed and "<class" not in ended.printed, ended.printed[:2000]
    assert "chat template" in ended.printed, ended.printed[:2000]
    assert place.run("data", str(place.config), f"chat_template={GOOD}").code == 0
    if name in ("multiplies", "reaches for the system", "raises an escape", "is no template"):
        place.run("chat", str(place.model), "device=cpu", "--max-new-tokens", "1", stdin="hello\n")


@pytest.mark.parametrize(
    "task", [json.dumps(row) for row in [{}, {"candidates": []}, {"candidates": [1, 2], "prompt": 1}]]
)
def test_tasks_that_are_none_are_refused(place: Place, task: str) -> None:
    path = place.root / "task.jsonl"
    path.write_text(task)
    assert "task.jsonl" in place.refused("eval", str(place.model), "--tasks", str(path), "device=cpu")
