"""The training loop that all methods share; a method only provides its step.

    (step, then every observer: checks, evaluation, save) x total -> publish the last or the best step -> test

All state of the loop is in the checkpoint: step number, position in the data, the method's state. So N + M steps equal,
bit for bit, N steps, a stop, and M more steps. start.py and build.py show how a run gets here.
"""

from dataclasses import dataclass

from keyhole.checkpoint.state import TENSORS
from keyhole.checkpoint.writer import split_state
from keyhole.errors import Mixed, NonFinite, UserError
from keyhole.machine.out_of_memory import out_of_memory
from keyhole.machine.text import counted, printable
from keyhole.model.structure.source import has_adapter
from keyhole.model.weights.save import first_bad_tensor, write_parts, write_state_parts
from keyhole.report.story import DONE, FAILED, STOPPED
from keyhole.training.checks import Divergence, FirstSteps
from keyhole.training.evaluation import Evaluation
from keyhole.training.metrics import QueuedStep, Recorder, token_count
from keyhole.training.records import Journaling, MetricsFile
from keyhole.training.reports import Reports
from keyhole.training.run import Command, Run
from keyhole.training.saving import Saver
from keyhole.training.signals import EXIT_INTERRUPTED
from keyhole.training.validation import evaluate

MOST_SAID = 600  # characters of an error on the page


@dataclass(kw_only=True)
class Leader:
    run: Run
    metrics: MetricsFile
    journal: Journaling | None
    reports: Reports
    evaluation: Evaluation
    saver: Saver

    def __post_init__(self) -> None:
        run, self.display, self.page = self.run, self.reports.display, self.reports.page
        self.recorder = run.recorder = Recorder(run.model.device, run.note, run.say, self.saver.way_back)
        run.observers += [self.metrics, *([] if self.journal is None else [self.journal])]
        run.observers += [self.reports, Divergence(run.say, self.metrics.kept)]
        run.observers += [FirstSteps(run, self.page.story), self.evaluation, self.saver]
        run.model.call_others = lambda what: run.call(Command[what.upper()])

    def go(self) -> int:
        """Runs the remaining steps and publishes the model; returns the exit code."""
        try:
            return self._go()
        except BaseException as error:
            self.page.ended(FAILED, printable(f"{type(error).__name__}: {error}", MOST_SAID))
            raise

    def _go(self) -> int:
        run = self.run
        try:
            self.display.open(run.first, lambda: run.interrupts.ask("a closed output"))
            self.recorder.restart_clock()
            self.evaluation.selection.start_clock()
            with run.interrupts:
                code = self.loop()
            run.call(Command.END, code)
            return code
        except Mixed as error:
            raise Mixed(f"{error}\n  {self.saver.way_back()}") from error
        except NonFinite as error:
            alone = not run.model.engine.shared and not run.model.sharded
            broken = first_bad_tensor(run.model.named_tensors()) if alone else None
            if broken is None:
                raise error from error.__cause__
            raise NonFinite(f"{error}\n  found: {broken} holds NaN or infinity, before this step") from error
        except Exception as error:
            if (lacks := out_of_memory(error)) is None:
                raise
            raise UserError(lacks) from error

    def loop(self) -> int:
        run = self.run
        if run.done > 0 and not run.origin.elsewhere:  # the evaluation or save may be missing
            self.after_step()
        while True:
            if run.is_asked() and (run.done < run.total or self.evaluation.gave_up):
                return self.leave()
            if run.is_last or run.done > run.total:
                return self.finish()
            self.step(run.done + 1)
            self.after_step()

    def step(self, step: int) -> None:
        """Queues one update; its numbers are read when the device has finished it."""
        run, loader = self.run, self.run.data.train
        run.call(Command.STEP)
        batches = run.next_batches()
        for observer in run.observers:
            observer.before_step(batches)
        loss = run.update(batches)
        update = None if self.journal is None else run.method.journal_update()
        known = {"learning_rate": run.rate, "epoch": loader.epoch, "tokens": token_count(batches)}
        entry = {"step": step, "loss": loss, **known, **run.method.metrics()}
        self.recorder.add(QueuedStep(entry, loader.where(), update, loader.position))

    def after_step(self) -> None:
        self.run.ends = self.run.ends or self.evaluation.selection.out_of_time()
        for observer in self.run.observers:
            observer.after_step()

    def leave(self) -> int:
        """After a signal: writes a checkpoint of the finished step, so that the run can be resumed."""
        by = self.run.interrupts.requested
        self.settle()
        path = self.saver.save_last()
        self.run.say(f"stopped by {by} after step {self.run.done}; saved {path}; go on with --resume")
        self.page.ended(STOPPED, f"By {by}; it can go on with --resume.")
        return EXIT_INTERRUPTED

    def finish(self) -> int:
        """Writes the last checkpoint, and publishes its model, or the best step's, at the top of the output
        directory."""
        run, root, saves = self.run, self.run.directory.root, self.run.config.save_model
        is_whole = run.done >= run.total
        if not is_whole:
            run.say(f"the run ends after step {run.done}: {run.ends}")
        self.settle()
        if saves:
            self.saver.save_last()
        best = self.evaluation.publish()
        if self.evaluation.gave_up:
            return self.leave()
        where = f"the model is in {root}" if saves else "no model was saved"
        if saves and has_adapter(root):
            beside = f"and its adapters in {root / 'adapter'}"
            where += f", {beside}: a program that does not load both (peft does) has half of it"
        self.page.ended(DONE, "" if is_whole else f"{run.ends}.".capitalize())
        done = f"{counted(run.done, 'step')}{self.display.summary()}"
        run.say(f"done: {done}{self.evaluation.outcome(best)}; {where}")
        return 0

    def settle(self) -> None:
        """Reads all numbers, applies deferred updates and waits for a checkpoint that is being written."""
        self.recorder.drain()
        self.run.flush()
        self.saver.wait()


def follow(run: Run) -> int:
    """The loop of the other ranks: executes the leader's commands until END; returns the exit code."""
    model, method = run.model, run.method
    with run.interrupts:
        while True:
            command, argument = run.listen()
            match command:
                case Command.END:
                    return argument
                case Command.STEP:
                    run.update(run.next_batches())
                case Command.EVALUATE:
                    method.flush()
                    if evaluate(model, run.data.eval, run.is_asked) is not None:
                        run.judge.dev_metrics(model, run.is_asked)
                case Command.TEST:
                    method.flush()
                    run.judge.test_metrics(model, run.is_asked)
                case Command.GO_BACK:
                    run.take_weights(argument)
                case Command.FLUSH:
                    method.flush()
                case Command.WRITE:
                    write_parts(model, None)
                case Command.STATE:
                    write_state_parts(model, None, split_state(method.state_dict())[0], TENSORS)
