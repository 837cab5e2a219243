"""One commit that publishes a model: its files and its card; old weight files are deleted.

    prepare   creates the repository, or checks that it exists, so that a missing token, a name of another owner and an
              unreachable hub are reported before a run begins, not after it
    check     refuses damaged weights: by the headers of their files, and by the checksums of a checkpoint
    push      makes the commit. huggingface_hub uploads large files separately and skips those that the hub has,
              so an interrupted push can simply be repeated

The published files are the model as Transformers reads it, with its adapter; of a checkpoint neither keyhole_state.json
nor optimizer.safetensors, which only a run can use; nothing of run/, and nothing that a save would not write beside the
weights (model/weights/small_files.py): no link is followed, no pickle or hidden file is sent. No local path is
published: an adapter names the repository itself as its base.
"""

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import keyhole
from keyhole.checkpoint.state import OWN_FILES, STATE, Damaged, verify
from keyhole.disk.files import read_small
from keyhole.disk.json_text import json_text
from keyhole.disk.weight_files import INDEX, has_weights, is_pickled, stored_tensors, stored_weights
from keyhole.errors import UserError, listed
from keyhole.hub.card import card, hub_id
from keyhole.model.structure.source import OF_ADAPTER, check_directory, hub_answers
from keyhole.model.weights.small_files import CARD, CONFIG, is_link, list_files

ADAPTER, MOST_BYTES = "adapter/adapter_config.json", 2**20
STALE = re.compile(r"(model(-\d{5}-of-\d{5})?\.safetensors|model\.safetensors\.index\.json|pytorch_model.*\.bin)")
REFUSALS = {
    401: "it does not accept your token: hf auth login anew, or another HF_TOKEN",
    403: "your token may not write there: choose a name of your own (you/model), or a token with that right",
}
NAME = re.compile(r"([\w.-]{1,96}/)?[\w.-]{1,96}")


def check_id(name: str, key: str = "hub_model_id") -> None:
    if not NAME.fullmatch(name) or "--" in name or ".." in name:
        raise UserError(f"{key}: {name!r} is no name of a model on the hub; it looks like you/model, or model")


def files_of(directory: str | Path) -> tuple[dict[str, Path], list[str]]:
    """The published files, by their names in the repository, without the card; and a line about what is left out."""
    directory = Path(directory)
    if not directory.is_dir():
        raise UserError(
            f"push: {directory} is not a directory here; give the output_dir of a run, or a checkpoint in it"
        )
    check_directory(directory)
    found, left = list_files(directory)
    found.pop(CARD, None)
    own = (*stored_weights(directory), INDEX, *(f"adapter/{name}" for name in OF_ADAPTER))
    found |= {name: directory / name for name in own if (directory / name).is_file()}
    for path in (directory / CONFIG, directory / CARD, *found.values()):
        if is_link(path, directory) or (path.parent.name == "adapter" and path.parent.is_symlink()):
            raise UserError(f"push: {path} is a link, and none is followed; put the file itself there")
    if not stored_weights(directory):
        why = "has its run ended?"
        if any((directory / name).is_file() for name in OWN_FILES):
            why = (
                "the checkpoint holds only what was learned (zo.fold=false); push the output_dir of the run, or what "
                "keyhole.load(DIR).save_pretrained(NEW) writes"
            )
        raise UserError(f"push: {directory} has no weights (model.safetensors); {why}")
    return dict(sorted(found.items())), [f"left out: {listed(left)}"] if left else []


def check(directory: str | Path) -> None:
    """Refuses damaged weights, which nobody could load. Of a checkpoint every published file is read."""
    place = Path(directory)
    if has_weights(place) and not is_pickled(place):
        stored_tensors(place)
    if (place / STATE).exists():
        try:
            verify(place, but=OWN_FILES)
        except Damaged as fault:
            raise UserError(f"push: {place} is damaged: {fault}; push another checkpoint of its run") from fault


def text_of_card(directory: Path, name: str) -> str:
    own = directory / CARD
    if own.exists():
        try:
            return read_small(own, MOST_BYTES).decode("utf-8")
        except (OSError, ValueError) as error:
            raise UserError(f"push: {own} is no text ({error}); mend it, or delete it: then a card is made") from error
    return card(directory, name)


def prepare(name: str, private: bool | None) -> str:
    """Creates the repository if it does not exist; returns its full name. UserError says what is missing."""
    check_id(name)
    from huggingface_hub import HfApi, get_token

    if not hub_answers():
        raise UserError(
            f"push: the hub cannot be reached from here (or HF_HUB_OFFLINE is set); push later: keyhole push DIR {name}"
        )
    if get_token() is None:
        raise UserError("push: no token for the hub; hf auth login, or HF_TOKEN=..., with the right to write")
    with _asking(name):
        return HfApi().create_repo(name, private=private, exist_ok=True).repo_id


def push(
    directory: str | Path, name: str, *, private: bool | None = None, say: Callable[[str], None] = lambda line: None
) -> str:
    """Publishes the model of a directory; returns the address of its page."""
    place, (files, left) = Path(directory), files_of(directory)
    check(place)
    text_of_card(place, name)  # a card that cannot be made is known before the repository is
    name = prepare(name, private)
    contents = {file: content(file, path, name) for file, path in files.items()}
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi

    api = HfApi()
    total = sum(path.stat().st_size for path in files.values())
    say(f"pushing {len(files) + 1} files, {total / 2**30:.2f} GiB, to {name}{'; '.join(['', *left])}")
    with _asking(name):
        stale = [file for file in api.list_repo_files(name) if STALE.fullmatch(file) and file not in files]
        contents[CARD] = text_of_card(place, name).encode()
        operations: list[CommitOperationAdd | CommitOperationDelete] = [
            *(CommitOperationAdd(file, sent) for file, sent in contents.items()),
            *map(CommitOperationDelete, stale),
        ]
        api.create_commit(name, operations, commit_message=f"Model trained with keyhole {keyhole.__version__}")
    return f"{api.endpoint}/{name}"


def content(file: str, path: Path, name: str) -> str | bytes:
    """The uploaded content: the file itself; for an adapter whose base is a local directory, its config with this
    repository as the base."""
    if file != ADAPTER:
        return str(path)
    try:
        found = json.loads(read_small(path, MOST_BYTES))
        base = found.get("base_model_name_or_path")
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        raise UserError(f"push: {path} is no JSON object ({error}); mend it, or remove the adapter") from error
    if base is None or hub_id(base):
        return str(path)
    return json_text(found | {"base_model_name_or_path": name}, indent=2).encode()


@contextmanager
def _asking(name: str) -> Iterator[None]:
    """A context that turns errors of the hub into UserErrors."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        status = getattr(getattr(error, "response", None), "status_code", None)
        said = f"{' '.join(str(error).split())} ({type(error).__name__})"
        why = REFUSALS.get(status or 0, f"{said}; try again: what has arrived is not sent twice")
        raise UserError(f"push: {name}: the hub refuses: {why}") from error
