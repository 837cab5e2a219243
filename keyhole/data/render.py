"""Examples into token ids, and which of them are trained on.

    chat            text and answer spans from the template (answers.py), tokenised once, nothing added:
                    the template has written bos itself, so it is never doubled
    plain text      [bos] prompt answer eos; bos only where the tokenizer adds one, neither if already there

The whole text is tokenised in one piece and answers are mapped to tokens by character offsets. Tokenising
prompt and answer apart would give other tokens than the model has ever seen ("Answer: " + "yes" has a lone
space that "Answer: yes" has not). A token that holds characters of both sides of the boundary counts as
answer; when the prompt's own tokens are a prefix of the whole, which is nearly always, no such token
exists. The report counts the rest. A tokenizer without offsets (not a fast one) is asked for the tokens of
the text up to the boundary instead; the answer begins where they stop agreeing.

The end-of-turn token is trained: it is how the model learns to stop. White space that a template writes
after it is not: generation has ended by then. A last answer that closes with no special token gets an eos,
also trained.

    label[t] = id[t] where trained, else -100; label[0] = -100 always, since nothing predicts the first token
"""

from bisect import bisect_right
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from keyhole.data.answers import ChatTemplate, Rendered, bos_ids, special_tokens
from keyhole.data.formats import Example
from keyhole.errors import UserError


class Tokens(NamedTuple):
    """One example in tokens."""

    ids_T: np.ndarray  # int32
    trained_T: np.ndarray  # bool
    end_id: int | None  # the special token its last answer stops with
    straddles: bool  # a token lies across the beginning of an answer


def check_text(text: str, where: str) -> None:
    """Refuses half a character: JSON can escape one, tokenizers cannot read it."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = text[error.start]
        raise UserError(
            f"{where}: the text has {half!a}, half of a character (a lone UTF-16 surrogate), near "
            f"{text[max(0, error.start - 20) : error.start + 20]!a}; write the whole character, or take it out"
        ) from None


class Renderer:
    """Turns examples into tokens, many at a time."""

    def __init__(self, tokenizer: Any, train_on: str = "answers") -> None:
        self.tokenizer, self.train_on = tokenizer, train_on
        self.template = ChatTemplate(tokenizer)
        self.special = special_tokens(tokenizer)
        self.bos, self.eos = bos_ids(tokenizer), tokenizer.eos_token_id

    def __call__(self, examples: list[Example]) -> list[Tokens]:
        """Tokens of each example, in order."""
        texts = [self._text(example) for example in examples]
        options = {"add_special_tokens": False, "return_attention_mask": False, "verbose": False}
        fast = self.tokenizer.is_fast
        for example, rendered in zip(examples, texts, strict=True):
            check_text(rendered.text, example.record.where)
        batch = self.tokenizer([t.text for t in texts], return_offsets_mapping=fast, **options)
        offsets = batch["offset_mapping"] if fast else [None] * len(texts)
        return [
            self._tokens(example, rendered, ids, at)
            for example, rendered, ids, at in zip(examples, texts, batch["input_ids"], offsets, strict=True)
        ]

    def _text(self, example: Example) -> Rendered:
        if example.turns is not None:
            return self.template.answers(example)
        text = example.prompt + example.answer
        return Rendered(text, [(len(example.prompt), len(text))])

    def _tokens(self, example: Example, rendered: Rendered, ids: list[int], offsets: list | None) -> Tokens:
        locate = Locate(self.tokenizer, rendered.text, ids, offsets)
        trained = [False] * len(ids)
        end_id = None
        for start, end in rendered.spans:
            a, b = locate(start), locate(end)
            b = self._end_of_turn(ids, a, b)
            trained[a:b] = [True] * (b - a)
            end_id = ids[b - 1] if b > a and ids[b - 1] in self.special else None
        if self._is_open(example, trained, end_id):
            ids, trained, end_id = [*ids, self.eos], [*trained, True], self.eos
        if example.turns is None and self.bos and ids[: len(self.bos)] != self.bos:
            ids, trained = [*self.bos, *ids], [False] * len(self.bos) + trained
        trained_T = np.array(trained, dtype=bool) if self.train_on == "answers" else np.ones(len(ids), dtype=bool)
        trained_T[:1] = False
        straddles = any(locate.is_inside(start) for start, _ in rendered.spans)
        return Tokens(np.array(ids, dtype=np.int32), trained_T, end_id, straddles)

    def _end_of_turn(self, ids: list[int], a: int, b: int) -> int:
        """Where answer [a, b) ends without the white space after its last special token."""
        last = next((t for t in range(b - 1, a - 1, -1) if ids[t] in self.special), b - 1)
        return last + 1 if last < b - 1 and not self.tokenizer.decode(ids[last + 1 : b]).strip() else b

    def _is_open(self, example: Example, trained: list[bool], end_id: int | None) -> bool:
        """Whether an eos has to be added: the last thing said is an answer, and no special token ends it."""
        last_turn_trained = example.turns is None or (
            bool(example.turns) and example.turns[-1]["role"] == "assistant" and example.turns[-1].get("weight") != 0
        )
        return self.eos is not None and any(trained) and last_turn_trained and end_id is None


class Locate:
    """Token index of a character position: the first token that ends after it."""

    def __init__(self, tokenizer: Any, text: str, ids: list[int], offsets: list[tuple[int, int]] | None) -> None:
        self.tokenizer, self.text, self.ids = tokenizer, text, ids
        self.ends = None if offsets is None else list(accumulate((end for _, end in offsets), max))

    def __call__(self, position: int) -> int:
        if position <= 0:
            return 0
        if position >= len(self.text):
            return len(self.ids)
        if self.ends is None:
            return self._by_prefix(position)
        return bisect_right(self.ends, position)

    def _by_prefix(self, position: int) -> int:
        prefix = self.tokenizer(self.text[:position], add_special_tokens=False).input_ids
        pairs = zip(prefix, self.ids, strict=False)
        return next((t for t, (x, y) in enumerate(pairs) if x != y), min(len(prefix), len(self.ids)))

    def is_inside(self, position: int) -> bool:
        """Whether a token lies across this position."""
        t = self(position)
        return self.ends is not None and 0 < t < len(self.ids) and self.ends[t - 1] < position
