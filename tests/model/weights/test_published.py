"""Models that were published in 4 or 8 bits: the numbers that their formats mean, taken over or unpacked."""

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import keyhole
from keyhole.disk import gguf
from keyhole.errors import UserError
from tests.conftest import build_llama
from tests.disk.published import write_bnb, write_gguf, write_ints
from tests.matrix import in_every_run
from tests.model.decoders import batch
from tests.model.streaming import assert_trained_alike

Write = Callable[[Path, Path], dict[str, torch.Tensor]]
GGUF = {f"gguf {form}": lambda a, b, form=form: write_gguf(a, b, form) for form in ("F16", "Q4_0", "Q4_1", "Q8_0")}
WRITERS: dict[str, Write] = GGUF | {
    "bnb": lambda a, b: write_bnb(a, b, nested=False),
    "bnb nested": write_bnb,
    "gptq": lambda a, b: write_ints(a, b, "gptq", sym=False),
    "gptq reordered": lambda a, b: write_ints(a, b, "gptq", sym=False, reorder=True),
    "gptq sym": lambda a, b: write_ints(a, b, "gptq", sym=True, group=64),
    "gptq 64": lambda a, b: write_ints(a, b, "gptq", sym=False, group=64),
    "gptq reordered 64": lambda a, b: write_ints(a, b, "gptq", sym=False, group=64, reorder=True),
    "awq": lambda a, b: write_ints(a, b, "awq", sym=False),
    "awq 64": lambda a, b: write_ints(a, b, "awq", sym=False, group=64),
}
EXACT = {"gguf Q4_0": "int4", "gguf Q8_0": "int8", "bnb": "nf4", "bnb nested": "nf4", "gptq sym": "int4"}
EXACT |= {"gguf Q4_1": "int4", "gptq 64": "int4", "awq 64": "int4"}  # with offsets


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama whose rows are whole blocks of every format."""
    path = tmp_path_factory.mktemp("plain") / "model"
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    build_llama(256, **shape).save_pretrained(path)
    return path


@pytest.mark.parametrize("name", WRITERS)
def test_unpacked_weights_are_those_that_the_format_means(name: str, source: Path, tmp_path: Path) -> None:
    numbers = WRITERS[name](source, tmp_path / "in")
    model = keyhole.load(tmp_path / "in", device="cpu", dtype="float32")
    for tensor in model.layout.tensors:
        torch.testing.assert_close(model.home(tensor), numbers[tensor.name], rtol=1e-6, atol=0)
    model.save_pretrained(tmp_path / "out")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert getattr(again.config, "quantization_config", None) is None
    one = batch()
    nll_B, count_B = model.nll(one)
    torch.testing.assert_close(nll_B.sum(), again(**one).loss * count_B.sum(), rtol=1e-5, atol=1e-5)
    assert name == "gguf F16" or any("published as" in line for line in model.describe())


@pytest.mark.parametrize("name", EXACT)
def test_a_grid_that_fits_is_taken_over_bit_for_bit(name: str, source: Path, tmp_path: Path) -> None:
    WRITERS[name](source, tmp_path / "in")
    plain = keyhole.load(tmp_path / "in", device="cpu", dtype="float32")
    packed = keyhole.load(tmp_path / "in", device="cpu", dtype="float32", wire=EXACT[name], placement="stream")
    assert any("bit for bit" in line for line in packed.describe())
    for mine, theirs in zip(packed.layout.tensors, plain.layout.tensors, strict=True):
        assert torch.equal(packed.home(mine), plain.home(theirs)), mine.name
    assert torch.equal(packed.nll(batch())[0], plain.nll(batch())[0])
    held = sum(packed.formats.home_bytes(u) for u in packed.layout.of_kind("block"))
    assert held < 0.6 * 2 * sum(u.numel for u in packed.layout.of_kind("block"))


@pytest.mark.parametrize(
    "name, wire", [
        ("gguf Q4_1", "nf4"), ("gguf Q4_1", "int8"), ("gptq", "int4"), ("gptq reordered 64", "int4"),
        ("gguf Q8_0", "int4"), ("awq", "nf4"), ("awq 64", "nf4"),
    ],
)  # fmt: skip
def test_another_grid_is_refused(name: str, wire: str, source: Path, tmp_path: Path) -> None:
    WRITERS[name](source, tmp_path / "in")
    better = EXACT.get(name, "null")
    with pytest.raises(UserError, match=f"wire: {wire} would round the weights again.*wire={better}"):
        keyhole.load(tmp_path / "in", device="cpu", wire=wire)


REASONS = {
    "gptq": "its groups are of 32 weights, a multiple of 64 ",
    "gptq reordered 64": "its inputs are reordered",
    "awq": "its groups are of 32 weights",
    "gguf Q5_0": "Q5_0 is no format of a wire",
    "bnb 128": "its blocks are of 128 weights, 64 are needed",
    "bnb some": "1 of 14 matrices of the blocks are not quantised .model.layers.0.self_attn.q_proj.weight",
}


@pytest.mark.parametrize("name", REASONS)
def test_a_refusal_says_why_no_grid_fits(name: str, source: Path, tmp_path: Path) -> None:
    (WRITERS | {"gguf Q5_0": lambda a, b: write_gguf(a, b, "Q5_0")}).get(name, WRITERS["bnb"])(source, tmp_path / "in")
    if name.startswith("bnb"):
        tensors = load_file(tmp_path / "in" / "model.safetensors")
        weight = f"{PROJ}.weight"
        kept = {key: tensor.clone() for key, tensor in tensors.items() if not key.startswith(f"{weight}")}
        if name == "bnb some":
            kept[weight] = torch.zeros(64, 64)
        else:
            kept |= {key: tensors[key].clone() for key in (weight, f"{weight}.quant_map")}
            kept[f"{weight}.absmax"] = tensors[f"{weight}.absmax"][::2].clone()
            state = bytes(tensors[f"{weight}.quant_state.bitsandbytes__nf4"].tolist())
            state = state.replace(b'"blocksize": 64', b'"blocksize": 128')
            kept[f"{weight}.quant_state.bitsandbytes__nf4"] = torch.tensor(list(state), dtype=torch.uint8)
        save_file(kept, tmp_path / "in" / "model.safetensors", metadata={"format": "pt"})
    wire = "nf4" if name.startswith("bnb") else "int4"
    with pytest.raises(UserError, match=rf"published as .*: {REASONS[name]}.*\. Set wire=null"):
        keyhole.load(tmp_path / "in", device="cpu", wire=wire)


def test_a_gguf_file_alone_says_what_belongs_beside_it(source: Path, tmp_path: Path) -> None:
    write_gguf(source, tmp_path / "in", "Q4_0")
    (tmp_path / "in" / "config.json").unlink()
    with pytest.raises(UserError, match="no config.json beside its GGUF file; config.json and the tokenizer's files"):
        keyhole.load(tmp_path / "in", device="cpu")


def test_zero_points_that_contradict_the_config_are_found(source: Path, tmp_path: Path) -> None:
    """sym is what config.json says; the file is looked at before its codes are believed."""
    write_ints(source, tmp_path / "in", "gptq", sym=False, group=64)
    text = (tmp_path / "in" / "config.json").read_text()
    (tmp_path / "in" / "config.json").write_text(text.replace('"sym": false', '"sym": true'))
    with pytest.raises(UserError, match="not symmetric, though config.json says so"):
        keyhole.load(tmp_path / "in", device="cpu", wire="int4")


PROJ = "model.layers.0.self_attn.q_proj"
HARMS = {  # (name of the format, the tensor, its new value, what the message says)
    "finer scales": ("gptq sym", f"{PROJ}.scales", lambda t: t.float() * 1.0001, "float16 cannot hold"),
    "finer scales with offsets": ("awq 64", f"{PROJ}.scales", lambda t: t.float() * 1.0001, "float16 cannot hold"),
    "another table": ("bnb", f"{PROJ}.weight.quant_map", lambda t: t * 0.9, "table of their own"),
}


@pytest.mark.parametrize("harm", HARMS)
def test_codes_are_taken_over_only_if_the_grid_is_theirs(harm: str, source: Path, tmp_path: Path) -> None:
    name, tensor, change, reason = HARMS[harm]
    WRITERS[name](source, tmp_path / "in")
    tensors = load_file(tmp_path / "in" / "model.safetensors")
    tensors[tensor] = change(tensors[tensor])
    save_file(tensors, tmp_path / "in" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=reason):
        keyhole.load(tmp_path / "in", device="cpu", dtype="float32", wire=EXACT[name])


DAMAGED = {"gptq sym": f"{PROJ}.scales", "awq 64": f"{PROJ}.scales", "bnb": f"{PROJ}.weight.absmax"}


@in_every_run(lambda bad, as_published: (bad == float("inf")) == as_published)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("as_published", [True, False])
@pytest.mark.parametrize("name", [*DAMAGED, "gguf Q4_0", "gguf Q4_1", "gguf Q8_0"])
def test_scales_of_nan_are_a_damaged_file(
    name: str, as_published: bool, bad: float, source: Path, tmp_path: Path
) -> None:
    """Whatever the wire: the message has the file and the tensor, and no setting that could not help."""
    WRITERS[name](source, tmp_path / "in")
    tensor = DAMAGED.get(name, f"{PROJ}.weight")
    if name in DAMAGED:
        path = tmp_path / "in" / "model.safetensors"
        tensors = load_file(path)
        tensors[tensor].view(-1)[1] = bad
        save_file(tensors, path, metadata={"format": "pt"})
    else:
        path = tmp_path / "in" / "model.gguf"
        raw, begin = bytearray(path.read_bytes()), gguf.GGUFShard(path).entries[tensor].begin
        raw[begin : begin + 2] = struct.pack("<e", bad)
        path.write_bytes(raw)
    with pytest.raises(UserError) as found:
        keyhole.load(tmp_path / "in", device="cpu", dtype="float32", wire=EXACT[name] if as_published else None)
    assert f"{path} is damaged: NaN or infinity in" in str(found.value) and tensor in str(found.value)
    assert "wire" not in str(found.value) and "cannot be read" not in str(found.value)


@pytest.mark.parametrize("wire", [None, "int4"])
def test_names_that_only_transformers_knows_are_refused(wire: str | None, source: Path, tmp_path: Path) -> None:
    """Experts that were quantised one by one, for a model with stacks: no package is asked for that would not help."""
    write_ints(source, tmp_path / "in", "gptq", sym=True, group=64)
    tensors = load_file(tmp_path / "in" / "model.safetensors")
    other = {name.replace("mlp.up_proj", "mlp.experts.0.w3"): tensor for name, tensor in tensors.items()}
    save_file(other, tmp_path / "in" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        UserError, match=r"published as GPTQ 4, and has no tensor for .*up_proj.weight: .*under other names"
    ):
        keyhole.load(tmp_path / "in", device="cpu", dtype="float32", wire=wire)


@pytest.mark.parametrize("wire", [None, "int4"])
def test_a_gguf_header_is_parsed_once(
    wire: str | None, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not for every tensor; and again when the file is another one, though as large."""
    parsed = []

    class Counted(gguf.Header):
        def __init__(self, data: Any, *about: Any) -> None:
            parsed.append(len(data))
            super().__init__(data, *about)

    write_gguf(source, tmp_path / "in", "Q4_0")
    monkeypatch.setattr(gguf, "Header", Counted)
    model = keyhole.load(tmp_path / "in", device="cpu", dtype="float32", wire=wire)
    assert len(parsed) == 1 < len(model.layout.tensors)
    path = tmp_path / "in" / "model.gguf"
    changed = path.read_bytes().replace(b"blk.0.", b"blk.9.")
    path.unlink()
    path.write_bytes(changed)
    with pytest.raises(UserError, match="no tensor for"):
        keyhole.load(tmp_path / "in", device="cpu", dtype="float32", wire=wire)
    assert len(parsed) == 2


@pytest.mark.parametrize("form", ["Q4_0", "Q4_1"])
def test_lora_trains_over_a_published_base(form: str, source: Path, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    write_gguf(source, tmp_path / "in", form)
    plain = keyhole.load(tmp_path / "in", device="cpu", dtype="float32")
    packed = keyhole.load(tmp_path / "in", device="cpu", dtype="float32", wire="int4", placement="stream")
    steps = [[batch(seed=t)] for t in range(3)]
    assert_trained_alike([plain, packed], lambda model: keyhole.LoRA(model, lr=1e-2, r=4), steps)
