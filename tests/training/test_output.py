"""What a run leaves on disk, and what it refuses before it has touched anything."""

import errno
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import keyhole
from keyhole.checkpoint import writer
from keyhole.checkpoint.journal import Writer
from keyhole.config import load_config
from keyhole.loading import prepare
from keyhole.training.start import train
from tests.training.runs import Make, metrics, same, weights


def test_output_directory(make: Make, tiny_data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything is where the documentation says, and transformers loads the model, equal in all weights. The tokenizer
    is that of the data, not read a second time."""
    config = make(save_steps=2, eval_data=str(tiny_data), report_to="tensorboard")
    with monkeypatch.context() as within:
        within.setattr(prepare, "read_tokenizer", lambda *args: pytest.fail("it was read for the data"))
        assert train(config) == 0
    root = Path(config.output_dir)
    assert sorted(path.name for path in root.glob("checkpoint-*")) == ["checkpoint-4", "checkpoint-6"]
    for name in ("config.yaml", "env.json", "metrics.jsonl", "report.html", "report.json", "tensorboard"):
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


def test_metrics_are_json_lines(make: Make) -> None:
    config = make(max_steps=2)
    train(config)
    lines = (Path(config.output_dir) / "run" / "metrics.jsonl").read_text().splitlines()
    expected = {"step", "loss", "learning_rate", "epoch", "tokens", "seconds", "tokens_per_second", "host_gib"}
    assert [set(json.loads(line)) for line in lines] == [expected | {"grad_norm"}] * 2


def test_a_save_that_is_waited_for_flushes_the_journal_first(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where records are flushed rarely: a checkpoint has its name when its step and all before it are on the
    disk."""
    events, sync, rename = [], Writer.sync, writer.put_in_place
    monkeypatch.setattr(Writer, "sync", lambda self: (sync(self), events.append(("flushed", self.synced))))
    monkeypatch.setattr(writer, "put_in_place", lambda new, path: (events.append(path.name), rename(new, path))[1])
    train(make(method="zo", max_steps=3, save_steps=2, background_save=False, journal_sync=1000))
    assert events[:4] == [("flushed", 2), "checkpoint-2", ("flushed", 3), "checkpoint-3"]


def test_a_journal_that_cannot_be_flushed_holds_up_checkpoints_and_not_the_end(
    make: Make, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """During training the save is tried again later; the last one is worth more than the journal."""

    def broken(self: Writer) -> None:
        self.fault = OSError(errno.EIO, "the disk is broken")
        raise self.fault

    monkeypatch.setattr(Writer, "sync", broken)
    config = make(method="zo", max_steps=4, save_steps=2, background_save=False)
    assert train(config) == 0
    out = capsys.readouterr().out
    assert "warning: the journal cannot be flushed to the disk" in out and "checkpoint-2 NOT saved" in out
    assert "the journal is not on the disk up to step 4" in out and "is on the disk up to step 0 only" in out
    assert [path.name for path in Path(config.output_dir).glob("checkpoint-*")] == ["checkpoint-4"]


def test_an_output_dir_that_is_a_mount_point(make: Make, small_disk: Callable[[int], Path]) -> None:
    """The model is put into place without a rename from another file system; nothing temporary is left."""
    config = make(output_dir=str(small_disk(80)), max_steps=3, save_steps=2)
    assert train(config) == 0 and train(replace(config, max_steps=4), resume="") == 0
    assert (Path(config.output_dir) / "model.safetensors").samefile(
        f"{config.output_dir}/checkpoint-4/model.safetensors"
    )
    assert not [path.name for path in Path(config.output_dir).iterdir() if path.name.startswith(".")]
