"""The probe of the machine."""

import json

import pytest
import torch

from keyhole.machine import probe
from keyhole.machine.rates import WORKSPACE_BYTES, WORKSPACE_BYTES_9


def test_environment_is_json_and_complete() -> None:
    """It can be stored in run/env.json and has every part."""
    found = json.loads(json.dumps(probe.environment()))
    assert set(found) == {"versions", "os", "cpu", "host_memory", "cuda", "gpus", "triton", "link_gb_s"}
    assert found["versions"]["torch"] == torch.__version__ and found["link_gb_s"] is None
    assert found["os"] and found["cpu"]["name"]


def test_triton_state_follows_the_interpreter_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    """TRITON_INTERPRET=1 is said, because it makes everything slow."""
    if probe.installed_version("triton") is None:
        pytest.skip("triton is not installed")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert "TRITON_INTERPRET=1" in probe.triton_state()
    monkeypatch.delenv("TRITON_INTERPRET")
    assert "TRITON_INTERPRET" not in probe.triton_state()


def test_the_workspace_of_a_product_is_that_of_the_card(monkeypatch: pytest.MonkeyPatch) -> None:
    """32 MiB from Hopper on, 8 MiB and a bit before; none on a CPU."""
    cards = {(8, 9): WORKSPACE_BYTES, (9, 0): WORKSPACE_BYTES_9, (10, 0): WORKSPACE_BYTES_9}
    for capability, expected in cards.items():
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
        assert probe.workspace_bytes(torch.device("cuda")) == expected
    assert WORKSPACE_BYTES_9 == 2**25 > WORKSPACE_BYTES >= 2**23 and probe.workspace_bytes(torch.device("cpu")) == 0


def test_a_full_gpu_does_not_stop_the_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """When the link cannot be measured, the reason stands in its place."""

    def fail() -> dict[str, float]:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried ...\nmore")

    monkeypatch.setattr(probe, "gpus", lambda: [{"name": "x"}])
    monkeypatch.setattr(probe, "link_speed", fail)
    found = probe.environment(measure_link=True)
    assert found["link_gb_s"] == "not measured: CUDA out of memory. Tried ..."


@pytest.mark.gpu
def test_link_speed_on_a_gpu() -> None:
    """All three rates are measured and plausible; both ways at once is not above one way alone by much."""
    rates = probe.link_speed()
    assert all(1 < rate < 1000 for rate in rates.values())
    assert rates["both_ways"] <= 1.2 * max(rates.values())
