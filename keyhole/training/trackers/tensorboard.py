"""TensorBoard: scalars in run/tensorboard; a resumed run replaces the steps that it repeats."""

from typing import Any

from keyhole.training.trackers import About, step_and_numbers

QUEUE = 10**6  # entries; with its default of 10 a slow disk would block this thread


class TensorBoard:
    """`tensorboard --logdir output_dir/run/tensorboard` shows it."""

    def __init__(self, about: About) -> None:
        from torch.utils.tensorboard import SummaryWriter

        place = str(about.directory / "tensorboard")
        self.writer = SummaryWriter(place, purge_step=about.first + 1, max_queue=QUEUE)

    def write(self, entry: dict[str, Any]) -> None:
        step, numbers = step_and_numbers(entry)
        for name, value in numbers.items():
            self.writer.add_scalar(name, value, step)

    def close(self) -> None:
        self.writer.close()
