"""The contents of a run's page besides the curves and answers: the plan, rows of the data, a traced step.

Each of these may fail without ending the run (reports.py). The traced step is the TRACED-th of this process, when
buffers are filled and kernels are compiled; its events cost some microseconds per unit, once.
"""

from dataclasses import fields
from typing import Any

from keyhole.data.marked import marked
from keyhole.data.run import Data
from keyhole.methods import METHODS
from keyhole.model.model import Model
from keyhole.offload.timeline import Timeline
from keyhole.report.step_time import spans_of
from keyhole.report.story import Sample, Story
from keyhole.training.planning import predict
from keyhole.training.run_page import RunPage

TRACED = 3


def planned(model: Model, method: str, tokens: float | None = None) -> dict[str, Any]:
    """The planned bytes by part, host bytes, and seconds of a step with this number of tokens."""
    found: dict[str, Any] = {}
    if model.device.type == "cuda" and METHODS[method].streams:
        assert model.placed is not None
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
