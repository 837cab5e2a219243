"""examples/idea.py, the idea in plain PyTorch, trains as keyhole does."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import torch
from transformers import AutoModelForCausalLM

import keyhole
from keyhole import assets
from keyhole.ops import draw_noise

PATH = Path(__file__).parents[1] / "examples" / "idea.py"


@pytest.fixture(scope="module")
def idea() -> ModuleType:
    spec = importlib.util.spec_from_file_location("idea", PATH)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def rows(count: int) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(2, 1500, (count, 4, 24), generator=generator)
    return [{"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)} for ids in drawn]


@pytest.mark.parametrize("method", ["lomo", "zo"])
def test_its_losses_are_keyholes(idea: ModuleType, method: str) -> None:
    """Five steps of each method have keyhole's losses on the embedded model; for zo, along keyhole's noise."""
    theirs = keyhole.load("demo", placement="stream", device="cpu", dtype="float32")
    lr, steps = {"lomo": 1e-2, "zo": 1e-3}[method], 5
    opt = {"lomo": keyhole.LOMO, "zo": keyhole.ZO}[method](theirs, lr=lr)
    starts = {tensor.name: tensor.start for tensor in theirs.layout.tensors}

    def noise(seed: int, name: str, like: torch.Tensor) -> torch.Tensor:
        return draw_noise(like.numel(), offset=starts[name], seed=0, step=seed).view(like.shape)

    ours = AutoModelForCausalLM.from_pretrained(assets.MODEL, dtype=torch.float32)
    step = idea.streamed(ours, getattr(idea, method), lr=lr, **({"noise": noise} if method == "zo" else {}))
    found = [(step(batch), opt.step(batch).item()) for batch in rows(steps)]
    for mine, keyholes in found:
        assert mine == pytest.approx(keyholes, rel=1e-5)
    assert len({round(mine, 3) for mine, _ in found}) > 1


def test_it_is_short(idea: ModuleType) -> None:
    """At most 150 lines that are not empty, and no import of keyhole."""
    text = PATH.read_text()
    assert len([line for line in text.splitlines() if line.strip()]) <= 150
    assert "import keyhole" not in text and "from keyhole" not in text
