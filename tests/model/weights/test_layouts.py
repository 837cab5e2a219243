"""What keyhole writes loads wherever its source loads: models published for several versions of Transformers, trained
and loaded again in the current one and, from another virtual environment (`make matrix`), in the last one before 5."""

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import keyhole
from tests.matrix import in_every_run
from tests.model.weights.layouts import OLD, write_layout
from tests.model.weights.reload import TEXT, reload

BEFORE_5 = Path(__file__).parents[3] / ".venv-4.57" / "bin" / "python"
LOADS = [(name, loader) for name in OLD for loader in ("current", "4.57")] + [
    (f"{name} at 5", "current") for name in OLD
]


def load_again(jobs: list[dict[str, Any]], loader: str, tmp_path: Path) -> dict[str, torch.Tensor]:
    if loader == "current":
        return reload(jobs)
    file = tmp_path / "jobs.json"
    file.write_text(json.dumps(jobs))
    words = [str(BEFORE_5), str(Path(__file__).with_name("reload.py")), str(file)]
    done = subprocess.run(words, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": ""})
    assert done.returncode == 0, done.stderr[-3000:]
    return load_file(f"{file}.safetensors")


@in_every_run(lambda name, loader: (name, loader) in (("llama", "current"), ("gemma3_text at 5", "current")))
@pytest.mark.parametrize(("name", "loader"), LOADS)
def test_what_is_written_loads_wherever_its_source_loads(
    name: str, loader: str, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    if loader != "current" and not BEFORE_5.exists():
        pytest.skip(f"{BEFORE_5.parents[1].name} with Transformers 4.57 is not there: `make matrix` makes it")
    source = write_layout(name, tmp_path / "source")
    jobs, expected = [{"model": str(source), "adapter": None}], []
    for method, options in ((keyhole.LOMO, {"lr": 1e-3}), (keyhole.LoRA, {"lr": 1e-2, "merge": False})):
        model = keyhole.load(source, dtype="float32", device="cpu")
        ids = model.tokenizer(TEXT, return_tensors="pt")["input_ids"]
        opt = method(model, **options)
        opt.step({"input_ids": ids, "labels": ids})
        out = tmp_path / method.__name__
        model.save_pretrained(out)
        expected.append(model.logits({"input_ids": ids}))
        jobs += [{"model": str(out), "adapter": str(out / "adapter") if expected[1:] else None}]
        published, now = ({f.name: f.read_bytes() for f in place.iterdir() if f.is_file()} for place in (source, out))
        assert published.keys() == now.keys()
        dtyped = published.pop("config.json").replace(b'dtype": "bfloat16"', b'dtype": "float32"')
        assert now.pop("config.json") == dtyped and b"float32" in dtyped
        assert [file for file in now if now[file] != published[file] and file != "model.safetensors"] == []
    jobs.append(jobs[0] | {"adapter": jobs[2]["adapter"]})  # the published base, as peft would load it
    again = load_again([job | {"ids": ids.tolist()} for job in jobs], loader, tmp_path)
    for i, logits in ((1, expected[0]), (2, expected[1]), (3, expected[1])):
        differ = float((again[f"{i}.logits"] - logits).abs().max() / logits.abs().max())
        record_property(f"difference {i}", differ)
        assert differ <= 1e-5, i
        assert torch.equal(again[f"{i}.ids"], again["0.ids"])
