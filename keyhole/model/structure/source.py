"""Where a model's files are: a directory here, or a hub id whose files are downloaded."""

from pathlib import Path

from keyhole.errors import UserError
from keyhole.model.structure.tokenizer import TOKENIZER_FILES

WEIGHT_PATTERNS = ["*.json", "*.safetensors", "*.jinja", "*.txt", *TOKENIZER_FILES]


def check_name(model: str | Path) -> None:
    """Refuses, without a request, what is neither a directory nor a hub id. One word is refused too: all such ids of
    the hub have a longer name today, and a word is more likely a directory that does not exist."""
    path, text = Path(model), str(model)
    if path.is_file():
        raise UserError(f"model: {text} is a file; give the directory that holds config.json and the weights")
    if not path.exists() and (path.is_absolute() or text.startswith((".", "~")) or text.count("/") != 1):
        raise UserError(
            f"model: {text} is not a directory here, and not a hub id, which looks like name/model "
            "(openai-community/gpt2, not gpt2)"
        )


def find_directory(model: str | Path) -> Path:
    """The directory itself, or the one into which the files of a hub id are downloaded."""
    check_name(model)
    if Path(model).is_dir():
        return Path(model)
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(str(model), allow_patterns=WEIGHT_PATTERNS))
    except Exception as error:  # no network, no such model, no access, no room: no type is common to them
        said = " ".join(str(error).split())
        raise UserError(
            f"model: {model} is not a directory here, and its files cannot be had from the hub: {said} "
            f"({type(error).__name__}). Check the name, the network, your access to it (hf auth login) and the room on "
            "the disk, or give the directory of a copy"
        ) from error
