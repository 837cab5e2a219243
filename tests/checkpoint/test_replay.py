"""From a journal back to the weights of a run."""

import errno
import shutil
from collections.abc import Callable
from dataclasses import replace as changed
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from keyhole.checkpoint import journal
from keyhole.checkpoint.replay import replay
from keyhole.config import TrainConfig, resolve
from keyhole.errors import NonFinite, UserError
from keyhole.methods.zo.traits import ZOConfig
from keyhole.model.weights import save
from keyhole.training.start import train
from tests.matrix import in_every_run
from tests.training.runs import same

VARIANTS = {
    "fp32": {},
    "streamed bf16, decay, two directions": {
        "placement": "stream", "dtype": "bfloat16", "weight_decay": 0.1, "zo": ZOConfig(directions=2),
    },
    "fp8 on the link": {"placement": "stream", "dtype": "bfloat16", "wire": "fp8"},
    "nearest, rademacher": {"dtype": "float16", "rounding": "nearest", "zo": ZOConfig(distribution="rademacher")},
    "low rank, within a period": {
        "placement": "stream", "dtype": "bfloat16", "zo": ZOConfig(rank=2, refresh=2, directions=2),
    },
    "low rank, at the end of one": {"dtype": "bfloat16", "zo": ZOConfig(rank=1, refresh=5)},
    "low rank, kept": {"zo": ZOConfig(rank=2, refresh=2, fold=False)},
    "clipped": {"zo": ZOConfig(clip=0.5)},
}  # fmt: skip

FROM_THE_BASE = ("fp32", "fp8 on the link", "low rank, within a period", "clipped")  # others: from a checkpoint
ALIKE = ("low rank, at the end of one", "nearest, rademacher")  # in `make test` only replayed by themselves


@pytest.fixture
def run(tiny_model: Path, tiny_data: Path, tmp_path: Path) -> Callable[..., TrainConfig]:
    def go(**changes: Any) -> TrainConfig:
        base = {"model": str(tiny_model), "train_data": str(tiny_data), "output_dir": str(tmp_path / "out")}
        base |= {"method": "zo", "learning_rate": 1e-2, "max_steps": 5, "batch_size": 2, "device": "cpu"}
        config = resolve(TrainConfig(**base | changes))[0]
        assert train(config) == 0
        return config

    return go


def weights(path: Path | str) -> dict[str, torch.Tensor]:
    return load_file(Path(path) / "model.safetensors")


@in_every_run(lambda variant: variant not in FROM_THE_BASE or variant == "fp32")
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_weights_of_the_run(run: Callable, tiny_model: Path, tmp_path: Path, variant: str) -> None:
    config = run(**VARIANTS[variant])
    said: list[str] = []
    done = replay(str(tiny_model), Path(config.output_dir), tmp_path / "again", device="cpu", say=said.append)
    assert done.steps == 5 and same(weights(config.output_dir), weights(tmp_path / "again"))
    assert not same(weights(tiny_model), weights(tmp_path / "again"))
    ours, theirs = ({f.name for f in Path(p).iterdir() if f.is_file()} for p in (tmp_path / "again", config.output_dir))
    assert ours == theirs and any("content" in line for line in said)
    for name in ("generation_config.json", "config.json"):
        assert (tmp_path / "again" / name).read_text() == (Path(config.output_dir) / name).read_text()


def test_any_step_of_the_run(run: Callable, tiny_model: Path, tmp_path: Path) -> None:
    config = run(save_steps=2, save_total_limit=None, dtype="bfloat16")
    path = Path(config.output_dir) / "run" / "journal"
    for placement in ("resident", "stream"):
        out = tmp_path / placement
        replay(str(tiny_model), path, out, steps=2, placement=placement, device="cpu", say=lambda line: None)
        assert same(weights(out), weights(Path(config.output_dir) / "checkpoint-2"))
    for steps in (6, 99):
        with pytest.raises(UserError, match=f"--steps: {steps} is not in the journal, which holds 1 to 5"):
            replay(str(tiny_model), path, tmp_path / "x", steps=steps, device="cpu")


def test_what_is_refused(run: Callable, tiny_model: Path, tmp_path: Path) -> None:
    config = run()
    root, out = Path(config.output_dir), tmp_path / "again"
    with pytest.raises(UserError, match="BASE: .* holds other weights .* than the run started from"):
        replay(str(root), root, out, device="cpu")
    with pytest.raises(UserError, match="exists and is not empty"):
        replay(str(tiny_model), root, root, device="cpu")
    with pytest.raises(UserError, match=r"JOURNAL: .* has no run/journal; give the output_dir of a run .* \(zo\)"):
        replay(str(tiny_model), tiny_model, out, device="cpu")
    with pytest.raises(UserError, match="is not there"):
        replay(str(tiny_model), tmp_path / "nowhere", out, device="cpu")
    with pytest.raises(UserError, match="OUT: .*journal is a file; choose a new directory"):
        replay(str(tiny_model), root, root / "run" / "journal", device="cpu")
    for place in (root / "run" / "journal" / "out", Path("/proc/out")):  # before the replay, not after it
        with pytest.raises(UserError, match="OUT: .*out cannot be written: /"):
            replay("nowhere", root, place, device="cpu")
    with pytest.raises(UserError, match="model: nowhere is not a directory here"):
        replay("nowhere", root, out, device="cpu")
    content = bytearray((root / "run" / "journal").read_bytes())
    content[-100] ^= 1
    (tmp_path / "bad").write_bytes(content)
    with pytest.raises(UserError, match="damaged: the record of step 4 .*--steps 3"):
        replay(str(tiny_model), tmp_path / "bad", out, device="cpu")
    assert not out.exists()


def test_a_last_record_that_is_damaged_or_cut_off_is_told(run: Callable, tiny_model: Path, tmp_path: Path) -> None:
    """A whole last record with a wrong checksum is refused like any other damage; one that is cut off is dropped with a
    line that names the last step."""
    content = (Path(run().output_dir) / "run" / "journal").read_bytes()
    bad, torn, told = tmp_path / "bad", tmp_path / "torn", list[str]()
    for last in (bytes([content[-1] ^ 1]), bytes(56)):  # a flipped bit; a power cut before the data were on the disk
        bad.write_bytes(content[: -len(last)] + last)
        with pytest.raises(UserError, match="is damaged: the record of step 5 was changed .*; --steps 4 rebuilds"):
            replay(str(tiny_model), bad, tmp_path / "again", device="cpu")
    assert replay(str(tiny_model), bad, tmp_path / "asked", steps=4, device="cpu", say=told.append).steps == 4
    assert not any("incomplete" in line for line in told)
    torn.write_bytes(content[:-1])
    assert replay(str(tiny_model), torn, tmp_path / "again", device="cpu", say=told.append).steps == 4
    line = "the record of step 5 is cut off after 55 of 56 bytes; step 4 is the last that is replayed"
    assert f"the journal is incomplete: {line}" in told
    bad.write_bytes(content[: -5 * 56] + bytes(56))
    with pytest.raises(UserError, match="the record of step 1 was changed .*; no step is left"):
        replay(str(tiny_model), bad, tmp_path / "none", device="cpu")


def test_a_journal_that_is_cut_between_two_records(run: Callable, tiny_model: Path, tmp_path: Path) -> None:
    root, told = Path(run().output_dir), list[str]()
    path = root / "run" / "journal"
    size = (path.stat().st_size - journal.read(path).begin) // 5
    path.write_bytes(path.read_bytes()[: -3 * size])
    assert replay(str(tiny_model), path, tmp_path / "again", device="cpu", say=told.append).steps == 2
    assert "the journal ends with step 2, and its run had max_steps=5: it was stopped, or is cut" in told


def test_a_full_disk_is_named(run: Callable, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is left of a model that could not be written; the same command works once there is room."""
    root, out = Path(run().output_dir), tmp_path / "again"

    def full(*args: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(save, "save_model", full)
        with pytest.raises(UserError, match="OUT: .* cannot be written: No space left on device; the journal is as it"):
            replay(str(tiny_model), root, out, device="cpu")
    assert replay(str(tiny_model), root, out, device="cpu").steps > 0


@pytest.mark.parametrize("lr", [1e30, 3e38])
def test_weights_that_are_not_finite_are_not_written(
    run: Callable, tiny_model: Path, tmp_path: Path, lr: float
) -> None:
    config = run(max_steps=1)
    path = Path(config.output_dir) / "run" / "journal"
    found = journal.read(path)
    bad = changed(found.records[0], coef=(lr, *(1e9 for _ in found.records[0].coef[1:])))
    path.write_bytes(path.read_bytes()[: found.begin] + journal.pack_record(bad, found.header, found.seed_crc))
    with pytest.raises(NonFinite, match="holds NaN or infinity, so the model is not saved"):
        replay(str(tiny_model), Path(config.output_dir), tmp_path / "again", device="cpu", say=lambda line: None)
    assert not (tmp_path / "again").exists()


@pytest.mark.parametrize("name", ["distribution", "rounding", "dtype", "wire"])
def test_rules_that_do_not_exist_are_refused(run: Callable, tiny_model: Path, tmp_path: Path, name: str) -> None:
    config = run(max_steps=1)
    path = Path(config.output_dir) / "run" / "journal"
    found = journal.read(path)
    bad = journal.pack_header(changed(found.header, **{name: "nonsense"}))
    path.write_bytes(bad + journal.pack_record(found.records[0], found.header, journal.CRC.unpack(bad[-4:])[0]))
    with pytest.raises(UserError, match="nonsense"):
        replay(str(tiny_model), Path(config.output_dir), tmp_path / "again", device="cpu", say=lambda line: None)


def test_the_embedded_model_by_its_name(run: Callable, tmp_path: Path) -> None:
    config = run(model="demo", train_data="demo", max_steps=2)
    replay("demo", Path(config.output_dir), tmp_path / "again", device="cpu", say=lambda line: None)
    assert same(weights(config.output_dir), weights(tmp_path / "again"))


# -- going on from a journal ------------------------------------------------------------------------------------------


def forget(config: TrainConfig, *names: str) -> None:
    """What a killed process would not have written yet."""
    root = Path(config.output_dir)
    for name in (*names, "model.safetensors"):
        target = root / name
        shutil.rmtree(target) if target.is_dir() else target.unlink()


@in_every_run(lambda variant, gone: (len(gone) == 2) == (variant in FROM_THE_BASE) and variant not in ALIKE)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("gone", [("checkpoint-5",), ("checkpoint-5", "checkpoint-2")])
def test_resume_replays_what_no_checkpoint_holds(
    run: Callable, variant: str, gone: tuple[str, ...], capsys: Any
) -> None:
    config = run(save_steps=2, save_total_limit=None, **VARIANTS[variant])
    before = weights(config.output_dir)
    forget(config, *gone, "checkpoint-4")
    assert train(config, resume="") == 0
    done = 5 if len(gone) > 1 else 3
    assert f"{done} steps of the journal replayed" in capsys.readouterr().out
    assert same(before, weights(config.output_dir))


@pytest.mark.parametrize(
    ("lost", "zeros", "says"),
    [
        (70, 0, ("ends in a torn record", "1 steps of the journal replayed")),  # step 5 is gone, step 4 torn
        (56, 56, ("is damaged (the record of step 5 was changed", "steps after 4 are done again", "2 steps of the")),
    ],
    ids=["torn", "a power cut left the length without the content"],
)
def test_resume_goes_on_behind_the_journal(
    run: Callable, tmp_path: Path, capsys: Any, lost: int, zeros: int, says: tuple[str, ...]
) -> None:
    config = run(save_steps=2, save_total_limit=None, lr_scheduler_type="constant")
    before, path = weights(config.output_dir), Path(config.output_dir) / "run" / "journal"
    forget(config, "checkpoint-5", "checkpoint-4")
    whole = path.read_bytes()
    path.write_bytes(whole[:-lost] + bytes(zeros))
    assert train(config, resume="") == 0
    out = capsys.readouterr().out
    assert all(each in out for each in says)
    assert same(before, weights(config.output_dir)) and path.read_bytes() == whole
    longer = changed(config, max_steps=7)
    assert train(longer, resume="") == 0
    assert journal.read(path).last == 7


def test_a_journal_that_cannot_go_on_is_set_aside(run: Callable, tiny_model: Path, tmp_path: Path) -> None:
    config = run(save_steps=2, save_total_limit=None, max_steps=6)
    root, path = Path(config.output_dir), Path(config.output_dir) / "run" / "journal"
    before = weights(root)
    forget(config, "checkpoint-6")
    path.write_bytes(path.read_bytes()[: -5 * 52])  # records 2 to 6
    assert train(config, resume="") == 0
    assert same(before, weights(root)) and path.with_name("journal.old").exists()
    assert journal.read(path).header.first == 4
    replay(str(root / "checkpoint-4"), root, tmp_path / "again", device="cpu", say=lambda line: None)
    assert same(before, weights(tmp_path / "again"))


@in_every_run(lambda first, guide: (first == 3) == (guide is None))
@pytest.mark.parametrize("first, guide", [(3, None), (4, None), (3, 4), (4, 4)])
def test_a_journal_from_a_checkpoint_with_factors(run: Callable, tmp_path: Path, first: int, guide: int | None) -> None:
    """A run that goes on elsewhere, in the middle of a period of 4 steps and at its end: the factors, and the V of the
    period, are those of the checkpoint. Its weights alone, or another step's, are refused."""
    config = run(max_steps=6, save_steps=first, save_total_limit=None, zo=ZOConfig(rank=1, refresh=4, guide=guide))
    begin, other = Path(config.output_dir) / f"checkpoint-{first}", tmp_path / "other"
    assert train(changed(config, output_dir=str(other)), resume=str(begin)) == 0
    assert journal.read(other / "run" / "journal").header.first == first
    replay(str(begin), other, tmp_path / "again", device="cpu", say=lambda line: None)
    assert same(weights(config.output_dir), weights(tmp_path / "again"))
    (begin / "keyhole_state.json").unlink()
    with pytest.raises(UserError, match=f"begins after step {first}, and .* low-rank factors"):
        replay(str(begin), other, tmp_path / "refused", device="cpu", say=lambda line: None)


def test_a_journal_from_a_light_checkpoint(run: Callable, tiny_model: Path, tmp_path: Path) -> None:
    """It holds no weights of blocks: these come from the model that its run began with. Another model, another step and
    the checkpoint of another run are refused, each by name; so are other weights in the place of the first."""
    how = {"save_steps": 2, "save_total_limit": None, "zo": ZOConfig(rank=1, refresh=2, fold=False)}
    config = run(max_steps=4, **how)
    root, base = Path(config.output_dir), tmp_path / "base"
    begin = root / "checkpoint-2"
    later = changed(config, max_steps=6, output_dir=str(tmp_path / "later"))
    assert train(later, resume=str(begin)) == 0
    assert not (begin / "model.safetensors").exists()
    replay(str(begin), tmp_path / "later", tmp_path / "again", device="cpu", say=lambda line: None)
    assert same(weights(later.output_dir), weights(tmp_path / "again"))
    assert run(max_steps=4, seed=7, output_dir=str(tmp_path / "other"), **how).seed == 7
    for wrong, words in (
        (tiny_model, "is not the checkpoint that the run went on from.*it was .*checkpoint-2"),
        (root / "checkpoint-4", "it is of step 4"),
        (tmp_path / "other" / "checkpoint-2", "with other factors"),
    ):
        with pytest.raises(UserError, match=f"(?s)BASE: .*{words}"):
            replay(str(wrong), tmp_path / "later", tmp_path / "wrong", device="cpu")
    shutil.copytree(tiny_model, base)
    moved = changed(config, model=str(base), output_dir=str(tmp_path / "moved"))
    assert train(moved) == 0
    later = changed(moved, max_steps=6, output_dir=str(tmp_path / "moved later"))
    assert train(later, resume=str(tmp_path / "moved" / "checkpoint-2")) == 0
    other = {name: tensor + 1 for name, tensor in weights(base).items()}
    save_file(other, base / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match="holds other weights by now .*restore them"):
        replay(str(tmp_path / "moved" / "checkpoint-2"), tmp_path / "moved later", tmp_path / "wrong", device="cpu")


def test_another_base_is_refused_on_resume(run: Callable, tiny_model: Path, tmp_path: Path) -> None:
    """A journal without a checkpoint needs the very weights it started from."""
    config = run()
    other = shutil.copytree(tiny_model, tmp_path / "other")
    content = bytearray((other / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (other / "model.safetensors").write_bytes(content)
    forget(config, "checkpoint-5")
    with pytest.raises(UserError, match="starts from the weights of .* holds others"):
        train(changed(config, model=str(other)), resume="")
