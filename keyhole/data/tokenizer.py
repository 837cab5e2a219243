"""What keyhole needs of a tokenizer, and what it finds out about one."""

import json
from collections.abc import Sequence
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, TypeAlias

from keyhole.errors import UserError, as_user_error

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

Tokenizer: TypeAlias = "PreTrainedTokenizerFast"  # or a slow one: Transformers' have one interface


def needed(tokenizer: "Tokenizer | None", model: object = "the directory") -> Tokenizer:
    if tokenizer is None:
        raise UserError(f"model: {model} has no tokenizer; copy its tokenizer files in")
    return tokenizer


def dropout_lines(tokenizer: Tokenizer) -> list[str]:
    """For a report: that BPE dropout was switched off when the tokenizer was read (model/structure/source.py)."""
    rates = (rate for key, rate in vars(tokenizer).items() if key == "keyhole_dropout")
    return [f"tokenizer: its BPE dropout of {rate} is off: a text has the same tokens in every run" for rate in rates]


def tokenized(tokenizer: Tokenizer, *texts: Any, **how: Any) -> Any:
    """tokenizer(*texts, **how). A pattern of tokenizer.json may give up on a text: the library panics."""
    with as_user_error("model: the tokenizer gives up on a text; is a pattern in its tokenizer.json at fault?"):
        return tokenizer(*texts, **how)


def bos_ids(tokenizer: Tokenizer) -> list[int]:
    """The tokens that the tokenizer adds before every text: [bos] or nothing."""
    with_special, without = tokenizer("a").input_ids, tokenizer("a", add_special_tokens=False).input_ids
    return list(with_special[: with_special.index(without[0])]) if without and without[0] in with_special else []


def special_tokens(tokenizer: Tokenizer) -> dict[int, str]:
    """Control tokens by id: those with a role (bos, eos, pad) and all added as special."""
    named = dict(zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True))
    return named | {i: t.content for i, t in tokenizer.added_tokens_decoder.items() if t.special}


def unknown_id(tokenizer: Tokenizer) -> int | None:
    """The token that stands for text that the tokenizer does not know; None if it has none of its own."""
    own = (
        getattr(tokenizer.backend_tokenizer.model, "unk_token", None) if tokenizer.is_fast else None
    )  # not in settings
    found = tokenizer.convert_tokens_to_ids(own) if isinstance(own, str) else tokenizer.unk_token_id
    return None if found in (tokenizer.bos_token_id, tokenizer.eos_token_id) else found


def pad_token_id(tokenizer: Tokenizer) -> int:
    """The padding id; any valid id works, because padding is masked."""
    return next(i for i in (tokenizer.pad_token_id, tokenizer.eos_token_id, 0) if i is not None)


def content_of(tokenizer: Tokenizer) -> str:
    """Everything of a tokenizer that the tokens of a text depend on, as text; with the versions of what tokenises."""
    fast = tokenizer.is_fast
    content = tokenizer.backend_tokenizer.to_str() if fast else json.dumps(tokenizer.get_vocab(), sort_keys=True)
    libraries = [version(name) for name in ("transformers", "tokenizers", "jinja2")]
    return "\n".join(
        [content, type(tokenizer).__name__, repr(tokenizer), str(tokenizer.special_tokens_map), *libraries]
    )


def token_texts(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    """Each token as text, with the space that it begins with; `?` for ids that the tokenizer does not know.

    A decoder takes the space off the first token of a text. So a token is decoded twice in a row, and the second time
    counts; a token of which two do not begin with one is shown as it is alone."""
    shown = []
    for word in tokenizer.convert_ids_to_tokens(list(ids)):
        alone = "?" if word is None else tokenizer.convert_tokens_to_string([word])
        twice = alone if word is None else tokenizer.convert_tokens_to_string([word, word])
        shown.append(twice[len(alone) :] if word is not None and twice.startswith(alone) else alone)
    return shown
