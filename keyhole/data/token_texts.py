"""Each token as text, with the space that it begins with.

A decoder takes the space off the first token of a text: SentencePiece's because encoding put one there, WordPiece's
because words are joined by spaces. So a token that is decoded alone has no space, and rows shown token by token read
`Thesoupwascold`. Here a token is decoded twice in a row, and the second time counts; a token of which two do not begin
with one is shown as it is alone.
"""

from typing import Any


def token_texts(tokenizer: Any, ids: list[int]) -> list[str]:
    """One text per id; `?` for ids that the tokenizer does not know."""
    return [_text(tokenizer, word) if word is not None else "?" for word in tokenizer.convert_ids_to_tokens(ids)]


def _text(tokenizer: Any, word: str) -> str:
    alone: str = tokenizer.convert_tokens_to_string([word])
    twice: str = tokenizer.convert_tokens_to_string([word, word])
    return twice[len(alone) :] if twice.startswith(alone) else alone
