"""`keyhole plan` needs a config.json and nothing else."""

import json
import re
from pathlib import Path

import pytest

from keyhole.cli import main
from keyhole.methods import METHODS

KEYS = {
    "method", "placement", "wire", "gpu_bytes", "host_bytes", "disk_bytes", "step_seconds", "tokens_per_second",
    "bound_by", "fits",
}  # fmt: skip
CONFIG = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 128, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 256, "vocab_size": 512,
    "dtype": "bfloat16",
}  # fmt: skip


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path / "model"


def test_a_directory_without_weights_is_planned(
    directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The JSON is a list of rows with the keys that were promised; one row is recommended."""
    options = ["--machine", "laptop", "--gpu", "1GiB", "--ram", "16GiB", "--link", "25GB/s", "--tokens", "2x128"]
    assert main(["plan", str(directory), *options, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {row["method"] for row in found} == set(METHODS) and all(KEYS <= row.keys() for row in found)
    assert sum(row["recommended"] for row in found) == 1
    assert all(row["tokens_per_second"] == pytest.approx(256 / row["step_seconds"]) for row in found)


OF_EXPERTS = {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "num_local_experts": 4}


@pytest.mark.parametrize(
    "change",
    [{"vocab_size": 0}, {"intermediate_size": 0}, OF_EXPERTS | {"num_attention_heads": 0},
     OF_EXPERTS | {"num_local_experts": 0}, OF_EXPERTS | {"num_experts_per_tok": -1}],
)  # fmt: skip
def test_sizes_that_no_model_has_are_refused(
    directory: Path, capsys: pytest.CaptureFixture[str], change: dict[str, int]
) -> None:
    """With a word that says what is wrong, where no file of weights can tell."""
    (directory / "config.json").write_text(json.dumps(CONFIG | change))
    assert main(["plan", str(directory), "--machine", "laptop"]) == 2
    assert re.search("a size in its config is 0|less than any model|no module can be built", capsys.readouterr().err)


def test_a_config_brings_its_settings(directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Batches and the method's settings are those of the file; the row it asks for is judged."""
    config = tmp_path / "my.yaml"
    config.write_text(
        f"model: {directory}\nmethod: lomo\noutput_dir: {tmp_path / 'out'}\ntrain_data: x.jsonl\nmax_steps: 10\n"
        "batch_size: 8\nmax_length: 2048\nplacement: resident\n"
    )
    assert main(["plan", str(config), "--machine", "laptop", "--gpu", "30MiB"]) == 0
    told = capsys.readouterr().out
    assert "step: 8 samples of 2,048 tokens" in told
    assert "method=lomo placement=resident does not fit; what would, cheapest first:" in told


def test_settings_alone_are_planned(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`model=DIR method=lomo`, as `keyhole train` takes them; the row that is asked for is judged."""
    words = [f"model={directory}", "method=lomo", "task=sst2", "batch_size=2", "max_length=64"]
    for order in (words, words[1:] + words[:1]):
        assert main(["plan", *order, "--machine", "laptop", "--gpu", "1MiB"]) == 0
        told = capsys.readouterr().out
        assert "step: 2 samples of 64 tokens" in told and "method=lomo placement=resident does not fit" in told
    assert main(["plan", "method=lomo", "--machine", "laptop"]) == 2
    assert "model: missing" in capsys.readouterr().err


def test_where_nothing_fits_no_row_is_blamed_that_nobody_asked_for(
    directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The row that needs the least is named as what it is; steps of several micro-batches are told apart."""
    words = ["--machine", "laptop", "--gpu", "1MiB", "--ram", "1MiB", "gradient_accumulation_steps=3"]
    assert main(["plan", str(directory), *words]) == 0
    told = capsys.readouterr().out
    assert "nothing fits; the least GPU memory is that of method=" in told and "does not fit" not in told
    assert "step: 3 micro-batches, each 4 samples of 1,024 tokens" in told


def test_words_are_flush_left_and_numbers_flush_right(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every cell begins, or ends, where its head does."""
    assert main(["plan", str(directory), "--machine", "laptop", "--gpu", "3MiB"]) == 0
    lines = capsys.readouterr().out.splitlines()
    head = next(i for i, line in enumerate(lines) if line.split()[:2] == ["method", "placement"])
    table = [line.ljust(200) for line in lines[head : lines.index(next(x for x in lines[head:] if "hours: " in x))]]
    for name in ("method", "placement", "wire", "GPU GiB", "host GiB", "disk GiB", "s/step", "tok/s", "hours", "fits"):
        begin = table[0].index(name)
        end = begin + len(name)
        words = name in ("method", "placement", "wire", "fits")
        assert all(line[begin - 1 : begin].isspace() != line[begin].isspace() for line in table) or not words, name
        assert all(line[end] == " " and line[end - 1] != " " for line in table) or words, name
