"""From a checked request to the loop, in the order in which it happens:

    data -> model -> method -> start block -> output directory -> journal replayed -> metrics, journal, page -> loop

A rank that is not the leader goes with the others up to the method, and then follows the leader's commands. Nothing is
written before data, model and method have been checked.
"""

from contextlib import ExitStack
from dataclasses import replace
from functools import partial

import torch
import transformers.modeling_utils  # every model needs these three, so they are timed with the other imports
import transformers.models.auto.modeling_auto
import transformers.models.auto.tokenization_auto  # noqa: F401

from keyhole.checkpoint import select
from keyhole.checkpoint.replay import apply_records, keep_directions
from keyhole.checkpoint.state import State
from keyhole.checkpoint.writer import Writer
from keyhole.config import to_yaml
from keyhole.data.run import Data, load_data
from keyhole.machine.probe import environment, versions
from keyhole.methods import METHODS
from keyhole.methods.base import Method
from keyhole.model.model import Model
from keyhole.model.weights.save import check_names
from keyhole.report.page import now
from keyhole.report.story import Story
from keyhole.training import rundir, start_block, trackers
from keyhole.training.display import Display
from keyhole.training.evaluation import Evaluation
from keyhole.training.follow import Commands, Follower
from keyhole.training.journaling import journaled, open_journal
from keyhole.training.loop import Run
from keyhole.training.metrics import MetricsFile
from keyhole.training.model_and_method import (
    dry_lines,
    load_model,
    make_method,
    make_schedule,
    shares_tokenizer,
    weights_source,
)
from keyhole.training.planning import faster_line
from keyhole.training.reports import Reports, RunPage, add_samples, begin_view, planned
from keyhole.training.resume import flat_config
from keyhole.training.sameness import same_directory, same_everywhere, same_weights
from keyhole.training.saving import Saver, describe, refuse_full_disk
from keyhole.training.schedule import Schedule
from keyhole.training.selection import Selection
from keyhole.training.signals import Interrupts
from keyhole.training.start import Request
from keyhole.training.validation import Judge


def run(request: Request, dry_run: bool) -> int:
    """Executes the run, or prints its start block only; returns the exit code."""
    config, origin, parts, ranks = request.config, request.origin, request.parts, request.parts.ranks
    with parts.waiting.phase("reading data"):
        data = (parts.load_data or load_data)(request.settings)
    if not shares_tokenizer(config, origin.choice):
        data = replace(data, tokenizer=None)  # the model reads its own
    same_everywhere(ranks, config, data)
    judge = Judge(data.dev, data.test, config.max_length, parts.allow_code_execution)
    judge.check(config, bool(data.eval), bool(data.labels))
    if origin.state is not None:
        data.train.load_state_dict(origin.loader)
    schedule = make_schedule(config, data.train.steps_per_epoch)
    display = parts.display(schedule.total, config.logging_steps)
    if dry_run:
        plan = start_block.plan_lines(config, origin.step, schedule, data.train.steps_per_epoch)
        lines = [*dry_lines(config, origin.choice, data), data.report, plan, request.notes]
        display.lines(start_block.block(config.method, config.model, [*lines, ["dry run: nothing was written"]]))
        return 0
    torch.manual_seed(config.seed)
    with ExitStack() as opened:
        with parts.waiting.phase("loading the model"):
            model = load_model(config, origin.choice, data, ranks)
        opened.callback(model.close)
        same_weights(ranks, weights_source(config, origin.choice))
        with parts.waiting.phase("making the method"):
            method = make_method(model, config, origin, data)
        run_id = rundir.new_run_id() if origin.state is None or origin.elsewhere else origin.state.run
        if METHODS[config.method].journaled:
            keep_directions(journaled(method), request.directory.journal, run_id)
        check_names(model)
        if ranks.is_leader:
            return lead(request, data, judge, schedule, display, model, method, run_id, opened).go()
        ranks.describe(model.device)  # the leader prints it
        if model.sharded or config.load_best_model_at_end:
            same_directory(ranks, request.lock.path)
        if origin.tail:
            apply_records(journaled(method), origin.tail)
        return Follower(
            root=request.directory.root,
            data=data,
            schedule=schedule,
            first=origin.step,
            model=model,
            method=method,
            judge=judge,
        ).go()


def lead(
    request: Request,
    data: Data,
    judge: Judge,
    schedule: Schedule,
    display: Display,
    model: Model,
    method: Method,
    run_id: str | None,
    opened: ExitStack,
) -> Run:
    """The run of the leader, who prints and writes: the start block, the output directory with the files of a run, and
    everything that observes its steps. What is opened is closed by `opened`, the saver first."""
    config, directory, origin, parts = request.config, request.directory, request.origin, request.parts
    row, ranks, first, say = METHODS[config.method], parts.ranks, origin.step, display.line
    with parts.waiting.phase("hashing the weights"):
        base = request.base() if origin.state is None else origin.base
    about = State(0, config=flat_config(config), versions=versions(), run=run_id, base=base)
    writer = Writer(model, method)
    groups = [
        start_block.model_lines(model.module, model.layout, model.dtype, method.keeps_base),
        start_block.machine_lines(config.device, model, method),
        [line] if (line := faster_line(model, method.name)) else [],
        data.report,
        ranks.describe(model.device),
        start_block.plan_lines(config, first, schedule, data.train.steps_per_epoch),
        describe(config, writer),
        request.notes,
        [str(parts.waiting)],
    ]
    lines = start_block.block(config.method, config.model, groups)
    display.lines(lines)
    if config.save_model:
        refuse_full_disk(directory.root, model)

    machine = environment()
    rundir.open_run(directory, to_yaml(config), machine, request.lock, run_id)
    if model.sharded or config.load_best_model_at_end:  # every rank writes there, or reads from it
        same_directory(ranks, request.lock.path)
    display.log_to(directory.log)
    with rundir.writing_to(directory.root):
        for path in origin.choice.damaged:
            select.set_aside(path, "damaged")
    if origin.tail:
        seconds = apply_records(journaled(method), origin.tail)
        say(f"resume: {len(origin.tail)} steps of the journal replayed in {seconds:.2f} s")
    with rundir.writing_to(directory.root):
        metrics = MetricsFile(directory.metrics, first, say)
        opened.callback(metrics.close)
        if metrics.lacks and not origin.elsewhere:
            say(f"warning: {directory.metrics} is damaged: {metrics.lacks}; the run goes on without them")
        fresh = Story(run_id or "", lines[0], config.method, config.model, model.device.type, lines=lines)
        fresh.began, fresh.total, fresh.planned = now(), schedule.total, planned(model, config.method)
        view = begin_view(directory, first, fresh, metrics.kept, machine, config)
        name = view.name
        told = trackers.About(directory.run, run_id or name, name, first, about.config)
        reports = Reports(directory, RunPage(view), trackers.open_trackers(config.report_to, told), display)
        opened.callback(reports.close)
        reports.tell("rows of the data", partial(add_samples, view.story, data, model.tokenizer))
        reports.begin()
        journal = None
        if row.journaled:
            journal = open_journal(
                journaled(method),
                origin,
                directory.journal,
                about,
                source=config.model if origin.choice.path is None else str(origin.choice.path),
                wire=config.wire,
                data=data,
                sync_every=config.journal_sync,
                say=say,
            )
            opened.callback(journal.close)
    held_out, state = data.eval.dataset, origin.choice.state
    rows = None if judge.dev or held_out is None else held_out.fingerprint  # of tasks: the questions
    questions = [task.fingerprint for task in judge.dev]
    selection = Selection(config, judge.metric or "loss", None if state is None else state.selection, questions, rows)
    selection.add_before(metrics.kept, 0 if state is None else state.step)
    root = directory.root
    saver = Saver(config, root, writer, about, say, loader=data.train, journal=journal, selection=selection)
    opened.callback(saver.close)
    opened.callback(display.close)
    saver.went_on_from(origin.choice.path, first)
    commands = Commands(ranks, Interrupts())
    evaluation = Evaluation(
        config=config,
        root=root,
        model=model,
        method=method,
        data=data,
        judge=judge,
        commands=commands,
        metrics=metrics,
        reports=reports,
        selection=selection,
        saver=saver,
    )
    return Run(
        config=config,
        directory=directory,
        data=data,
        schedule=schedule,
        first=first,
        here=not origin.elsewhere,
        model=model,
        method=method,
        commands=commands,
        metrics=metrics,
        journal=journal,
        reports=reports,
        evaluation=evaluation,
        saver=saver,
    )
