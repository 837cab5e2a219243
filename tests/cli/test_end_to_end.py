"""The real command on a tiny model: it trains, resumes, shows, scores, and refuses bad input unwritten."""

import io
import json
import math
import resource
import shutil
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from keyhole import assets
from keyhole.cli import main
from keyhole.config import load_config
from keyhole.methods import METHODS
from tests.matrix import in_every_run


@pytest.fixture
def config(tmp_path: Path, tiny_model: Path, tiny_data: Path) -> Path:
    """A config file for a run of four steps."""
    path = tmp_path / "run.yaml"
    path.write_text(
        f"model: {tiny_model}\nmethod: zo\ntrain_data: {tiny_data}\neval_data: {tiny_data}\n"
        f"output_dir: {tmp_path / 'out'}\nmax_steps: 4\nbatch_size: 4\nmax_length: 64\ndevice: cpu\n"
    )
    return path


@in_every_run(lambda method: method in ("zo", "lsp", "lomo-lora", "adam-offload", "sgd"))
@pytest.mark.parametrize("method", METHODS)
def test_train_with_every_method(config: Path, method: str, capsys: Any) -> None:
    """Each method runs from the command line, and the config it stores runs again and means the same."""
    assert main(["train", str(config), f"method={method}"]) == 0
    out = config.parent / "out"
    assert (out / "model.safetensors").exists() and (out / "run" / "metrics.jsonl").exists()
    stored, warnings = load_config(out / "run" / "config.yaml")
    assert stored == load_config(config, [f"method={method}"])[0] and warnings == []


def test_placement_and_switches_change_no_number(config: Path) -> None:
    """Streamed, with graphs and without: the same weights as resident, and the same metrics but for times and bytes."""
    found = []
    for name, words in {"resident": [], "stream": ["placement=stream"], "slow": ["offload.graphs=false"]}.items():
        out = config.parent / name
        assert main(["train", str(config), f"output_dir={out}", *words]) == 0
        rows = [json.loads(line) for line in (out / "run" / "metrics.jsonl").read_text().splitlines()]
        learned = [
            {key: row.get(key) for key in ("step", "loss", "eval_loss", "learning_rate", "epoch")} for row in rows
        ]
        found.append(((out / "model.safetensors").read_bytes(), learned))
    assert found[0] == found[1] == found[2] and len(found[0][1]) >= 4


def truncated(model: Path) -> None:
    file = model / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def reshaped(model: Path) -> None:
    text = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(text | {"intermediate_size": 72}))


def not_weights(model: Path) -> None:
    (model / "model.safetensors").unlink()
    (model / "pytorch_model.bin").write_bytes(b"PK not a pickle")


def coded(model: Path) -> None:
    from safetensors.torch import save_file

    found = {name: (50 * w).to(torch.int8) for name, w in load_file(model / "model.safetensors").items()}
    save_file(found, model / "model.safetensors", metadata={"format": "pt"})


def without_blocks(model: Path) -> None:
    text = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(text | {"num_hidden_layers": 0}))


DAMAGED = {"truncated": (truncated, "model.safetensors cannot be read"), "other shapes": (reshaped, "config.json says")}
DAMAGED |= {"no readable weights": (not_weights, "pytorch_model.bin"), "whole numbers": (coded, "codes of quantised")}
DAMAGED |= {"no blocks": (without_blocks, "would have no blocks: the number of layers in its config")}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_dry_run_checks_the_weight_files(
    name: str, config: Path, tiny_model: Path, tmp_path: Path, capsys: Any
) -> None:
    """What it says it checks, it checks: from the headers, without reading a weight."""
    damage, says = DAMAGED[name]
    before = sorted(config.parent.rglob("*"))
    assert main(["train", str(config), "--dry-run"]) == 0
    assert sorted(config.parent.rglob("*")) == before
    assert "weights: 21 tensors in 1 file, complete and of the shapes that the config says" in capsys.readouterr().out
    model = shutil.copytree(tiny_model, tmp_path / "damaged")
    damage(model)
    assert main(["train", str(config), f"model={model}", "--dry-run"]) == 2
    assert says in capsys.readouterr().err


def test_data_shows_samples(config: Path, capsys: Any) -> None:
    """`-n 2` shows two samples with what is trained on; method, steps and output_dir may be missing."""
    words = [line.replace(": ", "=") for line in config.read_text().split("\n") if line.startswith(("model", "train"))]
    for asked in ([str(config)], words):
        assert main(["data", *asked, "-n", "2"]) == 0
        text = capsys.readouterr().out
        assert text.count("sample ") >= 2 and "prompt_completion" in text and "TRAINED" in text


def test_eval_and_chat(tiny_model: Path, tiny_data: Path, monkeypatch: Any, capsys: Any) -> None:
    assert main(["eval", str(tiny_model), "--tasks", str(tiny_data), "device=cpu"]) == 0
    assert "perplexity" in capsys.readouterr().out
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\n"))
    assert main(["chat", str(tiny_model), "device=cpu", "--max-new-tokens", "3"]) == 0


# ---- bad input ---------------------------------------------------------------------------------------


def data(text: str) -> Any:
    """train_data is a file with this text."""

    def make(tmp_path: Path, model: Path) -> list[str]:
        (tmp_path / "bad.jsonl").write_text(text)
        return [f"train_data={tmp_path / 'bad.jsonl'}"]

    return make


BAD = {
    "malformed data": (data('{"prompt": "a", "completion": "b"}\n{"prompt\n'), "bad.jsonl, line 2"),
    "nothing trained": (data('{"prompt": "a b c", "completion": ""}'), "trained"),
    "output is a file": (lambda t, m: [f"output_dir={t / 'run.yaml'}"], "run.yaml"),
    "output is the model": (lambda t, m: [f"output_dir={m}"], "output_dir"),
    "format does not fit": (lambda t, m: ["data_format=messages"], "messages"),
    "too long": (lambda t, m: ["max_length=3", "overlong=error"], "max_length=3"),
    "no such layer": (lambda t, m: ["--dry-run", "method=lora", "lora.target_modules=[nope]"], "is called 'nope'"),
    "rank beyond": (lambda t, m: ["--dry-run", "method=lomo-lora", "lomo_lora.r=9999"], "Set r to "),
    "no such GPU": (lambda t, m: ["device=cuda:99"], "cuda"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name: str, config: Path, tiny_model: Path, tmp_path: Path, capsys: Any) -> None:
    """Each: exit code 2, one message that names the culprit, no traceback, nothing written."""
    if name == "no such GPU" and torch.cuda.device_count() > 99:
        pytest.skip("there is such a GPU")
    make, says = BAD[name]
    words = make(tmp_path, tiny_model)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert main(["train", str(config), *words]) == 2
    message = capsys.readouterr().err
    assert says in message and "Traceback" not in message and len(message.splitlines()) < 12
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    assert not (tmp_path / "out").exists()


@contextmanager
def address_space(more: int) -> Iterator[None]:
    """As in a shell after `ulimit -v`: this process may take so many bytes more."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (held + more, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def test_a_batch_that_host_memory_cannot_hold_is_refused(tmp_path: Path, capsys: Any) -> None:
    """In the middle of a step, by torch's own allocator: what was asked for, and what to lower; no traceback."""
    words = ["model=demo", "method=adamw", "train_data=demo", "train_weights=[40]", "batch_size=8000", "max_steps=1"]
    with address_space(2**28):
        assert main(["train", *words, "device=cpu", f"output_dir={tmp_path / 'out'}"]) == 2
    message = capsys.readouterr().err
    assert "out of host memory: " in message and "more were asked for" in message and "lower batch_size" in message
    assert "Traceback" not in message and "our mistake" not in message


def widened(model: Path, width: int) -> int:
    """Gives a model feed-forward layers of this width, whose weights are holes in its file; returns its bytes."""
    known = json.loads((model / "config.json").read_text())
    content = (model / "model.safetensors").read_bytes()
    header, end = json.loads(content[8 : 8 + struct.unpack("<Q", content[:8])[0]]), 0
    for entry in (entry for name, entry in header.items() if name != "__metadata__"):
        entry["shape"] = [width if side == known["intermediate_size"] else side for side in entry["shape"]]
        begin, end = end, end + 4 * math.prod(entry["shape"])
        entry["data_offsets"] = [begin, end]
    text = json.dumps(header).encode()
    with open(model / "model.safetensors", "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)
    (model / "config.json").write_text(json.dumps(known | {"intermediate_size": width}))
    return end


@pytest.mark.parametrize("verb", ["eval", "chat", "train"])
def test_a_model_that_host_memory_cannot_hold_is_refused(
    tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    """By every verb that loads one. Its files are not damaged: they cannot be mapped."""
    model = shutil.copytree(assets.locate("demo", assets.MODEL), tmp_path / "model")
    size = widened(model, 400_000)
    monkeypatch.setattr("sys.stdin", io.StringIO("hello"))
    run = ["method=lomo", "train_data=demo", "max_steps=1", f"output_dir={tmp_path / 'out'}", f"model={model}"]
    words = {"eval": [str(model), "--tasks", "demo"], "chat": [str(model)], "train": run}[verb]
    with address_space(size // 2):
        assert main([verb, *words, "device=cpu"]) == 2
    message = capsys.readouterr().err
    assert "model.safetensors cannot be mapped, 879MiB" in message and "raise `ulimit -v`" in message
    assert "damaged" not in message and "Traceback" not in message


def start_block(printed: str) -> list[str]:
    """The lines about what is trained and what is frozen."""
    lines = [line.strip() for line in printed.splitlines()]
    return [line for line in lines if line.startswith(("parameters:", "trained ", "frozen ", "factors "))]


OUTLINED = {method: [f"method={method}"] for method in METHODS}
OUTLINED |= {"low rank": ["method=zo", "zo.rank=2", "zo.fold=false"]}
OUTLINED |= {f"{method}, frozen": [f"method={method}", "freeze=embeddings"] for method in ("lora", "lomo-lora", "lomo")}
OUTLINED |= {"two layers": ["method=lora", "lora.target_modules=[q_proj,v_proj]", "lora.r=64"]}


@in_every_run(lambda name: name not in ("adalomo", "apollo-mini", "sgd", "galore"))  # they train what lomo and adamw do
@pytest.mark.parametrize("name", OUTLINED)
def test_a_dry_run_says_what_the_run_will_train(name: str, tmp_path: Path, capsys: Any) -> None:
    words = ["train", "model=demo", "train_data=demo", "max_steps=1", "device=cpu", f"output_dir={tmp_path / 'out'}"]
    assert main([*words, *OUTLINED[name], "--dry-run"]) == 0
    dry = start_block(capsys.readouterr().out)
    assert main([*words, *OUTLINED[name]]) == 0
    assert start_block(capsys.readouterr().out) == dry and len(dry) == 12
