"""Loading: straight into flat memory, from any layout of files, and errors that name the file."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

import keyhole
from keyhole.errors import UserError
from keyhole.loading import choose_device
from keyhole.methods import CLASSES
from tests.model.decoders import LAYERS, batch, config


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of 35 thousand parameters in one file. Do not change it."""
    path = tmp_path_factory.mktemp("saved") / "model"
    keyhole.load(config("llama"), init="random", device="cpu").save_pretrained(path)
    return path


@pytest.fixture
def broken(saved: Path, tmp_path: Path) -> Path:
    """A copy to break."""
    return Path(shutil.copytree(saved, tmp_path / "broken"))


def shard(path: Path, count: int, rename: str = "", bins: bool = False, **how: object) -> None:
    """Rewrites model.safetensors as `count` shards with an index, as large checkpoints come; or as .bin files, of which
    a single one has no index."""
    tensors = {name.removeprefix(rename): x for name, x in load_file(path / "model.safetensors").items()}
    (path / "model.safetensors").unlink()
    stem, end = ("pytorch_model", "bin") if bins else ("model", "safetensors")
    weight_map = {}
    for i in range(count):
        file = f"{stem}-{i + 1:05d}-of-{count:05d}.{end}" if count > 1 else f"{stem}.{end}"
        part = dict(list(tensors.items())[i::count])
        torch.save(part, path / file, **how) if bins else save_file(part, path / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    if count > 1:
        (path / f"{stem}.{end}.index.json").write_text(json.dumps({"weight_map": weight_map}))


@pytest.mark.parametrize("dtype", [torch.float64, "float64", torch.int8, "fp16"])
def test_a_dtype_that_cannot_be_trained_in_is_refused(dtype: torch.dtype | str) -> None:
    """Before anything is built, whether it was asked for or is that of the checkpoint."""
    with pytest.raises(UserError, match="^dtype: .* is not one of float32, bfloat16, float16; set dtype=float(32|16)"):
        keyhole.load(config("llama"), init="random", device="cpu", dtype=dtype)
    made = config("llama")
    made.dtype = torch.float64
    with pytest.raises(UserError, match=r"^dtype: float64 \(of the checkpoint, by its config.json\) is not one of"):
        keyhole.load(made, init="random", device="cpu")
    assert keyhole.load(made, init="random", device="cpu", dtype="bfloat16").dtype == torch.bfloat16


def test_dtype_is_that_of_the_checkpoint_or_as_asked(saved: Path, tmp_path: Path) -> None:
    """null means as stored; otherwise every weight is rounded once, to nearest."""
    full = keyhole.load(saved, device="cpu")
    half = keyhole.load(saved, device="cpu", dtype="bfloat16")
    assert full.dtype == torch.float32 and half.dtype == torch.bfloat16
    for (_, a), (_, b) in zip(full.named_tensors(), half.named_tensors(), strict=True):
        assert torch.equal(a.to(torch.bfloat16), b)
    half.save_pretrained(tmp_path / "half")
    assert keyhole.load(tmp_path / "half", device="cpu").dtype == torch.bfloat16


@pytest.mark.parametrize("name", ["llama", "gpt_oss", "mamba"])
def test_random_weights_depend_on_the_seed_alone(name: str) -> None:
    one = keyhole.load(config(name), init="random", device="cpu", seed=5)
    torch.rand(7)
    state = torch.random.get_rng_state()
    two = keyhole.load(config(name), init="random", device="cpu", seed=5, placement="stream")
    assert torch.equal(torch.random.get_rng_state(), state)  # and the caller's generator is left alone
    other = keyhole.load(config(name), init="random", device="cpu", seed=6)
    for (key, a), (_, b) in zip(one.named_tensors(), two.named_tensors(), strict=True):
        assert torch.equal(a, b), key
    assert not torch.equal(one.nll(batch())[0], other.nll(batch())[0])


LAYOUTS = {
    "shards": lambda path: shard(path, 3),
    "one .bin": lambda path: shard(path, 1, bins=True),
    "shards in .bin": lambda path: shard(path, 3, bins=True),
    "without the decoder's prefix": lambda path: shard(path, 1, "model.", bins=True),
    "the format of before PyTorch 1.6": lambda path: shard(path, 1, bins=True, _use_new_zipfile_serialization=False),
}


@pytest.mark.parametrize("how", LAYOUTS)
@pytest.mark.parametrize("placement", ["resident", "stream"])
def test_every_layout_of_files_is_read_to_the_same_bits(saved: Path, broken: Path, how: str, placement: str) -> None:
    LAYOUTS[how](broken)
    one, two = (keyhole.load(path, device="cpu", placement=placement) for path in (saved, broken))
    for (name, a), (_, b) in zip(one.named_tensors(), two.named_tensors(), strict=True):
        assert torch.equal(a, b), name


class Evil:
    """Unpickling it would write a file."""

    def __init__(self, at: Path) -> None:
        self.at = at

    def __reduce__(self) -> tuple:
        return (Path.write_text, (self.at, "owned"))


@pytest.mark.parametrize("zipped", [True, False])
def test_no_code_in_a_bin_file_runs(broken: Path, tmp_path: Path, zipped: bool) -> None:
    (broken / "model.safetensors").unlink()
    content = {"model.embed_tokens.weight": Evil(tmp_path / "owned")}
    torch.save(content, broken / "pytorch_model.bin", _use_new_zipfile_serialization=zipped)
    with pytest.raises(UserError, match="pytorch_model.bin holds more than tensors.*not opened"):
        keyhole.load(broken, device="cpu")
    assert not (tmp_path / "owned").exists()


def drop(path: Path, name: str) -> None:
    file = path / "model.safetensors"
    save_file({key: x for key, x in load_file(file).items() if key != name}, file, metadata={"format": "pt"})


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def reshape(path: Path) -> None:
    text = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(text | {"vocab_size": 98}))


def set_key(path: Path, **keys: object) -> None:
    text = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(text | keys))


def index(path: Path, weight_map: object) -> None:
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


BREAKS = {
    "no weights": (lambda p: (p / "model.safetensors").unlink(), "broken has no weights"),
    "pickle only": (
        lambda p: (p / "model.safetensors").rename(p / "pytorch_model.bin"),
        "pytorch_model.bin holds more than tensors, or is no weight file.*not opened: convert it to safetensors",
    ),
    "truncated": (lambda p: truncate(p / "model.safetensors"), "model.safetensors cannot be read.*incomplete"),
    "not safetensors": (lambda p: (p / "model.safetensors").write_text("hello"), "model.safetensors cannot be read"),
    "wrong shape": (reshape, r"model.safetensors holds .* with shape \(99, 32\); config.json says \(98, 32\)"),
    "missing tensor": (lambda p: drop(p, "model.layers.1.mlp.up_proj.weight"), r"broken lacks .*up_proj.weight \(1 "),
    "no config": (lambda p: (p / "config.json").unlink(), "broken has no config.json"),
    "broken config": (lambda p: (p / "config.json").write_text("{"), "config.json cannot be read"),
    "unknown architecture": (lambda p: set_key(p, model_type="nonsense"), "nonsense"),
    "not a decoder": (lambda p: (p / "config.json").write_text('{"model_type": "vit"}'), "not a decoder"),
    "quantized": (lambda p: set_key(p, quantization_config={"quant_method": "fp8"}), "quantization_config.*dequantize"),
    "shards of another save": (
        lambda p: (
            shutil.copy(p / "model.safetensors", p / "model-00001-of-00001.safetensors"),
            index(p, {"model.norm.weight": "model-00001-of-00001.safetensors"}),
        ),
        "holds two models, model.safetensors and the files that model.safetensors.index.json names",
    ),
    "adapters beside the weights": (
        lambda p: (p / "adapter_model.safetensors").write_bytes(b""),
        r"adapters beside its weights \(adapter_model.safetensors\).*folder adapter/",
    ),
    "adapters alone": (
        lambda p: ((p / "config.json").unlink(), (p / "adapter_model.bin").write_bytes(b"")),
        r"no config.json, but adapters \(adapter_model.bin\)",
    ),
    "weights are a directory": (
        lambda p: ((p / "model.safetensors").unlink(), (p / "model.safetensors").mkdir()),
        "model.safetensors cannot be read.*no ordinary file",
    ),
    "config is a list": (lambda p: (p / "config.json").write_text("[]"), "config.json cannot be read.*holds a list"),
    "deep config": (lambda p: (p / "config.json").write_text('{"a":' * 100_000), "config.json.*nested too deeply"),
    "binary config": (lambda p: (p / "config.json").write_bytes(b"\xff\xfe"), "config.json cannot be read"),
    "text for a number": (lambda p: set_key(p, hidden_size="wide"), "hidden_size"),
    "null for a number": (lambda p: set_key(p, num_hidden_layers=None), "model: "),
    "negative width": (lambda p: set_key(p, hidden_size=-8), "model: "),
    "no heads": (lambda p: set_key(p, num_attention_heads=0), "model: "),
    "unknown dtype": (lambda p: set_key(p, dtype="float12"), "float12"),
    "ten million layers": (lambda p: set_key(p, num_hidden_layers=10**7), "num_hidden_layers is 1e.07, more than any"),
}


@pytest.mark.parametrize("name", BREAKS)
def test_a_broken_directory_is_the_users_error(broken: Path, name: str) -> None:
    damage, says = BREAKS[name]
    damage(broken)
    with pytest.raises(UserError, match=says):
        keyhole.load(broken, device="cpu")


def test_a_missing_or_damaged_shard_is_named(broken: Path) -> None:
    shard(broken, 3)
    second = broken / "model-00002-of-00003.safetensors"
    truncate(second)
    with pytest.raises(UserError, match="model-00002-of-00003.safetensors cannot be read"):
        keyhole.load(broken, device="cpu")
    second.unlink()
    with pytest.raises(UserError, match=r"names model-00002-of-00003.safetensors, which is missing \(1 files\)"):
        keyhole.load(broken, device="cpu")


def test_wrong_arguments() -> None:
    with pytest.raises(UserError, match="choose pretrained or random"):
        keyhole.load(config("llama"), init="zeros")
    with pytest.raises(UserError, match='init="random"'):
        keyhole.load(config("llama"), device="cpu")
    with pytest.raises(UserError, match="resident, stream, auto"):
        keyhole.load(config("llama"), init="random", device="cpu", placement="gpu")
    with pytest.raises(UserError, match="gpu_memory: 8 is not a size with its unit, such as 8GiB"):
        keyhole.load(config("llama"), init="random", device="cpu", gpu_memory=8)
    with pytest.raises(UserError, match="use cpu, cuda or cuda:0"):
        choose_device("gpu")
    with pytest.raises(UserError, match="not supported"):
        choose_device("meta")


def test_a_model_of_transformers_is_answered_with_what_to_write() -> None:
    theirs = LlamaForCausalLM(config("llama"))
    with pytest.raises(UserError, match="found a LlamaForCausalLM, expected a directory.*or save it first"):
        keyhole.load(theirs)
    theirs.config._name_or_path = "some/llama"
    with pytest.raises(UserError, match=r'write keyhole.load\("some/llama"\)'):
        keyhole.load(theirs)
    with pytest.raises(UserError, match="found a NoneType"):
        keyhole.load(None)


@pytest.mark.parametrize("name", CLASSES)
def test_a_method_on_what_is_no_model_is_answered_with_what_to_write(name: str) -> None:
    method = getattr(keyhole, name)
    for wrong in ("x", LlamaForCausalLM(config("llama"))):
        with pytest.raises(UserError, match=rf"found a .*keyhole.{name}\(keyhole.load\("):
            method(wrong)


def test_models_and_methods_say_what_they_are() -> None:
    model = keyhole.load(config("llama"), init="random", device="cpu", placement="stream")
    size = f"{6_368 + 10_304 * LAYERS:,} parameters"
    assert repr(model) == f"<Model: LlamaForCausalLM, {size}, float32 on cpu, {LAYERS} of {LAYERS + 3} units streamed>"
    assert repr(keyhole.ZO(model, lr=1e-6)) == f"ZO({model!r}, lr=1e-06)"
    assert {"ZO", "LOMO", "load", "Model"} <= set(dir(keyhole))


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_cuda_asked_for_where_there_is_none() -> None:
    with pytest.raises(UserError, match="no CUDA GPU here; use device=cpu"):
        choose_device("cuda")
