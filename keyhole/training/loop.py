"""The one loop that every method shares; a method only brings its step.

    output_dir -> checkpoint and journal -> data -> model -> method -> (step, eval?, save?) x total -> model

Everything is checked before anything is written, and the cheap checks come first. What a step is made of
lives in keyhole/training/ (a file an idea) and what goes to disk in keyhole/checkpoint/. The loop itself
holds no state that a checkpoint does not: step number, position in the data, the method's state. So N + M
steps are the same, bit for bit, as N steps, a stop, and M more.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from keyhole.checkpoint import select as find
from keyhole.checkpoint.journal.replay import apply_records
from keyhole.checkpoint.state import method_state
from keyhole.config import TrainConfig, resolve
from keyhole.data import check_packing
from keyhole.errors import NonFinite, UserError
from keyhole.machine.probe import environment, versions
from keyhole.machine.sizes import GIB
from keyhole.methods import METHODS
from keyhole.model.model import Model
from keyhole.model.weights import save as hf
from keyhole.model.weights.finite import first_bad_tensor
from keyhole.plan.placement import PLANNED
from keyhole.training import rundir
from keyhole.training import start_block as start
from keyhole.training.change_check import CHECK_STEPS, Moved
from keyhole.training.evaluate import evaluate
from keyhole.training.job import Job, look
from keyhole.training.journaling import Journaling, open_journal
from keyhole.training.loading import dry_lines, load_model
from keyhole.training.lock import Lock, locked
from keyhole.training.metrics import Entry, MetricsFile, Record, Recorder, memory_gib, token_count
from keyhole.training.plot import plot_loss
from keyhole.training.saving import Saver
from keyhole.training.schedule import learning_rate
from keyhole.training.signals import EXIT_INTERRUPTED, Interrupts
from keyhole.training.tracker import require, tracker


def train(config: TrainConfig, *, resume: str | None = None, dry_run: bool = False) -> int:
    """Trains as the config says and returns the exit code: 0, or 130 when interrupted after a clean save.

    resume: None starts a new run; "" (or "auto", "last") goes on from the newest checkpoint in output_dir; a
    path, from that checkpoint. dry_run checks config, data and model without reading weights, prints the
    start block, and stops.
    """
    config, _ = resolve(config)  # the command line has done it; a config made in Python gets its checks here
    require(config.report_to)
    directory = rundir.inspect(config.output_dir, resume is not None)
    with locked(directory.lock) as lock:
        if not dry_run:
            lock.take()
        job = look(config, directory, resume)
        if dry_run:
            groups = [*dry_lines(config), job.data.report, job.plan_lines(), job.notes]
            job.display.lines(start.block(config, [*groups, ["dry run: nothing was written"]]))
            return 0
        return build(job, lock).go()


def build(job: Job, lock: Lock) -> "Run":
    """Loads model and method, says what was decided, makes the output directory ours, and replays the journal."""
    config, choice, data = job.config, job.origin.choice, job.data
    torch.manual_seed(config.seed)
    model = load_model(config, choice)
    if config.packing:
        check_packing(model, config.max_length)
    hf.add_end_tokens(model.module, data.end_token_ids)
    method = METHODS[config.method].from_config(model, config)
    if choice.state is not None:
        method.load_state_dict(method_state(choice.path, choice.state))
    decided = [*model.describe(), *getattr(method, "describe", list)()]
    machine = start.machine_lines(config, model.dtype, model.device, decided)
    groups = [start.model_lines(model.module, model.layout, model.dtype), machine, data.report]
    saver = Saver(job.directory.root, model, method, config, versions())
    job.display.lines(start.block(config, [*groups, job.plan_lines(), saver.describe(), job.notes]))
    saver.refuse_full_disk()
    rundir.open_run(job.directory, config, environment(), lock)
    find.set_aside(choice.damaged)
    saver.went_on_from(choice.path, job.first)
    if job.origin.tail:
        seconds = apply_records(method, job.origin.tail, job.display.line)
        job.display.line(f"resume: {len(job.origin.tail)} steps of the journal replayed in {seconds:.2f} s")
    journal = open_journal(config, job.directory, job.origin, data, method, versions(), job.display.line)
    saver.settle_journal = journal.settle
    return Run(job, model, method, saver, journal)


@dataclass
class Run:
    """A run whose pieces are all there: steps, what happens between them, and the end."""

    job: Job
    model: Model
    method: Any
    saver: Saver
    journal: Journaling
    interrupts: Interrupts = field(default_factory=Interrupts)
    moved: Moved | None = None
    moving_steps: int = 0  # steps with a rate above 0

    def __post_init__(self) -> None:
        job = self.job
        self.config, self.data, self.display = job.config, job.data, job.display
        self.metrics = MetricsFile(job.directory.metrics, job.first)
        self.track = tracker(job.config.report_to, job.directory.run, job.first)
        self.display.gone = lambda: self.interrupts.ask("a closed output")
        device, say = self.model.device, self.display.line
        self.recorder = Recorder(device, self.report, say, self.last_good, self.journal.note)

    def go(self) -> int:
        """All steps that are left, and the model out."""
        self.display.open(self.job.first)
        self.recorder.restart_clock()
        try:
            with self.interrupts:
                return self.loop()
        except NonFinite as error:
            broken = first_bad_tensor(self.model.named_tensors())
            if broken is None:
                raise
            raise NonFinite(f"{error}\n  found: {broken} holds NaN or infinity, before this step") from error
        except torch.OutOfMemoryError as error:
            raise UserError(
                f"out of GPU memory: {error}\n  lower batch_size (more gradient_accumulation_steps keep the "
                "step the same) or max_length, or use method=zo with placement=stream"
            ) from error
        finally:
            self.close()

    def loop(self) -> int:
        if self.job.origin.tail:
            self.between(self.job.first)  # the process may have died before what was due after this step
        for step in range(self.job.first + 1, self.job.total + 1):
            self.step(step)
            self.between(step)
            if self.interrupts.requested and step < self.job.total:
                return self.leave(step)
        return self.finish()

    def step(self, step: int) -> None:
        """One update, queued; its record is read when it is done."""
        c, loader = self.config, self.data.train
        rate = learning_rate(c.lr_scheduler_type, step - 1, self.job.total, c.learning_rate, c.warmup_ratio)
        batches = next(loader)
        if self.moved is None and self.moving_steps == 0:
            self.moved = Moved(self.model, torch.cat([b["input_ids"].flatten() for b in batches]))
        self.method.lr = rate
        loss = self.method.step(batches)
        self.moving_steps += rate > 0
        latest = getattr(self.method, "latest", None)
        record = Record(step, loss, rate, loader.epoch, token_count(batches), loader.where())
        record.extra, record.position = self.method.metrics(), loader.position
        record.update = None if latest is None or self.journal.writer is None else latest.coef
        self.recorder.add(record)

    def last_good(self) -> Path | None:
        """The newest good checkpoint, for a message that ends the run: one that is still being written counts."""
        self.journal.end()
        return self.saver.settled()

    def report(self, entry: Entry) -> None:
        """Takes the entry of a finished step, or of an evaluation."""
        self.metrics.write(entry)
        self.track.write(entry)
        if "loss" in entry:
            self.display.step(entry)

    def between(self, step: int) -> None:
        """Check, evaluation and save, where they are due after this step."""
        last = step == self.job.total
        checks = self.moved is not None and (self.moving_steps == CHECK_STEPS or last)
        evaluates = bool(self.data.eval) and (last or step % (self.config.eval_steps or self.job.total) == 0)
        evaluates = evaluates and step not in self.metrics.evaluated
        saves = self.saver.is_due(step) and not last and not self.interrupts.requested
        self.display.lines(self.saver.poll(step))
        waits = checks or evaluates or (saves and (self.saver.background is None or self.journal.writer is None))
        if waits:
            self.recorder.drain()
        if waits or (saves and self.saver.background is None):
            self.method.flush()
        if checks:
            self.check()
        if evaluates:
            self.evaluate(step)
        if saves:
            self.display.lines(self.saver.try_save(step, self.data.train.state_dict()))
        if waits:
            self.recorder.restart_clock()

    def check(self) -> None:
        """Once: whether every trained tensor has changed, and whether memory is what was planned."""
        if self.moving_steps:
            self.display.line(self.moved.verdict(self.moving_steps))
        if self.model.device.type == "cuda" and self.config.method in PLANNED:
            planned_gib = self.model.placed.device_bytes.total / GIB
            peak_gib = memory_gib(self.model.device)["gpu_gib"]
            self.display.line(f"check: peak GPU memory {peak_gib:.2f} GiB, planned {planned_gib:.2f} GiB")
        self.moved = None

    def evaluate(self, step: int) -> None:
        """Loss on the held-out data; given up when a signal came."""
        found = evaluate(self.model, self.data.eval, lambda: bool(self.interrupts.requested))
        if found is not None:
            self.report({"step": step, **found})
            numbers = f"loss {found['eval_loss']:.4f}, perplexity {found['perplexity']:.2f}"
            self.display.line(f"eval at step {step}: {numbers} over {found['eval_tokens']:,} tokens")

    def leave(self, step: int) -> int:
        """After a signal: the step is done, the checkpoint is written, the run can go on later."""
        self.recorder.drain()
        self.display.lines(self.saver.wait(step))
        path = self.saver.save_once(step, self.data.train.state_dict())
        told = f"stopped by {self.interrupts.requested} after step {step}"
        self.display.line(f"{told}; saved {path}; go on with --resume")
        return EXIT_INTERRUPTED

    def finish(self) -> int:
        """The last checkpoint, and its model at the top of the output directory."""
        self.recorder.drain()
        step = max(self.job.first, self.job.total)
        self.display.lines(self.saver.wait(step))
        self.saver.save_once(step, self.data.train.state_dict())
        self.saver.publish()
        self.display.line(f"done: {step} steps; the model is in {self.job.directory.root}")
        return 0

    def close(self) -> None:
        """Whatever happened: files closed, the curve drawn."""
        self.display.close()
        self.journal.end()
        self.saver.close()
        self.journal.close()
        self.metrics.close()
        self.track.close()
        self.model.close()
        if plot_loss(self.job.directory.metrics, self.job.directory.curve, start.title(self.config)):
            self.display.line(f"curve: {self.job.directory.curve}")
