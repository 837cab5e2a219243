"""Writing a model as an ordinary Hugging Face directory, atomically.

The files are written into a directory beside the target, flushed to disk, and moved into place at the end, file by
file when the target exists already (it may hold other things, such as run/). A crash leaves the old model.
"""

import os
import shutil
from pathlib import Path
from typing import Any

import torch

from keyhole.model.skeleton import saved_buffers

SHARD_SIZE = "2GB"  # also the extra host memory a save needs


def save_model(model: Any, path: Path) -> None:
    """model is a keyhole Model; its weights are at their homes (methods flush before they save)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.parent / f".{path.name}.saving-{os.getpid()}"
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        write_files(model, temporary)
        move_into_place(temporary, path)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def write_files(model: Any, path: Path) -> None:
    """The files themselves: weights, config, generation config, tokenizer."""
    tensors = dict(model.named_tensors()) | saved_buffers(model.module)
    with torch.no_grad():
        model.module.save_pretrained(path, state_dict=tensors, max_shard_size=SHARD_SIZE)
    if model.tokenizer is not None:
        model.tokenizer.save_pretrained(path)
    for file in path.iterdir():
        flush(file)
    flush(path)


def flush(path: Path) -> None:
    """Makes the file or directory durable."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def move_into_place(temporary: Path, path: Path) -> None:
    """One rename where nothing stands yet; otherwise one rename a file, stale weight shards removed last."""
    if not path.exists():
        os.replace(temporary, path)
        flush(path.parent)
        return
    names = {file.name for file in temporary.iterdir()}
    for name in sorted(names):
        os.replace(temporary / name, path / name)
    for old in path.glob("model*.safetensors*"):
        if old.name not in names:
            old.unlink()
    flush(path)
