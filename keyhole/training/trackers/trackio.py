"""Trackio: into its own directory on this machine (TRACKIO_DIR; `trackio show`), or to a Space or server of one's own.

Its variables are respected (TRACKIO_SPACE_ID, TRACKIO_SERVER_URL, ...). Runs are known by name there: the name of
output_dir and the beginning of the run's id, so that a resumed run goes on and no other one does.
"""

import os
from typing import Any

from keyhole.training.trackers import PROJECT, About, step_and_numbers


class Trackio:
    """One run of trackio."""

    def __init__(self, about: About) -> None:
        import trackio

        self.run = trackio.init(
            project=os.environ.get("TRACKIO_PROJECT", PROJECT),
            name=f"{about.name}-{about.run[:8]}",
            config=about.config,
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def write(self, entry: dict[str, Any]) -> None:
        step, numbers = step_and_numbers(entry)
        self.run.log(numbers, step=step)

    def close(self) -> None:
        import trackio

        trackio.finish()  # of this thread's run
