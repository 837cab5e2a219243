"""Checks that files, tasks and the chat template named in the data settings exist, before torch is imported.

It also checks the first row of each file, and that the tasks support the loss. No more is read and no request is made,
so it takes milliseconds, and a mistyped path is reported at once. The readers check again when they read. What reads
tasks is imported only for them.
"""

from pathlib import Path

from keyhole.data.files import resolve
from keyhole.data.first_rows import check_first_rows
from keyhole.data.settings import DataSettings
from keyhole.disk.json_text import read_json
from keyhole.errors import UserError
from keyhole.model.structure.source import names_classifier


def check_sources(settings: DataSettings) -> None:
    """Refuses missing files, patterns and folders, first rows that cannot be trained on, unknown tasks, and a loss that
    a task does not support."""
    given = [source for source in (settings.train_data, settings.eval_data) if source]
    sources = [[source] if isinstance(source, str) else source for source in given]
    for names in sources:
        resolve(names)
    _ = settings.template_text
    for names in () if _classifies(settings.model) else sources:
        check_first_rows(names, settings)
    if settings.task or settings.test_task:
        _check_tasks(settings)


def _classifies(model: str) -> bool:
    """Whether the model in a directory is a classifier: its labels come from a task, as is said when it is read."""
    try:
        return names_classifier(read_json(Path(model) / "config.json", "model"))
    except UserError:  # a hub id, or a model that will be refused
        return False


def _check_tasks(settings: DataSettings) -> None:
    from keyhole.data.tasks.names import check_names, listed_names, own_splits
    from keyhole.data.tasks.parse import read_spec
    from keyhole.data.tasks.places import find_splits
    from keyhole.data.tasks.spec import check_loss

    names = [*listed_names(settings.task), *listed_names(settings.test_task)]
    if names:
        check_names(names, settings.task_splits)
    for name in names:
        spec = read_spec(name)
        if name in listed_names(settings.task):
            check_loss(spec, settings.loss)
        find_splits(spec, settings.task_data, own_splits(settings.task_splits, spec.name))
