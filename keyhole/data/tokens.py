"""Turns examples into token ids, and decides which of them are trained on.

    chat            text and answer spans from the template (answers.py), tokenised once, nothing added:
                    the template writes bos itself, so it is never doubled
    plain text      [bos] prompt answer eos; bos only if the tokenizer adds one, neither if already there; the pieces
                    of a document (readers.py) have an eos after the last of them

The whole text is tokenised at once, and answers are mapped to tokens by character offsets. Tokenising prompt and answer
separately would give tokens that the model has never seen ("Answer: " + "yes" has a separate space token, "Answer: yes"
does not). A token with characters on both sides of the boundary counts as answer; nearly always the prompt's own tokens
are a prefix of the whole, and there is no such token. For a tokenizer without offsets (not a fast one), the text up to
the boundary is tokenised separately; the answer begins where the tokens differ. Offsets stay inside the tokenizers
library, and only the few needed ones are read: as Python tuples they would take 150 bytes per token.

The end-of-turn token is trained, so that the model learns to stop. White space that a template writes after it is not
trained: generation has ended by then. If the last answer has no special token at its end, an eos is added and trained.
`train_end_token: false` excludes all of these from the loss, and adds no eos: if answers are single words that are
scored, not generated, the end would be half of the trained tokens.
"""

import os.path
import re
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from keyhole.data.answers import Chat, Rendered, find
from keyhole.data.chat_template import ChatTemplate
from keyhole.data.examples import Example
from keyhole.data.opened import check_text
from keyhole.data.report import count_names
from keyhole.data.settings import DataSettings
from keyhole.data.tokenizer import Tokenizer, bos_ids, special_tokens, tokenized
from keyhole.data.turns import is_trained
from keyhole.machine.worker import bounded

if TYPE_CHECKING:
    from tokenizers import Encoding

CONTROL = re.compile(r"<[|\uff5c][^\s<>{}]{1,40}?[|\uff5c]>")


class Tokens(NamedTuple):
    ids_T: np.ndarray  # int32
    trained_T: np.ndarray  # bool
    end_id: int | None  # the special token that ends the last answer
    lost: Counter[str] = Counter()  # what the chat template leaves out (answers.py)


class Renderer:
    """Turns examples into tokens, many at a time.

    foreign: what looks like a control token (<|im_end|>) and is none of this tokenizer, with the number of its texts:
    of data, or of a chat template, that were made for another model."""

    def __init__(self, tokenizer: Tokenizer, how: DataSettings | None = None) -> None:
        self.tokenizer, self.how = tokenizer, (how := how or DataSettings())
        self.template = ChatTemplate(
            tokenizer, how.template_text, how.chat_template_kwargs, how.day, tuple(how.stop_token_ids)
        )
        self.foreign, self.own = Counter[str](), dict[str, bool]()
        self.special = special_tokens(tokenizer)
        self.bos, self.eos = bos_ids(tokenizer), tokenizer.eos_token_id
        self.trains_end = how.train_end_token is not False

    def __call__(self, examples: list[Example]) -> list[Tokens]:
        chats = [Chat(each.turns, each.given, each.record.where) for each in examples if each.turns is not None]
        written, texts = iter(bounded(partial(find, self.template), chats, _place)), []
        for example in examples:
            text = example.prompt + example.answer
            plain = Rendered(text, [(len(example.prompt), len(text))])
            texts.append(plain if example.turns is None else next(written))
            check_text(texts[-1].text, example.record.where)
            words = dict.fromkeys(CONTROL.findall(texts[-1].text))
            count_names(self.foreign, (word for word in words if not self._is_own(word)))
        options = {"add_special_tokens": False, "return_attention_mask": False, "verbose": False}
        batch = tokenized(self.tokenizer, [t.text for t in texts], **options)
        encodings = batch.encodings if self.tokenizer.is_fast else [None] * len(texts)
        return [
            self._tokens(example, rendered, ids, encoding)
            for example, rendered, ids, encoding in zip(examples, texts, batch["input_ids"], encodings, strict=True)
        ]

    def _is_own(self, word: str) -> bool:
        if word not in self.own:
            found = self.tokenizer.convert_tokens_to_ids(word)
            self.own[word] = found is not None and self.tokenizer.convert_ids_to_tokens(found) == word
        return self.own[word]

    def _tokens(self, example: Example, rendered: Rendered, ids: list[int], encoding: "Encoding | None") -> Tokens:
        trained_T: np.ndarray = np.zeros(len(ids), dtype=bool)
        end_id = None
        for start, end in rendered.spans:
            a, b = (self._locate(at, rendered.text, ids, encoding) for at in (start, end))
            b = self._end(ids, a, b)
            trained_T[a:b] = True
            end_id = ids[b - 1] if b > a and ids[b - 1] in self.special else None
        bos = self.bos if example.turns is None and ids[: len(self.bos)] != self.bos else []
        if trained_T.any() and end_id is None and self._is_open(example, rendered):
            ids, trained_T, end_id = [*ids, self.eos], np.append(trained_T, True), self.eos
        trained_T = np.append(np.zeros(len(bos), dtype=bool), trained_T) | (self.how.train_on == "all")
        trained_T[:1] = False
        return Tokens(np.array([*bos, *ids], dtype=np.int32), trained_T, end_id, rendered.lost)

    def _end(self, ids: list[int], a: int, b: int) -> int:
        """Where answer [a, b) ends: behind the special token that closes it, without the white space after that; or,
        if the end is not trained, before all special tokens, and white space between them, at its end."""
        t, closing = b, list[int]()
        while t > a and (ids[t - 1] in self.special or not self.tokenizer.decode(ids[t - 1 : t]).strip()):
            t -= 1
            closing += [t] if ids[t] in self.special else []
        return b if not closing else closing[0] + 1 if self.trains_end else closing[-1]

    def _is_open(self, example: Example, rendered: Rendered) -> bool:
        """Whether an eos must be added: the text ends with an answer that has no end token."""
        if self.eos is None or not self.trains_end:
            return False
        if example.turns is None:
            return example.record.ends
        followed = rendered.marked and rendered.text[rendered.spans[-1][1] :].strip()
        return is_trained(example.turns[-1]) and not followed

    def _locate(self, position: int, text: str, ids: list[int], encoding: "Encoding | None") -> int:
        """Token index of a character position: the first token that ends after it."""
        if position <= 0 or position >= len(text):
            return 0 if position <= 0 else len(ids)
        if encoding is None:
            prefix = tokenized(self.tokenizer, text[:position], add_special_tokens=False).input_ids
            return len(os.path.commonprefix([prefix, ids]))
        tokens = (encoding.char_to_token(at) for at in range(position, len(text)))
        return next((token for token in tokens if token is not None), len(ids))  # white space may have no token


def _place(chat: Chat) -> str:
    return f"{chat.where}: the chat template, for {len(chat.turns):,} turns,"
