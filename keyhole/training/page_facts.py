"""The contents of a run's page besides the curves: the plan, rows of the data, a traced step, sample answers.

Each of these may fail without ending the run (reports.py). The traced step is the TRACED-th of this process, when
buffers are filled and kernels are compiled; its events cost some microseconds per unit, once.

Answers of tasks are a by-product of scoring. For other data the model generates greedy answers to a few prompts, if
that is cheap: in the memory that a step leaves free, within SHARE of the time since the last evaluation (at least
LEAST_S seconds), and only if ANSWER_TOKENS tokens fit into that time, where a token is assumed to take as long as a
step.
"""

from dataclasses import fields
from typing import Any

from keyhole.data.capacity import context_length
from keyhole.data.dataset import Dataset
from keyhole.data.marked import marked
from keyhole.data.run import Data
from keyhole.data.tasks.question import Question, Task
from keyhole.eval.classes import ClassScore
from keyhole.eval.generate import answer_prompts
from keyhole.eval.score import AnswerScore, Score
from keyhole.eval.scoring import TaskScore
from keyhole.methods import METHODS
from keyhole.model.model import Model
from keyhole.offload.timeline import Timeline
from keyhole.report.step_time import spans_of
from keyhole.report.story import Answer, Answers, Sample, Story
from keyhole.training.planning import predict
from keyhole.training.run_page import RunPage

TRACED = 3
MOST_CHARACTERS = 600
MOST_PROMPT, OPENING, NEW_TOKENS, LEAST_NEW, ANSWER_TOKENS = 384, 12, 48, 4, 4
SHARE, LEAST_S, MOST_S = 0.05, 2.0, 30.0


def planned(model: Model, method: str, tokens: float | None = None) -> dict[str, Any]:
    """The planned bytes by part, host bytes, and seconds of a step with this number of tokens."""
    found: dict[str, Any] = {}
    if model.device.type == "cuda" and METHODS[method].streams:
        parts = model.placed.device_bytes
        found["device_bytes"] = parts.total
        found["parts"] = {each.name: getattr(parts, each.name) for each in fields(parts) if getattr(parts, each.name)}
    prediction = predict(model, method, tokens)
    if prediction is not None and METHODS[method].streams:
        found["host_bytes"] = prediction.host_bytes
    if prediction is not None and prediction.seconds is not None:
        step = prediction.seconds
        found["seconds"] = {"total": step.total, "compute": step.compute, "link": step.link, "CPU": step.cpu}
        found |= {"bound_by": step.bound_by, "source": prediction.source}
    return found


def samples(data: Data, tokenizer: Any) -> list[Sample]:
    """The first rows of the training data."""
    rows = marked(data.train.dataset, tokenizer, labels=data.labels)
    return [Sample(row.where, row.about, row.runs) for row in rows]


class Trace:
    """Traces one step of this process. The engine is restored afterwards, also after an error."""

    def __init__(self, model: Model, first: int, total: int) -> None:
        self.engine, self.step = model.engine, min(first + TRACED, total)
        self.timeline: Timeline | None = None
        self.seconds: float | None = None
        self.crossed = (0, 0)

    def begin(self, step: int) -> None:
        if step == self.step and self.timeline is None:
            self.crossed = self.engine.bytes_up, self.engine.bytes_down
            self.engine.timeline = self.timeline = Timeline(cuda=self.engine.cuda)

    def end(self) -> None:
        if self.timeline is not None and self.timeline.enabled:
            self.timeline.stop()
            self.engine.timeline = Timeline(enabled=False)
            up, down = self.crossed
            self.crossed = self.engine.bytes_up - up, self.engine.bytes_down - down

    def note(self, entry: dict[str, Any], page: RunPage) -> None:
        """Called for every entry that is read; when the traced step is complete, adds its trace to the page."""
        if entry["step"] == self.step and "seconds" in entry:
            self.seconds = entry["seconds"]
        if self.timeline is None or self.timeline.enabled or self.seconds is None or not self.timeline.is_done():
            return
        rows, timeline, seconds = spans_of(self.timeline.rows()), self.timeline, self.seconds
        self.seconds = None

        def tell(story: Story) -> None:
            story.spans, story.traced_step, story.traced_s = rows, self.step, seconds
            numbers = zip(("up_bytes", "down_bytes"), self.crossed, strict=True)
            story.measured = story.measured | {name: float(count) for name, count in numbers}

        page.change(tell)
        timeline.spans.clear()


def answers_of(task: Task, result: Score, count: int) -> list[Answer]:
    """The first answers of a scored task."""
    if isinstance(result, AnswerScore):
        rows = zip(task.questions[:count], result.answers, result.verdicts, strict=False)
        return [
            Answer(_prompt(q), _cut(said), _cut(" | ".join(q.references[:3])), bool(max(worth.values()) >= 1))
            for q, said, worth in rows
        ]
    if isinstance(result, TaskScore | ClassScore):
        return [_choice(q, said) for q, said in zip(task.questions[:count], result.predictions, strict=False)]
    return []


def _choice(question: Question, said: int | float) -> Answer:
    if isinstance(said, float):
        return Answer(_prompt(question), f"{said:.3f}", "" if question.value is None else f"{question.value:g}")
    right = said in (question.answer, *question.also)
    return Answer(_prompt(question), _cut(question.candidates[said]), _cut(question.candidates[question.answer]), right)


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


def generated(model: Model, dataset: Dataset | None, step: int, count: int, since_s: float, step_s: float) -> Answers:
    """Greedy answers to the first prompts of a data set; none if that is not cheap. since_s: seconds of training
    since the last answers; step_s: seconds of one step."""
    allowed_s = min(MOST_S, max(LEAST_S, SHARE * since_s))
    none = Answers(step, "")
    if dataset is None or model.classifies or model.tokenizer is None or model.ranks.several or not count:
        return none
    if ANSWER_TOKENS * step_s > allowed_s:
        return none
    longest = context_length(model.config) or MOST_PROMPT + NEW_TOKENS
    found = (_asked(dataset, i) for i in range(min(20 * count, len(dataset))))
    rows = [row for row in found if row is not None and len(row[0]) + LEAST_NEW <= longest][:count]
    while rows and not _fits(model, rows):
        rows.pop()
    if not rows:
        return none
    room = longest - max(len(prompt) for prompt, _ in rows)  # a position beyond a learned table ends in a CUDA error
    new = min(NEW_TOKENS, max(len(expected) for _, expected in rows) + 4, room)
    texts = answer_prompts(model, [prompt for prompt, _ in rows], new, max_time=allowed_s)
    shown = []
    for (prompt, expected), said in zip(rows, texts, strict=True):
        right = model.tokenizer.decode(expected, skip_special_tokens=True)
        same = True if said.strip() == right.strip() else None  # a different answer is not necessarily wrong
        shown.append(Answer(_end(model.tokenizer.decode(prompt)), _cut(said), _cut(right), same))
    return Answers(step, f"greedy, at most {new} tokens and {allowed_s:.0f} s", shown)


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
    tokens = len(rows) * (max(len(prompt) for prompt, _ in rows) + NEW_TOKENS)
    config = model.config.get_text_config()
    layers, hidden = getattr(config, "num_hidden_layers", 0), getattr(config, "hidden_size", 0)
    cached = 2 * layers * hidden * tokens * model.dtype.itemsize
    return tokens <= model.placed.work.tokens and cached <= model.placed.device_bytes.during_a_step
