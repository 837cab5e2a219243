"""The training loop that all methods share; a method only provides its step.

    (step, check?, evaluation?, save?) x total -> publish the last or the best step (selection.py) -> test

The published model is scored on the test questions of the run's tasks. If no model is saved (save_model: false), the
best weights could not be loaded again, so they are tested as soon as a step is the best so far.

All state of the loop is in the checkpoint: step number, position in the data, the method's state. So N + M steps equal,
bit for bit, N steps, a stop, and M more steps. start.py shows how a run gets here.
"""

from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch

from keyhole.checkpoint import select
from keyhole.data.run import Data
from keyhole.errors import NonFinite, UserError
from keyhole.machine.out_of_memory import out_of_memory
from keyhole.machine.sizes import GIB
from keyhole.machine.text import printable
from keyhole.methods import METHODS
from keyhole.methods.base import Method
from keyhole.model.model import Model
from keyhole.model.structure.source import has_adapter
from keyhole.model.weights.finite import first_bad_tensor
from keyhole.report.story import DONE, FAILED, STOPPED, Answers
from keyhole.training import rundir
from keyhole.training.change_check import CHECK_STEPS, ChangeCheck
from keyhole.training.crew import Command, Crew
from keyhole.training.display import Display
from keyhole.training.follow import next_batches, one_update, take_weights
from keyhole.training.journaling import Journaling
from keyhole.training.metrics import MetricsFile, QueuedStep, Recorder, memory_gib, token_count
from keyhole.training.observer import Reading
from keyhole.training.page_facts import Trace, planned
from keyhole.training.planning import pace_line
from keyhole.training.reports import Reports
from keyhole.training.room import NoRoom
from keyhole.training.sample_answers import SampleAnswers
from keyhole.training.saving import Saver
from keyhole.training.schedule import Schedule
from keyhole.training.selection import Selection
from keyhole.training.signals import EXIT_INTERRUPTED, Interrupts
from keyhole.training.start_block import counted_steps
from keyhole.training.validation import EVAL, TEST, Judge, evaluate, shown, shown_loss

MOST_SAID = 600  # characters of an error on the page


@dataclass(kw_only=True)
class Run:
    """A run with all its parts; `first` steps are done. here: they were done in this directory, where the evaluation or
    save due after the last of them may be missing."""

    directory: rundir.RunDir
    display: Display
    reports: Reports
    data: Data
    schedule: Schedule
    first: int
    here: bool
    eval_steps: int | None
    model: Model
    method: Method
    metrics: MetricsFile
    journal: Journaling | None
    saver: Saver
    selection: Selection
    judge: Judge
    interrupts: Interrupts = field(default_factory=Interrupts)
    changes: ChangeCheck | None = None
    moving_steps: int = 0  # steps with a learning rate above 0
    gave_up: bool = False  # a signal ended the last evaluation or test
    last_eval: dict[str, float] | None = None
    damaged: set[int] = field(default_factory=set)  # steps whose checkpoints were found damaged
    ends: str | None = None  # why the run ends before its last step
    sample_answers: int = 0  # number per evaluation, for the page
    timed: list[dict[str, float]] = field(default_factory=list)  # tokens and seconds of steps, until the check

    def __post_init__(self) -> None:
        self.total, self.done = self.schedule.total, self.first
        self.observers = [self.metrics, *([] if self.journal is None else [self.journal]), self.reports, self.saver]
        self.crew = Crew(self.model.ranks, self.interrupts)
        parts = {"check": Command.CHECK, "write": Command.WRITE, "state": Command.STATE}
        self.model.call_others = lambda what: self.crew.call(parts[what])
        self.display.gone = lambda: self.interrupts.ask("a closed output")
        self.trace = Trace(self.model, self.first, self.total)
        self.answers = SampleAnswers(self.model, self.data.eval.dataset, self.reports, self.sample_answers)
        self.recorder = Recorder(self.model.device, self.note, self.display.line, self.saver.newest_good)
        self.recorder.divergence.recall(self.metrics.kept)

    def go(self) -> int:
        """Runs the remaining steps and publishes the model; returns the exit code."""
        try:
            return self._go()
        except BaseException as error:
            self.reports.page.ended(FAILED, printable(f"{type(error).__name__}: {error}", MOST_SAID))
            raise
        finally:
            self.close()

    def _go(self) -> int:
        try:
            self.display.open(self.first)
            self.recorder.restart_clock()
            self.selection.start_clock()
            with self.interrupts:
                code = self.loop()
            self.crew.call(Command.END, code)
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
                self.after_step(step)
            if self.is_interrupted and (step < self.total or self.gave_up):
                return self.leave(step)
            if self.ends:
                break
        return self.finish(step)

    def step(self, step: int) -> None:
        """Queues one update; its numbers are read when the device has finished it."""
        loader = self.data.train
        self.crew.call(Command.STEP)
        batches = next_batches(self.method, loader)
        if self.changes is None and self.moving_steps == 0:
            self.changes = ChangeCheck(self.model, torch.cat([b["input_ids"].flatten() for b in batches]))
        self.trace.begin(step)
        try:
            loss, rate = one_update(self.method, self.schedule, step, batches)
        finally:
            self.trace.end()
        self.moving_steps += rate > 0
        record = QueuedStep(step, loss, rate, loader.epoch, token_count(batches), loader.where())
        record.extra, record.position = self.method.metrics(), loader.position
        record.update = None if self.journal is None else self.method.journal_update()
        self.recorder.add(record)
        self.display.lines(self.method.news())

    def note(self, reading: Reading) -> None:
        """Tells the observers; keeps tokens and seconds of the first steps for the check."""
        if self.changes is not None and "loss" in reading.entry:
            self.timed.append(reading.entry)
        self.reports.tell("the trace of a step", lambda: self.trace.note(reading.entry, self.reports.page))
        for each in self.observers:
            each.note(reading)

    @property
    def is_last(self) -> bool:
        return self.done == self.total or self.ends is not None

    @property
    def is_interrupted(self) -> bool:
        """Whether a signal has asked the run to stop."""
        return self.interrupts.requested is not None

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Inside, all numbers are read and deferred updates are applied; its time counts towards no step."""
        self.recorder.drain()
        self.flush()
        yield
        self.recorder.restart_clock()

    def after_step(self, step: int) -> None:
        """Check, evaluation and save, if they are due after this step."""
        self.ends = self.ends or self.selection.out_of_time()
        checks = self.changes is not None and (self.moving_steps == CHECK_STEPS or self.is_last)
        evaluates = bool(self.data.eval) and (self.is_last or step % (self.eval_steps or self.total) == 0)
        if checks or (evaluates and step not in self.metrics.evaluated):
            with self.paused():
                if checks:
                    self.check()
                if evaluates and step not in self.metrics.evaluated:
                    self.evaluate(step)
        self.keep_best(step)
        self.ends = self.ends or self.selection.out_of_patience()
        for each in self.observers:
            each.after_step(self)

    def flush(self) -> None:
        """Applies deferred updates; all ranks do it together if they share host memory or hold shards."""
        if self.model.engine.shared or self.model.sharded:
            self.crew.call(Command.FLUSH)
        self.method.flush()

    def check(self) -> None:
        """Once per run: checks that every trained tensor has changed, and compares memory and pace with the plan."""
        if self.moving_steps and self.changes is not None:
            self.display.line(self.changes.verdict(self.moving_steps))
        if self.model.device.type == "cuda" and METHODS[self.method.name].streams:
            assert self.model.placed is not None
            planned_gib = self.model.placed.device_bytes.total / GIB
            peak_gib = memory_gib(self.model.device)["gpu_gib"]
            self.display.line(f"check: peak GPU memory {peak_gib:.2f} GiB, planned {planned_gib:.2f} GiB")
        if line := pace_line(self.model, self.method.name, self.timed[1:]):  # the first step compiles
            self.display.line(line)
        if tokens := [entry["tokens"] for entry in self.timed[1:]]:
            pace = sum(tokens) / len(tokens)
            told = lambda: self.reports.page.planned(planned(self.model, self.method.name, pace))  # noqa: E731
            self.reports.tell("the plan", told)
        self.changes = None

    def evaluate(self, step: int) -> None:
        """Loss on the held-out data, and the tasks' metrics on dev. A signal aborts it, and the resumed run repeats
        it."""
        self.crew.call(Command.EVALUATE)
        found = evaluate(self.model, self.data.eval, lambda: self.is_interrupted)
        answers = Answers(step, "the first questions of dev")
        keep = self.answers.keep_in(answers)
        metrics = None if found is None else self.judge.dev_metrics(self.model, lambda: self.is_interrupted, keep)
        self.gave_up = metrics is None
        if found is not None and metrics is not None:
            found |= metrics
            self.last_eval = found
            self.selection.note(step, found)
            self.note(Reading({"step": step, **found}))
            scores = f"; {text}" if (text := shown(found, EVAL)) else ""
            self.display.line(f"eval at step {step}: {shown_loss(found)}{scores}")
            self.reports.tell("sample answers", lambda: self.answers.show(answers))

    def test(self, step: int) -> None:
        """The tasks' metrics on the test questions, with the current weights, which are those of this step. A signal
        aborts it, and the resumed run repeats it."""
        tested = self.metrics.tested
        if not self.judge.test or self.judge.is_done(tested.get(step)):
            return
        self.flush()
        self.crew.call(Command.TEST)
        found = self.judge.test_metrics(self.model, lambda: self.is_interrupted)
        self.gave_up = found is None
        if found is not None:
            tested[step] = {"step": step, **found}
            self.note(Reading(tested[step]))
            self.display.line(f"test of step {step}: {shown(found, TEST)}")

    def keep_best(self, step: int) -> None:
        """Saves the weights of the best evaluation so far if they are wanted and not on the disk yet; if no
        model is saved, tests them."""
        if not self.selection.settings.best or self.selection.best_steps()[:1] != [step]:
            return
        if not self.saver.settings.model:
            with self.paused():
                self.test(step)
        elif self.saver.best_step != step:
            with self.paused():
                self.display.lines(self.saver.save_best(step))

    def best_saved(self) -> int | None:
        return best_saved(self.selection, self.saver.settings.model, self.directory.root, self.damaged)

    def intact_best(self, last: int) -> int | None:
        """The best step with an intact checkpoint. A damaged checkpoint is reported and set aside, and the next best
        step is tried, down to the last one, which has just been saved."""
        while (best := self.best_saved()) not in (None, last):
            if (fault := self.saver.damage_of(best)) is None:
                break
            self.damaged.add(best)
            self.display.line(
                f"warning: checkpoint-{best}, the best, is damaged and not published: {fault}; the next best is "
                f"published instead, and the last weights are in checkpoint-{last}"
            )
        return best

    def leave(self, step: int) -> int:
        """After a signal: writes a checkpoint of the finished step, so that the run can be resumed."""
        self.recorder.drain()
        self.flush()
        self.display.lines(self.saver.wait(step))
        path = self.save_last(step)
        message = f"stopped by {self.interrupts.requested} after step {step}"
        self.display.line(f"{message}; saved {path}; go on with --resume")
        self.reports.page.ended(STOPPED, f"By {self.interrupts.requested}; it can go on with --resume.")
        return EXIT_INTERRUPTED

    def finish(self, step: int) -> int:
        """Writes the last checkpoint, and publishes its model, or the best step's, at the top of the output
        directory."""
        self.recorder.drain()
        self.flush()
        if step < self.total:
            self.display.line(f"the run ends after step {step}: {self.ends}")
        self.display.lines(self.saver.wait(step))
        if self.saver.settings.model:
            self.save_last(step)
        best = self.intact_best(step) if self.saver.settings.model else self.best_saved()
        if self.saver.settings.model:
            self.saver.publish(best)
            self.go_back(step, best)
        if best in (None, step) or self.saver.settings.model:  # else these weights are not the best step's
            self.test(best or step)
        if self.gave_up:
            return self.leave(step)
        evaluated = "" if self.last_eval is None else f"; eval {shown_loss(self.last_eval)}"
        tested = f"; test {text}" if (text := shown(self.metrics.tested.get(best or step, {}), TEST)) else ""
        where = f"the model is in {self.directory.root}" if self.saver.settings.model else "no model was saved"
        if self.saver.settings.model and has_adapter(self.directory.root):
            beside = self.directory.root / "adapter"
            where += f", and its adapters in {beside}: a program that does not load both (peft does) has half of it"
        self.reports.page.ended(DONE, "" if step == self.total else f"{self.ends}.".capitalize())
        done = f"{counted_steps(step)}{self.display.summary()}"
        self.display.line(f"done: {done}{evaluated}{self._chosen(best)}{tested}; {where}")
        return 0

    def save_last(self, step: int) -> Path:
        """The save that ends the run. On a full disk it waits for room; a new signal, or too long a wait, gives up."""
        before = self.interrupts.requested
        given_up = lambda: self.interrupts.requested != before  # noqa: E731
        try:
            return self.saver.save_last(step, given_up)
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

    def go_back(self, step: int, best: int | None) -> None:
        """Loads the published weights, if they are to be tested and are not those of this step."""
        tested = self.metrics.tested
        if best in (None, step) or not self.judge.test or self.judge.is_done(tested.get(best)):
            return
        self.crew.call(Command.GO_BACK, best)
        take_weights(self.model, self.method, self.directory.root / f"checkpoint-{best}")

    def _chosen(self, best: int | None) -> str:
        if best is None:
            return ""
        values, first = self.selection.values, self.selection.best_steps()[0]
        missed = "" if values[best] == values[first] else f" (step {first} was better, and has no intact checkpoint)"
        return f"; the best was {self.selection.shown(best)}, at step {best}{missed}"

    def close(self) -> None:
        """Closes files, draws the curve and frees memory, also after an error. Each of these is done even if another
        raises."""
        journal = () if self.journal is None else (self.journal.close,)
        parts = (self.display.close, self.saver.close, self.metrics.close, *journal, self.reports.close)
        with ExitStack() as stack:
            for close in (self.model.close, *reversed(parts)):
                stack.callback(close)


def best_saved(selection: Selection, saves_model: bool, root: Path, damaged: Collection[int] = ()) -> int | None:
    """The best step whose weights are in the output directory, or, if no model is saved, were tested; None if the last
    weights are wanted."""
    if not selection.settings.best:
        return None
    if not saves_model:
        return next(iter(selection.best_steps()), None)
    there = {select.step_of(path) for path in select.checkpoints(root)}
    return next((step for step in selection.best_steps() if step in there.difference(damaged)), None)
