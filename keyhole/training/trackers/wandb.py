"""Weights & Biases: to the server that you are logged in to; without a login, or with WANDB_MODE=offline, run/wandb.

wandb's own variables are respected (WANDB_MODE, WANDB_PROJECT, WANDB_ENTITY, ...). There is no prompt for a key:
without one the run is offline, and `wandb sync run/wandb/offline-run-*` sends it later. A resumed run has the same id;
steps that the server has already are not replaced there (wandb keeps the first).
"""

import netrc
import os
import urllib.parse
from contextlib import suppress
from typing import Any

from keyhole.training.trackers import PROJECT, About, step_and_numbers


class WandB:
    """One run of wandb."""

    def __init__(self, about: About) -> None:
        import wandb

        mode = os.environ.get("WANDB_MODE") or (None if is_logged_in() else "offline")
        if mode == "offline":
            os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # it would send error reports
        quiet = wandb.Settings(console="off", silent=True)
        self.run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=about.name,
            id=about.run,
            dir=str(about.directory),
            config=about.config,
            resume=None if mode == "offline" else "allow",
            mode=mode,
            settings=quiet,
            reinit="create_new",
        )

    def write(self, entry: dict[str, Any]) -> None:
        step, numbers = step_and_numbers(entry)
        self.run.log(numbers, step=step)

    def close(self) -> None:
        self.run.finish()


def is_logged_in() -> bool:
    """Whether wandb would find a login: a key or a token in the environment, or the server in ~/.netrc, where `wandb
    login` stores it. Otherwise wandb would prompt for one."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    server = urllib.parse.urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    for place in (os.environ.get("NETRC"), "~/.netrc", "~/_netrc"):
        with suppress(OSError, netrc.NetrcParseError, UnicodeDecodeError):
            if place and netrc.netrc(os.path.expanduser(place)).authenticators(server) is not None:
                return True
    return False
