"""The one exception that means "the user can fix this", and what is printed of things found in files.

The command line prints the message of a UserError and exits with 2; anything else is our fault, keeps its
traceback and exits with 1. A message names the key or file, the value found, the limit, and the change that
fixes it.

Names and texts in a message often come from a file, and a file may hold anything: terminal escapes that move the
cursor or retitle the window, half a character that cannot be printed, a hundred thousand column names. So every
message is cleaned where it is made (`printable`), and lists are cut (`listed`), here and nowhere else. A warning of the
Python API names the caller's line, however deep in keyhole it was found (`warn`).
"""

import contextlib
import sys
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path

MOST_CHARACTERS = 10_000
MOST_NAMES = 12
OWN = str(Path(__file__).parent) + "/"


def printable(text: object, most: int = MOST_CHARACTERS, kept: str = "\n\t") -> str:
    """The text with control characters, escapes and half characters written out (\\x1b), but for those `kept`; cut at
    `most` characters."""
    text = str(text)
    cut = f"... ({len(text) - most:,} more characters)" if len(text) > most else ""
    shown = "".join(c if c.isprintable() or c in kept else c.encode("unicode_escape").decode() for c in text[:most])
    return shown + cut


def listed(names: Iterable[object], most: int = MOST_NAMES) -> str:
    """`a, b, c`; of a long list the first `most`, each cut to a line, and how many more there are."""
    names = list(names)
    shown = ", ".join(printable(name, 80, kept="") for name in names[:most])
    return shown + (f", ... and {len(names) - most:,} more" if len(names) > most else "")


def warn(message: str) -> None:
    """A warning that points to the line outside of keyhole, and of the library code between, that led to it."""
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and _is_inside(frame.f_code.co_filename):
        level, frame = level + 1, frame.f_back
    warnings.warn(printable(message), stacklevel=level)


def _is_inside(filename: str) -> bool:
    return filename.startswith(OWN) or "/site-packages/torch/" in filename or filename == contextlib.__file__


class UserError(ValueError):
    """Something in the input, the config or the machine that the user can change. code: of a command that it ends."""

    code = 2

    def __init__(self, message: object = "") -> None:
        super().__init__(printable(message))


def is_foreign(error: BaseException) -> bool:
    """Whether a library raised it: any Exception but ours, and a panic of Rust, which is none."""
    is_exception = isinstance(error, Exception) and not isinstance(error, UserError)
    return is_exception or type(error).__name__ == "PanicException"


@contextlib.contextmanager
def as_user_error(said: str) -> Iterator[None]:
    """Whatever is raised about what the user gave, by a library too, becomes a UserError. said: how it begins."""
    try:
        yield
    except BaseException as error:
        if not is_foreign(error):
            raise
        raise UserError(f"{said}: {str(error).strip() or type(error).__name__}") from error


class Closed(UserError, AttributeError):
    """The model was closed: it, its methods and its module have nothing left."""

    def __init__(self) -> None:
        super().__init__("model: the model was closed (close(), or the end of its `with`); load it again")


class NonFinite(UserError):
    """A loss, a gradient or a weight is NaN or infinite."""


class Mixed(NonFinite):
    """A step was applied to a part of the weights, which are of two steps now: nothing may be written from them."""
