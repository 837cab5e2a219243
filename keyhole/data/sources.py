"""Whether what the data settings name is there: files, tasks, a chat template. Asked before torch is imported.

No row is read and no request is made, so it takes milliseconds: who mistyped a path hears of it at once. The readers
look again when they read.
"""

from keyhole.data.files import resolve
from keyhole.data.settings import DataSettings
from keyhole.data.tasks.names import check_names, listed_names, own_splits
from keyhole.data.tasks.parse import read_spec
from keyhole.data.tasks.places import find_splits


def check_sources(settings: DataSettings) -> None:
    """Refuses files, patterns and folders that are not there, and tasks that nobody knows."""
    for source in (settings.train_data, settings.eval_data):
        if source:
            resolve([source] if isinstance(source, str) else source)
    _ = settings.template_text
    names = [*listed_names(settings.task), *listed_names(settings.test_task)]
    if names:
        check_names(names, settings.task_splits)
    for name in names:
        spec = read_spec(name)
        find_splits(spec, settings.task_data, own_splits(settings.task_splits, spec.name))
