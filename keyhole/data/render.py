"""Turns examples into token ids, and decides which of them are trained on.

    chat            text and answer spans from the template (answers.py), tokenised once, nothing added:
                    the template writes bos itself, so it is never doubled
    plain text      [bos] prompt answer eos; bos only if the tokenizer adds one, neither if already there; the pieces
                    of a document (documents.py) have an eos after the last of them

The whole text is tokenised at once, and answers are mapped to tokens by character offsets. Tokenising prompt and answer
separately would give tokens that the model has never seen ("Answer: " + "yes" has a separate space token, "Answer: yes"
does not). A token with characters on both sides of the boundary counts as answer; nearly always the prompt's own tokens
are a prefix of the whole, and there is no such token. The report counts the exceptions. For a tokenizer without offsets
(not a fast one), the text up to the boundary is tokenised separately; the answer begins where the tokens differ.
Offsets stay inside the tokenizers library, and only the few needed ones are read: as Python tuples they would take 150
bytes per token.

The end-of-turn token is trained, so that the model learns to stop. White space that a template writes after it is not
trained: generation has ended by then. If the last answer has no special token at its end, an eos is added and trained.
`train_end_token: false` excludes all of these from the loss, and adds no eos: if answers are single words that are
scored, not generated, the end would be half of the trained tokens.

    label[t] = id[t] where trained, else -100; label[0] = -100 always, since nothing predicts the first token
"""

import re
import unicodedata
from typing import Any, NamedTuple

import numpy as np

from keyhole.data.answers import AnswerFinder, Lost, Rendered
from keyhole.data.chat_template import ChatTemplate, bos_ids, special_tokens
from keyhole.data.formats import Example
from keyhole.data.report import count_names
from keyhole.data.settings import PrepareSettings
from keyhole.data.turns import is_trained
from keyhole.errors import UserError

CONTROL = re.compile(r"<[|\uff5c][^\s<>{}]{1,40}?[|\uff5c]>")


class Tokens(NamedTuple):
    """One example in tokens."""

    ids_T: np.ndarray  # int32
    trained_T: np.ndarray  # bool
    end_id: int | None  # the special token that ends the last answer
    straddles: bool  # a token spans the beginning of an answer
    unpredicted: bool = False  # an answer begins with the first token, which nothing predicts: it is not trained on
    lost: Lost = Lost()


def check_text(text: str, where: str) -> None:
    """Refuses lone surrogates: JSON can escape them, tokenizers cannot read them."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = text[error.start]
        raise UserError(
            f"{where}: the text has {half!a}, half of a character (a lone UTF-16 surrogate), near "
            f"{text[max(0, error.start - 20) : error.start + 20]!a}; write the whole character, or take it out"
        ) from None


class Alphabet:
    """Finds what a tokenizer does not have in its vocabulary.

    missing    characters that it leaves out: a BPE without bytes and without an unknown token may have none for them
    foreign    what looks like a control token (<|im_end|>) and is none, with the number of its texts: of data, or of a
               chat template, that were made for another model"""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.seen: set[str] = set()
        self.missing: set[str] = set()
        self.own: dict[str, bool] = {}
        self.foreign: dict[str, int] = {}

    def look(self, texts: list[str]) -> None:
        """Tries the characters of these texts that were not tried before; white space and marks may have no token."""
        new = set().union(*texts) - self.seen
        self.seen |= new
        if alone := sorted(each for each in new if unicodedata.category(each)[0] not in "CMZ"):
            made = self.tokenizer(alone, add_special_tokens=False, verbose=False)["input_ids"]
            self.missing |= {each for each, ids in zip(alone, made, strict=True) if not ids}
        for text in texts:
            count_names(self.foreign, (word for word in dict.fromkeys(CONTROL.findall(text)) if not self._is_own(word)))

    def _is_own(self, word: str) -> bool:
        if word not in self.own:
            found = self.tokenizer.convert_tokens_to_ids(word)
            self.own[word] = found is not None and self.tokenizer.convert_ids_to_tokens(found) == word
        return self.own[word]


class Renderer:
    """Turns examples into tokens, many at a time."""

    def __init__(self, tokenizer: Any, how: PrepareSettings | None = None) -> None:
        self.tokenizer, self.how = tokenizer, (how := how or PrepareSettings())
        self.template = ChatTemplate(
            tokenizer, how.template_text, how.chat_template_kwargs, how.day, tuple(how.stop_token_ids)
        )
        self.answers, self.alphabet = AnswerFinder(self.template), Alphabet(tokenizer)
        self.special = special_tokens(tokenizer)
        self.bos, self.eos = bos_ids(tokenizer), tokenizer.eos_token_id
        self.trains_end = how.train_end_token is not False

    def __call__(self, examples: list[Example]) -> list[Tokens]:
        """Tokens of each example, in order."""
        texts = [self._text(example) for example in examples]
        for example, rendered in zip(examples, texts, strict=True):
            check_text(rendered.text, example.record.where)
        self.alphabet.look([rendered.text for rendered in texts])
        options = {"add_special_tokens": False, "return_attention_mask": False, "verbose": False}
        batch = self.tokenizer([t.text for t in texts], **options)
        encodings = batch.encodings if self.tokenizer.is_fast else [None] * len(texts)
        return [
            self._tokens(example, rendered, ids, encoding)
            for example, rendered, ids, encoding in zip(examples, texts, batch["input_ids"], encodings, strict=True)
        ]

    def _text(self, example: Example) -> Rendered:
        if example.turns is not None:
            return self.answers.find(example)
        text = example.prompt + example.answer
        return Rendered(text, [(len(example.prompt), len(text))])

    def _tokens(self, example: Example, rendered: Rendered, ids: list[int], encoding: Any) -> Tokens:
        locate = Locate(self.tokenizer, rendered.text, ids, encoding)
        trained_T: np.ndarray = np.zeros(len(ids), dtype=bool)
        end_id = None
        for start, end in rendered.spans:
            a, b = locate(start), locate(end)
            b = self._end_of_turn(ids, a, b) if self.trains_end else self._without_end(ids, a, b)
            trained_T[a:b] = True
            end_id = ids[b - 1] if b > a and ids[b - 1] in self.special else None
        ids_T = np.array(ids, dtype=np.int32)
        if trained_T.any() and end_id is None and self._is_open(example, rendered):
            ids_T, trained_T, end_id = np.append(ids_T, np.int32(self.eos)), np.append(trained_T, True), self.eos
        if example.turns is None and self.bos and ids[: len(self.bos)] != self.bos:
            ids_T = np.concatenate([np.array(self.bos, dtype=np.int32), ids_T])
            trained_T = np.concatenate([np.zeros(len(self.bos), dtype=bool), trained_T])
        if self.how.train_on == "all":
            trained_T[:] = True
        has_question = example.turns is not None or bool(example.prompt)
        unpredicted = self.how.train_on == "answers" and has_question and bool(trained_T[:1].any())
        trained_T[:1] = False
        straddles = any(locate.is_inside(start) for start, _ in rendered.spans)
        return Tokens(ids_T, trained_T, end_id, straddles, unpredicted, rendered.lost)

    def _end_of_turn(self, ids: list[int], a: int, b: int) -> int:
        """Where answer [a, b) ends without the white space after its last special token."""
        last = next((t for t in range(b - 1, a - 1, -1) if ids[t] in self.special), b - 1)
        return last + 1 if last < b - 1 and not self.tokenizer.decode(ids[last + 1 : b]).strip() else b

    def _without_end(self, ids: list[int], a: int, b: int) -> int:
        """Where answer [a, b) ends without the special tokens, and white space between them, that close it."""
        end = t = b
        while t > a and (ids[t - 1] in self.special or not self.tokenizer.decode(ids[t - 1 : t]).strip()):
            t -= 1
            end = t if ids[t] in self.special else end
        return end

    def _is_open(self, example: Example, rendered: Rendered) -> bool:
        """Whether an eos must be added: the text ends with an answer that has no end token."""
        if self.eos is None or not self.trains_end:
            return False
        if example.turns is None:
            return example.record.ends
        followed = rendered.marked and rendered.text[rendered.spans[-1][1] :].strip()
        return is_trained(example.turns[-1]) and not followed


class Locate:
    """Token index of a character position: the first token that ends after it."""

    def __init__(self, tokenizer: Any, text: str, ids: list[int], encoding: Any) -> None:
        self.tokenizer, self.text, self.ids, self.encoding = tokenizer, text, ids, encoding

    def __call__(self, position: int) -> int:
        if position <= 0:
            return 0
        if position >= len(self.text):
            return len(self.ids)
        if self.encoding is None:
            return self._by_prefix(position)
        tokens = (self.encoding.char_to_token(at) for at in range(position, len(self.text)))
        return next((token for token in tokens if token is not None), len(self.ids))  # white space may have no token

    def _by_prefix(self, position: int) -> int:
        prefix = self.tokenizer(self.text[:position], add_special_tokens=False).input_ids
        pairs = zip(prefix, self.ids, strict=False)
        return next((t for t, (x, y) in enumerate(pairs) if x != y), min(len(prefix), len(self.ids)))

    def is_inside(self, position: int) -> bool:
        """Whether a token spans this position."""
        t = self(position)
        if self.encoding is None or t >= len(self.ids):
            return False
        if t == 0:
            return position > 0
        before = self.encoding.token_to_chars(t - 1)
        return before is not None and before[1] < position
