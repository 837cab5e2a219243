"""What lies in an output directory: journals, checkpoints, markers and links that were damaged or made to harm."""

import json
import os
import shutil
import zlib
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keyhole.checkpoint import journal, state
from tests.hostile.conftest import MANY, Place
from tests.hostile.values import odd, places_of, with_value


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The outputs of finished runs by method, made by the first test that asks. Do not change them."""
    return {"kept": tmp_path_factory.mktemp("finished")}


@pytest.fixture
def ended(finished: dict[str, Path], new_place: Callable[[], Place]) -> Callable[[str], Place]:
    """A place whose out/ holds a finished run of two steps."""

    def make(method: str = "zo") -> Place:
        place = new_place()
        kept = finished["kept"] / method
        if not kept.exists():
            first = place.trained(f"method={method}", "save_steps=1")
            assert first.code == 0, first.printed
            shutil.copytree(place.out, kept, symlinks=True)
        else:
            shutil.copytree(kept, place.out, symlinks=True)
        return place

    return make


def resumed(place: Place, method: str = "zo", *more: str) -> int:
    return place.run(
        "train", str(place.config), f"method={method}", "save_steps=1", "max_steps=3", *more, "--resume"
    ).code


def header_and_rest(path: Path) -> tuple[dict[str, Any], bytes]:
    found = journal.read(path)
    return asdict(found.header), path.read_bytes()[found.begin :]


def packed(header: dict[str, Any]) -> bytes:
    """A header with a right checksum, whatever it says."""
    text = json.dumps(header).encode()
    front = journal.FRONT.pack(journal.MAGIC, journal.VERSION, len(text)) + text
    return front + journal.CRC.pack(zlib.crc32(front))


@settings(parent=MANY, max_examples=8)
@given(data=st.data())
def test_odd_journals(ended: Callable[..., Place], data: st.DataObject) -> None:
    """Any value of a header whose checksum is right, and any byte of the file: replayed and resumed, or refused."""
    place = ended()
    path = place.out / "run" / "journal"
    header, rest = header_and_rest(path)
    if data.draw(st.booleans()):
        content = packed(with_value(header, data.draw(st.sampled_from(places_of(header))), data.draw(odd))) + rest
    else:
        content = bytearray(path.read_bytes())
        content[data.draw(st.integers(0, len(content) - 1))] ^= data.draw(st.integers(1, 255))
        content = content[: data.draw(st.sampled_from([len(content), 7, 20, len(content) - 3]))]
    path.write_bytes(content)
    place.run("replay", str(place.model), str(path), str(place.out / "again"), "device=cpu")
    shutil.rmtree(place.out / "again", ignore_errors=True)
    resumed(place)


@pytest.mark.parametrize("number", [float("nan"), float("inf"), 3e38])
def test_a_journal_of_numbers_that_are_not_finite_writes_no_model(ended: Callable[..., Place], number: float) -> None:
    """Or that make weights so: exit code 2, and no directory."""
    place = ended()
    path = place.out / "run" / "journal"
    found = journal.read(path)
    first = found.records[0]
    body = found.header.record.pack(1, first.seed, first.epoch, first.row, 0.0, 0, 1.0, number)
    body += journal.CRC.pack(zlib.crc32(body, found.seed_crc))
    path.write_bytes(path.read_bytes()[: found.begin] + body)
    assert place.run("replay", str(place.model), str(path), str(place.out / "again"), "device=cpu").code == 2
    assert not list((place.out / "again").glob("*")) if (place.out / "again").exists() else True


@settings(parent=MANY, max_examples=8)
@given(data=st.data())
def test_odd_states(ended: Callable[..., Place], data: st.DataObject) -> None:
    """Any value of a checkpoint's state, with a right checksum."""
    method = data.draw(st.sampled_from(["adamw", "zo"]))
    place = ended(method)
    path = place.out / "checkpoint-2" / state.STATE
    content = json.loads(path.read_text())
    del content["crc32"]
    changed = with_value(content, data.draw(st.sampled_from(places_of(content))), data.draw(odd))
    path.write_text(state.dump(changed))
    resumed(place, method)


@pytest.mark.parametrize("part", ["config", "versions", "loader", "selection"])
def test_a_state_that_lacks_what_every_run_writes(ended: Callable[..., Place], part: str) -> None:
    """A part that is empty, or is without any one of its keys (of a config's, some)."""
    place = ended("adamw")
    path = place.out / "checkpoint-2" / state.STATE
    content = json.loads(path.read_text())
    del content["crc32"]
    whole = content[part]
    for name in ["", *whole][:16]:
        fewer = {key: value for key, value in whole.items() if key != name} if name else {}
        path.write_text(state.dump(content | {part: fewer}))
        place.run("train", str(place.config), "method=adamw", "max_steps=3", "--resume", "--dry-run")


@pytest.mark.parametrize("method", ["adamw", "lsp"])
def test_odd_tensors_of_the_optimizer(ended: Callable[..., Place], method: str) -> None:
    """A header that lies, or is of gigabytes, in a file whose checksum is right."""
    place = ended(method)
    path = place.out / "checkpoint-2" / "optimizer.safetensors"
    original = path.read_bytes()
    size = int.from_bytes(original[:8], "little")
    table = json.loads(original[8 : 8 + size])
    name = next(key for key in table if key != "__metadata__")
    for key, value in [
        ("shape", [10**12]),
        ("shape", [-1]),
        ("shape", "a"),
        ("dtype", "X"),
        ("data_offsets", [0, 10**15]),
        ("data_offsets", [-8, 0]),
    ]:
        text = json.dumps(table | {name: table[name] | {key: value}}).encode()
        rewrite(place, path, len(text).to_bytes(8, "little") + text + original[8 + size :])
        assert resumed(place, method) == 2, (key, value)
    for front in (2**63, 2**64 - 1, 0):
        rewrite(place, path, front.to_bytes(8, "little") + original[8:])
        assert resumed(place, method) == 2, front


def rewrite(place: Place, path: Path, content: bytes) -> None:
    """Another file of checkpoint-2, which its state describes truly; the older checkpoint goes."""
    shutil.rmtree(place.out / "checkpoint-1", ignore_errors=True)
    path.write_bytes(content)
    about = json.loads((path.parent / state.STATE).read_text())
    del about["crc32"]
    about["files"][path.name] = {"bytes": len(content), "crc32": f"{zlib.crc32(content):08x}"}
    (path.parent / state.STATE).write_text(state.dump(about))


LINKS = ["run/lock", "run/journal", "run/metrics.jsonl", "run/keyhole.json", "run/config.yaml", "run/log.txt"]
LINKS += [
    "run",
    "checkpoint-2",
    "checkpoint-2/model.safetensors",
    "model.safetensors",
    "config.json",
    ".probe.tmp",
    "run/.config.yaml.tmp",
]


@pytest.mark.parametrize("name", LINKS)
@pytest.mark.parametrize("to", ["file", "pipe"])
def test_links_and_pipes_in_a_run(ended: Callable[..., Place], name: str, to: str) -> None:
    """Whatever a run would write through a link stays as it is; nobody waits for a pipe."""
    place = ended()
    victim, path = place.root / "victim", place.out / name
    victim.write_text("precious")
    if path.is_dir():
        shutil.copytree(path, place.root / "moved")
        shutil.rmtree(path)
        victim = place.root / "moved"
    path.unlink(missing_ok=True)
    os.mkfifo(path) if to == "pipe" else path.symlink_to(victim)
    resumed(place)
