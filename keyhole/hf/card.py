"""The model card that the Trainer writes, corrected where it describes the Trainer's own optimizer.

The card reads `optim` of the arguments, which keyhole does not use: a published model would claim to have been
trained by AdamW. The line is replaced by one that states the method; everything else is the Trainer's.
"""

import json
import re
from pathlib import Path

from keyhole import __version__
from keyhole.hf.loading import Wanted
from keyhole.model.model import Model

OPTIMIZER = re.compile(r"^- optimizer: .*$", re.MULTILINE)


def state_method(card: Path, asked: Wanted, model: Model) -> None:
    """Replaces the line about the optimizer, if the card has one."""
    if not card.is_file():
        return
    settings = f", settings {json.dumps(asked.settings)}" if asked.settings else ""
    dtype = str(model.dtype).removeprefix("torch.")
    where = "streamed from host memory" if model.engine.streamed else "resident"
    line = f"- method: {asked.method} (keyhole {__version__}; {dtype}, {where}){settings}"
    text = card.read_text(encoding="utf-8")
    card.write_text(OPTIMIZER.sub(lambda found: line, text), encoding="utf-8")
