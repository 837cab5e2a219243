"""Builds a run after the checks that need no torch (start.py): data, model, method, reports, journal, loop.

    data -> model, method -> start block -> directory -> journal -> loop

Everything is checked before anything is written, and cheap checks come first. The config is read only here and in
model_and_method.py: each part gets only the values that it needs.
"""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import transformers.modeling_utils  # every model needs these three, so they are timed with the other imports
import transformers.models.auto.modeling_auto
import transformers.models.auto.tokenization_auto  # noqa: F401

from keyhole.checkpoint import select
from keyhole.checkpoint.journal.replay import apply_records, keep_directions
from keyhole.checkpoint.journal.resume_point import Origin
from keyhole.checkpoint.state import State
from keyhole.checkpoint.writer import Writer
from keyhole.config import TrainConfig, to_yaml
from keyhole.data.run import Data, load_data
from keyhole.errors import UserError
from keyhole.machine.probe import environment, versions
from keyhole.methods import METHODS
from keyhole.methods.base import Method
from keyhole.model.classification import name_labels
from keyhole.model.model import Model
from keyhole.model.weights.save import add_end_tokens
from keyhole.model.weights.save_parts import check_names
from keyhole.report.page import now
from keyhole.report.story import Story
from keyhole.report.view import STORY, View
from keyhole.training import page_facts, rundir, start_block, trackers
from keyhole.training.display import Display
from keyhole.training.follow import Follower
from keyhole.training.journaling import Journaling, journaled, open_journal
from keyhole.training.lock import Lock
from keyhole.training.loop import Run, best_saved
from keyhole.training.metrics import MetricsFile
from keyhole.training.model_and_method import (
    dry_lines,
    load_model,
    make_method,
    shares_tokenizer,
    total_steps,
    weights_source,
)
from keyhole.training.planning import faster_line
from keyhole.training.reports import Reports
from keyhole.training.request import Parts, Request
from keyhole.training.resume import flat_config
from keyhole.training.run_page import RunPage, begin_curves, begin_story
from keyhole.training.sameness import same_directory, same_everywhere, same_weights
from keyhole.training.saving import Saver, SaveSettings, describe, refuse_full_disk
from keyhole.training.schedule import Schedule
from keyhole.training.selection import Selection, SelectionSettings
from keyhole.training.trackers.behind import Behind, wait_until_open
from keyhole.training.validation import Judge


@dataclass(frozen=True)
class Job:
    """What is known before the model is loaded."""

    config: TrainConfig
    directory: rundir.RunDir
    origin: Origin
    notes: list[str]
    data: Data
    schedule: Schedule
    display: Display
    run_id: str | None
    parts: Parts
    judge: Judge
    base: Callable[[], str | None]

    def lines(self) -> list[str]:
        steps_per_epoch = self.data.train.steps_per_epoch
        return start_block.plan_lines(self.config, self.origin.step, self.schedule, steps_per_epoch)


def find_job(request: Request) -> Job:
    """Reads and checks the data. Writes nothing, so mistakes are reported within seconds."""
    config, origin, parts = request.config, request.origin, request.parts
    with parts.waiting.phase("reading data"):
        data = (parts.load_data or load_data)(request.settings)
    if not shares_tokenizer(config, origin.choice):
        data = replace(data, tokenizer=None)  # the model reads its own
    same_everywhere(parts.ranks, config, data)
    judge = Judge(data.dev, data.test, config.max_length, parts.allow_code_execution)
    judge.check()
    judge.check_config(config, bool(data.eval), bool(data.labels))
    if origin.state is not None:
        data.train.load_state_dict(origin.loader)
    total = total_steps(config.max_steps, config.num_train_epochs, data.train.steps_per_epoch)
    check_length(config, total)
    rate, warmup = config.learning_rate, config.warmup_ratio
    assert rate is not None  # the rules of the config have filled it in
    peak = rate if isinstance(rate, float | int) else 1.0  # auto: the schedule is a factor of the found rate
    schedule = Schedule(config.lr_scheduler_type, peak, total, warmup, config.min_lr_ratio, config.warmup_steps)
    run_id = rundir.new_run_id() if origin.state is None or origin.elsewhere else origin.state.run
    display = parts.display(total, config.logging_steps)
    where: dict[str, Any] = {"directory": request.directory, "notes": request.notes, "base": request.base}
    made: dict[str, Any] = {"data": data, "schedule": schedule, "display": display, "judge": judge}
    return Job(config=config, origin=origin, run_id=run_id, parts=parts, **where, **made)


def check_length(config: TrainConfig, total: int) -> None:
    """Lets the method refuse the number of steps if it follows from the data; other settings were checked before."""
    row = METHODS[config.method]
    for key, fault in row.faults(getattr(config, row.section), replace(config, max_steps=total)):
        raise UserError(f"{key}: {fault}")


def dry_run(job: Job) -> int:
    """Prints the start block of the run without starting it; returns the exit code."""
    config = job.config
    lines = [*dry_lines(config, job.origin.choice, job.data), job.data.report, job.lines(), job.notes]
    lines.append(["dry run: nothing was written"])
    job.display.lines(start_block.block(config.method, config.model, lines))
    return 0


def build_run(job: Job, lock: Lock) -> Run | Follower:
    """Loads model and method, prints the start block, creates the output directory, and replays the journal."""
    torch.manual_seed(job.config.seed)
    with ExitStack() as opened:  # closed again if something below fails
        with job.parts.waiting.phase("loading the model"):
            model = load_model(job.config, job.origin.choice, job.data, job.parts.ranks)
        opened.callback(model.close)
        same_weights(job.parts.ranks, weights_source(job.config, job.origin.choice))
        run = _build(job, lock, model, opened)
        opened.pop_all()
    return run


def _build(job: Job, lock: Lock, model: Model, opened: ExitStack) -> Run | Follower:
    config, origin, ranks, row = job.config, job.origin, job.parts.ranks, METHODS[job.config.method]
    method = _method(job, model)
    ranks_lines = ranks.describe(model.device)
    check_names(model)
    if not ranks.is_leader:
        return _follower(job, lock, model, method)
    about = _about(job)
    saves = SaveSettings(config.save_steps, config.save_total_limit, config.background_save, config.save_model)
    writer = Writer(model, method)
    lines = _start_block(job, model, method, [ranks_lines, describe(saves, writer)])
    job.display.lines(lines)
    if config.save_model:
        refuse_full_disk(job.directory.root, model)
    machine = environment()
    _open_directory(job, lock, model, machine)
    if origin.tail:
        seconds = apply_records(journaled(method), origin.tail, job.display.line)
        job.display.line(f"resume: {len(origin.tail)} steps of the journal replayed in {seconds:.2f} s")
    with rundir.writing_to(job.directory.root):
        metrics = MetricsFile(job.directory.metrics, origin.step, job.display.line)
        opened.callback(metrics.close)
        if metrics.lacks and not origin.elsewhere:
            lost = f"{job.directory.metrics} is damaged: {metrics.lacks}; the run goes on without them"
            job.display.line(f"warning: {lost}")
        reports = _reports(job, model, lines, machine, metrics)
        opened.callback(reports.close)
        journal = _journal(job, method, about) if row.journaled else None
        if journal is not None:
            opened.callback(journal.close)
    selection = _selection(job, metrics)
    saver = Saver(
        job.directory.root,
        writer,
        saves,
        about,
        job.display.line,
        loader=job.data.train,
        journal=journal,
        selection=selection,
        best_step=best_saved(selection, config.save_model, job.directory.root),
    )
    saver.went_on_from(origin.choice.path, origin.step)
    return Run(
        directory=job.directory,
        display=job.display,
        reports=reports,
        data=job.data,
        schedule=job.schedule,
        first=origin.step,
        here=not origin.elsewhere,
        eval_steps=config.eval_steps,
        model=model,
        method=method,
        metrics=metrics,
        journal=journal,
        saver=saver,
        selection=selection,
        judge=job.judge,
        sample_answers=config.sample_answers,
    )


def _method(job: Job, model: Model) -> Method:
    """The method, on a model that has been adapted to the data: its end tokens, labels and chat template."""
    config, data = job.config, job.data
    if config.packing:
        model.check_packing(config.max_length)
    add_end_tokens(model.module, data.end_token_ids)
    if data.labels:
        name_labels(model.config, data.labels, data.train.dataset.pad_token_id)
    if data.chat_template is not None:
        model.tokenizer.chat_template = data.chat_template  # `keyhole chat` must use the template of training
    with job.parts.waiting.phase("making the method"):
        method = make_method(model, config, job.origin)
    if METHODS[config.method].journaled:
        keep_directions(journaled(method), job.directory.journal, job.run_id)
    return method


def _meet_on_disk(job: Job, model: Model) -> bool:
    """Whether every rank writes to the output directory, or reads from it."""
    return model.sharded or job.config.load_best_model_at_end


def _follower(job: Job, lock: Lock, model: Model, method: Method) -> Follower:
    """The part of a rank that is not the leader: no reports, no saves of its own."""
    if _meet_on_disk(job, model):
        same_directory(job.parts.ranks, lock.path)
    if job.origin.tail:
        apply_records(journaled(method), job.origin.tail, job.display.line)
    shared: dict[str, Any]
    shared = {"data": job.data, "schedule": job.schedule, "first": job.origin.step, "judge": job.judge}
    return Follower(root=job.directory.root, model=model, method=method, **shared)


def _about(job: Job) -> State:
    """What checkpoints and the journal say about the run."""
    with job.parts.waiting.phase("hashing the weights"):
        base = job.base() if job.origin.state is None else job.origin.base
    return State(0, config=flat_config(job.config), versions=versions(), run=job.run_id, base=base)


def _start_block(job: Job, model: Model, method: Method, others: list[list[str]]) -> list[str]:
    config = job.config
    machine = start_block.machine_lines(config.device, model, method)
    machine += [line for line in [faster_line(model, method.name)] if line is not None]
    shown = start_block.model_lines(model.module, model.layout, model.dtype, method.keeps_base)
    groups = [shown, machine, job.data.report]
    ranks_lines, saves = others
    groups += [ranks_lines, job.lines(), saves, job.notes, [str(job.parts.waiting)]]
    return start_block.block(config.method, config.model, groups)


def _open_directory(job: Job, lock: Lock, model: Model, machine: dict[str, Any]) -> None:
    """Creates the output directory, or continues the run in it. machine: versions and hardware."""
    rundir.open_run(job.directory, to_yaml(job.config), machine, lock, job.run_id)
    if _meet_on_disk(job, model):
        same_directory(job.parts.ranks, lock.path)
    job.display.log_to(job.directory.log)
    with rundir.writing_to(job.directory.root):
        for path in job.origin.choice.damaged:
            select.set_aside(path, "damaged")


def _selection(job: Job, metrics: MetricsFile) -> Selection:
    """The evaluations that the run in this directory has made so far."""
    config, origin, judge, held_out = job.config, job.origin, job.judge, job.data.eval.dataset
    settings = SelectionSettings(
        best=config.load_best_model_at_end,
        metric=config.metric_for_best_model or judge.metric or "loss",
        greater=config.greater_is_better,
        patience=config.early_stopping_patience,
        minutes=config.max_minutes,
    )
    saved = None if origin.choice.state is None else origin.choice.state.selection
    rows = None if judge.dev or held_out is None else held_out.fingerprint  # of tasks: the questions
    made = Selection(settings, saved, [task.fingerprint for task in judge.dev], rows)
    made.add_before(metrics.kept, 0 if origin.choice.state is None else origin.choice.state.step)
    return made


def _reports(job: Job, model: Model, lines: list[str], machine: dict[str, Any], metrics: MetricsFile) -> Reports:
    """Page, trackers and display of the run. lines: the start block; machine: versions and hardware."""
    config, directory, first = job.config, job.directory, job.origin.step
    name = directory.root.absolute().name
    title = start_block.title(config.method, config.model)
    fresh = Story(job.run_id or "", title, config.method, config.model, model.device.type)
    fresh.total, fresh.lines, fresh.began = job.schedule.total, lines, now()
    story = begin_story(directory.run / STORY, job.run_id, first, fresh)
    view = View(name, directory.run, story, begin_curves(metrics.kept), machine, to_yaml(config), {"loss": config.loss})
    told = trackers.About(directory.run, job.run_id or name, name, first, flat_config(config))
    opened = [Behind(each, partial(trackers.open_tracker, each, told)) for each in trackers.names_of(config.report_to)]
    wait_until_open(opened)
    reports = Reports(directory.metrics, opened, job.display, directory.curve, title, RunPage(view))
    reports.tell("the plan", lambda: reports.page.planned(page_facts.planned(model, config.method)))
    reports.tell("rows of the data", lambda: setattr(story, "samples", page_facts.samples(job.data, model.tokenizer)))
    reports.begin()
    return reports


def _journal(job: Job, method: Method, about: State) -> Journaling:
    """The journal of this run, new or continued."""
    config, origin = job.config, job.origin
    return open_journal(
        journaled(method),
        origin,
        job.directory.journal,
        source=config.model if origin.choice.path is None else str(origin.choice.path),
        wire=config.wire,
        data=job.data,
        config=about.config,
        versions=about.versions,
        run=about.run,
        base=about.base if origin.choice.path is None else None,
        sync_every=config.journal_sync,
        say=job.display.line,
    )
