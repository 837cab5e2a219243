"""Programs that came with a model may take no memory and no time, and have no way out."""

import math
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

from keyhole.data.answers import Chat, find
from keyhole.data.chat_template import ChatTemplate
from keyhole.data.examples import example_of
from keyhole.data.opened import Record
from keyhole.data.tasks.spec import Expression, extracted
from keyhole.data.tokens import Renderer
from keyhole.errors import UserError
from keyhole.machine import worker
from keyhole.machine.worker import bounded
from tests.data import chats
from tests.data.chats import chat, tokenizer


def test_a_chat_without_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "SECONDS", 1)
    example = example_of(Record("data.jsonl", "line", 7, {"messages": chat("Hi", "A.") * 4000}), "messages")
    with pytest.raises(UserError, match="line 7: the chat template, for 8,000 turns, takes more than 1 s"):
        Renderer(tokenizer(chats.CHATML))([example])


def test_ten_million_characters_pass() -> None:
    """The bound is far from long texts in templates that touch them often."""
    source = "{% for m in messages %}{{ (m.content | trim).replace('a', 'b') + '' }}{% endfor %}"
    made = tokenizer(source)
    example = example_of(Record("f", "line", 1, {"messages": chat("a" * 10**7, "c", "d", "e")}), "messages")
    chat_ = Chat(example.turns or [], {}, "f")
    assert bounded(partial(find, ChatTemplate(made)), [chat_], str)[0].text == "b" * 10**7 + "cde"


def _odd(number: int) -> int:
    if number % 2 == 0:
        raise UserError(f"{number} is even")
    return number


def test_results_come_in_order_and_an_error_ends_the_batch() -> None:
    """The first item that fails says why, and nothing of the batch is left for the next."""
    numbers = list(range(1, 4000, 2))
    assert bounded(_odd, numbers, str) == numbers
    with pytest.raises(UserError, match="^2 is even$"):
        bounded(_odd, [1, 2, 3, 4], str)
    assert bounded(_odd, [5], str) == [5]


def test_no_torch_in_the_process() -> None:
    """It is to start at once, and to be small."""
    while worker._idle:
        worker._idle.pop().close()
    assert Renderer(tokenizer(chats.CHATML))(
        [example_of(Record("f", "line", 1, {"messages": chat("a", "b")}), "messages")]
    )
    maps = Path(f"/proc/{worker._idle[-1].process.pid}/maps").read_text()
    assert "torch" not in maps and "numpy" not in maps


def test_expressions_and_patterns_of_a_task_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "SECONDS", 1)
    with pytest.raises(UserError, match="^row takes more than 1 s"):
        bounded(
            Expression("range(99999) | map('string') | map('wordcount') | sum * 10 ** (10 ** 9)", "x").run,
            [{}] * 2,
            lambda _: "row",
        )
    with pytest.raises(UserError, match=r"extract: `\(a\+\)\+\$` takes more than 1 s"):
        extracted("(a+)+$", ["a" * 40 + "b"])
    assert extracted(r"= (\d)", ["a = 4, b = 5", "none"]) == ["5", None]


def test_an_import_is_not_charged(monkeypatch: pytest.MonkeyPatch) -> None:
    """The libraries of a module that an item needs may be larger than what the item may take."""
    monkeypatch.setattr(worker, "MEMORY_BYTES", 2**28)
    assert bounded(math.sqrt, [4.0], str) == [2.0]
    assert bounded(torch.is_tensor, [0], str) == [False]
    with pytest.raises(UserError, match="takes more than 0.25 GiB of memory"):
        bounded(bytes, [2**29], str)


def test_what_runs_in_the_process_is_imported_without_torch() -> None:
    names = ("answers", "chat_template", "opened", "sources", "tasks.spec", "tasks.question")
    code = f"import sys, keyhole.data.{', keyhole.data.'.join(names)}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
