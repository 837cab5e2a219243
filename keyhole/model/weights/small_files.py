"""What a model directory holds beside its weights, and how it comes back: to the byte as it was published.

Whoever publishes a model writes its config and tokenizer for the programs of that day. Transformers rewrites both when
it saves: a `rope_theta` becomes `rope_parameters`, a `PreTrainedTokenizerFast` a `TokenizersBackend`, which earlier
versions refuse, or pass over in silence and compute with another base. So the texts are read once, when the model is
loaded (a run may outlive its source), and written as they were. Edited by key, in the text that was there
(disk/json_text.py `edited`), is only what differs from what Transformers makes of the published text:

    dtype or torch_dtype      that of the saved weights, wherever the text has one
    what training changed     head and labels of a classifier, end tokens, no quantization where weights are plain again
    of the tokenizer          special tokens, sides, length; a chat template, as chat_template.jinja
    _name_or_path             the GGUF file that the weights were unpacked from

A tokenizer with another vocabulary, the config of a model whose text part alone was trained, and all texts of a model
without a directory are Transformers' own.

`list_files` says which files these are, for a save and a push alike: regular files of the directory, of the folders
that a sentence-transformers modules.json names, and of additional_chat_templates, up to MOST_BYTES (a tokenizer's up to
LIMIT_BYTES). No weights (but those of the named folders, which no training here changes), no pickles, nothing hidden,
no code that the config does not name, and no link. Links into the blobs of a snapshot from the hub are files; and when
a model is loaded, JSON that Transformers reads through a link anyway. README.md becomes README.base.md: the card of
what is written here is another one.
"""

import copy
import json
import os
import re
import tempfile
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch
import transformers

from keyhole.disk.files import read_small
from keyhole.disk.json_text import ABSENT, LIMIT_BYTES, Json, edited, read_json
from keyhole.disk.weight_files import weight_files
from keyhole.errors import UserError, listed
from keyhole.machine.settings import progress_bars
from keyhole.model.structure.config_files import TOKENS, make_writable, read_generation_config, setting
from keyhole.model.structure.source import OBJECTS, TOKENIZER_FILES, module_folders

CONFIG, GENERATION, TOKENIZER, SPECIAL_TOKENS = "config.json", "generation_config.json", *OBJECTS[1:3]
CARD, BASE_CARD = "README.md", "README.base.md"
TEMPLATE, TEMPLATES = "chat_template.jinja", "additional_chat_templates"
OF_TOKENIZER = (*TOKENIZER_FILES, SPECIAL_TOKENS, "added_tokens.json", TEMPLATE, f"{TEMPLATES}/*")
MOST_BYTES = 16 * 2**20
WEIGHTS = re.compile(
    r".*\.(safetensors|gguf|onnx|onnx_data|h5|msgpack|ot|npz|npy|tflite|pb|index\.json|bin|pt|pth|pkl|pickle|ckpt|joblib)"
)
# What a save replaces, or a run writes for itself: not told
OURS = re.compile(
    r"run|adapter|checkpoint-\d+|keyhole_state\.json|optimizer\.safetensors|trainer_state\.json|.*\.gguf"
    r"|model(-\d{5}-of-\d{5})?\.safetensors|model\.safetensors\.index\.json|pytorch_model.*\.bin(\.index\.json)?"
)
# The dtype is that of the weights; the others say who wrote the file, or are set by Transformers' Trainer for its run
NOT_COMPARED = {"dtype", "torch_dtype", "_from_model_config", "transformers_version", "_name_or_path", "use_cache"}
SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
FACTS = (
    *SPECIAL,
    "padding_side",
    "truncation_side",
    "model_max_length",
    "add_bos_token",
    "add_eos_token",
    "chat_template",
)
Edit = tuple[str, tuple[str, ...], object]  # a file, a key in it, its value; without a key all of it, None: it goes


def list_files(directory: Path, links: bool = False) -> tuple[dict[str, Path], list[str]]:
    """The files by their names, and each other one as `name (why not)`. links: JSON that loading has parsed may
    be a link."""
    code = set[str]()
    with suppress(UserError, AttributeError):  # none, or damaged; {"AutoConfig": "owner/name--file.Class"}
        named = (str(name) for name in read_json(directory / CONFIG, "model").get("auto_map", {}).values())
        code = {f"{name.rpartition('--')[2].rpartition('.')[0]}.py" for name in named}
    folders, entries = {TEMPLATES, *module_folders(directory)}, sorted(directory.iterdir())
    opened = [path for path in entries if path.name in folders and path.is_dir() and not path.is_symlink()]
    found, left = dict[str, Path](), []
    for path in [*entries, *(inside for folder in opened for inside in sorted(folder.iterdir()))]:
        name = path.relative_to(directory).as_posix()
        if path in opened or OURS.fullmatch(name):
            continue
        most = LIMIT_BYTES if any(fnmatch(name, each) for each in TOKENIZER_FILES) else MOST_BYTES
        reasons = {
            "hidden": path.name.startswith("."),
            "a link": is_link(path, directory) and not (links and name in (CONFIG, GENERATION, *OBJECTS[:2])),
            "no ordinary file": not path.is_file(),
            "weights, or a pickle": WEIGHTS.fullmatch(name) and not ("/" in name and path.suffix == ".safetensors"),
            "code that config.json does not name": path.suffix == ".py" and name not in code,
            f"more than {most // 2**20} MB": path.is_file() and path.stat().st_size > most,
        }
        why = next((reason for reason, holds in reasons.items() if holds), None)
        if why is None:
            found[name] = path
        else:
            left.append(f"{name} ({why})")
    return found, left


def is_link(path: Path, directory: Path) -> bool:
    """Whether a file of a directory is a link, other than into the blobs of the snapshot from the hub that it is."""
    snapshot, blobs = os.path.realpath(directory), os.path.dirname(os.path.realpath(path))
    return path.is_symlink() and blobs != os.path.join(os.path.dirname(os.path.dirname(snapshot)), "blobs")


@dataclass(frozen=True)
class SmallFiles:
    """The files of a model's directory when it was loaded. tokenizer: its facts then (None: there was none)."""

    texts: dict[str, bytes]
    left_out: list[str]
    tokenizer: Json | None

    @classmethod
    def read(cls, directory: Path, tokenizer: object, weights: Path | None = None) -> "SmallFiles":
        """weights: the directory that they are read from."""
        (found, left), texts, room = list_files(directory, links=True), dict[str, bytes](), LIMIT_BYTES
        for name, path in found.items():
            try:
                texts[name] = read_small(path, room)
                room -= len(texts[name])
            except OSError as error:
                left.append(f"{name} ({error.strerror})")
        texts |= {BASE_CARD: texts.pop(CARD)} if CARD in texts else {}
        files = [] if weights is None else weight_files(weights)
        if (packed := [file for file in files if file.endswith(".gguf")]) and CONFIG in texts:
            texts[CONFIG] = edited(texts[CONFIG].decode(), ["_name_or_path"], listed(packed)).encode()
        return cls(texts, left, None if tokenizer is None else facts(tokenizer))


def facts(tokenizer: Any) -> Json:
    """What a run may change of a tokenizer."""
    return {name: setting(tokenizer, name) for name in FACTS} | {"": len(tokenizer)}


def written(
    published: SmallFiles | None, module: Any, dtype: torch.dtype, tokenizer: Any, known: Any
) -> tuple[dict[str, bytes], list[str]]:
    """Everything but the weights of a module that is saved in this dtype, relative name -> content; and lines that say
    what was edited and what was left out. known: the tokenizer that was read when the module was loaded."""
    if published is None or CONFIG not in published.texts:
        return by_transformers(module, tokenizer), []
    texts, told = dict(published.texts), dict[str, list[str]]()
    of_tokenizer = () if tokenizer is None else _edits_of_tokenizer(published, tokenizer, known)
    for name, path, value in (*_edits_of_config(published.texts, module), *of_tokenizer):
        if path:
            before = texts.get(name, b"{}\n").decode()
            texts[name] = (after := edited(before, path, value)).encode()
            if after != before:
                told.setdefault(name, []).append(".".join(path))
        elif isinstance(value, bytes):
            texts[name], told[name] = value, ["anew"]
        else:
            del texts[name]
            told[name] = ["left out"]
    for path in _dtypes(json.loads(texts[CONFIG])):
        texts[CONFIG] = edited(texts[CONFIG].decode(), path, str(dtype).removeprefix("torch.")).encode()
    lines = {
        "edited beside the weights": [f"{name} ({', '.join(keys)})" for name, keys in told.items()],
        "left out beside the weights": published.left_out,
        "copied because config.json names it, not run": [name for name in texts if name.endswith(".py")],
    }
    return texts, [f"{what}: {listed(names)}" for what, names in lines.items() if names]


def _edits_of_config(texts: dict[str, bytes], module: Any) -> Iterator[Edit]:
    """Of config.json and generation_config.json."""
    config, stops = module.config, setting(module, "generation_config")
    said, known = json.loads(texts[CONFIG]), GENERATION in texts
    with tempfile.TemporaryDirectory() as place:
        for file in {CONFIG, GENERATION} & texts.keys():
            Path(place, file).write_bytes(texts[file])
        before = type(config).from_pretrained(place, local_files_only=True)
        if stops is not None:  # a classifier has none
            were = (
                read_generation_config(Path(place))
                if known
                else transformers.GenerationConfig.from_model_config(before)
            )
    if said.get("model_type", config.model_type) != config.model_type:  # the text part of it alone was trained
        yield CONFIG, (), by_transformers(module, None)[CONFIG]
    else:
        inside = {key for key in config.sub_configs if isinstance(said.get(key), dict)}
        yield from ((CONFIG, *change) for change in _changes(_json_of(before), _json_of(config), inside))
    if "quantization_config" in said and setting(config, "quantization_config") is None:
        yield from ((name, (), None) for name in texts if fnmatch(name, "*quant*_config.json"))
    changed = {} if stops is None else dict(_changes(_json_of(were), _json_of(stops)))
    if known or {key for (key,) in changed} <= {*TOKENS}:
        yield from ((GENERATION if known else CONFIG, path, value) for path, value in changed.items())
    else:
        yield GENERATION, (), stops.to_json_string().encode()


def _dtypes(config: Json) -> Iterator[tuple[str, ...]]:
    """Where it names a dtype, under either name, at any depth."""
    yield from ((key,) for key in ("dtype", "torch_dtype") if isinstance(config.get(key), str))
    yield from ((key, *path) for key, part in config.items() if isinstance(part, dict) for path in _dtypes(part))


def _json_of(config: Any) -> Json:
    config = copy.deepcopy(config)
    if isinstance(config, transformers.GenerationConfig):
        make_writable(config)
    return json.loads(config.to_json_string(use_diff=False))


def _changes(
    before: Json, now: Json, inside: Collection[str] = (), path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], object]]:
    """What differs, with the value of now. inside: keys whose objects are compared key by key. A token that is unset
    now was not changed by training."""
    for key in sorted((before.keys() | now.keys()) - NOT_COMPARED):
        old, new = before.get(key, ABSENT), now.get(key, ABSENT)
        if isinstance(old, dict) and isinstance(new, dict) and key in inside:
            yield from _changes(old, new, (), (*path, key))
        elif old != new and not (new is None and key in TOKENS):
            yield (*path, key), new


def _edits_of_tokenizer(published: SmallFiles, tokenizer: Any, known: Any) -> Iterator[Edit]:
    """Of the tokenizer's files; all of them anew, if the vocabulary is another one, or not all were copied."""
    texts, before = published.texts, published.tokenizer or {}
    changed = {key: value for key, value in facts(tokenizer).items() if value != before.get(key)}
    other = bool(before) and tokenizer is not known and tokenizer.get_vocab() != known.get_vocab()
    left = (why.partition(" (")[0] for why in published.left_out if OBJECTS[0] not in texts)
    absent = any(fnmatch(name, each) for name in left for each in OF_TOKENIZER)
    template = changed.get("chat_template", "")
    if not before or absent or other or "" in changed or not isinstance(template, str):
        yield from ((name, (), None) for name in texts if any(fnmatch(name, each) for each in OF_TOKENIZER))
        yield from ((name, (), content) for name, content in by_transformers(None, tokenizer).items())
        return
    if template:
        yield TEMPLATE, (), template.encode()
        if "chat_template" not in json.loads(texts.get(TOKENIZER, b"{}")):  # where it is, some programs read it first
            del changed["chat_template"]
    for key, value in changed.items():
        yield TOKENIZER, (key,), value
        if key in SPECIAL and SPECIAL_TOKENS in texts:
            yield SPECIAL_TOKENS, (key,), value


def by_transformers(module: Any, tokenizer: Any) -> dict[str, bytes]:
    """The files that Transformers writes for a module, a tokenizer or both, without weights."""
    with tempfile.TemporaryDirectory() as place, progress_bars().held(False):
        path = Path(place)
        if module is not None:
            make_writable(setting(module, "generation_config"))
            module.save_pretrained(path, state_dict={"nothing": torch.zeros(1)})
            (path / "model.safetensors").unlink()
        if tokenizer is not None:
            tokenizer.save_pretrained(path)
        return {file.relative_to(path).as_posix(): file.read_bytes() for file in path.rglob("*") if file.is_file()}
