"""Where a model's files are: a local directory, or a hub id whose files are downloaded; and its tokenizer.

A name that cannot be a hub id, or that begins with an existing directory, is a mistyped path: no request is sent to the
hub. Without a network the hub's library retries for half a minute before it gives up, so the connection is tested once,
in a few seconds. If the hub cannot be reached, files that were downloaded before are used, or the name is refused.

Weights in .bin files are downloaded only if a model has no safetensors, and of several copies of the weights
(original/, consolidated.safetensors) only the one that Transformers reads. Downloads go to huggingface_hub's cache. A
broken download continues at the byte where it broke. If the library gives up, complete files stay, and the next attempt
downloads the others. Each refusal of the hub raises an error that says what to do: a model that is gated, private or
missing (which the hub does not tell apart without a token), a token that is not valid.

A directory has a tokenizer if it has a vocabulary, which comes under many names:

    tokenizer.json                      of the tokenizers library, all in one file
    vocab.json with merges.txt          byte-level BPE (GPT-2, OPT, Qwen2); vocab.txt for word pieces
    tokenizer.model, spiece.model ...   SentencePiece
    tekken.json                         Mistral's
    tokenizer_config.json               alone only where no vocabulary is needed (ByT5 counts bytes)

special_tokens_map.json, added_tokens.json and chat_template.jinja are not enough for a tokenizer. Without a vocabulary,
Transformers raises an error for some families, and for others builds a tokenizer that maps every text to no tokens. The
latter counts as none: a run with it would train on nothing. If a file is there that should hold a vocabulary, and the
tokenizer knows special tokens only, that file is damaged or of another kind, and an error names it.
"""

import difflib
import json
import os
import re
import socket
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from keyhole.disk.files import read_small
from keyhole.disk.json_text import LIMIT_BYTES, read_json
from keyhole.errors import UserError, is_foreign, listed
from keyhole.machine.text import counted

TOKENIZER_FILES = ("token*", "vocab*", "merges.txt", "*.model", "tekken.json")
KEPT_PATTERNS = ["*.md", "*.py", "LICENSE*", "NOTICE*"]  # by a saved model
WEIGHT_PATTERNS = ["*.json", "*.safetensors", "*.jinja", "*.txt", *TOKENIZER_FILES, *KEPT_PATTERNS]
PICKLED_PATTERNS = ["pytorch_model*.bin"]
# Never downloaded
NOT_READ = ["*/*.safetensors", "*/*.json", "*/*.txt", "*/*.model", "*/*.md", "*/*.py", "consolidated*.safetensors"]
ADAPTER_FILES = ("adapter_model.safetensors", "adapter_model.bin")  # of peft
OF_ADAPTER = (*ADAPTER_FILES, "adapter_config.json")
CLASSIFIER = "ForSequenceClassification"
PATIENCE_S = 5.0
MOST_ID = 2**22  # as MOST_SIZE of config_files.py
ODD_TEXT = "".join(c * 40 + "!" for c in "a0 .\n")  # on which patterns that backtrack without end give up
OBJECTS = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json")
VOCABULARIES = ("tokenizer.json", "vocab.json", "vocab.txt", "*.model", "tekken.json")
READ_WITH_IT = ("*.json", "*.jinja", "*.txt", "*.model", "additional_chat_templates/*.jinja")


def check_name(model: str | Path) -> None:
    """Refuses, without a request, a name that is neither a directory nor a hub id. A single word is refused too: the
    hub's ids have an owner today, and a word is more likely a directory that does not exist."""
    path, text = Path(model), str(model)
    if os.path.isdir(path):  # also False for a name that no file can have
        return
    if os.path.exists(path):
        raise UserError(f"model: {text} is a file; give the directory that holds config.json and the weights")
    if path.is_absolute() or text.startswith((".", "~")) or text.count("/") != 1 or not all(text.split("/")):
        raise UserError(
            f"model: {text} is not a directory here, and not a hub id, which looks like name/model "
            f"(openai-community/gpt2, not gpt2){_nearest(path)}"
        )
    if os.path.isdir(path.parent):
        raise UserError(
            f"model: {text} is not a directory here{_nearest(path) or f', though {path.parent}/ is'}. If you mean a "
            "model of that name on the hub, call from another directory"
        )


def check_directory(model: str | Path) -> None:
    """Refuses also a directory that holds no model."""
    check_name(model)
    if not os.path.isdir(model):
        return
    adapters = next((name for name in ADAPTER_FILES if (Path(model) / name).exists()), None)
    if not (Path(model) / "config.json").exists():
        alone = f", but adapters ({adapters}): put them into the folder adapter/ of their model, and name that model"
        beside = " beside its GGUF file; config.json and the tokenizer's files of the original model belong there"
        packed = any(Path(model).glob("*.gguf"))
        why = alone if adapters else beside if packed else ", so it is not a Hugging Face model directory"
        raise UserError(f"model: {model} has no config.json{why}")
    if adapters:
        raise UserError(
            f"model: {model} has adapters beside its weights ({adapters}), which are not read there: move them, with "
            "adapter_config.json, into its folder adapter/, or away if they are merged into the weights"
        )


def names_classifier(config: Mapping[str, object]) -> bool:
    """Whether a config.json is that of a text classifier."""
    return CLASSIFIER in str(config.get("architectures"))


def has_adapter(directory: Path) -> bool:
    """Whether a model's directory has adapters in its folder adapter/; other files there are the user's."""
    return any((directory / "adapter" / name).exists() for name in OF_ADAPTER)


def _nearest(path: Path) -> str:
    """`; did you mean ...?`, from the directories beside a path that does not exist."""
    try:
        beside = [entry.name for entry in path.parent.iterdir() if entry.is_dir()]
    except OSError:
        return ""
    close = difflib.get_close_matches(path.name, beside, n=1)
    return f"; did you mean {path.parent / close[0]}?" if close else ""


def is_local(model: str | Path) -> bool:
    """Whether no request is made for this model: it is a directory, or the hub cannot be reached."""
    return os.path.isdir(model) or not hub_answers()


@cache
def hub_answers() -> bool:
    """Whether the hub can be reached. Tested once per process; behind a proxy True, and the library finds out."""
    import urllib.parse
    import urllib.request

    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return False
    if urllib.request.getproxies():
        return True
    at = urllib.parse.urlsplit(constants.ENDPOINT)
    try:
        socket.create_connection((at.hostname, at.port or (80 if at.scheme == "http" else 443)), PATIENCE_S).close()
    except OSError:
        return False
    return True


def find_file(model: str | Path, name: str) -> Path:
    """One small file of a hub id, downloaded or from the cache."""
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(str(model), name, local_files_only=is_local(model)))
    except Exception as error:  # as in find_directory
        raise _not_had(model, error) from error


def find_directory(model: str | Path) -> Path:
    """The directory itself, or the one into which the files of a hub id are downloaded."""
    check_name(model)
    if Path(model).is_dir():
        return Path(model)
    from huggingface_hub import snapshot_download

    local, directory = is_local(model), Path()
    try:
        for patterns in (WEIGHT_PATTERNS, [*WEIGHT_PATTERNS, *PICKLED_PATTERNS]):
            directory = Path(
                snapshot_download(str(model), allow_patterns=patterns, ignore_patterns=NOT_READ, local_files_only=local)
            )
            if any(directory.glob("*.safetensors")):
                break
        if folders := module_folders(directory):
            snapshot_download(
                str(model),
                allow_patterns=[f"{each}/*" for each in folders],
                ignore_patterns="*.bin",
                local_files_only=local,
            )
    except Exception as error:  # no network, no such model, no access, disk full: they have no common type
        raise _not_had(model, error) from error
    return directory


def module_folders(directory: Path) -> set[str]:
    """The folders of the other modules of a sentence-transformers model."""
    with suppress(OSError, ValueError, TypeError, KeyError, RecursionError):  # there is none, or it is damaged
        paths = [str(each["path"]) for each in json.loads(read_small(directory / "modules.json", 2**20))]
        return {path for path in paths if re.fullmatch(r"\w+", path)}
    return set()


def _not_had(model: str | Path, error: Exception) -> UserError:
    """The error for each way in which the hub, the network or the disk can fail, with what to do about it."""
    from huggingface_hub import constants, errors, get_token

    if not hub_answers():
        offline = os.environ.get("HF_HUB_OFFLINE") or os.environ.get("TRANSFORMERS_OFFLINE")
        why = "HF_HUB_OFFLINE is set" if offline else "the hub cannot be reached from here"
        in_part = type(error).__name__ == "IncompleteSnapshotError"  # older versions do not know it
        before = "it was downloaded in part only" if in_part else "nor was it downloaded before"
        return UserError(
            f"model: {model} is not a directory here, and {why}; {before}. Check the name and the network, or give the "
            "directory of a copy"
        )
    what, page = f"model: {model} is not a directory here, and ", f"{constants.ENDPOINT}/{model}"
    if isinstance(error, errors.GatedRepoError):
        return UserError(
            f"{what}on the hub it is gated: accept its conditions at {page}, wait until access is granted, "
            "and log in (hf auth login, or HF_TOKEN=...)"
        )
    if isinstance(error, errors.RepositoryNotFoundError):
        has_token = get_token() is not None
        private = "your token may not see it" if has_token else "it is private"
        act = "a token with access to it" if has_token else "hf auth login or HF_TOKEN=..."
        return UserError(
            f"{what}the hub has no model of that name, or {private}. Check the spelling; for a private one, {act}"
        )
    if isinstance(error, errors.HfHubHTTPError) and error.response is not None and error.response.status_code == 401:
        return UserError(f"{what}the hub does not accept your token: log in anew (hf auth login), or unset HF_TOKEN")
    if isinstance(error, errors.RemoteEntryNotFoundError):
        return UserError(
            f"{what}on the hub it has no config.json: it is no model that Transformers reads (a GGUF file? an "
            f"adapter?); see {page}"
        )
    said = " ".join(str(error).split())
    return UserError(
        f"{what}its files cannot be had from the hub: {said} ({type(error).__name__}). Check the name, the network, "
        "your access to it (hf auth login) and the room on the disk, or give the directory of a copy; files that were "
        "downloaded whole are kept, and the next attempt fetches the others"
    )


# -- the tokenizer -----------------------------------------------------------------------------------------------------


def read_tokenizer(model: str | Path, trust_remote_code: bool = False) -> Any:
    """The tokenizer of a directory (without a request) or a hub id; None if a directory has none."""
    from transformers import AutoTokenizer

    path = Path(model)
    if path.is_dir() and not any(file for name in TOKENIZER_FILES for file in path.glob(name)):
        return None
    for name in READ_WITH_IT if path.is_dir() else ():
        for file in path.glob(name):  # on a pipe Transformers would block, a device or a file of zeros it would read
            if not file.is_file():
                raise UserError(f"model: {file} cannot be read: it is no ordinary file")
            if (size := file.stat().st_size) > LIMIT_BYTES:
                raise UserError(f"model: {file} has {size:,} bytes; a file of a tokenizer has at most {LIMIT_BYTES:,}")
    try:
        how = {"local_files_only": is_local(path), "trust_remote_code": trust_remote_code}
        tokenizer = AutoTokenizer.from_pretrained(model, **how)
        added: dict[str, int] = getattr(
            tokenizer, "get_added_vocab", dict
        )()  # Mistral's own class does not have this method
        if (most := max(tokenizer.get_vocab().values(), default=0)) > MOST_ID:
            raise ValueError(f"a token has the id {most:,}, and no model has more than {MOST_ID:,}")
        if len(tokenizer) <= len(added):
            files = sorted(file.name for name in VOCABULARIES for file in path.glob(name)) if path.is_dir() else []
            if not files:
                return None
            raise UserError(
                f"model: the tokenizer of {path} has no vocabulary: {listed(files)} gives it "
                f"{counted(len(added), 'special token')} and nothing else, so no text would have a token; copy its "
                "files (tokenizer*, vocab*) from the original model again"
            )
        merges: Any = getattr(getattr(tokenizer, "backend_tokenizer", None), "model", None)
        if dropout := getattr(merges, "dropout", None):  # would make other tokens of a text every time
            merges.dropout, tokenizer.keyhole_dropout = None, dropout
        vars(tokenizer).get("init_kwargs", {}).pop("local_files_only", None)  # of this call: a save would publish it
        tokenizer(ODD_TEXT)  # settings of the wrong type fail at the first text, half characters at the first save
        json.dumps(getattr(tokenizer, "init_kwargs", ""), ensure_ascii=False, default=str).encode()
    except BaseException as error:  # bad files, a bad name, no network, a panic: each raises its own type
        if not is_foreign(error):
            raise
        for name in OBJECTS if path.is_dir() else ():
            if (path / name).exists():
                read_json(path / name, "model")  # names the file, if it is none at all
        why = str(error).strip().partition("\n")[0] or type(error).__name__
        act = "; copy its files (tokenizer*, vocab*) from the original model again" if path.is_dir() else ""
        raise UserError(f"model: the tokenizer of {model} cannot be read: {why}{act}") from error
    return tokenizer
