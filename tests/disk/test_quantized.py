"""Quantised weights in safetensors that are damaged or made up: refused with a reason, whatever they hold."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from keyhole.disk.weight_files import stored_tensors
from keyhole.errors import UserError
from tests.disk.published import write_bnb, write_ints

Q = "model.layers.0.self_attn.q_proj"
STATE = f"{Q}.weight.quant_state.bitsandbytes__nf4"
Tensors = dict[str, torch.Tensor]


def said(tensors: Tensors, **changes: Any) -> torch.Tensor:
    """The description of a weight with other values; None leaves one out."""
    about = json.loads(bytes(tensors[STATE].tolist())) | changes
    text = json.dumps({key: value for key, value in about.items() if value is not None})
    return torch.tensor(list(text.encode()), dtype=torch.uint8)


BNB: dict[str, Callable[[Tensors], object]] = {
    "no description": lambda t: t.update({STATE: torch.zeros(2**14, dtype=torch.uint8)}),
    "no JSON": lambda t: t.update({STATE: torch.full((40,), 200, dtype=torch.uint8)}),
    "numbers": lambda t: t.update({STATE: torch.rand(9)}),
    "deep": lambda t: t.update({STATE: torch.tensor(list(b"[" * 4000), dtype=torch.uint8)}),
    "huge shape": lambda t: t.update({STATE: said(t, shape=[2**40, 2**40])}),
    "negative": lambda t: t.update({STATE: said(t, shape=[-32, -32])}),
    "no shape": lambda t: t.update({STATE: said(t, shape=None)}),
    "blocks of 0": lambda t: t.update({STATE: said(t, blocksize=0)}),
    "no offset": lambda t: t.update({STATE: said(t, nested_offset=None)}),
    "no scales": lambda t: t.pop(f"{Q}.weight.absmax"),
    "short table": lambda t: t.update({f"{Q}.weight.quant_map": torch.zeros(2)}),
    "short scales": lambda t: t.update({f"{Q}.weight.absmax": torch.zeros(3, dtype=torch.uint8)}),
    "no weight": lambda t: t.pop(f"{Q}.weight"),
    "wider bytes": lambda t: t.update({f"{Q}.weight": t[f"{Q}.weight"].to(torch.int32)}),
}
GPTQ: dict[str, Callable[[Tensors], object]] = {
    "no scales": lambda t: t.pop(f"{Q}.scales"),
    "a vector": lambda t: t.update({f"{Q}.qweight": torch.zeros(7, dtype=torch.int32)}),
    "other zeros": lambda t: t.update({f"{Q}.qzeros": torch.zeros(9, 9, dtype=torch.int32)}),
    "groups that are not there": lambda t: t.update({f"{Q}.g_idx": torch.full((32,), 2**30, dtype=torch.int32)}),
    "no integers": lambda t: t.update({f"{Q}.qweight": t[f"{Q}.qweight"].float()}),
}


@pytest.mark.parametrize("kind, harm", [*(("bnb", h) for h in BNB), *(("gptq", h) for h in GPTQ)])
def test_damage_is_refused(kind: str, harm: str, tiny_model: Path, tmp_path: Path) -> None:
    """When the tensors are listed, or when they are read; the message says where."""
    if kind == "bnb":
        write_bnb(tiny_model, tmp_path / "in")
    else:
        write_ints(tiny_model, tmp_path / "in", "gptq", sym=True)
    tensors = {name: tensor.clone() for name, tensor in load_file(tmp_path / "in" / "model.safetensors").items()}
    (BNB if kind == "bnb" else GPTQ)[harm](tensors)
    save_file(tensors, tmp_path / "in" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match="model: .*in.*quantised weights cannot be read"):
        name = f"{Q}.weight"
        stored_tensors(tmp_path / "in")[name].read(tmp_path / "in", name)


@pytest.mark.parametrize(
    "changes", [
        {"quant_method": "exl2"}, {"bits": 3}, {"group_size": "x"}, {"bits": [4]}, {"bits": 4.0},
        {"checkpoint_format": "marlin"}, {"quant_method": "awq", "version": "gemv"}, {"group_size": 4},
    ],
)  # fmt: skip
def test_what_is_not_read_is_said(changes: dict[str, Any], tiny_model: Path, tmp_path: Path) -> None:
    write_ints(tiny_model, tmp_path / "in", "gptq", sym=True)
    config = json.loads((tmp_path / "in" / "config.json").read_text())
    config["quantization_config"] |= changes
    (tmp_path / "in" / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="are read|group_size 4 of config.json makes"):
        stored_tensors(tmp_path / "in")


def test_weights_beside_their_codes_are_refused(tiny_model: Path, tmp_path: Path) -> None:
    """Which of them is the model, nobody can know."""
    write_ints(tiny_model, tmp_path / "in", "gptq", sym=True)
    without(tmp_path / "in", **{f"{Q}.weight": torch.zeros(32, 32)})
    with pytest.raises(UserError, match=f"holds {Q}.weight twice, as numbers and as GPTQ codes"):
        stored_tensors(tmp_path / "in")


def without(directory: Path, *names: str, **new: torch.Tensor) -> None:
    """Removes tensors from a model, and adds others."""
    held = {name: tensor.clone() for name, tensor in load_file(directory / "model.safetensors").items()}
    kept = {name: tensor for name, tensor in held.items() if name not in names}
    save_file(kept | new, directory / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("lack", ["nested_absmax", "nested_quant_map"])
def test_codes_are_not_taken_for_scales(lack: str, tiny_model: Path, tmp_path: Path) -> None:
    """bitsandbytes' nested scales without one of their tensors, whether the description speaks of them or not."""
    write_bnb(tiny_model, tmp_path / "in")
    without(tmp_path / "in", f"{Q}.weight.{lack}")
    with pytest.raises(UserError, match=f"are quantised themselves, and {Q}.weight.{lack} is missing"):
        stored_tensors(tmp_path / "in")
    tensors = load_file(tmp_path / "in" / "model.safetensors")
    state = said(tensors, nested_blocksize=None, nested_offset=None, nested_dtype=None)
    both = (f"{Q}.weight.nested_absmax", f"{Q}.weight.nested_quant_map")
    without(tmp_path / "in", *both, **{STATE: state})
    stored = stored_tensors(tmp_path / "in")[f"{Q}.weight"]
    for read in (stored.read, stored.codes):
        with pytest.raises(UserError, match="absmax is uint8 without a nested_absmax"):
            read(tmp_path / "in", f"{Q}.weight")


def test_reordered_inputs_need_their_groups(tiny_model: Path, tmp_path: Path) -> None:
    """GPTQ with desc_act: without g_idx, any groups would be wrong ones; in order, they are known."""
    for reorder in (True, False):
        target = tmp_path / str(reorder)
        numbers = write_ints(tiny_model, target, "gptq", sym=True, reorder=reorder)
        without(target, f"{Q}.g_idx")
        if reorder:
            with pytest.raises(UserError, match=f"{Q} lacks g_idx, though config.json says desc_act"):
                stored_tensors(target)
        else:
            name = f"{Q}.weight"
            torch.testing.assert_close(stored_tensors(target)[name].read(target, name), numbers[name])


@pytest.mark.parametrize("shape, store", [((10, 30), torch.uint8), ((16, 64), torch.bfloat16), ((3, 5), torch.uint8)])
def test_codes_of_bitsandbytes_in_any_number_and_storage(
    shape: tuple[int, int], store: torch.dtype, tmp_path: Path
) -> None:
    """The last block may be short; the bytes may be called numbers of another dtype (bnb_4bit_quant_storage), of which
    some are NaN."""
    numel, generator = shape[0] * shape[1], torch.Generator().manual_seed(0)
    q = torch.randint(0, 16, (numel,), generator=generator)
    q[:4] = 15
    levels, absmax = torch.rand(16, generator=generator), torch.rand(-(-numel // 64), generator=generator)
    codes = [*q.tolist(), 0][: numel + numel % 2]
    raw = torch.tensor([high << 4 | low for high, low in zip(codes[::2], codes[1::2], strict=True)], dtype=torch.uint8)
    about = json.dumps({"quant_type": "nf4", "blocksize": 64, "shape": list(shape)}).encode()
    tensors = {"l.weight": raw.view(store).unsqueeze(1), "l.weight.absmax": absmax, "l.weight.quant_map": levels}
    tensors["l.weight.quant_state.bitsandbytes__nf4"] = torch.tensor(list(about), dtype=torch.uint8)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    found = stored_tensors(tmp_path)["l.weight"].read(tmp_path, "l.weight")
    expected = [float(levels[code] * absmax[i // 64]) for i, code in enumerate(q.tolist())]
    assert found.tolist() == torch.tensor(expected).view(shape).tolist()
