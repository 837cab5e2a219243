"""Executes a comparison: one run after the other in this process; the tables are rewritten after each.

    output_dir/comparison.json    what is compared: marks the directory as written by keyhole (directory.py)
    output_dir/runs/<id>/         a run of `keyhole train`: run/metrics.jsonl, log.txt, config.yaml, loss.png
    output_dir/results/<id>.json  its numbers, once it has ended (result.py)
    output_dir/table.json, table.md, report.html

First every model is scored without training (zero_shot.py), then every point of every grid is run with the first seed
(with all seeds, for choose_by: all-seeds), then the best point of each method with the other seeds. All tasks are read,
with the rows of every seed, before the first run and before anything is written, so that a mistake in the last task is
found at once.

If it is started again, the comparison continues: finished runs are not repeated (unless the data, the task file or the
result itself changed, which is reported); an interrupted run continues from its checkpoint or journal, or starts again.
Only metrics are kept of a run, unless save_model is set.
"""

import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from keyhole.checkpoint import select
from keyhole.compare import kept as shared
from keyhole.compare.file import ZERO_SHOT, Comparison
from keyhole.compare.kept import Kept
from keyhole.compare.page import make_page
from keyhole.compare.plan import Group, Trial, flat_settings, plan, with_data
from keyhole.compare.progress import Progress, Quiet
from keyhole.compare.result import (
    CRASH,
    FORMAT,
    MARKER,
    REFUSED,
    Marker,
    Result,
    blank,
    changes,
    inspect,
    mark,
    path_of,
    read_marker,
    read_result,
    summarise,
    write_result,
)
from keyhole.compare.table import Cell, cell_of, choose, number, seeds_of_grid, to_json, to_markdown, zero_shot_cell
from keyhole.config.data import data_settings
from keyhole.data.sources import check_sources
from keyhole.disk.files import remove, write_text
from keyhole.errors import UserError
from keyhole.machine.gpu import free_memory
from keyhole.machine.out_of_memory import out_of_memory
from keyhole.machine.probe import environment
from keyhole.machine.text import counted, duration, without_controls
from keyhole.model.structure.source import check_directory
from keyhole.training.display import Waiting
from keyhole.training.rundir import locked
from keyhole.training.signals import EXIT_INTERRUPTED
from keyhole.training.start import Parts, train
from keyhole.training.validation import Judge

FAILED = 1  # exit code


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
    kept = Kept()
    groups, warnings = plan(comparison, kept.model_hash)
    for warning in [*comparison.warnings, *warnings]:
        say(f"warning: {warning}")
    root = Path(comparison.output_dir)
    if dry_run:
        for group in groups:
            first = next(iter(group.trials.values())).config
            check_directory(first.model)
            check_sources(data_settings(first, None))
        for group in groups:
            for trial in group.trials.values():
                say(f"{trial.id}: {trial.label}")
        total, listed = number_of_runs(comparison, groups), sum(len(group.trials) for group in groups)
        fewer = " (choose_by: first-seed: of each grid only the best point is run with the other seeds)"
        say(f"{counted(total, 'run')}{fewer if total < listed else ''}")
        return 0
    kept.day = inspect(root).day
    code = allow_code_execution
    execution = Execution(comparison, groups, kept, root, retry, code, lambda text: say(without_controls(text)))
    execution.read_tasks()
    hashes = {name: kept.model_hash(path) for name, path in comparison.models.items()}
    now = Marker(FORMAT, comparison.title, comparison.source, kept.day, hashes)
    if not (root / MARKER).is_file():  # one that is there stays until the directory is locked
        mark(root, now)
    with locked(root / "runs" / "lock") as lock:
        lock.take()
        for line in changes(root, read_marker(root), now):
            execution.say(line)
        mark(root, now)
        return execution.go()


def number_of_runs(comparison: Comparison, groups: list[Group]) -> int:
    """With choose_by: first-seed, only one point of each grid is run with the other seeds."""
    if comparison.choose_by != "first-seed":
        return sum(len(group.trials) for group in groups)
    return sum(len(group.points) for group in groups) + len(groups) * (len(comparison.seeds) - 1)


@dataclass
class Execution:
    """A comparison that is being executed."""

    comparison: Comparison
    groups: list[Group]
    kept: Kept
    root: Path
    retry: bool
    allow_code_execution: bool
    say: Callable[[str], None]

    results: dict[str, Result] = field(default_factory=dict)
    zero_shot: dict[tuple[str, str], Result] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=environment)

    def go(self) -> int:
        """Executes the remaining runs. Tables are written also after an interruption."""
        total = number_of_runs(self.comparison, self.groups)
        self._recall()
        left = f"{counted(total, 'run')}, {len(self.results)} done" if self.results else counted(total, "run")
        self.say(f"{self.comparison.title}: {left}; everything goes to {self.root}/")
        self.progress = Progress(total)
        with self.progress.bar:
            self._score_untrained()
            for trial in self._trials():
                if trial.id not in self.results and not self._run(trial):
                    self._write_or_warn()
                    self.say("interrupted; the same command goes on from here")
                    return EXIT_INTERRUPTED
                self.progress.finished += 1
        fault = self._write()
        self.say(to_markdown(self.comparison, self.cells()))
        if fault is not None:
            raise UserError(
                f"output_dir: the tables in {self.root} cannot be written: {fault}; all results are in "
                f"{self.root / 'results'}, and the same command writes the tables from them"
            )
        self.say(f"page: {self.root / 'report.html'}")
        ended = [*self.results.values(), *self.zero_shot.values()]
        count = sum(result.error is not None for result in ended)
        if count:
            self.say(
                f"{count} of {len(ended)} runs failed, zero-shot included: table.md says why, --retry repeats them"
            )
        return FAILED if count else 0

    def _recall(self) -> None:
        """Reads the results of earlier runs of the plan."""
        changed: dict[str, int] = {}
        for trial in (trial for group in self.groups for trial in group.trials.values()):
            found = self._read(trial.id)
            if found is not None and found.kind != CRASH and not (found.error and self.retry):
                self.results[trial.id] = found
            elif found is None and any((self.root / "results").glob(f"{trial.id.rpartition('-')[0]}*.json")):
                changed[trial.task] = changed.get(trial.task, 0) + 1
        for task, count in changed.items():
            runs = "1 run is" if count == 1 else f"{count} runs are"
            self.say(f"{task}: the data or the task file have changed since the last time; {runs} done again")

    def _read(self, run: str) -> Result | None:
        """The result of a run, if it has one; a damaged one is reported and deleted."""
        found, path = read_result(self.root, run), path_of(self.root, run)
        if found is None and path.exists():
            self.say(f"{path}: damaged; this is done again")
            remove(path)
        return found

    def _trials(self) -> Iterator[Trial]:
        """The runs in order; the second part depends on the results of the first."""
        seeds = self.comparison.seeds
        first = seeds_of_grid(self.comparison)
        for seed in first:
            for group in self.groups:
                yield from (group.trials[point, seed] for point in group.points)
        for seed in [seed for seed in seeds if seed not in first]:
            for group in self.groups:
                point = choose(group, seeds, self.results, self.comparison.choose_by)
                if point is None:
                    self.progress.finished += 1
                else:
                    yield group.trials[point, seed]

    def read_tasks(self) -> None:
        """Reads all data, with the rows of every seed: mistakes in a task are found before hours of training, and the
        ids of runs contain a hash of their data."""
        for group in self.groups:
            for seed in self.comparison.seeds:
                data = self.kept.load_data(data_settings(group.trials[group.points[0], seed].config))
                judge = Judge(data.dev, data.test, allow_code_execution=self.allow_code_execution)
                for config in (group.trials[point, seed].config for point in group.points):
                    judge.check(config, bool(data.eval), bool(data.labels))
        self.groups = [with_data(group, self.kept.data_hash) for group in self.groups]

    def _run(self, trial: Trial) -> bool:
        """Executes a run and keeps its result; False if it was interrupted."""
        began_s = time.monotonic()
        self.progress.begin(trial.label)
        parts = Parts(
            load_data=self.kept.load_data,
            display=lambda total, every: Quiet(total, every, self.progress.step),
            model_hash=self.kept.model_hash,
            waiting=Waiting(silent=True),
            allow_code_execution=self.allow_code_execution,
        )
        try:
            if train(trial.config, resume="last", parts=parts) == EXIT_INTERRUPTED:
                return False
            result = summarise(trial, self.kept.load_data(data_settings(trial.config)))
        except Exception as error:
            result = self._failed(blank(trial), error)
        free_memory()
        self.results[result.id] = result
        write_result(self.root, result)
        if result.kind != CRASH and not trial.config.save_model:  # a crashed run will go on from its checkpoint
            select.delete(select.checkpoints(Path(trial.config.output_dir)), self.say).join()
        told = f"{trial.label}: {_line(result)}, {duration(time.monotonic() - began_s)}"
        self.say(f"[{self.progress.count()}] {told}")
        self._write_or_warn()
        return True

    def _failed(self, result: Result, error: Exception) -> Result:
        """The result of a run, or of a model without training, that ended with this error; the other runs continue."""
        told = str(error) if isinstance(error, UserError) else out_of_memory(error)
        if told is not None:  # would happen again; the other runs continue
            result.error, result.kind = _one_line(told), REFUSED
            return result
        if isinstance(error, torch.AcceleratorError):
            raise error  # the device is lost: no later run can work
        result.error, result.kind = f"{type(error).__name__}: {error}", CRASH
        with suppress(OSError):
            (self.root / "results").mkdir(exist_ok=True)
            trace = "".join(traceback.format_exception(error))
            write_text(self.root / "results" / f"{result.id}.error.txt", trace)
        return result

    def _score_untrained(self) -> None:
        """Scores every model without training on the test questions of every task."""
        for group in self.groups:
            place = (group.model, group.task)
            trial = next(iter(group.trials.values()))
            if place in self.zero_shot or trial.config.head is not None:  # a new head is untrained
                continue
            made = blank(trial)
            made.id, made.method, made.point = shared.untrained_id(trial, self.groups, self.kept), ZERO_SHOT, []
            found = self._read(made.id)
            if found is None or found.error:
                self.progress.begin(f"{group.model}, {group.task}, {ZERO_SHOT}")
                found = shared.score_untrained(
                    trial, made, self.groups, self.kept, self.allow_code_execution, self._failed
                )
                free_memory()
                write_result(self.root, found)
                self.say(f"{group.model}, {group.task}, {ZERO_SHOT}: {_line(found)}")
            self.zero_shot[place] = found

    def cells(self) -> list[Cell]:
        """The table so far."""
        cells, untrained = list[Cell](), dict(self.zero_shot)
        for group in self.groups:
            first = untrained.pop((group.model, group.task), None)
            cells += [] if first is None else [zero_shot_cell(first)]
            cells.append(cell_of(group, self.comparison, self.results))
        return cells

    def _write_or_warn(self) -> None:
        if (fault := self._write()) is not None:
            print(f"keyhole: the tables cannot be written: {fault}", file=sys.stderr)

    def _write(self) -> OSError | None:
        """Writes the tables so far; returns the error if that fails."""
        cells = self.cells()
        settings = {f"{group.method} on {group.task}": _settings_of(group) for group in self.groups}
        try:
            write_text(self.root / "table.json", to_json(self.comparison, cells, self.environment))
            write_text(self.root / "table.md", to_markdown(self.comparison, cells))
            write_text(self.root / "report.html", make_page(self.comparison, cells, settings, self.environment))
        except OSError as error:
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


def _settings_of(group: Group) -> dict[str, object]:
    """The settings of a group's runs by dotted key; of a grid, all values of the setting."""
    values = flat_settings(next(iter(group.trials.values())).config)
    for name in dict(group.points[0]) if len(group.points) > 1 else ():
        values[name] = " | ".join(dict.fromkeys(dict(point)[name] for point in group.points))
    return values


def _one_line(text: str) -> str:
    """The lines of a message, divided by `;` where a line ends in no mark of its own."""
    lines = [" ".join(line.split()) for line in text.splitlines() if line.strip()]
    return " ".join(
        [*(line if line.endswith((";", ":", ".", ",")) else f"{line};" for line in lines[:-1]), *lines[-1:]]
    )
