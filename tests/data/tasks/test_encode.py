"""Questions in tokens: the boundary between prompt and candidate, bos, cuts, and ends."""

from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from keyhole.data.tasks.encode import Encoder
from keyhole.data.tasks.question import Question
from keyhole.errors import UserError


def bpe(*texts: str, bos: bool = False) -> PreTrainedTokenizerFast:
    """A small BPE that merges across what people think of as boundaries."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
    trainer = trainers.BpeTrainer(special_tokens=["<unk>", "<s>", "</s>"], vocab_size=200, show_progress=False)
    tokenizer.train_from_iterator(texts * 20, trainer)
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")


def test_boundary_where_tokens_merge() -> None:
    """A token across prompt and candidate belongs to the candidate, and all candidates begin at the same place."""
    tokenizer = bpe("Answer: yes", "Answer: no", "Answer: ")
    question = Question("Answer: ", ("yes", "no", "maybe"), 0)
    alone = tokenizer("Answer: ").input_ids
    rows = Encoder(tokenizer).encode([question])[0]
    begins = {next(t for t, label in enumerate(row.labels) if label >= 0) for row in rows}
    assert len(begins) == 1
    begin = begins.pop()
    assert tokenizer("Answer: yes").input_ids[: len(alone)] != alone and 0 < begin
    for row, candidate in zip(rows, question.candidates, strict=True):
        whole = tokenizer("Answer: " + candidate).input_ids
        assert row.input_ids[-len(whole) :] == whole
        assert row.labels[begin:] == row.input_ids[begin:]


def test_candidates_of_the_same_tokens_are_refused() -> None:
    """Their scores would be equal, whatever the model has learned; two wrong ones, or two right ones, may be."""
    encoder = Encoder(bpe("Answer: yes", "Answer: no"))
    with pytest.raises(UserError, match="the candidates '\u732b', '\u72ac' have the same tokens"):
        encoder.encode([Question("Answer: ", ("yes", "\u732b", "\u72ac"), 1)])
    assert encoder.encode([Question("Answer: ", ("yes", "\u732b", "\u72ac"), 0)])
    assert encoder.encode([Question("Answer: ", ("yes", "\u732b", "\u72ac"), 1, also=(2,))])


def test_bos_comes_first_once() -> None:
    tokenizer = bpe("good soup", bos=True)
    encoder = Encoder(tokenizer)
    for prompt in ("good", "<s>good", ""):
        for row in encoder.encode([Question(prompt, (" soup", " s"), 0)])[0]:
            assert row.input_ids[0] == 1 and row.input_ids[1] != 1
            assert row.labels[0] == -100 and row.labels[-1] == row.input_ids[-1]


def test_prompts_of_generated_answers_lose_their_beginning_but_not_bos() -> None:
    """As long as the limit with bos; at least one token of the prompt stays."""
    tokenizer = bpe("good soup", bos=True)
    ids = tokenizer("good soup is good soup", add_special_tokens=False).input_ids
    question = Question("good soup is good soup", ("",), 0)
    for limit, kept in ((None, len(ids)), (len(ids) + 1, len(ids)), (len(ids), len(ids) - 1), (1, 1)):
        encoder = Encoder(tokenizer, limit)
        assert encoder.prompts([question, question]) == [[1, *ids[-kept:]]] * 2
        assert encoder.truncated == 2 * (kept < len(ids))


def test_an_empty_prompt_is_begun_with_something(tiny_model: Path) -> None:
    """Without bos the end-of-text token stands before the first scored token, which nothing could predict else."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    row = Encoder(tokenizer).encode([Question("", ("yes", "no"), 0)])[0][0]
    assert row.input_ids[0] == tokenizer.eos_token_id
    assert row.labels == [-100, *tokenizer("yes").input_ids]


def test_chat_prompts_go_through_the_template(tiny_model: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    turns = [{"role": "user", "content": "How was it?"}]
    row = Encoder(tokenizer).encode([Question(turns, ("good", "bad"), 0)])[0][0]
    assert tokenizer.decode(row.input_ids) == "<|user|>How was it?<|end|><|assistant|>good"
    assert tokenizer.decode([i for i in row.labels if i >= 0]) == "good"


@pytest.mark.parametrize("bos", [False, True])
def test_long_prompts_lose_their_beginning(bos: bool) -> None:
    tokenizer = bpe("abcdefghij", bos=bos)
    tokenizer.add_tokens(list("abcdefghij"))  # one token a letter
    encoder = Encoder(tokenizer, max_length=6)
    rows = encoder.encode([Question("abcdefg", ("hi", "j"), 0), Question("ab", ("c", "d"), 0)])
    texts = [tokenizer.decode(row.input_ids, skip_special_tokens=True).replace(" ", "") for row in rows[0]]
    assert texts == (["efghi", "defgj"] if bos else ["defghi", "cdefgj"])
    assert all(len(row.input_ids) == 6 for row in rows[0]) and encoder.truncated == 1
    assert not bos or rows[0][0].input_ids[0] == 1
    with pytest.raises(UserError, match="takes 6 in all"):
        encoder.encode([Question("ab", ("abcdef", "a"), 0)])


def test_mistakes_are_named(tiny_model: Path) -> None:
    with pytest.raises(UserError, match="no tokenizer"):
        Encoder(None)
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    tokenizer.chat_template = "{{ raise_exception('only users') }}"
    with pytest.raises(UserError, match="task.jsonl, line 3: .*only users"):
        Encoder(tokenizer).encode([Question([{"role": "x", "content": ""}], ("a", "b"), 0, "task.jsonl, line 3")])
    tokenizer.backend_tokenizer.normalizer = normalizers.Replace("~", "")
    with pytest.raises(UserError, match="line 4: candidate '~' adds no token"):
        Encoder(tokenizer).encode([Question("a", ("~", "b"), 0, "task.jsonl, line 4")])


def letters(max_length: int | None = None, overlong: str = "truncate") -> Encoder:
    """One token per letter."""
    tokenizer = bpe("abcdefghij")
    tokenizer.add_tokens(list("abcdefghij"))
    return Encoder(tokenizer, max_length, overlong)


@pytest.mark.parametrize(("prompt", "answer", "left"), [("ab", "cdefghij", "abcdef"), ("abcdefgh", "ij" * 5, "fghiji")])
def test_a_long_answer_in_free_text_loses_its_end(prompt: str, answer: str, left: str) -> None:
    """It keeps half a row at least, and what a short prompt leaves."""
    encoder = letters(6)
    row = encoder.encode([Question(prompt, (answer,), 0)])[0][0]
    assert encoder.tokenizer.decode(row.input_ids).replace(" ", "") == left and encoder.truncated == 1


def test_overlong_questions_are_dropped_or_refused() -> None:
    long = Question("abcdefgh", ("i", "j"), 0, "a.jsonl, line 2")
    assert letters(6, "drop").encode([long, Question("a", ("b", "c"), 0)])[0] == []
    with pytest.raises(UserError, match="a.jsonl, line 2: 9 tokens, more than max_length=6"):
        letters(6, "error").encode([long])
