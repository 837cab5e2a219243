"""The two loops in which checkpoints are timed: keyhole's training loop, and MeZO's."""

from pathlib import Path

import torch

import keyhole
from keyhole.bench.zo.textbook import Textbook, take_weights
from keyhole.checkpoint import journal
from keyhole.training.metrics import QueuedStep, Recorder
from keyhole.training.observer import Reading

LR = 1e-7


class Loop:
    """The loop of the trainer: numbers are read one step late, and the journal is written."""

    def __init__(self, model: keyhole.Model, batch: dict[str, torch.Tensor], scratch: Path) -> None:
        self.model, self.batch, self.scratch = model, batch, scratch
        self.method = keyhole.ZO(model, LR)
        self.step_count = 0
        self.seconds: list[float] = []
        header = journal.Header("", 0, "", 0, 1, "gaussian", "stochastic", 1e-3, "", None, [], [], {}, {}, {})
        self.journal = journal.Writer(scratch / "journal", journal.create(scratch / "journal", header), 0)
        device = model.device
        self.recorder = Recorder(device, self._note, print, lambda: None)

    def _note(self, reading: Reading) -> None:
        self.seconds.append(reading.entry["seconds"])
        device, update = self.model.device.type, tuple(reading.update or ())
        self.journal.append(journal.Record(reading.step, 0, 0, reading.step, 0.0, device, update))

    def step(self) -> None:
        self.step_count += 1
        loss = self.method.step(self.batch)
        record = QueuedStep(self.step_count, loss, LR, 0.0, 0, "", {}, self.method.journal_update())
        self.recorder.add(record)

    def settle(self, step: int) -> None:
        self.journal.wait_for(step, 60.0)
        self.journal.sync()

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.step()

    def tensors(self) -> dict[str, torch.Tensor]:
        """The weights in host memory or on the GPU, with all deferred updates applied."""
        self.method.flush()
        return dict(self.model.named_tensors())

    def wait(self) -> None:
        self.recorder.drain()
        if self.model.device.type == "cuda":
            torch.cuda.synchronize(self.model.device)


class TextbookLoop:
    """MeZO's loop, which reads its losses synchronously in every step."""

    def __init__(self, model: keyhole.Model, batch: dict[str, torch.Tensor], scratch: Path) -> None:
        take_weights(model)
        self.model, self.batch, self.scratch = model, batch, scratch
        self.method = Textbook(model.module, LR)

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.method.step(self.batch)

    def wait(self) -> None:
        if self.model.device.type == "cuda":
            torch.cuda.synchronize(self.model.device)

    def tensors(self) -> dict[str, torch.Tensor]:
        return dict(self.model.module.state_dict())
