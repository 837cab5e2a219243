"""How much time and memory a template may use, and how much it has used.

    budget = 2^26 + 64 * characters of the messages         an iteration of a loop costs 64, a call 2048

This allows about a million iterations, or 64 million characters: a few seconds. Long templates in use need some 10^5
for a chat of ten turns. No value can be larger than its cost: a list is charged with everything nested in it when it is
made, so a list that contains itself twice, nested sixty times, is stopped at a million items.
"""

from typing import Any

BUDGET, PER_CHARACTER, PER_ITEM, PER_CALL = 2**26, 64, 64, 2048
TOO_MUCH = "the template loops or multiplies text beyond all bounds, so it was stopped"


class Runaway(Exception):
    """A template exceeded its budget of memory or time."""


class Watch:
    """The state of one rendering: the cost so far, and which message the output belongs to. brackets: written around
    marked text, where its position cannot be known while it is made."""

    def __init__(self, messages: list[dict[str, Any]], budget: int, brackets: tuple[str, str] | None = None) -> None:
        self.left, self.position, self.dated, self.brackets = budget, 0, False, brackets
        self.index = {id(message): i for i, message in enumerate(messages)}
        self.loops: list[int | None] = []  # for each running loop: the index of its current message
        self.segments: list[tuple[int, int, int]] = []
        self.marked: list[tuple[int, int]] = []
        self.since = 0

    def spend(self, amount: int) -> None:
        self.left -= amount
        if self.left < 0:
            raise Runaway(TOO_MUCH)

    def write(self, text: str) -> str:
        self.spend(len(text))
        self.position += len(text)
        return text

    def note(self) -> None:
        """Assigns the output since the last call to the current message."""
        owner = next((i for i in reversed(self.loops) if i is not None), None)
        if owner is not None and self.position > self.since:
            self.segments.append((self.since, self.position, owner))
        self.since = self.position

    def enter(self) -> None:
        self.note()
        self.loops.append(None)

    def turn(self, item: Any, literal: int) -> None:
        self.spend(PER_ITEM + literal)
        self.note()
        self.loops[-1] = self.index.get(id(item))

    def leave(self) -> None:
        self.note()
        self.loops.pop()


def size(value: Any, most: int) -> int:
    """The cost of a value with everything nested in it: 1 per character, 64 per item; stops above `most`."""
    total, todo = 0, [value]
    while todo and total <= most:
        item = todo.pop()
        total += PER_ITEM if todo or total else 1
        if isinstance(item, str | bytes):
            total += len(item)
        elif isinstance(item, int) and not isinstance(item, bool):
            total += item.bit_length() // 3
        elif isinstance(item, dict):
            todo += [*item.keys(), *item.values()]
        elif isinstance(item, list | tuple | set):
            todo += item
    return total


def flat_size(value: Any) -> int:
    """The cost of a value without nested values."""
    return 1 + len(value) if isinstance(value, str | bytes | list | tuple | dict) else 1


def depth(value: Any) -> int:
    """The nesting depth of lists and dicts."""
    level, here = 0, [value]
    while here := [item for item in here if isinstance(item, list | tuple | dict)]:
        level += 1
        here = [child for item in here for child in (item.values() if isinstance(item, dict) else item)]
    return level
