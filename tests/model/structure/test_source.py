"""Names of models; tokenizers, found under all the names of their files, in training and in loading alike. The hub is
not asked."""

import json
import shutil
import socket
import time
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub.errors import OfflineModeIsEnabled

import keyhole
from keyhole.data.run import load_tokenizer
from keyhole.errors import UserError
from keyhole.model.structure import source
from keyhole.model.structure.source import find_directory, module_folders, read_tokenizer
from tests.model.decoders import config


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GPT-2 without a tokenizer. Do not change it."""
    path = tmp_path_factory.mktemp("bare") / "model"
    keyhole.load(config("gpt2"), init="random", device="cpu").save_pretrained(path)
    return path


@pytest.fixture
def directory(bare: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy to put files in, on a machine without a network."""

    def refuse(*args: Any, **options: Any) -> None:
        raise AssertionError("a request was made")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    return Path(shutil.copytree(bare, tmp_path / "model"))


def write(path: Path, *names: str) -> None:
    letters = {chr(i): i - ord("a") for i in range(ord("a"), ord("z") + 1)}
    known = {
        "vocab.json": json.dumps(letters | {"ab": 26}),
        "merges.txt": "#version: 0.2\na b\n",
        "special_tokens_map.json": json.dumps({"eos_token": "a"}),
        "added_tokens.json": json.dumps({"<x>": 27}),
        "tokenizer_config.json": json.dumps({"model_max_length": 10}),
        "chat_template.jinja": "{{ messages }}",
    }
    for name in names:
        (path / name).write_text(known[name])


def test_a_vocabulary_and_merges_are_a_tokenizer(directory: Path) -> None:
    """As older checkpoints come: both roads find it, and a saved model keeps it."""
    write(directory, "vocab.json", "merges.txt")
    model = keyhole.load(directory, device="cpu")
    assert model.tokenizer("abc").input_ids == load_tokenizer(str(directory))("abc").input_ids == [26, 2]
    model.save_pretrained(directory.parent / "out")
    assert read_tokenizer(directory.parent / "out")("abc").input_ids == [26, 2]


@pytest.mark.parametrize("names", [(), ("special_tokens_map.json", "added_tokens.json"), ("tokenizer_config.json",)])
def test_without_a_vocabulary_there_is_none(directory: Path, names: tuple[str, ...]) -> None:
    """Also where Transformers would make one that has no token for any text."""
    write(directory, "chat_template.jinja", *names)
    assert keyhole.load(directory, device="cpu").tokenizer is None
    with pytest.raises(UserError, match="has no tokenizer; copy its tokenizer files in$"):
        load_tokenizer(str(directory))


def test_a_vocabulary_of_special_tokens_is_named(directory: Path) -> None:
    """A tokenizer file that maps every text to nothing is not called missing: what is wrong is said, on both roads."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>").save_pretrained(directory)
    for read in (lambda: keyhole.load(directory, device="cpu"), lambda: load_tokenizer(str(directory))):
        with pytest.raises(UserError, match="has no vocabulary: tokenizer.json gives it 2 special tokens and nothing"):
            read()


@pytest.mark.parametrize(("most", "is_read"), [(2**22, True), (2**22 + 1, False)])
def test_an_id_that_no_model_has_is_refused(directory: Path, most: int, is_read: bool) -> None:
    """The largest counts."""
    write(directory, "merges.txt")
    (directory / "vocab.json").write_text(json.dumps({"a": 0, "b": 1, "ab": most}))
    if is_read:
        assert read_tokenizer(directory)("ab").input_ids == [most]
    else:
        with pytest.raises(UserError, match="a token has the id 4,194,305, and no model has more than 4,194,304"):
            read_tokenizer(directory)


def test_bytes_need_no_vocabulary(directory: Path) -> None:
    """ByT5's tokenizer is its config."""
    from transformers import ByT5Tokenizer

    ByT5Tokenizer().save_pretrained(directory)
    assert len(keyhole.load(directory, device="cpu").tokenizer("abc", add_special_tokens=False).input_ids) == 3


@pytest.mark.parametrize("text", ["{", "", "7", "null", "[1]", '"x"'])
def test_a_file_that_cannot_be_read_is_named(directory: Path, text: str) -> None:
    """On both roads, in one line, in words and not in Python's."""
    (directory / "tokenizer.json").write_text(text)
    for read in (lambda: keyhole.load(directory, device="cpu"), lambda: load_tokenizer(str(directory))):
        with pytest.raises(
            UserError, match=f"model: {directory}/tokenizer.json cannot be read, it may be dam"
        ) as error:
            read()
        assert "\n" not in str(error.value) and "attribute" not in str(error.value)


CODE = """
from transformers import PreTrainedTokenizer

class Letters(PreTrainedTokenizer):
    vocab_files_names = {}
    vocab_size = 26

    def get_vocab(self):
        return {chr(97 + i): i for i in range(26)}

    def _tokenize(self, text):
        return list(text)

    def _convert_token_to_id(self, token):
        return ord(token) - 97

    def _convert_id_to_token(self, index):
        return chr(97 + index)
"""


def test_code_beside_a_model_runs_only_if_asked(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tokenizer of the model's own: refused, with the reason; with trust_remote_code it is used."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(directory.parent / "modules"))
    (directory / "letters.py").write_text(CODE)
    about = {"tokenizer_class": "Letters", "auto_map": {"AutoTokenizer": ["letters.Letters", None]}}
    (directory / "tokenizer_config.json").write_text(json.dumps(about))
    with pytest.raises(UserError, match="tokenizer .* cannot be read"):
        keyhole.load(directory, device="cpu")
    assert keyhole.load(directory, device="cpu", trust_remote_code=True).tokenizer("abc").input_ids == [0, 1, 2]


@pytest.mark.parametrize("model", ["/no/such/dir", "./nothing", "nothing", "a/b/c", __file__])
def test_not_a_directory(model: str) -> None:
    with pytest.raises(UserError, match="is not a directory here|is a file; give the directory"):
        keyhole.load(model)


@pytest.mark.parametrize("fault", [OfflineModeIsEnabled("offline"), OSError(28, "No space left"), RuntimeError("odd")])
def test_whatever_the_hub_says_is_one_message(fault: Exception, monkeypatch: pytest.MonkeyPatch) -> None:

    def refuse(*args: object, **options: object) -> None:
        raise fault

    monkeypatch.setattr("huggingface_hub.snapshot_download", refuse)
    monkeypatch.setattr(source, "hub_answers", lambda: True)
    with pytest.raises(UserError, match=f"^model: some/model is not .*{type(fault).__name__}.*the disk"):
        find_directory("some/model")
    with pytest.raises(UserError, match="openai-community/gpt2, not gpt2"):
        find_directory("gpt2")


def test_a_mistyped_path_asks_no_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the first part is a directory here, it is a path and no hub id; the nearest one is named."""
    (tmp_path / "models" / "llama-7b").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(source, "hub_answers", lambda: pytest.fail("the hub was asked"))
    with pytest.raises(UserError, match="models/lama-7b is not a directory here; did you mean models/llama-7b?"):
        keyhole.load("models/lama-7b")
    with pytest.raises(UserError, match="models/x is not a directory here, though models/ is"):
        keyhole.load("models/x")


def test_an_unreachable_hub_is_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hub's library would try for half a minute; one look at the connection is enough."""

    def fail(*args: object, **options: object) -> None:
        raise OSError("no route")

    monkeypatch.setattr(source.socket, "create_connection", fail)
    monkeypatch.setattr("urllib.request.getproxies", dict)
    source.hub_answers.cache_clear()
    begin_s = time.perf_counter()
    with pytest.raises(UserError, match="no-such-owner/model is not a directory here, and the hub cannot be reached"):
        keyhole.load("no-such-owner/model")
    source.hub_answers.cache_clear()
    assert time.perf_counter() - begin_s < 15  # 23 s before


def test_folders_of_other_modules_are_plain_names(tmp_path: Path) -> None:
    """Of a sentence-transformers model; a path that leads elsewhere is none, and damaged files name none."""
    assert module_folders(tmp_path) == set()
    (tmp_path / "modules.json").write_text(
        '[{"path": ""}, {"path": "1_Pooling"}, {"path": "../x"}, {"path": "2_Dense"}]'
    )
    assert module_folders(tmp_path) == {"1_Pooling", "2_Dense"}
    (tmp_path / "modules.json").write_text("[{}]")
    assert module_folders(tmp_path) == set()
