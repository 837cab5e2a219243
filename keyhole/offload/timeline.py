"""When uploads, kernels and write-backs ran: spans measured with CUDA events, written as a Chrome / Perfetto trace.

A span is a pair of timing events recorded on the stream where the work is enqueued, so measuring adds no wait. Open
the JSON file in a trace viewer (ui.perfetto.dev or chrome://tracing): one lane each for upload, compute, write-back.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch


class Timeline:
    """Collects spans (lane, label, begin, end) while enabled, and writes them as a trace."""

    def __init__(self, enabled: bool = True) -> None:
        self.enabled = enabled
        self.spans: list[tuple[str, str, torch.cuda.Event, torch.cuda.Event]] = []
        if enabled:
            self.origin = torch.cuda.Event(enable_timing=True)
            self.origin.record()

    @contextmanager
    def span(self, lane: str, label: str) -> Iterator[None]:
        """Measures the work that is enqueued inside, on the current stream."""
        if not self.enabled:
            yield
            return
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        yield
        end.record()
        self.spans.append((lane, label, begin, end))

    def rows(self) -> list[tuple[str, str, float, float]]:
        """(lane, label, start_ms, duration_ms) of every span. Waits for the device."""
        torch.cuda.synchronize()
        return [
            (lane, label, self.origin.elapsed_time(begin), begin.elapsed_time(end))
            for lane, label, begin, end in self.spans
        ]

    def save(self, path: Path) -> None:
        """Writes the trace as JSON."""
        lanes = ["upload", "compute", "write-back"]
        events = [
            {
                "name": label,
                "cat": lane,
                "ph": "X",
                "pid": 0,
                "tid": lanes.index(lane),
                "ts": 1e3 * start,
                "dur": 1e3 * ms,
            }
            for lane, label, start, ms in self.rows()
        ]
        names = [
            {"name": "thread_name", "ph": "M", "pid": 0, "tid": i, "args": {"name": lane}}
            for i, lane in enumerate(lanes)
        ]
        path.write_text(json.dumps({"traceEvents": names + events, "displayTimeUnit": "ms"}))
