"""The training loop: exact resume, interrupts, and what a run leaves on disk."""

import json
import math
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import keyhole
from keyhole import trainer
from keyhole.config import AdamWConfig, LSPConfig, SGDConfig, TrainConfig, ZOConfig, load_config, resolve
from keyhole.errors import UserError
from keyhole.methods import METHODS
from keyhole.trainer import train
from keyhole.training import saving
from keyhole.training.guard import NonFinite
from keyhole.training.metrics import read_metrics

Make = Callable[..., TrainConfig]
TIMED = {"seconds", "tokens_per_second", "host_gib", "gpu_gib", "host_wait_s"}
PADDED = {"changed"}  # zo's count includes the padding between tensors, which no checkpoint holds
VARIANTS = {
    "adamw": {"method": "adamw", "learning_rate": 1e-3, "max_grad_norm": 1.0, "weight_decay": 0.1, "save_steps": 2},
    "adamw-bf16": {"method": "adamw", "learning_rate": 1e-3, "dtype": "bfloat16"},
    "adamw-packed": {"method": "adamw", "learning_rate": 1e-3, "packing": True, "max_length": 48},
    "sgd": {"method": "sgd", "learning_rate": 1e-2, "sgd": SGDConfig(momentum=0.9)},
    "zo": {"method": "zo", "learning_rate": 1e-3, "zo": ZOConfig(directions=2)},
    "zo-streamed-bf16": {"method": "zo", "learning_rate": 1e-3, "placement": "stream", "dtype": "bfloat16"},
    "zo-streamed-fp8": {
        "method": "zo",
        "learning_rate": 1e-3,
        "placement": "stream",
        "dtype": "bfloat16",
        "wire": "fp8",
    },
    "zo-wire-fp32": {
        "method": "zo",
        "learning_rate": 1e-3,
        "placement": "stream",
        "dtype": "bfloat16",
        "wire": "fp32",
    },
    "lomo-streamed-bf16": {"method": "lomo", "learning_rate": 1e-2, "placement": "stream", "dtype": "bfloat16"},
    "adalomo-streamed": {"method": "adalomo", "learning_rate": 1e-3, "placement": "stream"},
    "galore": {"method": "galore", "learning_rate": 1e-3},
    "lsp-streamed-bf16": {
        "method": "lsp",
        "learning_rate": 1e-3,
        "placement": "stream",
        "dtype": "bfloat16",
        "lsp": LSPConfig(d=16, r=4, check_freq=2, alpha=0.05, optimizer_on="cpu"),
    },
    "adam-offload-streamed": {"method": "adam-offload", "learning_rate": 1e-3, "placement": "stream", "save_steps": 2},
}


@pytest.fixture
def make(tiny_model: Path, tiny_data: Path, tmp_path: Path) -> Make:
    """Builds the config of a short run in tmp_path/<name>; keywords change it."""

    def build(name: str = "out", **changes: Any) -> TrainConfig:
        base = {"model": str(tiny_model), "train_data": str(tiny_data), "output_dir": str(tmp_path / name)}
        base |= {"method": "adamw", "learning_rate": 1e-3, "max_steps": 6, "batch_size": 4, "device": "cpu"}
        return resolve(TrainConfig(**base | {"lr_scheduler_type": "cosine", "warmup_ratio": 0.2} | changes))[0]

    return build


@pytest.fixture
def stop_after(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Raises a signal inside the given step of the next run."""

    def arrange(step: int, number: int = signal.SIGINT) -> None:
        real, calls = trainer.Run.step, []

        def once(self: trainer.Run, current: int) -> None:
            if current == step and not calls:
                calls.append(current)
                signal.raise_signal(number)
            real(self, current)

        monkeypatch.setattr(trainer.Run, "step", once)

    return arrange


def weights(path: Path | str) -> dict[str, torch.Tensor]:
    """A copy: the library maps files, and some tests damage them afterwards."""
    return {name: tensor.clone() for name, tensor in load_file(Path(path) / "model.safetensors").items()}


def metrics(config: TrainConfig, ignore: set[str] = TIMED | PADDED) -> list[dict[str, Any]]:
    entries = read_metrics(Path(config.output_dir) / "run" / "metrics.jsonl")
    return [{name: value for name, value in entry.items() if name not in ignore} for entry in entries]


def losses(config: TrainConfig) -> list[float]:
    return [entry["loss"] for entry in metrics(config) if "loss" in entry]


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


# -- exact resume ----------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", VARIANTS)
def test_n_plus_m_equals_n_stop_resume_m(make: Make, tiny_data: Path, variant: str, stop_after: Callable) -> None:
    """A run that is interrupted and resumed has the weights and metrics of one that was not, bit for bit."""
    settings = VARIANTS[variant] | {"eval_data": str(tiny_data), "eval_steps": 2}
    settings |= {"batch_size": 2, "gradient_accumulation_steps": 2}
    through, stopped = make("through", **settings), make("stopped", **settings)
    assert train(through) == 0
    stop_after(3)
    assert train(stopped) == 130
    assert (Path(stopped.output_dir) / "checkpoint-3").is_dir()
    assert not (Path(stopped.output_dir) / "model.safetensors").exists()
    assert train(stopped, resume="") == 0
    assert same(weights(through.output_dir), weights(stopped.output_dir))
    assert metrics(through) == metrics(stopped)
    assert len(losses(through)) == 6


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_same_on_a_gpu(make: Make, tiny_data: Path, variant: str, stop_after: Callable) -> None:
    """On a GPU, where losses are read a step late, a resumed run is exact too."""
    settings = VARIANTS[variant] | {"device": "cuda", "eval_data": str(tiny_data), "eval_steps": 2}
    through, stopped = make("through", **settings), make("stopped", **settings)
    assert train(through) == 0
    stop_after(3)
    assert train(stopped) == 130
    assert train(stopped, resume="") == 0
    assert same(weights(through.output_dir), weights(stopped.output_dir))
    assert metrics(through) == metrics(stopped)


def test_saves_and_evaluations_do_not_bend_the_curve(make: Make, tiny_data: Path) -> None:
    """Looking at a zeroth-order run (which applies its deferred update early) changes nothing."""
    plain = make("plain", method="zo")
    busy = make("busy", method="zo", save_steps=1, eval_steps=1, eval_data=str(tiny_data))
    assert train(plain) == train(busy) == 0
    assert same(weights(plain.output_dir), weights(busy.output_dir))
    assert metrics(plain) == [entry for entry in metrics(busy) if "loss" in entry]


def test_resume_from_a_path_into_another_directory(make: Make) -> None:
    """A checkpoint of one run can be gone on from elsewhere; the old run stays as it is."""
    first, second = make("first", save_steps=2), make("second", save_steps=2)
    train(first)
    before = sorted(str(path) for path in Path(first.output_dir).rglob("*"))
    assert train(second, resume=str(Path(first.output_dir) / "checkpoint-4")) == 0
    assert same(weights(first.output_dir), weights(second.output_dir))
    assert [entry["step"] for entry in metrics(second)] == [5, 6]
    assert before == sorted(str(path) for path in Path(first.output_dir).rglob("*"))


def test_a_finished_run_can_be_made_longer(make: Make, capsys: pytest.CaptureFixture) -> None:
    """With a constant rate, 4 steps and then 6 are the same as 6; the change is said."""
    whole = make("whole", lr_scheduler_type="constant", warmup_ratio=0.0)
    grown = make("grown", lr_scheduler_type="constant", warmup_ratio=0.0, max_steps=4)
    train(whole)
    train(grown)
    assert train(replace(grown, max_steps=6), resume="last") == 0
    assert "max_steps: 4 -> 6, from step 5 on" in capsys.readouterr().out
    assert same(weights(whole.output_dir), weights(grown.output_dir))


def test_resuming_a_finished_run_changes_nothing(make: Make) -> None:
    """There is nothing left to do: exit code 0, the same weights, the same metrics."""
    config = make()
    train(config)
    before, entries = weights(config.output_dir), metrics(config)
    assert train(config, resume="") == 0
    assert same(before, weights(config.output_dir)) and metrics(config) == entries


def test_resume_without_a_checkpoint_starts(make: Make, capsys: pytest.CaptureFixture) -> None:
    """A job that always passes --resume also starts the first time."""
    config = make(max_steps=2)
    assert train(config, resume="") == 0
    assert "no checkpoint" in capsys.readouterr().out
    assert len(losses(config)) == 2


@pytest.mark.parametrize("harm", ["truncated weights", "missing config", "bad state"])
def test_a_damaged_checkpoint_is_named_and_passed_over(make: Make, harm: str, capsys: pytest.CaptureFixture) -> None:
    """The run goes on from the one before, and ends where the undamaged run ended."""
    config = make(save_steps=2)
    train(config)
    before, last = weights(config.output_dir), Path(config.output_dir) / "checkpoint-6"
    if harm == "truncated weights":
        os.truncate(last / "model.safetensors", 1000)
    elif harm == "missing config":
        (last / "config.json").unlink()
    else:
        (last / "keyhole_state.json").write_text('{"step": 6')
    assert train(config, resume="") == 0
    assert "checkpoint-6 is damaged and passed over" in capsys.readouterr().out
    assert same(before, weights(config.output_dir)) and same(before, weights(last))
    assert len(losses(config)) == 6


def test_settings_that_may_not_change(make: Make) -> None:
    """What a run is cannot change on the way; the run stays as it was."""
    config = make(max_steps=2)
    train(config)
    before = sorted(Path(config.output_dir).rglob("*"))
    with pytest.raises(UserError, match="  batch_size: the run has 4, the config now says 2\n  seed: the run"):
        train(replace(config, seed=5, batch_size=2), resume="")
    with pytest.raises(UserError, match="adamw.beta1"):
        train(replace(config, adamw=AdamWConfig(beta1=0.5)), resume="")
    assert before == sorted(Path(config.output_dir).rglob("*"))


# -- interrupts ------------------------------------------------------------------------------------

CHILD = """
import sys
from keyhole.config import load_config
from keyhole.trainer import train
{arrange}
sys.exit(train(load_config(sys.argv[1])[0]))
"""


def start_child(config: TrainConfig, tmp_path: Path, arrange: str = "") -> subprocess.Popen:
    from keyhole.config import to_yaml

    (tmp_path / "config.yaml").write_text(to_yaml(config))
    command = [sys.executable, "-c", CHILD.format(arrange=arrange), str(tmp_path / "config.yaml")]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env)


def test_sigterm_from_outside(make: Make, tmp_path: Path) -> None:
    """A real process finishes its step, saves, and exits with 130; what it saved can be gone on from."""
    config = make(max_steps=100_000, logging_steps=1000)
    child = start_child(config, tmp_path)
    try:
        while " 1/100000 " not in child.stdout.readline():
            assert child.poll() is None
        child.send_signal(signal.SIGTERM)
        out, _ = child.communicate(timeout=60)
    finally:
        child.kill()
    assert child.returncode == 130, out
    done = len(losses(config))
    assert f"stopped by SIGTERM after step {done}" in out and done < 100_000
    assert train(replace(config, max_steps=done + 1), resume="") == 0
    assert len(losses(config)) == done + 1


def test_a_second_signal_during_the_save_harms_nothing(make: Make, tmp_path: Path) -> None:
    """The process dies at once; the checkpoint before is whole, and the half-written one is swept away."""
    arrange = """
import os, signal, time
from keyhole.checkpoint import background
real = background.write_state
def write(path, about, scalars):
    real(path, about, scalars)
    if about.step == 4:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGINT)
background.write_state = write
"""
    config = make(save_steps=2)
    child = start_child(config, tmp_path, arrange)
    out, _ = child.communicate(timeout=120)
    assert child.returncode == -signal.SIGINT, out
    root = Path(config.output_dir)
    assert list(root.glob(".checkpoint-4.saving-*")) and not (root / "checkpoint-4").exists()
    assert train(config, resume="") == 0
    whole = make("whole")
    train(whole)
    assert same(weights(whole.output_dir), weights(root)) and not list(root.glob(".*"))


# -- what a run leaves, and what it refuses --------------------------------------------------------


def test_output_directory(make: Make, tiny_data: Path) -> None:
    """Everything is where the documentation says, and transformers loads the model, equal in all weights."""
    config = make(save_steps=2, eval_data=str(tiny_data), report_to="tensorboard")
    assert train(config) == 0
    root = Path(config.output_dir)
    assert sorted(path.name for path in root.glob("checkpoint-*")) == ["checkpoint-4", "checkpoint-6"]
    for name in ("config.yaml", "env.json", "metrics.jsonl", "loss.png", "keyhole.json", "tensorboard"):
        assert (root / "run" / name).exists(), name
    assert load_config(root / "run" / "config.yaml")[0] == config
    theirs = AutoModelForCausalLM.from_pretrained(root)
    ours = keyhole.load(root, device="cpu")
    assert all(torch.equal(t, dict(theirs.named_parameters())[n]) for n, t in ours.named_tensors())
    assert same(weights(root), weights(root / "checkpoint-6"))
    tokenizer = AutoTokenizer.from_pretrained(root)
    ends = theirs.generation_config.eos_token_id
    assert tokenizer.eos_token_id in (ends if isinstance(ends, list) else [ends])
    last = metrics(config)[-1]
    assert last["step"] == 6 and last["perplexity"] == pytest.approx(math.exp(last["eval_loss"]))


@pytest.mark.parametrize("method", METHODS)
def test_training_learns(make: Make, method: str) -> None:
    """Every method lowers the loss on a set it sees again and again."""
    rates = {"sgd": 0.1, "zo": 2e-3}
    steps = 60 if method == "zo" else 20
    config = make(method=method, learning_rate=rates.get(method, 3e-3), max_steps=steps, batch_size=8)
    assert train(config) == 0
    curve = losses(config)
    assert sum(curve[-5:]) < 0.95 * sum(curve[:5])


@pytest.mark.parametrize("method", ["adamw", "zo"])
def test_accumulation_equals_one_large_batch(make: Make, method: str) -> None:
    """Two micro-batches of 2 are one batch of 4: the loss is weighted by trained tokens, not by batches."""
    whole, split = (
        make("whole", method=method),
        make("split", method=method, batch_size=2, gradient_accumulation_steps=2),
    )
    train(whole)
    train(split)
    assert losses(whole) == pytest.approx(losses(split), rel=1e-4)
    assert [e["tokens"] for e in metrics(whole)] == [e["tokens"] for e in metrics(split)]


def test_epochs_become_steps(make: Make) -> None:
    """24 samples in batches of 4 are 6 steps an epoch; half an epoch more is 3."""
    config = make(max_steps=None, num_train_epochs=1.5)
    train(config)
    assert [entry["epoch"] for entry in metrics(config)][-1] == 1.5
    assert len(losses(config)) == 9


def test_dry_run_writes_nothing(make: Make, capsys: pytest.CaptureFixture, tmp_path: Path) -> None:
    """It prints what would run, reads no weights, and leaves no file."""
    bare = tmp_path / "bare"
    config = make()
    shutil.copytree(config.model, bare, ignore=shutil.ignore_patterns("*.safetensors"))
    config = replace(config, model=str(bare))
    assert train(config, dry_run=True) == 0
    out = capsys.readouterr().out
    assert "LlamaForCausalLM, 35,296 parameters" in out and "steps: 6" in out
    assert not Path(config.output_dir).exists()


def test_bad_directories_are_refused_before_anything(make: Make, tmp_path: Path) -> None:
    """Somebody else's directory and our own finished run: one message each, nothing touched."""
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "notes.txt").write_text("x")
    with pytest.raises(UserError, match=r"notes\.txt"):
        train(make("theirs"))
    config = make(max_steps=1)
    train(config)
    before = {path: path.stat().st_mtime_ns for path in Path(config.output_dir).rglob("*")}
    with pytest.raises(UserError, match="--resume"):
        train(config)
    assert before == {path: path.stat().st_mtime_ns for path in Path(config.output_dir).rglob("*")}


def test_bad_input_leaves_no_directory(make: Make, tmp_path: Path) -> None:
    """A model without weights, or CUDA where there is none, is found before the output directory is made."""
    bare = tmp_path / "bare"
    shutil.copytree(make().model, bare, ignore=shutil.ignore_patterns("*.safetensors"))
    with pytest.raises(UserError, match="no weights"):
        train(make(model=str(bare)))
    if not torch.cuda.is_available():
        with pytest.raises(UserError, match="cuda"):
            train(make(device="cuda"))
    assert not Path(make().output_dir).exists()


def test_non_finite_loss_stops_the_run(make: Make) -> None:
    """A rate that blows the weights up: the step, the samples and the last good checkpoint are named."""
    config = make(method="sgd", learning_rate=1e12, save_steps=1, lr_scheduler_type="constant", warmup_ratio=0.0)
    with pytest.raises(NonFinite) as error:
        train(config)
    root, message = Path(config.output_dir), str(error.value)
    step = metrics(config)[-1]["step"]
    assert f"step {step}: the loss is nan" in message and f"last good checkpoint is {root}" in message
    assert f"checkpoint-{step - 1}" in message
    assert metrics(config)[-1]["loss"] is None
    assert all(tensor.isfinite().all() for tensor in weights(root / f"checkpoint-{step - 1}").values())
    assert not (root / "model.safetensors").exists() and (root / "run" / "loss.png").exists()


def test_broken_weights_are_not_saved(make: Make, tmp_path: Path) -> None:
    """A NaN that no batch has met yet is found before it is written."""
    broken = tmp_path / "broken"
    model = AutoModelForCausalLM.from_pretrained(make().model)
    with torch.no_grad():
        model.model.embed_tokens.weight[2, 0] = float("nan")  # a byte that no row has
    model.save_pretrained(broken)
    AutoTokenizer.from_pretrained(make().model).save_pretrained(broken)
    with pytest.raises(NonFinite, match="embed_tokens.weight holds NaN or infinity"):
        train(make(model=str(broken), save_steps=2))
    assert not list(Path(make().output_dir).glob("checkpoint-*"))


def test_steps_lost_to_rounding_are_pointed_out(make: Make, capsys: pytest.CaptureFixture) -> None:
    """bfloat16 norms near 1 do not move at a small rate; the user is told which tensors stand still."""
    train(make(dtype="bfloat16", learning_rate=1e-5, max_steps=4))
    out = capsys.readouterr().out
    assert "trained tensors did not change in 3 steps" in out and "layernorm.weight" in out


# -- a full disk -----------------------------------------------------------------------------------


def test_a_disk_without_room_is_refused_at_the_start(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the first step, with both numbers."""
    monkeypatch.setattr(saving, "free_bytes", lambda path: 2**20)
    with pytest.raises(UserError, match=r"output_dir: saving the model takes 0\.06 GiB, and .* has 0\.00 GiB free"):
        train(make())
    assert not Path(make().output_dir).exists()


def test_a_disk_that_fills_up_does_not_stop_training(
    make: Make, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """A save without room is skipped aloud and tried again; the old checkpoint stays; the end is saved."""
    config = make(save_steps=2, max_steps=20)
    monkeypatch.setattr(saving, "RETRY_STEPS", 3)
    real = saving.free_bytes

    def free(path: Path) -> int:
        return 0 if (Path(config.output_dir) / "checkpoint-2").exists() and len(losses(config)) < 7 else real(path)

    monkeypatch.setattr(saving, "free_bytes", free)
    assert train(config) == 0
    out = capsys.readouterr().out
    assert "checkpoint-4 NOT saved (output_dir: a checkpoint takes 0.06 GiB" in out
    assert "checkpoint-2 stays; trying again at step 7" in out and "saved" in out.partition("step  7/20")[2]
    assert (Path(config.output_dir) / "checkpoint-20").is_dir()


@pytest.mark.parametrize(("method", "background"), [("zo", True), ("adamw", True), ("adamw", False)])
def test_files_that_cannot_grow_do_not_stop_training(make: Make, tmp_path: Path, method: str, background: bool) -> None:
    """A real limit on file sizes during two saves: loud, the old checkpoint stays, a later save succeeds, same bits."""
    arrange = """
import resource
from keyhole import trainer
from keyhole.training import saving
saving.RETRY_STEPS = 3
real = trainer.Run.step
def step(self, number):
    if number in (4, 8):
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000 if number == 4 else -1, -1))
    real(self, number)
trainer.Run.step = step
"""
    settings = {"method": method, "save_steps": 2, "max_steps": 12, "background_save": background}
    config, whole = make(**settings), make("whole", **settings)
    child = start_child(config, tmp_path, arrange)
    out, _ = child.communicate(timeout=120)
    assert child.returncode == 0, out
    assert "warning: checkpoint-4 NOT saved" in out and "File too large" in out and "checkpoint-2 stays" in out
    assert sorted(path.name for path in Path(config.output_dir).glob("checkpoint-*")) == [
        "checkpoint-10",
        "checkpoint-12",
    ]
    assert not list(Path(config.output_dir).glob(".*"))
    train(whole)
    assert same(weights(whole.output_dir), weights(config.output_dir))


def test_a_journal_that_cannot_be_written_does_not_stop_training(make: Make, tmp_path: Path) -> None:
    """Records wait in memory until the file may grow again; none is missing at the end."""
    arrange = """
import resource
from keyhole import trainer
real = trainer.Run.step
def step(self, number):
    if number in (3, 6):
        size = self.job.directory.journal.stat().st_size + 10 if number == 3 else -1
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, -1))
    real(self, number)
trainer.Run.step = step
trainer.MetricsFile.write = lambda self, entry: None
"""
    from keyhole.checkpoint import journal

    config = make(method="zo", max_steps=8)
    child = start_child(config, tmp_path, arrange)
    out, _ = child.communicate(timeout=120)
    assert child.returncode == 0, out
    assert "warning: the journal cannot be written" in out and "whole again, up to step 6" in out
    found = journal.read(Path(config.output_dir) / "run" / "journal")
    assert found.last == 8 and found.fault is None


def test_two_processes_in_one_directory(make: Make, tmp_path: Path) -> None:
    """The second one is refused with the number of the first, which goes on."""
    config = make(max_steps=100_000, logging_steps=1000)
    child = start_child(config, tmp_path)
    try:
        while " 1/100000 " not in child.stdout.readline():
            assert child.poll() is None
        with pytest.raises(UserError, match=f"process {child.pid} is training into"):
            train(config, resume="")
        assert child.poll() is None
    finally:
        child.kill()
        child.communicate()


def test_room_is_made_by_deleting_the_oldest_first(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """With room for two checkpoints only, the oldest goes before the third is written, never the newest."""
    config = make(save_steps=2)
    root = Path(config.output_dir)
    monkeypatch.setattr(saving, "free_bytes", lambda path: 0 if len(list(root.glob("checkpoint-*"))) > 1 else 2**40)
    assert train(config) == 0
    assert sorted(path.name for path in root.glob("checkpoint-*")) == ["checkpoint-4", "checkpoint-6"]


def test_metrics_are_json_lines(make: Make) -> None:
    """Every step has one line with the documented names."""
    config = make(max_steps=2)
    train(config)
    lines = (Path(config.output_dir) / "run" / "metrics.jsonl").read_text().splitlines()
    expected = {
        "step",
        "loss",
        "learning_rate",
        "epoch",
        "tokens",
        "seconds",
        "tokens_per_second",
        "host_gib",
    }
    assert [set(json.loads(line)) for line in lines] == [expected | {"grad_norm"}] * 2
