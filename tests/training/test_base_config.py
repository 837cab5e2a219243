"""The same weights under another config.json are another model: what a run learned beside them is of the first one."""

import json
import shutil
from dataclasses import replace as changed
from pathlib import Path
from typing import Any

import pytest

from keyhole.checkpoint.replay import replay
from keyhole.config import TrainConfig, resolve
from keyhole.errors import UserError
from keyhole.methods.lora.traits import LoRAConfig
from keyhole.methods.zo.traits import ZOConfig
from keyhole.training.start import train

KINDS = {
    "fold": {"method": "zo", "zo": ZOConfig(rank=1, refresh=2, fold=False)},
    "lora": {"method": "lora", "lora": LoRAConfig(merge=False)},
    "merged": {"method": "lora"},
    "journal": {"method": "zo"},
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_another_config_under_the_weights_is_refused(
    tiny_model: Path, tiny_data: Path, tmp_path: Path, kind: str
) -> None:
    """By its key, then and now, with exit code 2, on resume and replay; a key that changes no number may change. A run
    that resumes from weights of its own has its own config beside them."""
    base, out = shutil.copytree(tiny_model, tmp_path / "base"), tmp_path / "out"
    common = {"model": str(base), "train_data": str(tiny_data), "output_dir": str(out), "learning_rate": 1e-4}
    config = resolve(TrainConfig(**common, max_steps=2, batch_size=2, device="cpu", **KINDS[kind]))[0]
    assert train(config) == 0

    def edit(**keys: Any) -> None:
        (base / "config.json").write_text(json.dumps(json.loads((base / "config.json").read_text()) | keys))

    def resume(steps: int) -> int:
        if kind == "journal":
            shutil.rmtree(out / f"checkpoint-{steps - 1}")
            (out / "model.safetensors").unlink()
        return train(changed(config, max_steps=steps), resume="")

    edit(transformers_version="9.9", use_cache=False)
    assert resume(3) == 0
    edit(rms_norm_eps=0.5)
    words = r"has another config.json: rms_norm_eps was 1e-06 then, and is 0.5 now"
    with pytest.raises(UserError, match=f"--resume: .*{words}") as refused:
        resume(4)
    assert refused.value.code == 2
    if kind == "journal":
        with pytest.raises(UserError, match=f"BASE: .*{words}"):
            replay(str(base), out, tmp_path / "again", device="cpu")


@pytest.mark.parametrize("method", ["zo", "lomo"])
def test_a_run_with_weights_of_its_own_says_that_the_config_of_its_base_is_another(
    tiny_model: Path, tiny_data: Path, tmp_path: Path, method: str, capsys: pytest.CaptureFixture
) -> None:
    """And goes on with that of its checkpoint."""
    base, out = shutil.copytree(tiny_model, tmp_path / "base"), tmp_path / "out"
    common = {"model": str(base), "train_data": str(tiny_data), "output_dir": str(out), "method": method}
    config = resolve(TrainConfig(**common, learning_rate=1e-4, max_steps=2, batch_size=2, device="cpu"))[0]
    assert train(config) == 0 and train(changed(config, max_steps=3), resume="") == 0
    assert "another config.json" not in capsys.readouterr().out
    (base / "config.json").write_text(
        json.dumps(json.loads((base / "config.json").read_text()) | {"rms_norm_eps": 0.5})
    )
    assert train(changed(config, max_steps=4), resume="") == 0
    words = "has another config.json: rms_norm_eps was 1e-06 then, and is 0.5 now; the run goes on with that of"
    assert f"resume: model={base} {words} {out}/checkpoint-3\n" in capsys.readouterr().out
    assert json.loads((out / "config.json").read_text())["rms_norm_eps"] == 1e-6
