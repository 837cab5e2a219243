"""The tokenizer of a model directory, or None: the same for training, evaluation and `keyhole.load`.

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

import json
from pathlib import Path
from typing import Any

from keyhole.disk.json_text import LIMIT_BYTES, read_json
from keyhole.errors import UserError, listed
from keyhole.machine.text import counted
from keyhole.model.structure.source import TOKENIZER_FILES, is_local

OBJECTS = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json")
VOCABULARIES = ("tokenizer.json", "vocab.json", "vocab.txt", "*.model", "tekken.json")
READ_WITH_IT = ("*.json", "*.jinja", "*.txt", "*.model", "additional_chat_templates/*.jinja")


def read_tokenizer(model: str | Path, trust_remote_code: bool = False) -> Any:
    """The tokenizer of a directory (without a request) or a hub id; None if a directory has none."""
    from transformers import AutoTokenizer

    path = Path(model)
    if path.is_dir() and not any(file for name in TOKENIZER_FILES for file in path.glob(name)):
        return None
    for name in READ_WITH_IT if path.is_dir() else ():
        for file in path.glob(name):
            _check_readable(file)
    try:
        how = {"local_files_only": is_local(path), "trust_remote_code": trust_remote_code}
        tokenizer = AutoTokenizer.from_pretrained(model, **how)
        added: dict[str, int] = getattr(
            tokenizer, "get_added_vocab", dict
        )()  # Mistral's own class does not have this method
        if len(tokenizer) <= len(added):
            return _without_vocabulary(path, len(added))
        tokenizer("a")  # settings of the wrong type fail at the first text, half characters at the first save
        json.dumps(getattr(tokenizer, "init_kwargs", ""), ensure_ascii=False, default=str).encode()
    except UserError:
        raise
    except Exception as error:  # bad files, a bad name, no network: each raises its own type
        for name in OBJECTS if path.is_dir() else ():
            if (path / name).exists():
                read_json(path / name, "model")  # names the file, if it is none at all
        why = str(error).strip().partition("\n")[0] or type(error).__name__
        act = "; copy its files (tokenizer*, vocab*) from the original model again" if path.is_dir() else ""
        raise UserError(f"model: the tokenizer of {model} cannot be read: {why}{act}") from error
    return tokenizer


def _without_vocabulary(path: Path, special: int) -> None:
    """UserError if a file is there that should hold the vocabulary."""
    files = sorted(file.name for name in VOCABULARIES for file in path.glob(name)) if path.is_dir() else []
    if files:
        raise UserError(
            f"model: the tokenizer of {path} has no vocabulary: {listed(files)} gives it "
            f"{counted(special, 'special token')} and nothing else, so no text would have a token; copy its files "
            "(tokenizer*, vocab*) from the original model again"
        )


def _check_readable(file: Path) -> None:
    """Refuses files on which Transformers would block (a pipe) or read without end (a device, a file of zeros)."""
    try:
        size = file.stat().st_size
        if not file.is_file() and not file.is_dir():
            raise OSError("it is no ordinary file")
    except OSError as error:
        raise UserError(f"model: {file} cannot be read: {error.strerror or error}") from error
    if size > LIMIT_BYTES:
        raise UserError(f"model: {file} has {size:,} bytes; a file of a tokenizer has at most {LIMIT_BYTES:,}")
