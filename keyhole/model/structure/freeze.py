"""`freeze`: which parameters a run leaves as they are.

A parameter is frozen if one of these describes it:

    embeddings              the tables of tokens and positions, and the head over the vocabulary
    model.layers.0          a module: everything below it
    *.mlp.down_proj.*       a name with `*` for any characters, `?` for one, [0-9] for one of several

A tied parameter has several names, and is frozen by any of them. A frozen parameter has `requires_grad` False, as if
the user had called requires_grad_(False) on it: it has no gradient, no noise and no optimizer state, and the memory
plan counts none. It is marked, too: a layer whose weight is frozen by this setting gets no adapters, whereas users of
peft freeze a whole model before they add some.

For `zo` it also takes noise away: a step moves every trained weight at random (docs/methods.md, "Which weights zo
trains").
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from keyhole.errors import UserError

EMBEDDINGS = "embeddings"
WILD = "*?["


def freeze(module: nn.Module, described: str | Sequence[str] | None) -> None:
    """Freezes the parameters so described; UserError for a description that fits none, or if none would be trained."""
    if described is None:
        return
    texts = [described] if isinstance(described, str) else described
    if not isinstance(texts, list | tuple) or not all(isinstance(text, str) for text in texts):
        raise UserError(f"freeze: found {described!r:.60}, expected text, such as {EMBEDDINGS!r}, or a list of texts")
    for text in texts:
        found = list(_described(module, text))
        if not found:
            raise UserError(f"freeze: no parameter of {type(module).__name__} is called {text!r}{_meant(module, text)}")
        param: Any  # gets an attribute
        for param in found:
            param.requires_grad_(False)
            param.keyhole_frozen = True
    if not any(param.requires_grad for param in module.parameters()):
        raise UserError("freeze: every parameter is frozen, so there is nothing to train; freeze fewer")


@contextmanager
def frozen_as(module: nn.Module, described: str | Sequence[str] | None) -> Iterator[None]:
    """A context in which these parameters are frozen, and none that `freeze` was told before; afterwards as before."""
    before = [(param, param.requires_grad, is_left_out(param)) for param in module.parameters()]
    try:
        for param, _, left_out in before:
            param.requires_grad_(param.requires_grad or left_out)
        freeze(module, described)
        yield
    finally:
        one: Any
        for one, trained, left_out in before:
            one.requires_grad_(trained)
            one.keyhole_frozen = left_out


def is_left_out(param: nn.Parameter) -> bool:
    """Whether `freeze` describes this parameter."""
    return bool(vars(param).get("keyhole_frozen"))


def _described(module: nn.Module, text: str) -> Iterator[nn.Parameter]:
    if text == EMBEDDINGS:
        yield from _embeddings(module)
        return
    for name, param in module.named_parameters(remove_duplicate=False):
        if name == text or name.startswith(f"{text}.") or (any(c in text for c in WILD) and fnmatchcase(name, text)):
            yield param


def _embeddings(module: nn.Module) -> Iterator[nn.Parameter]:
    """The weights of every embedding table, and of the head over the vocabulary (not of a classifier's head)."""
    for part in module.modules():
        if isinstance(part, nn.Embedding):
            yield from part.parameters()
    model: Any = module  # a class of Transformers
    head = model.get_output_embeddings()
    if head is not None:
        yield from head.parameters()


def _meant(module: nn.Module, text: str) -> str:
    """The names most like it, or how names look."""
    names = [name for name, _ in module.named_parameters(remove_duplicate=False)]
    owners = {name[:end] for name in names for end, letter in enumerate(name) if letter == "."}
    known = [*names, *sorted(owners), EMBEDDINGS]
    close = get_close_matches(text, known, n=2)
    return f"; did you mean {' or '.join(close)}?" if close else f"; names are such as {names[-1]}, or {EMBEDDINGS}"
