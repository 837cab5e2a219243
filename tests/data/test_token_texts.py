"""Rows that are shown token by token keep the spaces between words, whatever the tokenizer's decoder strips."""

from typing import Any

import pytest
from tokenizers import Tokenizer, decoders
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from keyhole.data.token_texts import token_texts

LLAMA_2 = [
    decoders.Replace("▁", " "),
    decoders.ByteFallback(),
    decoders.Fuse(),
    decoders.Strip(" ", left=1, right=0),
]


@pytest.mark.parametrize(
    ("decoder", "words", "shown"),
    [
        (
            decoders.Sequence(LLAMA_2),
            ["<s>", "▁The", "▁so", "up", "▁▁", "<0x0A>"],
            ["<s>", " The", " so", "up", "  ", "\n"],
        ),
        (decoders.Metaspace(), ["▁The", "▁so", "up"], [" The", " so", "up"]),
        (decoders.WordPiece(), ["the", "so", "##up", "."], [" the", " so", "up", "."]),
        (decoders.ByteLevel(), ["The", "Ġsoup", "Ã", "Ċ"], ["The", " soup", "\ufffd", "\n"]),
    ],
    ids=["llama-2", "metaspace", "wordpiece", "byte-level"],
)
def test_a_token_keeps_its_space(decoder: Any, words: list[str], shown: list[str]) -> None:
    """SentencePiece and WordPiece take it off a token that is decoded alone; a part of a character stays a mark."""
    made = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token=words[0]))
    made.decoder = decoder
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made)
    assert token_texts(tokenizer, list(range(len(words)))) == shown
