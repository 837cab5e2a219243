"""The training loop that all methods share; a method only provides its step.

    (step, then every observer: checks, evaluation, save) x total -> publish the last or the best step -> test

All state of the loop is in the checkpoint: step number, position in the data, the method's state. So N + M steps equal,
bit for bit, N steps, a stop, and M more steps. start.py and build.py show how a run gets here.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from keyhole.config import TrainConfig
from keyhole.data.run import Data
from keyhole.errors import NonFinite, UserError
from keyhole.machine.out_of_memory import out_of_memory
from keyhole.machine.text import counted, printable
from keyhole.methods.base import Method
from keyhole.model.model import Model
from keyhole.model.structure.source import has_adapter
from keyhole.model.weights.saved_files import first_bad_tensor
from keyhole.report.story import DONE, FAILED, STOPPED
from keyhole.training.checks import Divergence, FirstSteps
from keyhole.training.evaluation import Evaluation
from keyhole.training.follow import Command, Commands, next_batches, one_update
from keyhole.training.journaling import Journaling
from keyhole.training.metrics import MetricsFile, QueuedStep, Recorder, token_count
from keyhole.training.observer import Observer, Reading
from keyhole.training.reports import Reports, Trace
from keyhole.training.rundir import RunDir
from keyhole.training.saving import NoRoom, Saver
from keyhole.training.schedule import Schedule
from keyhole.training.signals import EXIT_INTERRUPTED

MOST_SAID = 600  # characters of an error on the page


@dataclass(kw_only=True)
class Run:
    """A run with all its parts; `first` steps are done. here: they were done in this directory, where the evaluation or
    save due after the last of them may be missing."""

    config: TrainConfig
    directory: RunDir
    data: Data
    schedule: Schedule
    first: int
    here: bool
    model: Model
    method: Method
    commands: Commands
    metrics: MetricsFile
    journal: Journaling | None
    reports: Reports
    evaluation: Evaluation
    saver: Saver
    ends: str | None = None  # why the run ends before its last step

    def __post_init__(self) -> None:
        self.total, self.done, self.display = self.schedule.total, self.first, self.reports.display
        self.first_steps = FirstSteps(self.model, self.method.name, self.reports)
        self.trace = Trace(self.model, self.first, self.total, self.reports.page.story)
        written: list[Observer] = [self.metrics] if self.journal is None else [self.metrics, self.journal]
        shown = [self.trace, self.reports, Divergence(self.display.line, self.metrics.kept)]
        self.observers = [*written, *shown, self.first_steps, self.evaluation, self.saver]
        self.recorder = Recorder(self.model.device, self.note, self.display.line, self.saver.newest_good)
        kinds = {"check": Command.CHECK, "write": Command.WRITE, "state": Command.STATE}
        self.model.call_others = lambda what: self.commands.call(kinds[what])

    def go(self) -> int:
        """Runs the remaining steps and publishes the model; returns the exit code."""
        try:
            return self._go()
        except BaseException as error:
            self.reports.page.ended(FAILED, printable(f"{type(error).__name__}: {error}", MOST_SAID))
            raise

    def _go(self) -> int:
        try:
            self.display.open(self.first, lambda: self.commands.interrupts.ask("a closed output"))
            self.recorder.restart_clock()
            self.evaluation.selection.start_clock()
            with self.commands.interrupts:
                code = self.loop()
            self.commands.call(Command.END, code)
            return code
        except NonFinite as error:
            ranks = self.model.ranks.not_finite()
            if ranks:
                error = NonFinite(f"{error}\n  found: on rank {', '.join(map(str, ranks))}")
            alone = not self.model.engine.shared and not self.model.sharded
            broken = first_bad_tensor(self.model.named_tensors()) if alone else None
            if broken is None:
                raise error from error.__cause__
            raise NonFinite(f"{error}\n  found: {broken} holds NaN or infinity, before this step") from error
        except Exception as error:
            if (lacks := out_of_memory(error)) is None:
                raise
            raise UserError(lacks) from error

    def loop(self) -> int:
        for step in range(self.first, self.total + 1):
            if step > self.first:
                self.step(step)
            self.done = step
            if step > self.first or (step > 0 and self.here):  # the evaluation or save may be missing
                self.after_step()
            if self.is_interrupted and (step < self.total or self.evaluation.gave_up):
                return self.leave()
            if self.ends:
                break
        return self.finish()

    def step(self, step: int) -> None:
        """Queues one update; its numbers are read when the device has finished it."""
        loader = self.data.train
        self.commands.call(Command.STEP)
        batches = next_batches(self.method, loader)
        self.first_steps.begin(batches)
        with self.trace.around(step):
            loss, rate = one_update(self.method, self.schedule, step, batches)
        self.first_steps.moved += rate > 0
        record = QueuedStep(step, loss, rate, loader.epoch, token_count(batches), loader.where())
        record.extra, record.position = self.method.metrics(), loader.position
        record.update = None if self.journal is None else self.method.journal_update()
        self.recorder.add(record)
        self.display.lines(self.method.news())

    def note(self, reading: Reading) -> None:
        """Numbers have been read."""
        for observer in self.observers:
            observer.note(reading)

    def after_step(self) -> None:
        """A step has been queued."""
        self.ends = self.ends or self.evaluation.selection.out_of_time()
        for observer in self.observers:
            observer.after_step(self)

    @property
    def is_last(self) -> bool:
        return self.done == self.total or self.ends is not None

    @property
    def is_interrupted(self) -> bool:
        return self.commands.is_asked

    @contextmanager
    def paused(self) -> Iterator[None]:
        self.recorder.drain()
        self.flush()
        yield
        self.recorder.restart_clock()

    def flush(self) -> None:
        """Applies deferred updates; all ranks do it together if they share host memory or hold shards."""
        if self.model.engine.shared or self.model.sharded:
            self.commands.call(Command.FLUSH)
        self.method.flush()

    def leave(self) -> int:
        """After a signal: writes a checkpoint of the finished step, so that the run can be resumed."""
        by = self.commands.interrupts.requested
        path = self.save_last()
        self.display.line(f"stopped by {by} after step {self.done}; saved {path}; go on with --resume")
        self.reports.page.ended(STOPPED, f"By {by}; it can go on with --resume.")
        return EXIT_INTERRUPTED

    def finish(self) -> int:
        """Writes the last checkpoint, and publishes its model, or the best step's, at the top of the output
        directory."""
        saves, root, is_whole = self.config.save_model, self.directory.root, self.done == self.total
        if not is_whole:
            self.display.line(f"the run ends after step {self.done}: {self.ends}")
        if saves:
            self.save_last()
        else:
            self.settle()
        best = self.evaluation.publish(self)
        if self.evaluation.gave_up:
            return self.leave()
        where = f"the model is in {root}" if saves else "no model was saved"
        if saves and has_adapter(root):
            beside = f"and its adapters in {root / 'adapter'}"
            where += f", {beside}: a program that does not load both (peft does) has half of it"
        self.reports.page.ended(DONE, "" if is_whole else f"{self.ends}.".capitalize())
        done = f"{counted(self.done, 'step')}{self.display.summary()}"
        self.display.line(f"done: {done}{self.evaluation.outcome(self.done, best)}; {where}")
        return 0

    def settle(self) -> None:
        """Reads all numbers, applies deferred updates and waits for a checkpoint that is being written."""
        self.recorder.drain()
        self.flush()
        self.display.lines(self.saver.wait(self.done))

    def save_last(self) -> Path:
        """The save that ends the run. On a full disk it waits for room; a new signal, or too long a wait, gives up."""
        step, interrupts = self.done, self.commands.interrupts
        self.settle()
        before = interrupts.requested
        try:
            return self.saver.save_last(step, lambda: interrupts.requested != before)
        except NonFinite:
            raise
        except UserError as error:
            good = self.saver.last_good
            if self.journal is not None and self.journal.has(step):
                kept = f"all {step} steps are in {self.directory.journal}: --resume replays them, and nothing is lost"
            elif good is None:
                kept = "there is no checkpoint, so all steps are lost"
            else:
                kept = f"the steps after {good.name} are lost, and --resume goes on from there"
            when = "there is room" if isinstance(error, NoRoom) else "it can be written to"
            raise UserError(f"{error}\n  once {when}: {kept}") from error
