"""A run that is stopped and resumed is the run that was not, bit for bit."""

import json
import os
import shutil
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from keyhole.checkpoint import journal, select
from keyhole.checkpoint.state import dump
from keyhole.errors import UserError
from keyhole.training import build, evaluation
from keyhole.training.start import train
from tests.matrix import in_every_run
from tests.training.runs import VARIANTS, Make, losses, metrics, same, weights

# Each differs from a variant that every run has in one setting, and shares the code that saves and resumes
ALIKE = ("adamw-bf16", "adamw-packed", "zo-streamed-bf16", "zo-streamed-fp8", "zo-wire-fp32")
ALIKE += ("zo-low-rank-int4", "zo-low-rank-kept")  # test_zo_runs.py resumes kept factors
ALIKE += ("zo",)  # test_data_of_runs.py stops a resident run; two directions: checkpoint/test_replay.py


@in_every_run(lambda variant: variant not in ALIKE)
@pytest.mark.parametrize("variant", VARIANTS)
def test_n_plus_m_equals_n_stop_resume_m(
    make: Make, tiny_data: Path, tmp_path: Path, variant: str, stopped_is_whole: Callable
) -> None:
    """A run that is interrupted and resumed has the weights and metrics of one that was not, bit for bit."""
    few = tmp_path / "few.jsonl"
    few.write_text("".join(tiny_data.read_text().splitlines(keepends=True)[:4]))
    settings = VARIANTS[variant] | {"eval_data": str(few), "eval_steps": 2}
    settings |= {"batch_size": 2, "gradient_accumulation_steps": 2, "max_steps": 4}
    through, stopped = make("through", **settings), make("stopped", **settings)
    stopped_is_whole(through, stopped, 3)
    assert len(losses(through)) == 4


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_same_on_a_gpu(make: Make, tiny_data: Path, variant: str, stopped_is_whole: Callable) -> None:
    """On a GPU, where losses are read a step late, a resumed run is exact too."""
    settings = VARIANTS[variant] | {"device": "cuda", "eval_data": str(tiny_data), "eval_steps": 2}
    stopped_is_whole(make("through", **settings), make("stopped", **settings), 3)


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


@pytest.mark.parametrize("method", ["zo", "adamw"])
def test_two_histories_are_not_spliced(make: Make, method: str) -> None:
    """A checkpoint of one run is not gone on from in the directory of another: not by its path, and not as a copy in
    it."""
    settings = {"method": method, "save_steps": 2, "max_steps": 4}
    one, other = make("one", **settings), make("other", **settings, seed=1)
    train(one)
    train(other)
    longer, root = replace(one, max_steps=6), Path(one.output_dir)
    foreign = Path(other.output_dir) / "checkpoint-4"
    before = {path: path.stat().st_mtime_ns for path in root.rglob("*") if path.name != "lock"}
    with pytest.raises(UserError, match=r"--resume: .*one holds a run of its own \(checkpoint-4\), and .* of another"):
        train(replace(longer, seed=1), resume=str(foreign))
    copy = shutil.copytree(foreign, root / "checkpoint-5")
    state = json.loads((copy / "keyhole_state.json").read_text())
    del state["crc32"]
    (copy / "keyhole_state.json").write_text(dump(state | {"step": 5}))
    with pytest.raises(UserError, match="are of different runs"):
        train(replace(longer, seed=1), resume="")
    shutil.rmtree(copy)
    assert before == {path: path.stat().st_mtime_ns for path in root.rglob("*") if path.name != "lock"}
    assert train(longer, resume="") == 0


def test_a_copy_of_an_own_checkpoint_can_be_gone_on_from(make: Make, tmp_path: Path) -> None:
    """A backup of this very run, kept elsewhere, is no other history; but it must not be older than what is here."""
    config = make(method="zo", save_steps=2, max_steps=4, save_total_limit=None)
    train(config)
    longer, root = replace(config, max_steps=6), Path(config.output_dir)
    for step in (2, 4):
        shutil.copytree(root / f"checkpoint-{step}", tmp_path / "backup" / f"checkpoint-{step}")
    with pytest.raises(UserError, match="holds checkpoint-4 too, which is later"):
        train(longer, resume=str(tmp_path / "backup" / "checkpoint-2"))
    assert train(longer, resume=str(tmp_path / "backup" / "checkpoint-4")) == 0
    assert journal.read(root / "run" / "journal").last == 6


def test_a_slower_start_does_not_overwrite_a_finished_run(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two runs are started into one new directory; one ends before the other has loaded its model."""
    config, real, other = make(max_steps=3), build.load_model, []

    def slow(*about: Any) -> Any:
        if not other:
            other.append(1)
            assert train(config) == 0
            other.append(weights(config.output_dir))
        return real(*about)

    monkeypatch.setattr(build, "load_model", slow)
    for resume in (None, ""):
        other.clear()
        shutil.rmtree(config.output_dir, ignore_errors=True)
        with pytest.raises(UserError, match=r"holds a run already \(checkpoint-3\)"):
            train(replace(config, seed=9), resume=resume)
        assert same(weights(config.output_dir), other[1])


@pytest.mark.parametrize("at", [2, 6])
def test_an_evaluation_that_a_signal_ended_is_done_on_resume(
    make: Make, tiny_data: Path, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    """In the middle of a run and after its last step: the metrics are those of a run that was not stopped."""
    settings = {"eval_data": str(tiny_data), "eval_steps": 2}
    through, stopped = make("through", **settings), make("stopped", **settings)
    train(through)
    real, calls = evaluation.evaluate, []

    def interrupted(model: Any, batches: Any, stop: Callable[[], bool]) -> Any:
        calls.append(1)
        if len(calls) == at // 2:
            signal.raise_signal(signal.SIGINT)
        return real(model, batches, stop)

    with monkeypatch.context() as patch:
        patch.setattr(evaluation, "evaluate", interrupted)
        assert train(stopped) == 130
    assert (Path(stopped.output_dir) / f"checkpoint-{at}").is_dir()
    assert train(stopped, resume="") == 0
    assert metrics(through) == metrics(stopped) and same(weights(through.output_dir), weights(stopped.output_dir))


@in_every_run(lambda method: method != "adamw")
@pytest.mark.parametrize("method", ["zo", "adamw", "lora"])
def test_moved_model_and_data_are_known_by_their_content(make: Make, tmp_path: Path, method: str, capsys: Any) -> None:
    """The directories have other names now: the run goes on, to the bit; other content is refused."""
    model = shutil.copytree(make().model, tmp_path / "model")
    data = shutil.copy(make().train_data, tmp_path / "d.jsonl")
    settings = {"method": method, "lr_scheduler_type": "constant", "warmup_ratio": 0.0}
    whole, config = make("whole", **settings), make(model=str(model), train_data=str(data), max_steps=3, **settings)
    train(whole)
    train(config)
    (tmp_path / "new").mkdir()
    moved = replace(config, model=str(model.rename(tmp_path / "new" / "model")), max_steps=6)
    moved = replace(moved, train_data=str(Path(data).rename(tmp_path / "new" / "e.jsonl")))
    assert train(moved, resume="") == 0
    said = capsys.readouterr().out
    assert said.count("of the same content") == 2 and "max_steps: 3 -> 6, from step 4 on" in said
    assert same(weights(whole.output_dir), weights(config.output_dir))
    other = shutil.copytree(moved.model, tmp_path / "other")
    content = (other / "model.safetensors").read_bytes()
    (other / "model.safetensors").write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    for place in (other, tmp_path / "lost"):
        with pytest.raises(UserError, match=f"(model: the run has .*now says |model=|model: ){place}"):
            train(replace(moved, model=str(place), max_steps=7), resume="")
    Path(moved.train_data).write_text('{"prompt": "a", "completion": "b"}\n')
    with pytest.raises(UserError, match="the training data are not those of the checkpoint"):
        train(replace(moved, max_steps=7), resume="")


def test_resuming_a_finished_run_changes_nothing(
    make: Make, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """There is nothing left to do: exit code 0, the same weights, the same metrics. The model gets the
    tokenizer of the data."""
    config, given, load_model = make(), [], build.load_model

    def load(config: Any, choice: Any, data: Any, *how: Any) -> Any:
        model = load_model(config, choice, data, *how)
        given.append(data.tokenizer is model.tokenizer or data.tokenizer)
        return model

    monkeypatch.setattr(build, "load_model", load)
    train(config)
    before, entries = weights(config.output_dir), metrics(config)
    for again in (config, replace(config, max_steps=config.max_steps - 2)):  # fewer steps than were made
        assert train(again, resume="") == 0 and "None" not in capsys.readouterr().out
        assert same(before, weights(config.output_dir)) and metrics(config) == entries
    assert given == [True, True, True]


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


def test_files_of_the_user_in_checkpoints_stay(make: Make, capsys: pytest.CaptureFixture) -> None:
    """In checkpoints that become too old, beside them, and in a directory of the name of the next checkpoint; each is
    said once. Runs go on past what is left, to the same weights; nothing of it is published."""
    config, whole = make(save_steps=2, max_steps=4), make("whole", save_steps=2, max_steps=4)
    for run in (config, whole):
        train(run)
    root = Path(config.output_dir)
    mine = ["checkpoint-2/gguf/q4.gguf", "checkpoint-4/eval.json", "checkpoint-50/trainer_state.json", "gguf/q8.gguf"]
    for name in [*mine, "checkpoint-6/notes.txt", "checkpoint-4/gguf/q4.gguf"]:
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_text("mine")
    capsys.readouterr()
    for steps in (6, 8):
        assert train(replace(config, max_steps=steps), resume="") == 0
    said = capsys.readouterr().out
    for steps in (6, 8):
        train(replace(whole, max_steps=steps), resume="")
    assert same(weights(root), weights(whole.output_dir))
    assert all((root / name).read_text() == "mine" for name in [*mine, "checkpoint-6.kept/notes.txt"])
    assert said.count("checkpoint-2 is deleted, except for files in it that keyhole did not write (gguf/q4.gguf)") == 1
    assert said.count("checkpoint-4 is deleted, except for") == said.count("it is called checkpoint-6.kept now") == 1
    assert said.count("checkpoint-50 has no keyhole_state.json") == 2 and "damaged" not in said
    assert [path.name for path in (root / "checkpoint-2").iterdir()] == ["gguf"]
    assert [path.name for path in (root / "gguf").iterdir()] == ["q8.gguf"]
    assert [path.name for path in select.checkpoints(root)] == ["checkpoint-6", "checkpoint-8"]


def test_files_of_a_run_that_are_damaged_are_said(make: Make, capsys: pytest.CaptureFixture) -> None:
    """Metrics cut in the middle, with a changed bit, or gone; a journal that is gone, or shorter than the checkpoint:
    the run goes on to the same weights, and says what is lost. A whole one says nothing."""
    constant = {"method": "zo", "max_steps": 3, "lr_scheduler_type": "constant", "warmup_ratio": 0.0}
    config, whole = make("run", **constant), make("whole", **constant | {"max_steps": 4})
    train(whole)
    train(config)
    root, longer = Path(config.output_dir), make("resumed", **constant | {"max_steps": 4})
    journal_bytes, lines = (root / "run" / "journal").stat().st_size, (root / "run" / "metrics.jsonl").read_text()
    record = journal.read(root / "run" / "journal").header.record.size + journal.CRC.size
    harms: dict[str, Callable[[Path], Any]] = {
        "": lambda run: None,
        "2 of the steps up to 3 have no line": lambda run: (run / "metrics.jsonl").write_text(lines[: len(lines) // 2]),
        "3 of the steps up to 3 have no line": lambda run: (run / "metrics.jsonl").unlink(),
        "1 of its lines cannot be read": lambda run: (run / "metrics.jsonl").write_text("}" + lines),
        "journal is missing; a new one begins after step 3": lambda run: (run / "journal").unlink(),
        "journal ends with step 2, and gets another": lambda run: os.truncate(run / "journal", journal_bytes - record),
    }
    for says, harm in harms.items():
        shutil.rmtree(longer.output_dir, ignore_errors=True)
        harm(Path(shutil.copytree(root, longer.output_dir), "run"))
        capsys.readouterr()
        assert train(longer, resume="") == 0
        said = capsys.readouterr().out
        assert says in said and ("is damaged" in said or "journal" in said) == bool(says), said
        assert same(weights(whole.output_dir), weights(longer.output_dir))


@pytest.mark.parametrize("harm", ["cut", "gone"])
def test_a_lost_marker_names_the_checkpoint_to_go_on_from(make: Make, harm: str) -> None:
    """run/keyhole.json is gone or torn: nothing is touched, and the way on is in the message."""
    config = make(max_steps=2, save_steps=1)
    train(config)
    root = Path(config.output_dir)
    marker = root / "run" / "keyhole.json"
    marker.unlink() if harm == "gone" else os.truncate(marker, 9)
    with pytest.raises(UserError, match=f"keyhole.json .*--resume {root}/checkpoint-2"):
        train(config, resume="")
    assert train(make("new", max_steps=3), resume=str(root / "checkpoint-2")) == 0


def test_a_finished_model_without_checkpoints_is_not_begun_anew(make: Make) -> None:
    """Its checkpoints were deleted for room: --resume would start at step 0, and write over the model. The journal of
    zo leads on; without it there is nothing to go on from."""
    for method in ("lomo", "zo"):
        config = make(f"finished-{method}", method=method, max_steps=3)
        train(config)
        root = Path(config.output_dir)
        for path in root.glob("checkpoint-*"):
            shutil.rmtree(path)
        before = (root / "model.safetensors").read_bytes()
        if method == "zo":
            train(replace(config, max_steps=4), resume="")
            assert (root / "model.safetensors").read_bytes() != before
            continue
        with pytest.raises(UserError, match="holds a finished model, and no checkpoint"):
            train(replace(config, max_steps=4), resume="")
        assert (root / "model.safetensors").read_bytes() == before
