"""The data of a run, for the trainer and for `keyhole data`.

    load_data(settings) -> Data: a resumable loader of the training rows, batches of held-out rows, and the report

Rows come from files (prepare.py) or from tasks, which also give the questions of dev and test. Training rows are mixed
and packed; held-out rows never are, so that their loss does not depend on a setting of training. Both are compared with
the limits of the model (capacity.py), so that a text that is too long is refused here and not in the middle of the run.

Two things that the data depend on belong to the run and are kept in the loader's state: the date that a chat template
may print (the day the run began, also after a resume), and the template itself if it is not the tokenizer's. That
template is saved with the trained model, so that programs that use the model build the prompts of training.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from keyhole.assets import MODEL, TEST, TRAIN, locate
from keyhole.data.batches import EvalBatches, Loader, Padding, choose_padding, stratifies
from keyhole.data.capacity import check_data, context_length
from keyhole.data.collect import Collector, arrange
from keyhole.data.dataset import Dataset
from keyhole.data.prepare import tokenise
from keyhole.data.preview import preview
from keyhole.data.settings import DataSettings
from keyhole.data.tasks.draw import draw_tasks, report_lines, warning_lines
from keyhole.data.tasks.encode import CANDIDATES, TOKENS, Encoder, TextEncoder, ends
from keyhole.data.tasks.parse import read_spec
from keyhole.data.tasks.question import Labels, Task, check_settings, class_names, find_labels
from keyhole.data.tasks.spec import CHOICE, listed_names
from keyhole.data.tokenizer import Tokenizer, dropout_lines, needed, unknown_id
from keyhole.disk.json_text import read_json
from keyhole.errors import UserError
from keyhole.model.structure.skeleton import is_classifier, read_config
from keyhole.model.structure.source import read_tokenizer
from keyhole.model.weights.fit import forget_what_is_read

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

MOST_COMPARED = 2**21  # samples


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
    tokenizer: "Tokenizer | None" = None


@dataclass(frozen=True)
class Rows:
    """The rows of a run, from files or from tasks; of tasks also their questions, and the labels of a classifier."""

    train: Dataset
    held_out: Dataset | None
    report: list[str]
    dev: tuple[Task, ...] = ()
    test: tuple[Task, ...] = ()
    labels: Labels | None = None


def load_tokenizer(model: str) -> Tokenizer:
    return needed(read_tokenizer(locate(model, MODEL)), locate(model, MODEL))


def load_data(settings: DataSettings) -> Data:
    settings = replace(settings, template_date=settings.day.isoformat())  # one date, also after midnight
    known, tokenizer = _model_config(settings), load_tokenizer(settings.model)
    rows = (_of_tasks if settings.task else _of_files)(settings, tokenizer, known)
    further = tuple(drawn["test"] for drawn in draw_tasks(settings, training=False))
    train, report, test = rows.train, [*dropout_lines(tokenizer), *rows.report], (*rows.test, *further)
    steps = settings.gradient_accumulation_steps
    if settings.batch_size * steps > len(train):
        product = f" x gradient_accumulation_steps={steps}" if steps > 1 else ""
        report.append(
            f"warning: batch_size={settings.batch_size}{product} is more than the {len(train):,} rows of the data: "
            "every step sees all of them once, and no more"
        )
    report += [f"test: task {task.name}: {task.about} ({task.fingerprint})" for task in further]
    report += [line for task in further for line in warning_lines(task)]
    about: dict[str, object] = {"date": settings.template_date}
    about |= {"chat_template": train.chat_template} if train.chat_template else {}
    if rows.labels is not None:
        find_labels([task.spec for task in test], known, settings.head is not None)  # refuses tests with other labels
        about |= {"labels": list(rows.labels.names), "pad_token_id": train.pad_token_id}
    positions, asked = context_length(known), settings.pad_to_multiple_of
    padding = choose_padding(train, asked, positions) if settings.padding is None else Padding(*settings.padding)
    loader = Loader(
        train,
        settings.batch_size,
        steps,
        seed=settings.seed,
        about=about | {"padding": [asked, *padding]},
        padding=padding,
        stratified=stratifies(train, settings.stratify),
    )
    report += loader.report(asked, settings.stratify)
    if rows.held_out is not None:
        padding = choose_padding(rows.held_out, asked, positions, padding.multiple)
    return Data(
        loader,
        EvalBatches(rows.held_out, settings.batch_size, padding),
        report,
        train.end_token_ids,
        train.chat_template,
        dev=rows.dev,
        test=test,
        labels=() if rows.labels is None else rows.labels.names,
        tokenizer=tokenizer,
    )


def preview_data(settings: DataSettings, count: int = 3, *, color: bool = False) -> str:
    """What `keyhole data` prints: the first samples of train_data, and a report on them. Reads only these; of a task
    all candidates of its questions, whatever the loss."""
    known, tokenizer = _model_config(settings), load_tokenizer(settings.model)
    if settings.task:
        rows = _of_tasks(settings, tokenizer, known, candidates=True)
    else:
        rows = _of_files(replace(settings, eval_data=None, train_weights=None), tokenizer, known, max(1, count))
    names = () if rows.labels is None else rows.labels.names
    return "\n".join(
        [*dropout_lines(tokenizer), *rows.report, "", preview(rows.train, tokenizer, count, color=color, labels=names)]
    )


def _model_config(settings: DataSettings) -> "PreTrainedConfig":
    """The HF config of the model, with the requested head; refuses data settings that do not fit it."""
    count = settings.num_labels
    if settings.head is not None and count is None and settings.task:
        count = len(class_names(read_spec(listed_names(settings.task)[0])))
    known = read_config(locate(settings.model, MODEL), head=settings.head, num_labels=count)
    forget_what_is_read(known)  # its module may be built, to find a table of positions
    if is_classifier(known):
        check_settings(settings, known.architectures[0])
    return known


def stop_token_ids(model: str) -> tuple[int, ...]:
    """The tokens that end an answer, from the model's generation_config.json; none if that cannot be read."""
    try:
        ids = read_json(Path(locate(model, MODEL)) / "generation_config.json", "model").get("eos_token_id")
    except UserError:
        return ()
    return tuple(i for i in (ids if isinstance(ids, list) else [ids]) if isinstance(i, int))


def _of_files(
    settings: DataSettings, tokenizer: Tokenizer, known: "PreTrainedConfig", samples: int | None = None
) -> Rows:
    """The data of files. samples: how many are enough."""
    train, lines = _file_set(settings, settings.train_data, TRAIN, tokenizer, known, samples)
    report = [f"train: {line}" for line in lines]
    if not settings.eval_data:
        return Rows(train, None, report)
    unmixed = replace(settings, packing=False, train_weights=None, dedup=False)
    held_out, lines = _file_set(unmixed, settings.eval_data, TEST, tokenizer, known)
    return Rows(train, held_out, report + [f"eval:  {line}" for line in [*lines, *_overlap(train, held_out)]])


def _overlap(train: Dataset, held_out: Dataset) -> list[str]:
    """A warning, if samples of the held-out data are training samples too, by their tokens: their loss says nothing of
    others. Only training samples of a length that the held-out data have are compared, of very many the first."""

    def key(data: Dataset, index: int) -> int:
        return hash(data.ids[data.starts[index] : data.starts[index + 1]].tobytes())

    total, lengths = len(held_out.lengths), set(held_out.lengths)
    ours = {key(train, i) for i, length in enumerate(train.lengths[:MOST_COMPARED]) if length in lengths}
    count = sum(key(held_out, i) in ours for i in range(total))
    told = f"warning: {count:,} of the {total:,} samples are also in train_data: their loss is that of training"
    return [told] if count else []


def _file_set(
    settings: DataSettings,
    source: str | list[str] | None,
    demo: Path,
    tokenizer: Tokenizer,
    known: "PreTrainedConfig",
    samples: int | None = None,
) -> tuple[Dataset, list[str]]:
    """A data set within the limits of the model with HF config `known`, and its report."""
    assert source is not None  # or task
    sources = [locate(name, demo) for name in ([source] if isinstance(source, str) else source)]
    how = replace(settings, stop_token_ids=stop_token_ids(settings.model))
    data = arrange(tokenise(sources, tokenizer, how, samples=samples), how, len(sources))
    return data, data.report.lines() + check_data(data, settings.model, known)


def _of_tasks(
    settings: DataSettings, tokenizer: Tokenizer, known: "PreTrainedConfig", candidates: bool = False
) -> Rows:
    """The data of tasks. candidates: all of them, where questions have several."""
    drawn = draw_tasks(settings)
    train = [each["train"] for each in drawn]
    dev, test = ([each[split] for each in drawn if each[split].questions] for split in ("dev", "test"))
    labels, loss = None, str(settings.loss)
    if is_classifier(known):
        labels = find_labels([task.spec for task in train], known, settings.head is not None)
    elif candidates and all(task.spec.kind == CHOICE for task in train):
        loss = CANDIDATES
    data = arrange(_question_set(train, tokenizer, settings, loss, labels, known), settings, len(train))
    report = [line for each in drawn for line in report_lines(each)]
    report += [*data.report.lines(), *check_data(data, settings.model, known)]
    if settings.loss == CANDIDATES:
        report.append(f"loss: candidates; {len(data.lengths):,} candidates of {len(data):,} questions")
    held_out = None  # without dev there is no selection; test never selects
    if dev:
        held_out = _question_set(dev, tokenizer, replace(settings, overlong="truncate"), TOKENS, labels, known)
        check_data(held_out, settings.model, known)
    return Rows(data, held_out, report, tuple(dev), tuple(test), labels)


def _question_set(
    tasks: Sequence[Task],
    tokenizer: Tokenizer,
    how: DataSettings,
    loss: str,
    labels: Labels | None,
    known: "PreTrainedConfig",
) -> Dataset:
    """The questions as training rows; for a classifier, if there are labels. known: the HF config of the model."""
    collector = Collector(how, [], unknown_id(tokenizer))
    report, end = collector.report, tokenizer.eos_token_id
    report.read = sum(len(task.questions) for task in tasks)
    if labels is None:
        encoder = Encoder(tokenizer, how.max_length, how.overlong)
        rows, padding_id = encoder.training_rows(tasks, loss, how.train_end_token, report), encoder.pad_token_id
        if end is not None and any(ends(task, how.train_end_token) for task in tasks):
            collector.ends[end] += 1
    else:
        texts = TextEncoder(tokenizer, known, how.max_length, how.overlong)
        rows, padding_id = texts.training_rows(tasks, labels, report), texts.pad_token_id
    for row in rows:
        collector.keep(row)
    return collector.dataset(padding_id)
