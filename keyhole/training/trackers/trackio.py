"""Trackio: into its own directory on this machine (TRACKIO_DIR; `trackio show`), or to your own Space or server.

trackio's own variables are respected (TRACKIO_SPACE_ID, TRACKIO_SERVER_URL, ...). trackio identifies runs by name: the
name of output_dir and the beginning of the run's id, so that only a resumed run continues an existing one.
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

        trackio.finish()  # ends the run of this thread
