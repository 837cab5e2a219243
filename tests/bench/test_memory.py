"""Memory by part, on tiny shapes: the formulas hold exactly, and checkpointing and LOMO do what they are for."""

import json
from pathlib import Path
from typing import Any

from keyhole.bench.ledger import PARTS
from keyhole.cli import main
from keyhole.loading.homes import ALIGN_BYTES


def run(out: Path, only: str) -> tuple[dict[str, dict[str, Any]], str]:
    """Records by name, and the page; no trial fails."""
    assert main(["bench", "memory", "--quick", f"--only={only}", f"--out={out}"]) == 0
    records = json.loads(next(out.glob("*.json")).read_text())["records"]
    assert all(r["status"] == "ok" for r in records), records
    return {r["name"]: r for r in records}, next(out.glob("*.md")).read_text()


def test_torch_s_optimizers_hold_what_the_formulas_say(tmp_path: Path) -> None:
    """Gradients and state to the byte; weights with the padding between units."""
    found, page = run(tmp_path, "7B native")
    assert len(found) == 8 and "vs floor" in page and all(f"{part} MiB" in page for part in PARTS)
    for name, record in found.items():
        own, floor = record["own"], record["floor"]
        assert own["gradients"] == floor["gradients"], name
        assert own["state"] == floor["state"], name
        assert 0 <= own["weights"] - floor["weights"] < 64 * ALIGN_BYTES, name
        assert sum(record["at_peak"].values()) <= sum(own.values())
        if "checkpointing" in name:
            without = found[name.removesuffix(" checkpointing")]["own"]
            assert floor["activations"] < own["activations"] < 0.5 * without["activations"]
    states = [found[f"7B native {name}"]["own"]["state"] for name in ("sgd", "sgd master", "adamw", "adamw master")]
    assert states == sorted(states) and states[0] == 0


def test_a_fused_update_keeps_no_gradients(tmp_path: Path) -> None:
    """At least the largest matrix, far less than all, and no state."""
    found, _ = run(tmp_path, "7B lomo")
    for record in found.values():
        own, floor = record["own"], record["floor"]
        assert floor["gradients"] <= own["gradients"] < 0.2 * own["weights"] and own["state"] == 0
    all_kept, inputs_kept = (found[f"7B lomo{name}"]["own"]["activations"] for name in ("", " checkpointing"))
    assert inputs_kept < 0.6 * all_kept
