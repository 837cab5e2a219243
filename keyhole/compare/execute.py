"""Executes a comparison: one run after the other in this process; the tables are rewritten after each.

    output_dir/comparison.json    what is compared: marks the directory as written by keyhole (directory.py)
    output_dir/runs/<id>/         a run of `keyhole train`: run/metrics.jsonl, log.txt, config.yaml
    output_dir/results/<id>.json  its numbers, once it has ended (result.py)
    output_dir/table.json, table.md, report.html

First every model is scored without training, then every point of every grid is run with the first seed
(with all seeds, for choose_by: all-seeds), then the best point of each method with the other seeds. All tasks are read,
with the rows of every seed, before the first run and before anything is written, so that a mistake in the last task is
found at once.

If it is started again, the comparison continues: finished runs are not repeated (unless the data, the task file or the
result itself changed, which is reported); an interrupted run continues from its checkpoint or journal, or starts again.
Only metrics are kept of a run, unless save_model is set.
"""

import hashlib
import json
import re
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path

import torch

from keyhole.checkpoint import select
from keyhole.compare.file import ZERO_SHOT, Comparison
from keyhole.compare.page import make_page
from keyhole.compare.plan import Group, Kept, Trial, plan, questions, with_data
from keyhole.compare.result import (
    CRASH,
    MARKER,
    REFUSED,
    Result,
    blank,
    finite_tests,
    inspect,
    mark,
    path_of,
    read_result,
    summarise,
    write_result,
)
from keyhole.compare.table import Cell, cell_of, choose, number, seeds_of_grid, to_json, to_markdown, zero_shot_cell
from keyhole.data.settings import data_settings
from keyhole.data.sources import check_sources
from keyhole.disk.files import remove, write_text
from keyhole.disk.json_text import finite
from keyhole.errors import UserError
from keyhole.eval.rows import BATCH_TOKENS, PASSES
from keyhole.loading import load
from keyhole.machine.gpu import free_memory
from keyhole.machine.out_of_memory import out_of_memory
from keyhole.machine.probe import environment
from keyhole.machine.text import counted, duration, without_controls
from keyhole.methods.workload import Workload
from keyhole.model.structure.source import check_directory
from keyhole.training.display import Display, Waiting
from keyhole.training.rundir import locked
from keyhole.training.signals import EXIT_INTERRUPTED
from keyhole.training.start import Parts, train
from keyhole.training.validation import Judge, common_metric

FAILED = 1  # exit code
OF_UNTRAINED = ("task", "task_data", "task_splits", "num_train", "num_dev", "num_eval", "dtype", "max_length", "seed")


def compare(
    comparison: Comparison,
    *,
    allow_code_execution: bool = False,
    retry: bool = False,
    dry_run: bool = False,
    say: Callable[[str], None] = print,
) -> int:
    """Executes the runs that are not done yet and returns the exit code: 0, FAILED if a run of the table failed, now or
    before, or 130 if interrupted. retry: repeats failed runs too."""
    kept, root = Kept(), Path(comparison.output_dir)
    groups, warnings = plan(comparison, kept.model_hash)
    for warning in warnings:
        say(f"warning: {warning}")
    if dry_run:
        for group in groups:
            first = next(iter(group.trials.values())).config
            check_directory(first.model)
            check_sources(data_settings(first, None))
        for group in groups:
            for trial in group.trials.values():
                say(f"{trial.id}: {trial.label}")
        total = number_of_runs(comparison, groups)
        fewer = " (choose_by: first-seed: of each grid only the best point is run with the other seeds)"
        say(f"{counted(total, 'run')}{fewer if total < sum(len(group.trials) for group in groups) else ''}")
        return 0
    kept.day = inspect(root)
    execution = Execution(comparison, groups, kept, retry, allow_code_execution, say)
    if not (root / MARKER).is_file():
        mark(root, comparison.title, kept.day)
    with locked(root / "runs" / "lock") as lock:
        lock.take()
        return execution.go()


def number_of_runs(comparison: Comparison, groups: list[Group]) -> int:
    """With choose_by: first-seed, only one point of each grid is run with the other seeds."""
    if comparison.choose_by != "first-seed":
        return sum(len(group.trials) for group in groups)
    return sum(len(group.points) for group in groups) + len(groups) * (len(comparison.seeds) - 1)


class Quiet(Display):
    """The display of a run inside a comparison: its lines go only to run/log.txt."""

    def _print(self, text: str) -> None:
        """Nothing: the lines of a terminal are the comparison's."""


class Execution:
    """A comparison that is being executed. untrained: for each model and task, the model without training, as a run
    that takes no step."""

    def __init__(
        self,
        comparison: Comparison,
        groups: list[Group],
        kept: Kept,
        retry: bool,
        allow_code_execution: bool,
        say: Callable[[str], None],
    ) -> None:
        self.comparison, self.kept, self.retry, self.code = comparison, kept, retry, allow_code_execution
        self.say: Callable[[str], None] = lambda text: say(without_controls(text))
        self.root, self.results, self.environment = Path(comparison.output_dir), dict[str, Result](), environment()
        self.total, self.finished = number_of_runs(comparison, groups), 0
        for group in groups:  # all data, with the rows of every seed: mistakes are found before hours of training
            for seed in comparison.seeds:
                data = kept.load_data(data_settings(group.trials[group.points[0], seed].config))
                judge = Judge(data.dev, data.test, allow_code_execution=allow_code_execution)
                for point in group.points:
                    judge.check(group.trials[point, seed].config, bool(data.eval), bool(data.labels))
        self.groups = [with_data(group, kept.data_hash) for group in groups]
        self.untrained = self._untrained()

    def _untrained(self) -> dict[tuple[str, str], Trial]:
        """Ids are equal where the score would be: methods and their settings have no part in them. The weights are in
        the format of the runs where all runs of the task have one: the model may fit host memory in no other."""
        found: dict[tuple[str, str], Trial] = {}
        for group in self.groups:
            place, trial = (group.model, group.task), next(iter(group.trials.values()))
            if place in found or trial.config.head is not None:  # a new head is untrained
                continue
            of_task = [each for each in self.groups if (each.model, each.task) == place]
            wires = [other.config.wire for each in of_task for other in each.trials.values()]
            config, values = replace(trial.config, wire=None if None in wires else wires[0]), asdict(trial.config)
            told = [self.kept.model_hash(config.model) or config.model, *map(values.get, OF_UNTRAINED), config.wire]
            told.append(questions(self.kept.load_data(data_settings(config))))
            digest = hashlib.blake2b(json.dumps(told).encode(), digest_size=6).hexdigest()
            run = f"{trial.id.rsplit('-', 2)[0]}-{ZERO_SHOT}-{digest}"
            found[place] = replace(trial, method=ZERO_SHOT, point=(), config=config, id=run)
        return found

    def go(self) -> int:
        """Executes the remaining runs. Tables are written also after an interruption."""
        self._recall()
        done = sum(result.method != ZERO_SHOT for result in self.results.values())
        left = counted(self.total, "run") + (f", {done} done" if done else "")
        self.say(f"{self.comparison.title}: {left}; everything goes to {self.root}/")
        self.began_s, self.before = time.monotonic(), done
        for trial in self._trials():
            if trial.id not in self.results and not self._run(trial):
                self._write()
                self.say("interrupted; the same command goes on from here")
                return EXIT_INTERRUPTED
            self.finished += trial.method != ZERO_SHOT
        fault = self._write()
        self.say(to_markdown(self.comparison, self.cells()))
        if fault is not None:
            raise UserError(
                f"output_dir: the tables in {self.root} cannot be written: {fault}; all results are in "
                f"{self.root / 'results'}, and the same command writes the tables from them"
            )
        self.say(f"page: {self.root / 'report.html'}")
        if failed := sum(result.error is not None for result in self.results.values()):
            told = f"{failed} of {len(self.results)} runs failed, zero-shot included"
            self.say(f"{told}: table.md says why, --retry repeats them")
        return FAILED if failed else 0

    def _recall(self) -> None:
        """Reads the results of earlier runs of the plan; a damaged one is deleted."""
        changed = Counter[str]()
        trials = [trial for group in self.groups for trial in group.trials.values()]
        for trial in (*self.untrained.values(), *trials):
            found, path = read_result(self.root, trial.id), path_of(self.root, trial.id)
            if found is None and path.exists():
                self.say(f"{path}: damaged; this is done again")
                remove(path)
            elif found is None and any(path.parent.glob(f"{trial.id.rpartition('-')[0]}*.json")):
                changed[trial.task] += trial.method != ZERO_SHOT
            if found is None or found.kind == CRASH or found.error and (self.retry or trial.method == ZERO_SHOT):
                continue
            self.results[trial.id] = found
        for task, count in (+changed).items():
            again = f"{counted(count, 'run')} to do again"
            self.say(f"{task}: the data or the task file have changed since the last time; {again}")

    def _trials(self) -> Iterator[Trial]:
        """The runs in order; the last part depends on the results of those before."""
        yield from self.untrained.values()
        seeds = self.comparison.seeds
        first = seeds_of_grid(self.comparison)
        for seed in first:
            for group in self.groups:
                yield from (group.trials[point, seed] for point in group.points)
        for seed in [seed for seed in seeds if seed not in first]:
            for group in self.groups:
                point = choose(group, first, self.results)
                if point is None:
                    self.finished += 1
                else:
                    yield group.trials[point, seed]

    def _run(self, trial: Trial) -> bool:
        """Executes a run and keeps its result; False if it was interrupted."""
        began_s, result = time.monotonic(), blank(trial)
        parts = Parts(
            load_data=self.kept.load_data,
            display=Quiet,
            model_hash=self.kept.model_hash,
            waiting=Waiting(silent=True),
            allow_code_execution=self.code,
        )
        try:
            if trial.method == ZERO_SHOT:
                self._score_untrained(trial, result)
            elif train(trial.config, resume="last", parts=parts) == EXIT_INTERRUPTED:
                return False
            else:
                result = summarise(trial, self.kept.load_data(data_settings(trial.config)))
        except torch.AcceleratorError:
            raise  # the device is lost: no later run can work
        except Exception as error:
            self._failed(result, error)
        free_memory()
        self.results[result.id] = result
        write_result(self.root, result)
        if result.kind != CRASH and not trial.config.save_model:  # a crashed run will go on from its checkpoint
            select.delete(select.checkpoints(Path(trial.config.output_dir)), self.say)
        place = ""
        if trial.method != ZERO_SHOT:
            done = self.finished + 1
            left_s = (time.monotonic() - self.began_s) / max(1, done - self.before) * (self.total - done)
            place = f"[{done}/{self.total}{f', {duration(left_s)} left' if done < self.total else ''}] "
        self.say(f"{place}{trial.label}: {_line(result)}, {duration(time.monotonic() - began_s)}")
        self._write()
        return True

    def _score_untrained(self, trial: Trial, made: Result) -> None:
        """The metrics of the model that the runs would train, evaluated as a run evaluates (training/validation.py)."""
        config, data = trial.config, self.kept.load_data(data_settings(trial.config))
        judge = Judge(data.dev, data.test, config.max_length, self.code)
        made.dev_metric, made.test_metric = judge.metric or "loss", common_metric(data.test)
        model = load(
            config.model,
            dtype=config.dtype or "auto",
            workload=Workload(method="eval", tokens=BATCH_TOKENS, passes=PASSES),
            placement=config.placement,
            gpu_memory=config.gpu_memory,
            device=config.device,
            wire=config.wire,
        )
        try:
            made.tests = finite_tests(judge.test_metrics(model, lambda: False) or {})
            dev = judge.dev_metrics(model, lambda: False, has_loss=False) or {}
        finally:
            model.close()
        made.test, made.dev = made.tests.get(f"test_{made.test_metric}"), finite(dev.get(f"eval_{made.dev_metric}"))

    def _failed(self, result: Result, error: Exception) -> None:
        """Completes the result of a run that ended with this error; the other runs continue."""
        told = str(error) if isinstance(error, UserError) else out_of_memory(error)
        if told is not None:  # would happen again
            result.error, result.kind = re.sub(r"[;:,.]?\s*\n\s*", "; ", told), REFUSED
            return
        result.error, result.kind = f"{type(error).__name__}: {error}", CRASH
        with suppress(OSError):
            (self.root / "results").mkdir(exist_ok=True)
            write_text(self.root / "results" / f"{result.id}.error.txt", "".join(traceback.format_exception(error)))

    def cells(self) -> list[Cell]:
        found: dict[tuple[str, str, str], Cell] = {}
        for group in self.groups:
            first, place = self.untrained.get((group.model, group.task)), (group.model, group.task)
            if first is not None and first.id in self.results:
                found.setdefault((*place, ZERO_SHOT), zero_shot_cell(self.results[first.id]))
            found[*place, group.method] = cell_of(group, self.comparison, self.results)
        return list(found.values())

    def _write(self) -> OSError | None:
        """Writes the tables so far; says and returns the error if that fails."""
        cells = self.cells()
        try:
            write_text(self.root / "table.json", to_json(self.comparison, cells, self.environment))
            write_text(self.root / "table.md", to_markdown(self.comparison, cells))
            write_text(self.root / "report.html", make_page(self.comparison, cells, self.environment))
        except OSError as error:
            print(f"keyhole: the tables cannot be written: {error}", file=sys.stderr)
            return error
        return None


def _line(result: Result) -> str:
    if result.error:
        return f"failed: {result.error}"
    test = f"test {result.test_metric or ''} {number(result.test_metric, result.test)}"
    if result.method == ZERO_SHOT:
        return test
    size = "" if result.gpu_gib is None else f", GPU {result.gpu_gib:.2f} GiB"
    best = f"step {result.best_step} of {result.steps}"
    return f"dev {result.dev_metric} {number(result.dev_metric, result.dev)}, {test} ({best}{size})"
