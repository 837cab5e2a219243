"""Greedy answers in free text, generated in batches.

Prompts are sorted by length and put into batches, padded on the left, the longest first, so that a lack of memory shows
at once. A batch has as many rows as fit `batch_tokens`, prompt and answer together. If units are streamed, each new
token moves W bytes over the link once for the whole batch:

    bytes over the link = W * tokens of the longest answer * batches

An answer ends at the model's end token, at the first of the task's stop strings, which is cut off, or after
max_new_tokens, at most half of the model's context. A prompt that leaves no room for an answer loses its beginning.

The tokens of an answer become text together with those of the prompt before them: a SentencePiece tokenizer (Llama 2,
Mistral) drops the space at the beginning of a text, and a program whose first line is indented by three spaces, and
whose others by four, is none.
"""

from collections.abc import Callable, Iterable, Sequence

import torch
from transformers import GenerationConfig, LogitsProcessor, PreTrainedTokenizerBase, StoppingCriteria

from keyhole.data.capacity import check_ids, context_length
from keyhole.data.tasks.encode import Encoder
from keyhole.data.tasks.question import Question
from keyhole.errors import NonFinite
from keyhole.eval.rows import BATCH_TOKENS, not_finite, plan_batches
from keyhole.model.model import Model
from keyhole.ranks import Ranks

MOST_ROWS = 64
Watch = Callable[[list[list[int]]], Iterable[list[int]]]  # iterates over the batches, with a progress bar
PLAIN: dict[str, object] = {"do_sample": False, "num_beams": 1}  # greedy


def generate_answers(
    model: Model,
    questions: Sequence[Question],
    *,
    max_new_tokens: int,
    stop: Sequence[str] = (),
    max_length: int | None = None,
    batch_tokens: int = BATCH_TOKENS,
    watch: Watch = iter,
) -> tuple[list[str], int]:
    """The answers in the order of the questions, and how many prompts were cut."""
    longest = max_length or context_length(model.config)
    max_new_tokens = answer_limit(max_new_tokens, longest)
    encoder = Encoder(model.tokenizer, None if longest is None else max(1, longest - max_new_tokens))
    prompts = encoder.prompts(list(questions))
    for question, ids in zip(questions, prompts, strict=True):
        check_ids(ids, question.where, model.source, model.config)
    texts = continue_prompts(
        model, prompts, max_new_tokens=max_new_tokens, stop=stop, batch_tokens=batch_tokens, watch=watch
    )
    return texts, encoder.truncated


def answer_limit(asked: int, longest: int | None) -> int:
    """The largest number of tokens of an answer. longest: of prompt and answer together; None: no limit."""
    return asked if longest is None else max(1, min(asked, longest // 2))


def continue_prompts(
    model: Model,
    prompts: list[list[int]],
    *,
    max_new_tokens: int,
    stop: Sequence[str] = (),
    batch_tokens: int = BATCH_TOKENS,
    watch: Watch = iter,
    settings: dict[str, object] | None = None,
    apart: bool = False,
) -> list[str]:
    """The text generated after each prompt of tokens, in order. settings: of Transformers' generation
    (default: greedy, regardless of the model's own settings); apart: an answer becomes text without its prompt, as in
    other programs."""
    answers = dict[int, str]()
    ranks = Ranks() if model.sharded else model.ranks  # each visit is a collective, and lengths of answers are unknown
    own = ranks.share(plan_batches([len(ids) for ids in prompts], batch_tokens, max_new_tokens, MOST_ROWS))
    for batch in watch(own):
        befores = [prompts[i] for i in batch]
        made = _generated(model, befores, max_new_tokens, stop, settings)
        for i, before, ids in zip(batch, befores, made, strict=True):
            text = text_after(model.tokenizer, [] if apart else before, ids)
            answers[i] = text[: min([text.find(word) for word in stop if word in text], default=len(text))]
    for theirs in ranks.objects(answers):
        answers |= theirs
    return [answers[i] for i in range(len(prompts))]


def _generated(
    model: Model, prompts: list[list[int]], new: int, stop: Sequence[str], settings: dict[str, object] | None
) -> list[list[int]]:
    """The tokens after each prompt of one batch, at most `new`."""
    tokenizer, own = model.tokenizer, model.module.generation_config
    width = max(map(len, prompts))
    ends = own.eos_token_id if own.eos_token_id is not None else tokenizer.eos_token_id
    first_end = ends[0] if isinstance(ends, list) else ends
    pad = next((i for i in (tokenizer.pad_token_id, own.pad_token_id, first_end) if i is not None), 0)
    ids = torch.tensor([[pad] * (width - len(row)) + row for row in prompts])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in prompts])
    options = (PLAIN if settings is None else settings) | {
        "max_new_tokens": new,
        "pad_token_id": pad,
        "eos_token_id": ends,
        "logits_processor": [Guard()],
        "stopping_criteria": [_Stops(tokenizer, stop, width)] if stop else None,
    }
    if settings is None:  # a setting that a call does not give would be filled in from the model's own
        model.module.generation_config = GenerationConfig()
    try:
        made: list[list[int]] = model.generate(ids, mask, **options)[:, width:].tolist()
    except NonFinite as error:
        raise not_finite(model, str(error)) from None
    finally:
        model.module.generation_config = own
    return made


class Guard(LogitsProcessor):
    """Ends an answer whose logits are NaN. The cause is determined later, when no weights are being copied."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if scores.isnan().any():
            raise NonFinite("no answer: the model's logits are NaN")
        return scores


def text_after(tokenizer: PreTrainedTokenizerBase, before: list[int], ids: list[int]) -> str:
    """The text of the tokens `ids` where they follow the tokens `before`."""
    texts = [before, [*before, *ids], ids]
    start, whole, alone = tokenizer.batch_decode(texts, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    after: str = whole[len(start) :] if whole.startswith(start) else alone  # else: `before` ends inside of a character
    return after


class _Stops(StoppingCriteria):
    """Ends a row whose last tokens contain a stop string."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop: Sequence[str], width: int) -> None:
        self.tokenizer, self.stop, self.width = tokenizer, stop, width
        self.tail = max(map(len, stop)) + 4  # tokens; each has at least one character, except pieces of one

    def __call__(self, input_ids: torch.Tensor, scores: torch.FloatTensor, **options: object) -> torch.Tensor:
        made = input_ids[:, max(self.width, input_ids.shape[1] - self.tail) :]
        texts = self.tokenizer.batch_decode(made, clean_up_tokenization_spaces=False)
        return torch.tensor([any(word in text for word in self.stop) for text in texts], device=input_ids.device)
