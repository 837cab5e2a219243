"""Answers of the model after an evaluation, for the run's page: what training does to what the model says.

Answers of tasks are a by-product of scoring. For other data the model generates greedy answers to a few prompts, if
that is cheap: in the memory that a step leaves free, within SHARE of the time since the last evaluation (at least
LEAST_S seconds), and only if ANSWER_TOKENS tokens fit into that time, where a token is assumed to take as long as a
step. A failure here does not end the run (reports.py).
"""

from keyhole.data.capacity import context_length
from keyhole.data.dataset import Dataset
from keyhole.data.tasks.question import Question, Task
from keyhole.eval.choices import ClassScore, TaskScore
from keyhole.eval.generate import answer_prompts
from keyhole.eval.score import AnswerScore, Score
from keyhole.model.model import Model
from keyhole.report.story import Answer, Answers

MOST_CHARACTERS = 600
MOST_PROMPT, OPENING, NEW_TOKENS, LEAST_NEW, ANSWER_TOKENS = 384, 12, 48, 4, 4
SHARE, LEAST_S, MOST_S = 0.05, 2.0, 30.0


def answers_of(task: Task, result: Score, count: int) -> list[Answer]:
    """The first answers of a scored task."""
    questions, rows = task.questions[:count], []
    if isinstance(result, AnswerScore):
        for q, said, worth in zip(questions, result.answers, result.verdicts, strict=False):
            expected = " | ".join(q.references[:3])
            rows.append(Answer(_prompt(q), _cut(said), _cut(expected), bool(max(worth.values()) >= 1)))
    elif isinstance(result, TaskScore | ClassScore):
        for q, choice in zip(questions, result.predictions, strict=False):
            if isinstance(choice, float):  # a number is what is asked for
                rows.append(Answer(_prompt(q), f"{choice:.3f}", "" if q.value is None else f"{q.value:g}"))
            else:
                said, expected = q.candidates[choice], q.candidates[q.answer]
                rows.append(Answer(_prompt(q), _cut(said), _cut(expected), choice in (q.answer, *q.also)))
    return rows


def _prompt(question: Question) -> str:
    if question.texts:
        return _end(" | ".join(question.texts))
    if isinstance(question.prompt, str):
        return _end(question.prompt)
    return _end(" | ".join(str(turn.get("content", "")) for turn in question.prompt))


def _cut(text: str) -> str:
    """The beginning of an answer."""
    return text if len(text) <= MOST_CHARACTERS else f"{text[:MOST_CHARACTERS]} …"


def _end(text: str) -> str:
    """The end of a prompt, where the question is."""
    return text if len(text) <= MOST_CHARACTERS else f"… {text[-MOST_CHARACTERS:]}"


def generated(model: Model, dataset: Dataset, step: int, count: int, since_s: float, step_s: float) -> Answers:
    """Greedy answers to the first prompts of a data set; none if that is not cheap. since_s: seconds of training
    since the last answers; step_s: seconds of one step."""
    allowed_s, tokenizer = min(MOST_S, max(LEAST_S, SHARE * since_s)), model.tokenizer
    if model.classifies or tokenizer is None or model.ranks.several or ANSWER_TOKENS * step_s > allowed_s:
        return Answers(step, "")
    longest = context_length(model.config) or MOST_PROMPT + NEW_TOKENS
    found = (_asked(dataset, i) for i in range(min(20 * count, len(dataset))))
    rows = [row for row in found if row is not None and len(row[0]) + LEAST_NEW <= longest][:count]
    while rows and not _fits(model, rows):
        rows.pop()
    if not rows:
        return Answers(step, "")
    room = longest - max(len(prompt) for prompt, _ in rows)  # a position beyond a learned table ends in a CUDA error
    new = min(NEW_TOKENS, max(len(expected) for _, expected in rows) + 4, room)
    made = Answers(step, f"greedy, at most {new} tokens and {allowed_s:.0f} s")
    texts = answer_prompts(model, [prompt for prompt, _ in rows], new, max_time=allowed_s)
    for (prompt, expected), said in zip(rows, texts, strict=True):
        right = tokenizer.decode(expected, skip_special_tokens=True)
        same = True if said.strip() == right.strip() else None  # a different answer is not necessarily wrong
        made.rows.append(Answer(_end(tokenizer.decode(prompt)), _cut(said), _cut(right), same))
    return made


def _asked(dataset: Dataset, index: int) -> tuple[list[int], list[int]] | None:
    """The prompt of a row and its answer in the data; None if it is too long, or has no prompt."""
    row = dataset.rows[index]
    sample = row[0] if dataset.right is None else row[dataset.right[index]]
    part = slice(dataset.starts[sample], dataset.starts[sample + 1])
    ids, trained = dataset.ids[part].tolist(), dataset.trained[part].tolist()
    if True not in trained:
        return None
    begin = trained.index(True)
    begin = begin if begin > 1 else min(OPENING, len(ids) - 1)  # plain text: its beginning is the prompt
    end = next((i for i in range(begin, len(ids)) if not trained[i]), len(ids))
    return (ids[:begin], ids[begin:end]) if 0 < begin <= MOST_PROMPT else None


def _fits(model: Model, rows: list[tuple[list[int], list[int]]]) -> bool:
    """Whether the tokens and their KV cache fit into the GPU memory that the finished training step used."""
    if model.device.type != "cuda":
        return True
    assert model.placed is not None
    tokens, config = len(rows) * (max(len(prompt) for prompt, _ in rows) + NEW_TOKENS), model.config.get_text_config()
    cached = 2 * config.num_hidden_layers * config.hidden_size * tokens * model.dtype.itemsize
    return bool(tokens <= model.placed.work.tokens and cached <= model.placed.device_bytes.during_a_step)
