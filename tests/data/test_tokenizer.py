"""What is found out about a tokenizer, whatever its settings leave out."""

from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders
from tokenizers.models import BPE, WordLevel
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from keyhole.data.tokenizer import bos_ids, content_of, pad_token_id, special_tokens, token_texts, unknown_id

WORDS = {"<unk>": 0, "<s>": 1, "</s>": 2, "<pad>": 3, "a": 4, "the": 5}


def made(unk: str | None = "<unk>", model: Any = None, **roles: str) -> PreTrainedTokenizerFast:
    backend = Tokenizer(model or WordLevel(WORDS, unk_token=unk))
    backend.add_special_tokens([AddedToken("<hidden>", special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, **roles)


def test_padding_needs_no_token_of_its_own() -> None:
    """Its own id, else that of the end, also where they are 0, else the first there is."""
    assert pad_token_id(made(pad_token="<pad>", eos_token="</s>")) == 3
    assert pad_token_id(made(pad_token="<unk>", eos_token="</s>")) == 0
    assert pad_token_id(made(eos_token="</s>")) == 2
    assert pad_token_id(made()) == 0


def test_an_unknown_token_is_that_of_the_model_if_no_setting_names_it() -> None:
    """Not where it is the first or the last token of a text, which others mean."""
    assert unknown_id(made()) == unknown_id(made(unk_token="<unk>", eos_token="</s>")) == 0
    assert (
        unknown_id(made(unk="<s>", bos_token="<s>")) is None and unknown_id(made(unk="</s>", eos_token="</s>")) is None
    )
    bytewise = BPE(vocab={"a": 0, "b": 1}, merges=[])
    assert unknown_id(made(model=bytewise)) is None and unknown_id(made(model=bytewise, unk_token="b")) == 1


def test_what_is_added_before_a_text_and_what_controls_it() -> None:
    plain, with_bos = made(eos_token="</s>"), made(bos_token="<s>")
    processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    with_bos.backend_tokenizer.post_processor = processor
    assert bos_ids(plain) == [] and bos_ids(with_bos) == [1]
    assert special_tokens(plain) == {2: "</s>", 6: "<hidden>"} and special_tokens(with_bos) == {1: "<s>", 6: "<hidden>"}
    assert len({content_of(plain), content_of(with_bos), content_of(made())}) == 3 and content_of(made()) == content_of(
        made()
    )


LLAMA_2 = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", left=1, right=0)]


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
    """SentencePiece and WordPiece take it off a token that is decoded alone; a part of a character stays a mark, and so
    does an id that there is no token for."""
    tokenizer = made(model=WordLevel({word: i for i, word in enumerate(words)}, unk_token=words[0]))
    tokenizer.backend_tokenizer.decoder = decoder
    assert token_texts(tokenizer, [*range(len(words)), 1000]) == [*shown, "?"]
