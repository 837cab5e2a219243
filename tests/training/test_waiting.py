"""What a start says while it waits: by a clock that the test holds."""

import io
import json
from pathlib import Path

import pytest

from keyhole.data.prepare import prepare
from keyhole.loading import load
from keyhole.machine.progress import listening, tell
from keyhole.training.display import CLEAR, Waiting
from tests.data.chats import tokenizer


class Clock:
    """Seconds that pass when the test says so."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def test_plain_lines_are_rare() -> None:
    """Without a terminal: nothing within two seconds, then a line every ten, and no control codes."""
    clock, stream = Clock(), io.StringIO()
    waiting = Waiting(stream=stream, clock=clock)
    with waiting.phase("reading data"):
        for second in range(15):
            clock.now_s = 100.0 + second
            tell("tokenising", second * 1000, lambda: 15_000, "rows")
    assert stream.getvalue().splitlines() == [
        "keyhole: tokenising: 2,000 of 15,000 rows",
        "keyhole: tokenising: 12,000 of 15,000 rows",
    ]
    assert str(waiting) == "start: 14.0 s (reading data 14.0)"


def test_a_terminal_has_one_line_that_is_gone_at_the_end() -> None:
    """The line is drawn over, and cleared when the work is done, also when it fails."""
    clock, stream = Clock(), Terminal()
    waiting = Waiting(stream=stream, clock=clock)
    with pytest.raises(KeyError), waiting.phase("loading the model"):
        tell("reading weights", 2**30, 4 * 2**30, "bytes")
        raise KeyError
    text = stream.getvalue()
    assert text == f"{CLEAR}loading the model{CLEAR}reading weights: 1.0 of 4.0 GiB{CLEAR}"


def test_nothing_is_said_in_silence_or_into_a_closed_stream(capsys: pytest.CaptureFixture[str]) -> None:
    """A comparison has the screen; a stream that nobody reads is no reason to stop."""
    closed = Terminal()
    closed.close()
    for waiting in (Waiting(silent=True), Waiting(stream=closed)):
        with waiting.phase("importing", now=True):
            tell("reading", 1)
    assert capsys.readouterr() == ("", "")


def test_tokenising_and_reading_weights_tell_how_far_they_are(tmp_path: Path, tiny_model: Path) -> None:
    """Rows; bytes of all bytes, the last time all of them."""
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": "Hello"}) + "\n" for _ in range(700)))
    heard = []
    with listening(lambda what, done, total, unit: heard.append((what, done, total() if callable(total) else total))):
        prepare(str(path), tokenizer())
        load(tiny_model, device="cpu").close()
    rows = [(done, total) for what, done, total in heard if what == "tokenising"]
    sizes = [(done, total) for what, done, total in heard if what == "reading weights"]
    assert rows == [(512, None), (700, None)]
    assert len(sizes) > 5 and sizes[-1][0] == sizes[-1][1] and sizes == sorted(sizes)
