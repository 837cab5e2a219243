"""keyhole env: YAML for people, JSON for programs."""

import json
from typing import Any

import torch
import yaml

from keyhole.cli import main


def test_env_as_text_and_json(capsys: Any) -> None:
    """Both hold the same facts; only the free memory changes meanwhile."""
    assert main(["env", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["versions"]["torch"] == torch.__version__
    assert main(["env"]) == 0
    told = yaml.safe_load(capsys.readouterr().out)
    for facts in (found, told):
        facts["host_memory"]["available_bytes"] = 0
    assert told == found
