"""The one loop that every method shares; a method only brings its step.

    output_dir -> checkpoint to go on from -> data -> model -> method -> (step, eval?, save?) x total -> model

Everything is checked before anything is written, and the cheap checks come first. What a step is made of
lives in keyhole/training/ (a file an idea) and what goes to disk in keyhole/checkpoint/. The loop itself
holds no state that a checkpoint does not: step number, position in the data, the method's state. So N + M
steps are the same, bit for bit, as N steps, a stop, and M more.
"""

from typing import Any

import torch

from keyhole.checkpoint import find, hf
from keyhole.checkpoint.resume import apply_changes
from keyhole.checkpoint.state import method_state
from keyhole.config import TrainConfig
from keyhole.data import Data, check_packing, from_config
from keyhole.methods import METHODS
from keyhole.model.load import choose_device, choose_dtype, load
from keyhole.model.model import Model
from keyhole.model.skeleton import build, read_config
from keyhole.plan.memory import Workload
from keyhole.plan.placement import place
from keyhole.plan.probe import environment, versions
from keyhole.training import moved, rundir, start
from keyhole.training.display import Display
from keyhole.training.evaluate import evaluate
from keyhole.training.metrics import Entry, MetricsFile, Record, Recorder
from keyhole.training.plot import plot_loss
from keyhole.training.saving import Saver
from keyhole.training.schedule import learning_rate
from keyhole.training.signals import EXIT_INTERRUPTED, Interrupts
from keyhole.training.tracker import tracker


def train(config: TrainConfig, *, resume: str | None = None, dry_run: bool = False) -> int:
    """Trains as the config says and returns the exit code: 0, or 130 when interrupted after a clean save.

    resume: None starts a new run; "" (or "auto", "last") goes on from the newest checkpoint in output_dir; a
    path, from that checkpoint. dry_run checks config, data and model without reading weights, prints the
    start block, and stops.
    """
    directory = rundir.inspect(config.output_dir, resume is not None)
    choice = find.Choice() if resume is None else find.choose(resume, directory.root)
    notes = resume_lines(resume, choice, config)
    torch.manual_seed(config.seed)
    data = from_config(config)
    if choice.state is not None:
        data.train.load_state_dict(choice.state.loader)
    first = choice.state.step if choice.state else 0
    total = total_steps(config, data.train.steps_per_epoch)
    plan = start.plan_lines(config, first, total, data.train.steps_per_epoch)
    display = Display(total, config.logging_steps)
    if dry_run:
        say_all(
            display,
            start.block(config, [*dry_lines(config), data.report, plan, notes, ["dry run: nothing written"]]),
        )
        return 0
    model = load_model(config, choice)
    if config.packing:
        check_packing(model, config.max_length)
    hf.add_end_tokens(model.module, data.end_token_ids)
    method = METHODS[config.method].from_config(model, config)
    if choice.state is not None:
        method.load_state_dict(method_state(choice.path, choice.state))
    machine = start.machine_lines(config, model.dtype, model.device, model.describe())
    groups = [start.model_lines(model.module, model.layout, model.dtype), machine, data.report, plan, notes]
    say_all(display, start.block(config, groups))
    saver = Saver(directory.root, model, method, config, versions())
    saver.refuse_full_disk()
    rundir.open_run(directory, config, environment())
    find.set_aside(choice.damaged)
    if choice.path is not None and choice.path.parent.resolve() == directory.root.resolve():
        saver.last_good, saver.last_step = choice.path, first
    return Run(config, model, method, data, directory, saver, display, first, total).go()


def resume_lines(resume: str | None, choice: find.Choice, config: TrainConfig) -> list[str]:
    """What going on means here: from where, what is damaged, what changed."""
    if resume is None:
        return []
    if choice.state is None:
        return [f"resume: no checkpoint in {config.output_dir} yet, so this is a new run"]
    lines = [f"resume: from {choice.path}, {choice.state.step} steps done"]
    lines += [f"resume: {path} is damaged and passed over: {fault}" for path, fault in choice.damaged.items()]
    lines += [f"resume: {change}" for change in apply_changes(choice.state, config)]
    then, now = choice.state.versions, versions()
    other = [
        f"{name} {then[name]} -> {now[name]}" for name in ("torch", "keyhole") if then.get(name) != now[name]
    ]
    return lines + [f"resume: {change}: equal to the last bit only with the same version" for change in other]


def total_steps(config: TrainConfig, steps_per_epoch: int) -> int:
    """max_steps, or the steps of num_train_epochs passes over the data."""
    if config.max_steps is not None:
        return config.max_steps
    return max(1, round(config.num_train_epochs * steps_per_epoch))


def workload(config: TrainConfig) -> Workload:
    """What will run, for the memory plan."""
    directions = config.zo.directions if config.method == "zo" else 1
    passes = 2 * directions * config.gradient_accumulation_steps if config.method == "zo" else 1
    return Workload(config.method, config.batch_size * (config.max_length or 2048), passes, directions)


def load_model(config: TrainConfig, choice: find.Choice) -> Model:
    """The model of the config, or of the checkpoint to go on from."""
    where = {"placement": config.placement, "gpu_memory": config.gpu_memory, "device": config.device}
    source = config.model if choice.path is None else str(choice.path)
    return load(source, dtype=config.dtype, seed=config.seed, workload=workload(config), **where)


def dry_lines(config: TrainConfig) -> list[list[str]]:
    """The lines about model and machine without its weights."""
    hf_config, device = read_config(config.model), choose_device(config.device)
    dtype = choose_dtype(config.dtype, hf_config)
    module = build(hf_config, dtype)
    layout, placed = place(module, config.placement, config.gpu_memory, dtype, device, workload(config))
    return [
        start.model_lines(module, layout, dtype),
        start.machine_lines(config, dtype, device, placed.reasons),
    ]


def say_all(display: Display, lines: list[str]) -> None:
    for line in lines:
        display.line(line)


class Run:
    """A run whose pieces are all there: steps, what happens between them, and the end."""

    def __init__(
        self, config: TrainConfig, model: Model, method: Any, data: Data, directory: rundir.RunDir, saver: Saver,
        display: Display, first: int, total: int,
    ) -> None:  # fmt: skip
        self.config, self.model, self.method, self.data = config, model, method, data
        self.directory, self.saver, self.display, self.first, self.total = (
            directory,
            saver,
            display,
            first,
            total,
        )
        self.metrics = MetricsFile(directory.metrics, first)
        self.track = tracker(config.report_to, directory.run, first)
        self.recorder = Recorder(model.device, self.report, lambda: saver.last_good and str(saver.last_good))
        self.interrupts = Interrupts()
        self.moved: moved.Moved | None = None
        self.moving_steps = 0  # steps with a rate above 0, until the check is done

    def go(self) -> int:
        """All steps that are left, and the model out."""
        self.display.open(self.first)
        self.recorder.restart_clock()
        try:
            with self.interrupts:
                for step in range(self.first + 1, self.total + 1):
                    self.step(step)
                    self.between(step)
                    if self.interrupts.requested and step < self.total:
                        return self.leave(step)
                return self.finish()
        finally:
            self.close()

    def step(self, step: int) -> None:
        """One update, queued; its record is read when it is done."""
        c = self.config
        self.method.lr = learning_rate(
            c.lr_scheduler_type, step - 1, self.total, c.learning_rate, c.warmup_ratio
        )
        batches = next(self.data.train)
        if self.moved is None and self.moving_steps == 0:
            self.moved = moved.Moved(self.model, torch.cat([b["input_ids"].flatten() for b in batches]))
        loss = self.method.step(batches)
        self.moving_steps += self.method.lr > 0
        epoch = self.data.train.epoch
        tokens = sum(
            int(b["attention_mask"].sum()) if "attention_mask" in b else b["input_ids"].numel()
            for b in batches
        )
        where = self.data.train.where()
        self.recorder.add(Record(step, loss, self.method.lr, epoch, tokens, where, self.method.metrics()))

    def report(self, entry: Entry) -> None:
        """Takes the entry of a finished step, or of an evaluation."""
        self.metrics.write(entry)
        self.track.write(entry)
        if "loss" in entry:
            self.display.step(entry)

    def between(self, step: int) -> None:
        """Check, evaluation and save, where they are due after this step."""
        last = step == self.total
        checks = self.moved is not None and (self.moving_steps == moved.STEPS or last)
        evaluates = bool(self.data.eval) and (last or step % (self.config.eval_steps or self.total) == 0)
        saves = self.saver.is_due(step) and not last and not self.interrupts.requested
        if not (checks or evaluates or saves):
            return
        self.recorder.drain()
        self.method.flush()
        if checks:
            self.check()
        if evaluates:
            self.evaluate(step)
        if saves:
            self.display.line(self.saver.try_save(step, self.data.train.state_dict()))
        self.recorder.restart_clock()

    def check(self) -> None:
        """Whether every trained tensor has changed, once."""
        still, share = self.moved.still()
        if self.moving_steps:
            self.display.line(
                moved.verdict(still, share, self.moving_steps, self.model.dtype, len(self.moved.before))
            )
        self.moved = None

    def evaluate(self, step: int) -> None:
        """Loss on the held-out data; given up when a signal came."""
        result = evaluate(self.model, self.data.eval, lambda: bool(self.interrupts.requested))
        if result is not None:
            self.report({"step": step, **result})
            self.display.line(
                f"eval at step {step}: loss {result['eval_loss']:.4f}, perplexity {result['perplexity']:.2f}"
            )

    def leave(self, step: int) -> int:
        """After a signal: the step is done, the checkpoint is written, the run can go on later."""
        self.recorder.drain()
        path = self.saver.save_once(step, self.data.train.state_dict())
        self.display.line(
            f"stopped by {self.interrupts.requested} after step {step}; saved {path}; go on with --resume"
        )
        return EXIT_INTERRUPTED

    def finish(self) -> int:
        """The last checkpoint, and its model at the top of the output directory."""
        self.recorder.drain()
        self.saver.save_once(max(self.first, self.total), self.data.train.state_dict())
        self.saver.publish()
        self.display.line(f"done: {max(self.first, self.total)} steps; the model is in {self.directory.root}")
        return 0

    def close(self) -> None:
        """Whatever happened: files closed, the curve drawn."""
        self.display.close()
        self.metrics.close()
        self.track.close()
        if plot_loss(self.directory.metrics, self.directory.run / "loss.png", start.title(self.config)):
            self.display.line(f"curve: {self.directory.run / 'loss.png'}")
