"""keyhole env: text for people, JSON for programs."""

import json
from typing import Any

import torch

from keyhole.cli import main
from keyhole.cli.pages import machine_lines


def test_env_as_text_and_json(capsys: Any) -> None:
    assert main(["env", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["versions"]["torch"] == torch.__version__
    assert main(["env"]) == 0
    text = capsys.readouterr().out
    assert torch.__version__ in text and "GiB available" in text and "triton" in text


def test_a_gpu_machine_is_printed_with_its_link() -> None:
    """GPU, limit and link lines appear when there is something to say."""
    found = {
        "versions": {"keyhole": "0", "triton": "3.6", "datasets": None},
        "os": "Linux",
        "cpu": {"name": "x", "cores": 3},
        "host_memory": {"total_bytes": 2**34, "available_bytes": 2**33, "cgroup_limit_bytes": 2**32},
        "cuda": {"built_for": "12.8", "driver": "570.1"},
        "gpus": [{"name": "H200", "capability": "9.0", "total_bytes": 2**37, "free_bytes": 2**36}],
        "triton": "usable",
        "link_gb_s": {"host_to_device": 55.0, "device_to_host": 54.0, "both_ways": 50.0},
    }
    text = "\n".join(f"{name:<13} {line}" for name, line in machine_lines(found))
    parts = ["triton        3.6, usable", "not installed", "16.0 GiB, 8.0 GiB available"]
    parts += ["limit: 4.0 GiB", "H200, 128.0 GiB", "50.0 GB/s each"]
    for part in parts:
        assert part in text
    assert text.count("triton") == 1
    assert ("link", "not measured: x") in machine_lines(found | {"link_gb_s": "not measured: x"})
