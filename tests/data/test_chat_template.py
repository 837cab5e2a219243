"""Chats are written as Transformers writes them, and passed in the form that a template takes."""

import datetime
from typing import Any

import pytest

from keyhole.data.chat_template import ChatTemplate, Program
from tests.data import chats
from tests.data.chats import chat, tokenizer
from tests.data.test_answers import talk, trained


@pytest.mark.parametrize("arguments", [{"a": 1}, '{"a": 1}'], ids=["object", "JSON text"])
def test_a_template_that_joins_arguments_gets_them_as_text(arguments: Any) -> None:
    """Such a template fails on an object; it is found out, and both forms are written alike."""
    found, _ = trained(chats.JOINING, talk(arguments=arguments))
    assert found == ['<call>weather {"a": 1}', "Sun.</s>"]


def test_the_template_of_a_setting_replaces_the_tokenizers() -> None:
    """As text; with the variables of chat_template_kwargs, here one that adds a word."""
    given = chats.BARE + "{{ 'bye' if polite }}"
    assert trained(chats.CHATML, chat("Hi", "A."), chat_template=given)[0] == ["A.\n</s>"]
    more = {"chat_template": given, "chat_template_kwargs": {"polite": True}}
    assert trained(chats.CHATML, chat("Hi", "A."), **more)[0] == ["A.\nbye</s>"]


def test_texts_are_those_of_transformers() -> None:
    """Every template here, with and without the generation prompt, writes what apply_chat_template writes."""
    names = [name for name, value in vars(chats).items() if name.isupper() and isinstance(value, str)]
    assert len(names) >= 12
    for name in names:
        tok = tokenizer(getattr(chats, name))
        for prompt in (False, True):
            ours = ChatTemplate(tok).write(chat("Hi", " A.\n", "More?"), prompt)
            options = {"tokenize": False, "add_generation_prompt": prompt, "date_string": "26 Jul 2024"}
            assert ours == tok.apply_chat_template(chat("Hi", " A.\n", "More?"), **options), name


DAY = datetime.date(2025, 3, 4)


def test_each_character_belongs_to_a_message() -> None:
    """What is written at a turn of the loop is that message's, also when an inner loop runs over other messages."""
    source = "head{% for m in messages %}{{ m.content }}{% for n in messages[1:] %}{{ n.role[0] }}{% endfor %}!"
    done = Program(source + "{% endfor %}tail", DAY).render(chat("A", "B"), {})
    assert done.text == "headAa!Ba!tail" and done.after == "tail"
    parts = [("A", 0), ("a", 1), ("!", 0), ("B", 1), ("a", 1), ("!", 1)]
    assert [(done.text[a:b], i) for a, b, i in done.segments] == parts


def test_the_date_is_the_one_it_is_given() -> None:
    """strftime_now does not look at the clock."""
    assert Program("{{ strftime_now('%d %b %Y') }}", DAY).render([], {}).text == "04 Mar 2025"
