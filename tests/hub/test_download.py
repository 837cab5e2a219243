"""Models from the hub, against a server on this machine: what is fetched, how often, and what is said otherwise.

huggingface_hub reads its variables when it is imported; here they are read anew for every question.
"""

import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from huggingface_hub import close_session, constants

import keyhole
from keyhole import assets
from keyhole.errors import UserError
from keyhole.model.structure import source
from tests.hub.server import TOKEN, Hub, hub_here


@pytest.fixture
def hub() -> Iterator[Hub]:
    with hub_here() as found:
        yield found


def variables(hub: Hub, home: Path, **env: str) -> dict[str, str]:
    """All variables of a process that is to know this hub, nothing of the user's, and these."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    return clean | hub.env | {"HF_HOME": str(home)} | env


@contextmanager
def as_if_new(hub: Hub, home: Path, **env: str) -> Iterator[None]:
    """In this process the library reads its variables as a new one would, and has no connection yet."""

    def read_anew() -> None:
        close_session()
        importlib.reload(constants)
        source.hub_answers.cache_clear()

    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("time.sleep", lambda seconds: None)  # between the library's attempts
            patch.setattr(os, "environ", variables(hub, home, **env))
            read_anew()
            yield
    finally:
        read_anew()


def fetch(hub: Hub, name: str, home: Path, **env: str) -> str:
    """What one gets who asks for a model: its directory, or the message for the user."""
    with as_if_new(hub, home, **env):
        try:
            source.find_file(name, "config.json")
            return str(source.find_directory(name))
        except UserError as error:
            return f"UserError {error}"


def weights_asked(hub: Hub) -> list[tuple[str, str, str]]:
    return [asked for asked in hub.asked if asked[0] == "GET" and asked[1].endswith((".safetensors", ".bin"))]


def test_files_are_fetched_once_and_used_without_a_network(hub: Hub, tmp_path: Path) -> None:
    """The first call downloads what Transformers reads and no second copy; the next one asks for the commit only, and
    with HF_HUB_OFFLINE nothing is asked."""
    repo = hub.add("owner/tiny", assets.MODEL)
    junk = ("original/model.safetensors", "consolidated.safetensors", "pytorch_model.bin", "onnx/config.json", "a.gguf")
    small = {"LICENSE": b"free", "README.md": b"# Tiny", "1_Pooling/config.json": b"{}"}
    repo.files |= dict.fromkeys(junk, b"not to be fetched") | small | {"modules.json": b'[{"path": "1_Pooling"}]'}
    directory = Path(fetch(hub, "owner/tiny", tmp_path))
    found = {str(p.relative_to(directory)) for p in directory.rglob("*") if not p.is_dir()}
    assert found == {path.name for path in assets.MODEL.iterdir()} | small.keys() | {"modules.json"}
    assert all((directory / name).read_bytes() == repo.files[name] for name in found)
    hub.asked.clear()
    assert Path(fetch(hub, "owner/tiny", tmp_path)) == directory
    assert weights_asked(hub) == []
    hub.asked.clear()
    assert Path(fetch(hub, "owner/tiny", tmp_path, HF_HUB_OFFLINE="1")) == directory
    assert hub.asked == []


def test_bin_files_are_fetched_where_there_are_no_others(hub: Hub, tmp_path: Path) -> None:
    repo = hub.add("owner/old", assets.MODEL)
    repo.files["pytorch_model.bin"] = repo.files.pop("model.safetensors")
    assert (Path(fetch(hub, "owner/old", tmp_path)) / "pytorch_model.bin").exists()


def test_a_broken_connection_is_taken_up_where_it_broke(hub: Hub, tmp_path: Path) -> None:
    repo = hub.add("owner/large", assets.MODEL)
    repo.files["model.safetensors"] = whole = os.urandom(2**20) * 24
    hub.cut["model.safetensors"] = [14 * 2**20]
    directory = Path(fetch(hub, "owner/large", tmp_path))
    assert (directory / "model.safetensors").read_bytes() == whole
    (first, second) = weights_asked(hub)
    assert first[2] == "" and int(second[2].removeprefix("bytes=").rstrip("-")) >= 10 * 2**20


def test_an_interrupted_download_keeps_the_files_that_are_whole(hub: Hub, tmp_path: Path) -> None:
    repo = hub.add("owner/two", assets.MODEL)
    shards = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    repo.files |= dict.fromkeys(shards, repo.files.pop("model.safetensors"))
    repo.files[shards[1]] += b"!"
    hub.cut[shards[1]] = [100] + [0] * 20
    said = fetch(hub, "owner/two", tmp_path)
    assert said.startswith("UserError") and "the next attempt fetches the others" in said
    hub.cut.clear()
    hub.asked.clear()
    directory = Path(fetch(hub, "owner/two", tmp_path))
    assert [path.rpartition("/")[2] for _, path, _ in weights_asked(hub)] == [shards[1]]
    assert all((directory / name).read_bytes() == repo.files[name] for name in shards)


REFUSALS = [
    ("owner/none", {}, "the hub has no model of that name, or it is private"),
    ("owner/none", {"HF_TOKEN": TOKEN}, "or your token may not see it"),
    ("owner/private", {}, "for a private one, hf auth login or HF_TOKEN"),
    ("owner/gated", {}, "it is gated: accept its conditions at http://127.0.0.1"),
    ("owner/private", {"HF_TOKEN": "hf_old"}, "does not accept your token: log in anew"),
    ("owner/gguf", {}, "it has no config.json"),
    ("owner/private", {"HF_HUB_OFFLINE": "1"}, "HF_HUB_OFFLINE is set; nor was it downloaded before"),
]


@pytest.mark.parametrize(("name", "env", "says"), REFUSALS)
def test_what_is_not_given_is_told_with_what_to_do(
    hub: Hub, tmp_path: Path, name: str, env: dict[str, str], says: str
) -> None:
    hub.add("owner/private", assets.MODEL, private=True)
    hub.add("owner/gated", assets.MODEL, gated=True)
    hub.add("owner/gguf", assets.MODEL).files.pop("config.json")
    said = fetch(hub, name, tmp_path, **env)
    assert said.startswith(f"UserError model: {name} is not a directory here, and ") and says in said


def test_a_token_opens_what_is_private_or_gated(hub: Hub, tmp_path: Path) -> None:
    hub.add("owner/private", assets.MODEL, private=True, gated=True)
    assert (Path(fetch(hub, "owner/private", tmp_path, HF_TOKEN=TOKEN)) / "model.safetensors").exists()


def test_a_directory_asks_nobody(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import socket

    def refuse(*args: object) -> None:
        raise AssertionError("a connection was tried")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    model = keyhole.load(tiny_model, device="cpu", placement="stream")
    assert model.tokenizer is not None


def test_a_model_of_the_hub_is_loaded_with_its_tokenizer(hub: Hub, tmp_path: Path) -> None:
    hub.add("owner/tiny", assets.MODEL)
    said = []
    for env in ({}, {"HF_HUB_OFFLINE": "1"}):
        hub.asked.clear()
        with as_if_new(hub, tmp_path, **env):
            model = keyhole.load("owner/tiny", device="cpu", placement="stream")
        ids = model.tokenizer("The soup was", return_tensors="pt").input_ids
        said.append(model.tokenizer.decode(model.generate(ids, do_sample=False, max_new_tokens=4)[0]))
        assert bool(hub.asked) == (not env) and model.source == "owner/tiny"
    assert said[0] == said[1] and said[0].startswith("The soup was")
