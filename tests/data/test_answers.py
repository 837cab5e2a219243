"""All that the assistant wrote is trained, whatever the template does to it; what is lost is counted."""

import datetime
import json
from typing import Any

import pytest

from keyhole.data.chat_template import ChatTemplate, Program
from keyhole.data.examples import example_of
from keyhole.data.opened import Record
from keyhole.data.settings import DataSettings
from keyhole.data.tokens import Renderer
from keyhole.errors import UserError
from tests.data import chats
from tests.data.chats import chat, tokenizer
from tests.data.test_tokens import trained_text

ARGUMENTS = {"city": "Paris", "days": 2}


def call(arguments: Any = ARGUMENTS, **turn: Any) -> dict[str, Any]:
    """An assistant turn that calls a tool."""
    calls = [{"type": "function", "function": {"name": "weather", "arguments": arguments}}]
    return {"role": "assistant", "content": "", "tool_calls": calls} | turn


def talk(**turn: Any) -> list[dict[str, Any]]:
    """Question, call, result, answer."""
    question, result = {"role": "user", "content": "Weather?"}, {"role": "tool", "content": "sunny, 20"}
    return [question, call(**turn), result, {"role": "assistant", "content": "Sun."}]


def trained(template: str | None, messages: list[dict[str, Any]], **how: Any) -> tuple[list[str], Any]:
    """The trained stretches of a chat, and what the template lost."""
    tok = tokenizer(template)
    example = example_of(Record("data.jsonl", "line", 7, {"messages": messages}), "messages")
    tokens = Renderer(tok, DataSettings(**how))([example])[0]
    return trained_text(tok, tokens), tokens.lost


WRITTEN = '\n<tool_call>\n{"name": "weather", "arguments": {"city": "Paris", "days": 2}}\n</tool_call><|im_end|>'


@pytest.mark.parametrize("arguments", [ARGUMENTS, json.dumps(ARGUMENTS)], ids=["object", "JSON text"])
def test_tool_calls_are_trained_and_results_are_not(arguments: Any) -> None:
    found, lost = trained(chats.CALLING, talk(arguments=arguments))
    assert found == [WRITTEN, "Sun.<|im_end|>"] and not any(lost)


def test_calls_that_a_template_drops_are_not_trained_as_an_empty_turn() -> None:
    """The turn would teach to stop at once; it is left out and counted, with what it said before the call."""
    found, lost = trained(chats.CHATML, talk())
    assert found == ["Sun.<|im_end|>"] and lost["calls"] == 1
    found, lost = trained(chats.CHATML, talk(content="Let me see."))
    assert found == ["Sun.<|im_end|>"] and lost["calls"] == 1


def test_reasoning_is_trained_where_it_is_written_and_counted_where_it_is_not() -> None:
    """The thought of the last answer is part of it; that of an earlier one is dropped by the template."""
    said = [*chat("Hi"), {"role": "assistant", "content": "A.", "reasoning": "hm"}]
    found, lost = trained(chats.CALLING, said)
    assert found == ["<think>\nhm\n</think>\n\nA.<|im_end|>"] and lost["reasoning"] == 0
    found, lost = trained(chats.CALLING, [*said, *chat("More?", "B.")])
    assert found == ["A.<|im_end|>", "B.<|im_end|>"] and lost["reasoning"] == 1
    _, lost = trained(chats.THINKING, chat("Hi", "<think>well</think>\n\nA.", "More?", "B."))
    assert lost["reasoning"] == 1 and lost["text"] == 0


def test_the_end_of_an_answer_does_not_depend_on_what_follows() -> None:
    """A template that closes no turn: a stop token of the model that follows is the end, any other is not."""
    said = chat("Hi", "A.", "More?", "B.")
    assert trained(chats.JOINING, said)[0] == ["A.", "B.</s>"]
    stop = tokenizer().convert_tokens_to_ids("<|user|>")
    assert trained(chats.JOINING, said, stop_token_ids=(stop,))[0] == ["A.<|user|>", "B.</s>"]
    assert trained(chats.CHANNELS, said)[0] == ["<|system|>final\nA.<|end|>", "<|system|>final\nB.</s>"]


def test_a_template_that_marks_its_answers_is_believed() -> None:
    """Exactly what stands inside {% generation %} is trained, without turns of weight 0; no end is added."""
    said = chat("Hi", "A.", "More?", "B.")
    assert trained(chats.MARKED, said)[0] == ["A.<|end|>", "B.<|end|>"]
    said[1]["weight"] = 0
    assert trained(chats.MARKED, said)[0] == ["B.<|end|>"]
    bare = chats.MARKED.replace("{{ '<|end|>' }}{% endgeneration %}", "{% endgeneration %}{{ '<|end|>' }}")
    assert trained(bare, said)[0] == ["B."]


@pytest.mark.parametrize("flag", [{"weight": 0}, {"train": False}, {"train": 0}, {"loss": False}, {"training": False}])
def test_a_turn_is_taken_out_by_weight_or_train(flag: dict[str, Any]) -> None:
    tok = tokenizer(chats.CHATML)
    sharegpt = [{"from": "human" if i % 2 == 0 else "gpt", "value": text} for i, text in enumerate("abcd")]
    sharegpt[1] |= flag
    messages = chat(*"abcd")
    messages[1] |= flag
    for layout, turns in (("conversations", sharegpt), ("messages", messages)):
        example = example_of(Record("f", "line", 1, {layout: turns}), layout)
        assert trained_text(tok, Renderer(tok)([example])[0]) == ["d<|im_end|>"]


def test_a_template_with_a_mistake_names_the_row() -> None:
    with pytest.raises(UserError, match=r"line 7: the chat template cannot write this chat.*unexpected '}'"):
        trained(chats.CHATML, chat("Hi", "A."), chat_template="{{ messages } }}")


@pytest.mark.parametrize("end", [None, True, False])
def test_the_end_token_can_be_left_out(end: bool | None) -> None:
    tok = tokenizer(chats.CLOSING)
    renderer = Renderer(tok, DataSettings(train_end_token=end))
    pair = example_of(Record("f", "line", 1, {"prompt": "Answer:", "completion": " yes"}), "prompt_completion")
    talk = example_of(Record("f", "line", 2, {"messages": chat("Hi", "A.")}), "messages")
    texts = [trained_text(tok, tokens) for tokens in renderer([pair, talk])]
    assert texts == ([[" yes"], ["A."]] if end is False else [[" yes</s>"], ["A.<|end|>\n</s>"]])


MARKED_TURN = (
    "<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>"
    "{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}"
)
LATE_MARKS = {
    "macro": "{% macro turn(m) %}" + MARKED_TURN + "{% endmacro %}{% for m in messages %}{{ turn(m) }}{% endfor %}",
    "set": "{% for m in messages %}{% set t %}" + MARKED_TURN + "{% endset %}{{ t }}\n{% endfor %}",
    "call": "{% macro w() %}[{{ caller() }}]{% endmacro %}{% for m in messages %}{% call w() %}"
    + MARKED_TURN
    + "{% endcall %}{% endfor %}",
}


@pytest.mark.parametrize("place", LATE_MARKS)
def test_marks_are_found_in_text_that_is_written_later(place: str) -> None:
    """A macro or a set block makes its text before it is written; the mark is where the text ends up."""
    found, lost = trained(LATE_MARKS[place], chat("Hi", "A.", "More?", "A."))
    assert found == ["A.<|im_end|>", "A.<|im_end|>"] and not any(lost)


def test_marked_text_that_is_changed_afterwards_is_refused() -> None:
    changing = "{% for m in messages %}{% set t %}" + MARKED_TURN + "{% endset %}{{ t[:-2] }}{% endfor %}"
    with pytest.raises(UserError, match="generation"):
        trained(changing, chat("Hi", "A."))


def test_nothing_is_trained_of_a_chat_in_which_the_template_marks_nothing() -> None:
    """The template has marks, and none around this answer: it is counted, not guessed."""
    unless_last = "{% for m in messages %}" + MARKED_TURN.replace("'assistant'", "'assistant' and not loop.last")
    found, lost = trained(unless_last + "{% endfor %}", chat("Hi", "A."))
    assert found == [] and lost["text"] == 1


@pytest.mark.parametrize("call", ["weather()", {"arguments": {}}, {"name": "weather", "parameters": ARGUMENTS}])
def test_a_call_that_no_template_can_write_is_refused(call: Any) -> None:
    """Without a name, or with its arguments under another key: they would be trained as {}."""
    with pytest.raises(UserError, match=r"line 7: column messages\[1\].tool_calls\[0\]"):
        trained(chats.CALLING, talk(tool_calls=[call]))


@pytest.mark.parametrize("role", ["model", "Assistant", "gpt"])
def test_an_assistant_by_another_name_is_refused(role: str) -> None:
    """Its turns would be read and never trained on."""
    with pytest.raises(UserError, match="expected assistant"):
        trained(chats.CHATML, [*chat("Hi", "A."), {"role": role, "content": "B."}])
    assert trained(chats.CHATML, [*chat("Hi", "A."), {"role": role, "content": "B.", "weight": 0}])


def test_what_a_turn_says_under_keys_of_its_own_is_counted() -> None:
    """Text that the template does not know; a turn that has nothing else is not trained as an empty answer."""
    said = chat("Hi", "A.")
    found, lost = trained(chats.CHATML, [said[0], said[1] | {"thought": "hm", "id": None}])
    assert found == ["A.<|im_end|>"] and lost == {"text": 1}
    found, lost = trained(chats.CHATML, [said[0], {"role": "assistant", "content": "", "refusal": "No."}])
    assert found == [] and lost == {"text": 1, "empty": 1}
    found, lost = trained(chats.CHATML, [said[0], {"role": "assistant", "content": ""}])
    assert found == ["<|im_end|>"] and lost == {"empty": 1}


def test_a_system_prompt_a_question_and_tools_that_are_not_written_are_counted() -> None:
    """A template that skips turns, or knows no tools, changes what the answer answers; white space is no text."""
    said = [{"role": "system", "content": " Be brief.\n"}, *chat("First?", "A.", "Second?", "B.")]
    assert not any(trained(chats.LLAMA3, said)[1])
    skipping = (
        "{{ eos_token }}{% for m in messages %}{% if m.role != 'system' and m.content != 'First?' %}"
        "{{ m.content + eos_token }}{% endif %}{% endfor %}"
    )
    found, lost = trained(skipping, said)
    assert [text[:2] for text in found] == ["A.", "B."] and lost["context"] == 2
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {}}}]
    row = {"messages": chat("Hi", "A."), "tools": tools}
    example = example_of(Record("data.jsonl", "line", 7, row), "messages")
    for template, count in ((chats.CHATML, 1), ("{{ tools | tojson }}" + chats.CHATML, 0)):
        assert Renderer(tokenizer(template), DataSettings())([example])[0].lost["tools"] == count


def test_a_header_is_given_though_the_prompt_goes_on_with_a_thought() -> None:
    """The role is plain text behind a special token, and the prompt opens a thought that old answers have lost."""
    opens = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{% if m.role == 'assistant' and not loop.last %}{{ m.content.split('</think>')[-1] }}"
        "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
    )
    found, lost = trained(opens, chat("Hi", "<think>\nhm</think>A.", "More?", "<think>\nhm</think>B."))
    assert found == ["A.<|im_end|>", "hm</think>B.<|im_end|>"] and lost["reasoning"] == 1
    assert trained(opens, chat("Hi", "A."))[0] == ["A.<|im_end|>"]


SAID = chat("Hi", "A.", "More?", "B.")
SHAPES = {
    # It writes a system prompt of its own at the first message, which here is an answer.
    "own system prompt": (
        "{% for m in messages %}{% if loop.first %}<|im_start|>system\nBe good.<|im_end|>{% endif %}"
        "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
        SAID[1:], ["A.<|im_end|>", "B.<|im_end|>"],
    ),
    # The answer is closed inside the loop; what is said afterwards the assistant did not write.
    "remark at the end": (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% else %}<|im_start|>system\nOver.<|im_end|>{% endif %}",
        SAID[:2], ["A.<|im_end|>"],
    ),
    # A first loop lists the turns: what it says of an answer is not the answer.
    "list of the turns": (
        "Roles:{% for m in messages %} {{ m.role }}{% endfor %}\n"
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
        SAID, ["A.<|im_end|>", "B.<|im_end|>"],
    ),
    # The loop writes the generation prompt, and another line break after the last answer; of two answers in a row the
    # second is trained without its header.
    "prompt in the loop": (
        "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content }}{% if m.role == 'assistant' %}"
        "{{ eos_token if loop.last else eos_token + '\n' }}{% endif %}"
        "{% if loop.last and add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}{% endfor %}",
        [*SAID[:2], SAID[3]], ["A.</s>", "B.</s>"],
    ),
}  # fmt: skip


@pytest.mark.parametrize(("template", "messages", "expected"), SHAPES.values(), ids=SHAPES)
def test_answers_are_found_whatever_stands_around_them(template: str, messages: list, expected: list[str]) -> None:
    assert trained(template, messages)[0] == expected


@pytest.mark.parametrize("cities", [("Paris", "Rome"), ("Paris", "Paris")], ids=["other", "equal"])
def test_a_second_call_of_the_same_function_is_missed(cities: tuple[str, str]) -> None:
    """Of two calls the template writes the first; the name of the function is there, but not twice."""
    first = chats.CALLING.replace("in message.tool_calls", "in (message.tool_calls or [])[:1]")
    two = [{"function": {"name": "weather", "arguments": {"city": city}}} for city in cities]
    found, lost = trained(first, talk(tool_calls=two))
    assert found == ["Sun.<|im_end|>"] and lost["calls"] == 1
    assert trained(chats.CALLING, talk(tool_calls=two))[1]["calls"] == 0


@pytest.mark.parametrize("arguments", ["{'city': 'Paris'}", '{"city": "Par', "[1]", [1, 2], 5], ids=str)
def test_a_call_with_arguments_that_are_no_object_is_refused(arguments: Any) -> None:
    """Text that is not JSON would be written as a text, which no program can call with."""
    with pytest.raises(UserError, match=r"tool_calls\[0\].arguments: expected an object, or one as JSON text"):
        trained(chats.CALLING, talk(arguments=arguments))


def test_results_of_tools_that_are_not_written_are_counted() -> None:
    """As they stand, or as JSON; a template that skips them leaves an answer without its reason."""
    said = [*talk()[:2], {"role": "tool", "content": 'it is "fine"\nand dry'}, talk()[3]]
    encoding = chats.CALLING.replace(
        "<tool_response>\n' + message.content", "<tool_response>\n' + message.content | tojson"
    )
    skipping = chats.CALLING.replace("for message in messages", "for message in messages if message.role != 'tool'")
    assert len({chats.CALLING, encoding, skipping}) == 3
    lost = [trained(template, said)[1]["context"] for template in (chats.CALLING, encoding, skipping)]
    assert lost == [0, 0, 1]


def test_another_turn_inside_of_an_answer_is_refused() -> None:
    """A template that writes question and answer at once, when its loop is at the answer, would train both; likewise
    one that writes the result of a tool into the turn that called it."""
    pairs = (
        "{% for m in messages if m.role == 'assistant' %}{{ '<|user|>' + messages[2 * loop.index0].content }}"
        "{{ '<|assistant|>' + m.content + '<|end|>' }}{% endfor %}"
    )
    with pytest.raises(UserError, match="line 7: cannot find turn 2"):
        trained(pairs, chat("First?", "A.", "Second?", "B."))
    with pytest.raises(UserError, match="line 7: cannot find turn 2"):
        trained(chats.AHEAD, talk())
    assert trained(chats.CHATML, chat("First?", "First? A."))[0] == ["First? A.<|im_end|>"]


@pytest.mark.parametrize("ours", ["reasoning_content", "reasoning", "thinking"])
@pytest.mark.parametrize("theirs", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_reaches_a_template_that_calls_it_otherwise(ours: str, theirs: str) -> None:
    template = chats.CALLING.replace("message.reasoning_content", f"message.{theirs}")
    found, lost = trained(template, [*chat("Hi"), {"role": "assistant", "content": "A.", ours: "hm"}])
    assert found == ["<think>\nhm\n</think>\n\nA.<|im_end|>"] and not any(lost)


@pytest.mark.parametrize("prompt", ["<think>", "<|user|><|assistant|>", "A long"])
@pytest.mark.parametrize("answer", ["<b>bold</b>", "</think>no", "A."])
def test_an_answer_that_begins_like_the_prompt_is_trained_from_its_first_character(prompt: str, answer: str) -> None:
    """A letter in common with a generation prompt that no finished answer has is part of the answer."""
    template = (
        "{% for m in messages %}{{ 'Q: ' + m.content + ' A:' if m.role == 'user' else m.content + eos_token }}"
        f"{{% endfor %}}{{% if add_generation_prompt %}}{{{{ '{prompt}' }}}}{{% endif %}}"
    )
    assert trained(template, chat("why", answer, "how", answer))[0] == [f"{answer}</s>"] * 2


def test_documents_and_variables_of_a_row_reach_the_template() -> None:
    """They are written as the template writes them; what it never writes or reads is counted, also if a setting has
    it."""
    writing = "{% for d in documents or [] %}{{ d.text + '\n' }}{% endfor %}{{ 'short\n' if brief else '' }}"
    documents = [{"id": "1", "text": "Paris is large,\nand old."}]
    row = {"messages": chat("Hi", "A."), "documents": documents, "chat_template_kwargs": {"brief": True, "other": None}}
    as_text = {key: json.dumps(value) for key, value in row.items()}
    for given in (row, as_text):
        example = example_of(Record("data.jsonl", "line", 7, given), "messages")
        tok = tokenizer(writing + chats.CHATML)
        tokens = Renderer(tok, DataSettings())([example])[0]
        assert tok.decode(tokens.ids_T).startswith("Paris is large,\nand old.\nshort\n<|im_start|>")
        assert trained_text(tok, tokens) == ["A.<|im_end|>"] and not any(tokens.lost)
        settings = DataSettings(chat_template_kwargs={"enable_thinkng": False})
        lost = Renderer(tokenizer(chats.CHATML), settings)([example])[0].lost
        assert lost["documents"] == 1 and lost["variables"] == 1
    encoded = Renderer(tokenizer("{{ documents | tojson }}" + chats.CHATML), DataSettings())([example])[0]
    assert encoded.lost["documents"] == 0


@pytest.mark.parametrize("column", [{"documents": "a text"}, {"chat_template_kwargs": {"tools": []}}], ids=str)
def test_what_no_template_can_be_given_is_refused(column: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=f"line 7: column {next(iter(column))}"):
        example_of(Record("data.jsonl", "line", 7, {"messages": chat("Hi", "A."), **column}), "messages")


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
