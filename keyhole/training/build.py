"""From a checked request to the loop, in the order in which it happens:

    data -> model -> method -> start block -> output directory -> journal replayed -> metrics, journal, page -> loop

A rank that is not the leader goes with the others up to the method, and then follows the leader's commands. Nothing is
written before data, model and method have been checked.
"""

from contextlib import ExitStack

import torch
import transformers.modeling_utils  # every model needs these three, so they are timed with the other imports
import transformers.models.auto.modeling_auto
import transformers.models.auto.tokenization_auto  # noqa: F401

from keyhole.checkpoint import select
from keyhole.checkpoint.replay import apply_records, keep_directions
from keyhole.checkpoint.resume import Origin
from keyhole.checkpoint.state import State
from keyhole.checkpoint.writer import Writer
from keyhole.config import TrainConfig, to_yaml
from keyhole.data.run import load_data
from keyhole.data.settings import DataSettings
from keyhole.disk.files import writing_to
from keyhole.disk.json_text import Json
from keyhole.machine.host import versions
from keyhole.machine.probe import environment
from keyhole.methods import METHODS
from keyhole.model.structure.config_files import base_config
from keyhole.model.weights.save import check_names
from keyhole.training import rundir
from keyhole.training.display import Display
from keyhole.training.evaluation import Evaluation
from keyhole.training.loop import Leader, follow
from keyhole.training.model_and_method import (
    block,
    dry_lines,
    load_model,
    machine_lines,
    make_method,
    make_schedule,
    model_lines,
    plan_lines,
    weights_source,
)
from keyhole.training.records import MetricsFile, journaled, open_journal
from keyhole.training.reports import open_reports
from keyhole.training.run import Run
from keyhole.training.saving import Saver, describe, refuse_full_disk
from keyhole.training.signals import Interrupts
from keyhole.training.start import (
    Parts,
    flat_config,
    same_directory,
    same_everywhere,
    same_weights,
    split_lines,
)
from keyhole.training.validation import Judge, Selection


def run(
    config: TrainConfig,
    directory: rundir.RunDir,
    lock: rundir.Lock,
    origin: Origin,
    notes: list[str],
    settings: DataSettings,
    parts: Parts,
    dry_run: bool,
) -> int:
    """Executes the run that start.py has checked, or prints its start block only; returns the exit code."""
    ranks = parts.ranks
    with parts.waiting.phase("reading data"):
        data = (parts.load_data or load_data)(settings)
    same_everywhere(ranks, config, data)
    judge = Judge(data.dev, data.test, config.max_length, parts.allow_code_execution)
    judge.check(config, bool(data.eval), bool(data.labels))
    if origin.state is not None:
        data.train.load_state_dict(origin.loader)
    schedule = make_schedule(config, data.train.steps_per_epoch)
    display = parts.display(schedule.total, config.logging_steps)
    if dry_run:
        plan = plan_lines(config, origin.step, schedule, data.train.steps_per_epoch)
        lines = [*dry_lines(config, origin.choice, data), data.report, plan, notes]
        display.lines(block(config.method, config.model, [*lines, ["dry run: nothing was written"]]))
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
            keep_directions(journaled(method), directory.journal, run_id)
        check_names(model)
        run = Run(
            config=config,
            directory=directory,
            data=data,
            judge=judge,
            schedule=schedule,
            origin=origin,
            model=model,
            method=method,
            interrupts=Interrupts(quiet=not ranks.is_leader),
            say=display.line,
        )
        if ranks.is_leader:
            return lead(run, parts, lock, notes, display, run_id, opened).go()
        ranks.describe(model.device)  # the leader prints it
        if model.sharded or config.load_best_model_at_end:
            same_directory(ranks, lock.path)
        if origin.tail:
            apply_records(journaled(method), origin.tail)
        return follow(run)


def lead(
    run: Run,
    parts: Parts,
    lock: rundir.Lock,
    notes: list[str],
    display: Display,
    run_id: str | None,
    opened: ExitStack,
) -> Leader:
    """The run of the leader, who prints and writes: the start block, the output directory with the files of a run, and
    everything that observes its steps. What is opened is closed by `opened`, the saver first."""
    config, directory, model, method, data = run.config, run.directory, run.model, run.method, run.data
    origin, ranks = run.origin, parts.ranks
    with parts.waiting.phase("hashing the weights"):
        known = origin.original or State(0)
        if origin.state is None:
            known = State(0, base=parts.model_hash(config.model), base_config=base_config(config.model))
    writer = Writer(model, method)
    groups = [
        model_lines(model.module, model.layout, model.dtype, method.keeps_base),
        machine_lines(config.device, model, method),
        data.report,
        ranks.describe(model.device),
        plan_lines(config, run.first, run.schedule, data.train.steps_per_epoch),
        writer.lines if config.save_model else [],
        describe(config, writer),
        notes,
        split_lines(origin.choice.state, model.pass_tokens),
        [str(parts.waiting)],
    ]
    lines = block(config.method, config.model, groups)
    display.lines(lines)
    if config.save_model:
        refuse_full_disk(directory.root, model)

    machine = environment()
    rundir.open_run(directory, to_yaml(config), machine, lock, run_id)
    if model.sharded or config.load_best_model_at_end:  # every rank writes there, or reads from it
        same_directory(ranks, lock.path)
    display.log_to(directory.log)
    with writing_to(directory.root):
        for path in origin.choice.damaged:
            select.set_aside(path, "damaged")
    if origin.tail:
        seconds = apply_records(journaled(method), origin.tail)
        run.say(f"resume: {len(origin.tail)} steps of the journal replayed in {seconds:.2f} s")
    rows = None if run.judge.dev or data.eval.dataset is None else data.eval.dataset.fingerprint
    judged: Json = {"rows": rows, "questions": [task.fingerprint for task in run.judge.dev]}
    with writing_to(directory.root):
        metrics = MetricsFile(directory.metrics, run.first, run.say)
        opened.callback(metrics.close)
        if metrics.lacks and not origin.elsewhere:
            run.say(f"warning: {directory.metrics} is damaged: {metrics.lacks}; the run goes on without them")
        selection = Selection(config, run.judge.metric or "loss", metrics.kept)
        judged = selection.check_rows(judged, None if origin.state is None else origin.state.selection)
        about = State(
            0,
            config=flat_config(config),
            versions=versions(),
            run=run_id,
            base=known.base,
            base_config=known.base_config,
            pass_tokens=model.pass_tokens,
            selection=judged,
        )
        reports = open_reports(run, display, run_id, lines, metrics.kept, machine)
        opened.callback(reports.close)
        journal = open_journal(run, about) if METHODS[config.method].journaled else None
        if journal is not None:
            opened.callback(journal.close)
    saver = Saver(run, writer, about, metrics=metrics, journal=journal, selection=selection, begin=origin.choice.path)
    opened.callback(saver.close)
    opened.callback(display.close)
    evaluation = Evaluation(run, metrics, reports, selection, saver)
    return Leader(run=run, metrics=metrics, journal=journal, reports=reports, evaluation=evaluation, saver=saver)
