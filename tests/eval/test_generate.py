"""Answers in the model's own words: batches and padding change nothing, and answers stop."""

from pathlib import Path

import pytest
from tokenizers import decoders

import keyhole
from keyhole.data.tasks.question import Question
from keyhole.eval.generate import answer_limit, generate_answers

PROMPTS = ["The soup", "A", "Bread was warm and", "Stamp: red, blue,"]


def alone(model: keyhole.Model, prompt: str, new: int) -> str:
    ids = model.tokenizer(prompt, return_tensors="pt").input_ids
    made = model.generate(ids, do_sample=False, max_new_tokens=new, pad_token_id=0)[0, ids.shape[1] :]
    return model.tokenizer.decode(made, skip_special_tokens=True)


@pytest.mark.parametrize("placement", ["resident", "stream"])
@pytest.mark.parametrize("batch_tokens", [1, 40, 4096])
def test_answers_are_those_of_one_prompt_at_a_time(tiny_model: Path, placement: str, batch_tokens: int) -> None:
    """Whatever is in the batch, padding is not seen, and answers come in the order of the questions."""
    model = keyhole.load(tiny_model, device="cpu", placement=placement)
    questions = [Question(prompt, ("x",), 0) for prompt in PROMPTS]
    answers, cut = generate_answers(model, questions, max_new_tokens=6, batch_tokens=batch_tokens)
    assert answers == [alone(model, prompt, 6) for prompt in PROMPTS] and cut == 0


@pytest.mark.parametrize(
    "own",
    [{"min_new_tokens": 6}, {"no_repeat_ngram_size": 1}, {"bad_words_ids": [[0]]}, {"max_time": 1e-9},
     {"do_sample": True, "num_return_sequences": 2}, {"return_dict_in_generate": True}],
)  # fmt: skip
def test_answers_are_greedy_whatever_the_model_prefers(tiny_model: Path, own: dict) -> None:
    """Every setting of the model's generation_config.json is put aside, and is there again afterwards."""
    model = keyhole.load(tiny_model, device="cpu")
    first = int(model.generate(model.tokenizer(PROMPTS[0], return_tensors="pt").input_ids, max_new_tokens=1)[0, -1])
    config = model.module.generation_config
    if "min_new_tokens" in own:
        config.eos_token_id = first  # the answer is empty, unless it must be longer
    question = [Question(PROMPTS[0], ("x",), 0)]
    wanted = generate_answers(model, question, max_new_tokens=6)
    config.update(**own | ({"bad_words_ids": [[first]]} if "bad_words_ids" in own else {}))
    assert generate_answers(model, question, max_new_tokens=6) == wanted
    assert model.module.generation_config is config


def test_an_answer_keeps_its_first_character(tiny_model: Path) -> None:
    """SentencePiece tokenizers drop one at the beginning of a text, where an answer does not stand: a program would
    lose a space of its first line's indentation."""
    model = keyhole.load(tiny_model, device="cpu")
    question = [Question(PROMPTS[0], ("x",), 0)]
    (whole,), _ = generate_answers(model, question, max_new_tokens=6)
    backend = model.tokenizer.backend_tokenizer
    backend.decoder = decoders.Sequence([backend.decoder, decoders.Strip(whole[0], 1, 0)])
    assert alone(model, PROMPTS[0], 6) == whole[1:], "the tokens of the answer by themselves"
    assert generate_answers(model, question, max_new_tokens=6) == ([whole], 0)


def test_an_answer_ends_at_a_stop_string(tiny_model: Path) -> None:
    model = keyhole.load(tiny_model, device="cpu")
    whole = alone(model, PROMPTS[0], 20)
    stop = whole[5:7]
    calls = []
    forward = model.module.forward
    model.module.forward = lambda *args, **kwargs: calls.append(1) or forward(*args, **kwargs)
    answers, _ = generate_answers(model, [Question(PROMPTS[0], ("x",), 0)], max_new_tokens=20, stop=[stop])
    assert answers == [whole[: whole.index(stop)]] and len(calls) < 20


@pytest.mark.parametrize(("asked", "lengths"), [(10, (246, 10)), (400, (128, 128))])
def test_a_long_prompt_leaves_room_for_its_answer(tiny_model: Path, asked: int, lengths: tuple[int, int]) -> None:
    """Prompt and answer share the context; the beginning is cut and counted. An answer takes half of the
    context at most, so that the question keeps the other half and no position is missing."""
    model = keyhole.load(tiny_model, device="cpu")
    seen: list[tuple[int, int]] = []
    generate = model.generate
    model.generate = lambda ids, mask, **options: (
        seen.append((ids.shape[1], options["max_new_tokens"]))
        or generate(ids, mask, **(options | {"max_new_tokens": 1}))
    )
    _, cut = generate_answers(model, [Question("x" * 300, ("y",), 0)], max_new_tokens=asked)
    assert cut == 1 and seen == [lengths] and answer_limit(400, None) == 400
