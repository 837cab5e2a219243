"""The data of a run, for the trainer and for `keyhole data`.

    load_data(settings) -> Data: a resumable loader of train_data, batches of eval_data, and the report

Instead of files a run may name tasks (data/tasks/), which provide training rows and the questions of dev and test.

Both sets are prepared in the same way, except that evaluation data are never packed, so that their loss does not depend
on a setting of training. Both are compared with the limits of the model (capacity.py), so that a text that is too long
is refused here and not in the middle of the run.

Two things that the data depend on belong to the run and are kept in the loader's state: the date that a chat template
may print (the day the run began, also after a resume), and the template itself if it is not the tokenizer's. That
template is saved with the trained model, so that programs that use the model build the prompts of training.
"""

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from keyhole.assets import MODEL, TEST, TRAIN, locate
from keyhole.data.cache import cached
from keyhole.data.capacity import check_data, context_length
from keyhole.data.dataset import Dataset
from keyhole.data.loader import EvalBatches, Loader
from keyhole.data.overlap import overlap_line
from keyhole.data.padding import Padding, choose, describe
from keyhole.data.prepare import arrange, check_weights, tokenise
from keyhole.data.preview import preview
from keyhole.data.settings import DataSettings, PrepareSettings
from keyhole.data.strata import decide as decide_strata
from keyhole.data.strata import describe as describe_strata
from keyhole.data.tasks.classify import check_settings
from keyhole.data.tasks.encode import Encoder
from keyhole.data.tasks.labels import class_names, find_labels
from keyhole.data.tasks.names import listed_names
from keyhole.data.tasks.parse import read_spec
from keyhole.data.tasks.preview import preview_classes, preview_task
from keyhole.data.tasks.question import Task
from keyhole.data.tasks.run import load_tasks, load_test_tasks, warning_lines
from keyhole.disk.json_text import read_json
from keyhole.errors import UserError
from keyhole.model.structure.skeleton import is_classifier, read_config
from keyhole.model.structure.tokenizer import read_tokenizer
from keyhole.model.weights.published import forget_what_is_read


@dataclass(frozen=True)
class Data:
    """Everything a run needs to know about its data. chat_template: the one to save with the model; None: its own.
    dev, test: the questions of each task, if the run has tasks; eval then has the right answers of dev.
    labels: names of a classifier's labels. tokenizer: the model's, as it was read, so that the model need not read it
    again."""

    train: Loader
    eval: EvalBatches
    report: list[str]
    end_token_ids: list[int]
    chat_template: str | None = None
    dev: tuple[Task, ...] = ()
    test: tuple[Task, ...] = ()
    labels: tuple[str, ...] = ()
    tokenizer: Any = None


def load_tokenizer(model: str) -> Any:
    """The tokenizer in the directory of a model."""
    read_config(locate(model, MODEL))  # a clear error if there is no model at all
    return _tokenizer(model)


def _tokenizer(model: str) -> Any:
    model = locate(model, MODEL)
    tokenizer = read_tokenizer(model)
    if tokenizer is None:
        raise UserError(f"model: {model} has no tokenizer; copy its tokenizer files in")
    return tokenizer


def load_data(settings: DataSettings, tokenizer: Any = None) -> Data:
    """Loaders and report. tokenizer: None takes the model's."""
    settings = replace(settings, template_date=settings.day.isoformat())  # one date, also after midnight
    known = _model_config(settings)
    tokenizer = tokenizer or _tokenizer(settings.model)
    tasks = load_tasks(settings, tokenizer, known) if settings.task else None
    further = load_test_tasks(settings)
    if tasks is not None:
        train, report = tasks.train, [*tasks.report, *_step_lines(settings, len(tasks.train))]
    else:
        assert settings.train_data is not None  # or task
        train, report = _prepare(settings, settings.train_data, TRAIN, tokenizer, known)
        report = [f"train: {line}" for line in [*report, *_step_lines(settings, len(train))]]
    report += [f"test: task {task.name}: {task.about} ({task.fingerprint})" for task in further]
    report += [line for task in further for line in warning_lines(task)]
    about: dict[str, Any] = {"date": settings.template_date}
    about |= {"chat_template": train.chat_template} if train.chat_template else {}
    if tasks is not None and tasks.labels:
        has_head = settings.head is not None
        specs = [task.spec for task in (*tasks.test, *further) if task.spec is not None]
        find_labels(specs, known, has_head)  # refuses tests with other labels
        about |= {"labels": list(tasks.labels), "pad_token_id": train.pad_token_id}
    positions, asked = context_length(known), settings.pad_to_multiple_of
    padding = choose(train, asked, positions) if settings.padding is None else Padding(*settings.padding)
    loader = Loader(
        train,
        settings.batch_size,
        settings.gradient_accumulation_steps,
        seed=settings.seed,
        about=about | {"padding": [asked, *padding]},
        pad_to_multiple_of=padding.multiple,
        pad_to_most=padding.most,
        stratified=decide_strata(train, settings.stratify),
    )
    report.append(describe(train, loader.order_of(0), settings.batch_size, padding, asked))
    if loader.stratified:
        report.append(describe_strata(train, settings.stratify))
    batches = EvalBatches(None, settings.batch_size)
    if tasks is not None:
        if tasks.held_out is not None:
            batches = EvalBatches(
                tasks.held_out, settings.batch_size, *choose(tasks.held_out, asked, positions, padding.multiple)
            )
        test = (*tasks.test, *further)
        about = {"dev": tasks.dev, "test": test, "labels": tasks.labels, "tokenizer": tokenizer}
        return Data(loader, batches, report, train.end_token_ids, **about)
    if settings.eval_data:
        unmixed = replace(settings, packing=False, train_weights=None, dedup=False)
        held_out, lines = _prepare(unmixed, settings.eval_data, TEST, tokenizer, known)
        report += [f"eval:  {line}" for line in [*lines, *overlap_line(train, held_out)]]
        batches = EvalBatches(held_out, settings.batch_size, *choose(held_out, asked, positions, padding.multiple))
    about = {"test": further, "tokenizer": tokenizer}
    return Data(loader, batches, report, train.end_token_ids, train.chat_template, **about)


def preview_data(settings: DataSettings, count: int = 3, *, color: bool = False) -> str:
    """What `keyhole data` prints: the first samples of train_data, and a report on them. Reads only these."""
    known = _model_config(settings)
    tokenizer = _tokenizer(settings.model)
    if settings.task:
        tasks = load_tasks(settings, tokenizer, known)
        if tasks.labels:
            return "\n".join([*tasks.report, "", preview_classes(tasks.train, tokenizer, tasks.labels, count)])
        encoder = Encoder(tokenizer, settings.max_length, "drop" if settings.overlong == "drop" else "truncate")
        end = settings.train_end_token
        shown = [preview_task(task, tokenizer, encoder, count, color=color, end=end) for task in tasks.drawn]
        return "\n".join([*tasks.report, "", *shown])
    assert settings.train_data is not None  # or task
    dataset, lines = _prepare(settings, settings.train_data, TRAIN, tokenizer, known, samples=max(1, count))
    return "\n".join([*lines, "", preview(dataset, tokenizer, count, color=color)])


def _model_config(settings: DataSettings) -> Any:
    """The HF config of the model, with the requested head; refuses data settings that do not fit it."""
    count = settings.num_labels
    if settings.head is not None and count is None and settings.task:
        count = len(class_names(read_spec(listed_names(settings.task)[0])))
    known = read_config(locate(settings.model, MODEL), head=settings.head, num_labels=count)
    forget_what_is_read(known)  # its module may be built, to find a table of positions
    if is_classifier(known):
        check_settings(settings, known.architectures[0])
    return known


def _prepare(
    settings: DataSettings,
    source: str | list[str],
    demo: Path,
    tokenizer: Any,
    known: Any,
    samples: int | None = None,
) -> tuple[Dataset, list[str]]:
    """A data set within the limits of the model with HF config `known`, and its report."""
    sources = [locate(name, demo) for name in ([source] if isinstance(source, str) else source)]
    weights = None if samples is not None else settings.train_weights
    check_weights(weights, len(sources))
    how = PrepareSettings(**{field.name: getattr(settings, field.name) for field in fields(PrepareSettings)})
    how = replace(how, stop_token_ids=stop_token_ids(settings.model))
    if settings.data_cache is not None and samples is None:
        data = cached(settings.data_cache, sources, tokenizer, how)
    else:
        data = tokenise(sources, tokenizer, how, samples=samples)
    data = arrange(data, how, weights, settings.seed)
    warnings = check_data(data, settings.model, known)
    return data, [*data.report.lines(), *warnings]


def stop_token_ids(model: str) -> tuple[int, ...]:
    """The tokens that end an answer, from the model's generation_config.json; none if that cannot be read."""
    try:
        ids = read_json(Path(locate(model, MODEL)) / "generation_config.json", "model").get("eos_token_id")
    except UserError:
        return ()
    return tuple(i for i in (ids if isinstance(ids, list) else [ids]) if isinstance(i, int))


def _step_lines(settings: DataSettings, rows: int) -> list[str]:
    """A warning if one step takes more rows than there are."""
    batch, steps = settings.batch_size, settings.gradient_accumulation_steps
    if batch * steps <= rows:
        return []
    product = f" x gradient_accumulation_steps={steps}" if steps > 1 else ""
    return [
        f"warning: batch_size={batch}{product} is more than the {rows:,} rows of the data: every step sees all of them "
        "once, and no more"
    ]
