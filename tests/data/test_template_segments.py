"""A chat template may do what templates do, and not eat memory or time."""

import datetime

import jinja2
import pytest

from keyhole.data.bill import BUDGET, Runaway
from keyhole.data.files import Record
from keyhole.data.formats import normalise
from keyhole.data.render import Renderer
from keyhole.data.settings import PrepareSettings
from keyhole.data.template_segments import Template
from keyhole.errors import UserError
from tests.data import chats
from tests.data.chats import chat, tokenizer

DAY = datetime.date(2025, 3, 4)
GROW = "{% set ns = namespace(x='x') %}{% for i in range(70) %}{% set ns.x = GROWN %}{% endfor %}{{ ns.x }}"
SEARCH = (
    "{% set b = 'x' * 20000000 %}{% set c = ['x'] * 100000 %}"
    "{% for i in range(99999) %}{% if TEST %}{% endif %}{% endfor %}"
)
HOSTILE = {
    "nested loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "loop that writes": "{% for i in range(99999) %}{% for j in range(99999) %}x{% endfor %}{% endfor %}",
    "product": "{{ 'x' * 10**12 }}",
    "product of lists": "{{ ['x' * 1000000] * 1000000 }}",
    "doubled by +": GROW.replace("GROWN", "ns.x + ns.x"),
    "doubled by ~": GROW.replace("GROWN", "ns.x ~ ns.x"),
    "a list that holds itself twice": GROW.replace("GROWN", "[ns.x, ns.x]"),
    "a dict that holds itself twice": GROW.replace("GROWN", "{'a': ns.x, 'b': ns.x}"),
    "squared": GROW.replace("'x'", "10").replace("GROWN", "ns.x * ns.x"),
    "power": "{{ 10 ** 10 ** 10 }}",
    "padding": "{{ 'x' | center(10000000000) }}",
    "padding by a method": "{{ 'x'.ljust(10000000000) }}",
    "format %": "{{ '%10000000000d' % 1 }}",
    "format {}": "{{ '{:10000000000}'.format(1) }}",
    "replace": "{{ ('x' * 100000).replace('x', 'y' * 100000) }}",
    "join": "{{ range(99999) | join('y' * 1000000) }}",
    "macro that calls itself": "{% macro f(n) %}{{ f(n - 1) ~ f(n - 1) if n }}{% endmacro %}{{ f(50) }}",
    "indent": "{{ ('x\n' * 100000) | indent(100000) }}",
    "indent by a text": "{{ ('x\n' * 30000) | indent('x' * 10000) | length }}",
    "indent by a number": "{{ ('x\n' * 30000) | indent(3000) | length }}",
    "indent at other breaks": "{{ ('x\u2028' * 30000) | indent('x' * 10000) | length }}",
    "deep JSON": GROW.replace("range(70)", "range(400)").replace("GROWN", "[ns.x]").replace("{{ ns.x }}", "")
    + "{{ ns.x | tojson(indent='x' * 10000) | length }}",
    "text in text": SEARCH.replace("TEST", "'yx' in b"),
    "text not in text": SEARCH.replace("TEST", "b not in b"),
    "text in a list": SEARCH.replace("TEST", "i in c"),
    "the test in": SEARCH.replace("TEST", "'yx' is in b"),
    "filter by a test": SEARCH.replace("TEST", "['yx'] | select('in', b) | list"),
    "equal texts": SEARCH.replace("TEST", "b == b ~ ''"),
    "the test eq": SEARCH.replace("TEST", "b is eq b"),
    "equal lists": SEARCH.replace("TEST", "c == c"),
    "a chain of comparisons": SEARCH.replace("TEST", "0 < 1 < 2 and b <= b <= b"),
    "JSON": "{{ ([1] * 10000) | tojson(indent='x' * 1000000) }}",
    "text kept aside": "{% set y %}{% for i in range(99999) %}" + "y" * 10_000 + "{% endfor %}{% endset %}",
    "constant": "{% set a = 'x' | center(10000000000) %}",
    "endless recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
}


@pytest.mark.parametrize("source", HOSTILE.values(), ids=HOSTILE.keys())
def test_a_template_that_loops_or_multiplies_is_stopped(source: str) -> None:
    """Before it has taken memory or time; the error names the row."""
    renderer = Renderer(tokenizer(chats.CHATML), PrepareSettings(chat_template=source))
    example = normalise(Record("data.jsonl", "line", 7, {"messages": chat("Hi", "A.")}), "messages")
    with pytest.raises(UserError, match="line 7: the chat template cannot write this chat"):
        renderer([example])


def test_an_honest_template_is_far_from_the_bound() -> None:
    """A chat of 400 turns, in a template that looks at all turns at each turn."""
    source = "{% for m in messages %}{% for n in messages %}{% if n.role == 'x' %}{% endif %}{% endfor %}"
    source += "{{ m.role ~ ': ' ~ m.content | trim ~ '\n' }}{{ messages | length }}{% endfor %}"
    template = Template(source, DAY)
    template.render(chat(*["word " * 50] * 400), {})
    assert template.sandbox.watch.left > BUDGET / 2


@pytest.mark.parametrize(
    "source",
    [
        "a in b", "a not in b", "b in b", "a in c", "a in d", "a == b", "b != a", "1 < n < 5", "1 < n < 3 < z",
        "n >= z", "n in range(9)", "a in none_such", "a == none_such", "b is in d", "n is ge 3", "a is lower",
        "c == [a, b]", "a in [b, a]", "n in (1, 2)", "a in d.values()", "0 < n in (1, 3)",
    ],
)  # fmt: skip
def test_comparisons_keep_their_meaning(source: str) -> None:
    """Each answers as Jinja does without a bill."""
    values = {"a": "x", "b": "xyz", "c": ["x", "xyz"], "d": {"xyz": "x"}, "n": 3, "z": 4}
    plain = jinja2.Environment().from_string(f"{{{{ {source} }}}}").render(values)
    assert Template(f"{{{{ {source} }}}}", DAY).render([], values).text == plain


def test_the_budget_grows_with_the_text() -> None:
    """Ten million characters pass through a template that touches them ten times."""
    source = "{% for m in messages %}{{ (m.content | trim).replace('a', 'b') + '' }}{% endfor %}"
    assert len(Template(source, DAY).render([{"role": "user", "content": "a" * 10**7}], {}).text) == 10**7


def test_each_character_belongs_to_a_message() -> None:
    """What is written at a turn of the loop is that message's, also when an inner loop runs over other messages."""
    source = "head{% for m in messages %}{{ m.content }}{% for n in messages[1:] %}{{ n.role[0] }}{% endfor %}!"
    source += "{% endfor %}tail"
    done = Template(source, DAY).render(chat("A", "B"), {})
    assert done.text == "headAa!Ba!tail"
    assert [(done.text[a:b], i) for a, b, i in done.segments] == [
        ("A", 0),
        ("a", 1),
        ("!", 0),
        ("B", 1),
        ("a", 1),
        ("!", 1),
    ]


def test_the_date_is_the_one_it_is_given() -> None:
    """strftime_now does not look at the clock; whether it was called is known."""
    done = Template("{{ strftime_now('%d %b %Y') }}", DAY).render([], {})
    assert (done.text, done.dated) == ("04 Mar 2025", True)
    assert not Template("x", DAY).render([], {}).dated


def test_a_template_has_no_way_out() -> None:
    """Attributes of Python's own objects stay closed."""
    with pytest.raises(Exception, match="unsafe"):
        Template("{{ ''.__class__.__mro__ }}{{ ''.__class__.__mro__[1].__subclasses__() }}", DAY).render([], {})
    with pytest.raises(Runaway, match="1,048,577 characters"):
        Template("x" * (2**20 + 1), DAY)
