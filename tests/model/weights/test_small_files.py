"""What lies beside the weights comes back as it was published; what training changed is edited in the text."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

import keyhole
from keyhole.checkpoint.select import checkpoints
from keyhole.cli import main
from keyhole.errors import UserError
from keyhole.hub.push import files_of
from keyhole.model.weights import small_files
from tests.disk.published import write_gguf, write_ints
from tests.hf.runs import trainer
from tests.model.weights.layouts import TURN, write_layout

KEPT = ["LICENSE", "README.md", "preprocessor_config.json", "tokenizer.model", "vocab.txt", "modules.json", "notes.py"]
KEPT += ["1_Pooling/config.json", "1_Pooling/model.safetensors", "additional_chat_templates/rag.jinja"]
LEFT = [".env", "training_args.bin", "tf_model.h5", "other.py", "1_Pooling/pytorch_model.bin", "link.txt", "large.json"]


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_layout("llama", tmp_path_factory.mktemp("layout") / "llama")


@pytest.fixture
def source(llama: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(llama, tmp_path / "source"))


def texts(path: Path) -> dict[str, bytes]:
    """All files but the weights and what a run adds."""
    found = {f.relative_to(path).as_posix(): f.read_bytes() for f in sorted(path.rglob("*")) if f.is_file()}
    run = ("model.", "run/", "checkpoint-", "keyhole_state", "optimizer.safetensors", "training_args.bin")
    return {name: content for name, content in found.items() if not name.startswith(run)}


def edits(before: Path, after: Path) -> dict[str, Any]:
    """Files of another content: in JSON the keys that differ, elsewhere the text; None for what is gone."""
    was, now = texts(before), texts(after)
    found: dict[str, Any] = {name: None for name in was.keys() - now.keys()}
    for name in (name for name in now if now[name] != was.get(name)):
        if name.endswith(".json") and name in was:
            a, b = json.loads(was[name]), json.loads(now[name])
            found[name] = {key: b.get(key) for key in a.keys() | b.keys() if a.get(key) != b.get(key)}
        else:
            found[name] = now[name].decode()
    return found


def test_all_other_small_files_come_back_and_are_what_a_push_sends(source: Path, tmp_path: Path) -> None:
    """No weights, pickles, links, folders of the user or code that nobody names, and a line tells. A source that is
    gone by the end is no loss."""
    about = json.loads((source / "config.json").read_text()) | {"auto_map": {"AutoConfig": "me/other--notes.Config"}}
    for name in (*KEPT, *LEFT[:-2], "data/rows.jsonl"):
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).write_text(f"this is {name}")
    (source / "config.json").write_text(json.dumps(about))
    (source / "modules.json").write_text(json.dumps([{"path": ""}, {"path": "1_Pooling"}, {"path": "../up"}]))
    (tmp_path / "secret").write_text("secret")
    (source / "link.txt").symlink_to(tmp_path / "secret")
    (source / "large.json").write_bytes(bytes(small_files.MOST_BYTES + 1))
    published = {name: text for name, text in texts(source).items() if name not in (*LEFT, "data/rows.jsonl")}
    model = keyhole.load(source, device="cpu")
    shutil.rmtree(source)
    with pytest.warns(UserWarning) as told:
        model.save_pretrained(out := tmp_path / "out")
    left, code = (next(str(w.message) for w in told if start in str(w.message)) for start in ("left out", "not run"))
    assert all(f"{name} (" in left for name in (*LEFT, "data")) and "notes.py" in code
    published["README.base.md"] = published.pop("README.md")
    assert texts(out) == published
    (out / "training_args.bin").write_bytes(b"")
    (out / "theirs").symlink_to(tmp_path / "secret")
    files, (said,) = files_of(out)
    assert files.keys() == published.keys() | {"model.safetensors"} and "theirs (a link)" in said
    for name in ("config.json", "model.safetensors"):
        (out / name).rename(tmp_path / name)
        (out / name).symlink_to(tmp_path / name)
        with pytest.raises(UserError, match=f"{name} is a link, and none is followed"):
            files_of(out)
        (tmp_path / name).replace(out / name)


def test_a_snapshot_from_the_hub_is_made_of_links_into_its_blobs(llama: Path, tmp_path: Path) -> None:
    snapshot = tmp_path / "models--a--b" / "snapshots" / "1"
    blobs = Path(shutil.copytree(llama, tmp_path / "models--a--b" / "blobs"))
    snapshot.mkdir(parents=True)
    for file in blobs.iterdir():
        (snapshot / file.name).symlink_to(Path("..", "..", "blobs", file.name))
    keyhole.load(snapshot, device="cpu").save_pretrained(tmp_path / "out")
    assert texts(tmp_path / "out") == texts(llama)


def test_what_a_run_sets_is_edited_by_key(source: Path, tmp_path: Path, capsys: Any) -> None:
    """An end token that generation did not know, a template of its own: in checkpoints as in the output, and the start
    block says so. What is made of these keeps them."""
    text = (source / "generation_config.json").read_text()
    (source / "generation_config.json").write_text(json.dumps(json.loads(text) | {"eos_token_id": 0}, indent=4))
    turns = [{"role": "user", "content": "2 + 3"}, {"role": "assistant", "content": "5"}]
    (rows := tmp_path / "chats.jsonl").write_text(json.dumps({"messages": turns}) + "\n")
    template, out = "{% for m in messages %}{{ m['content'] + '</s>' }}{% endfor %}", tmp_path / "out"
    words = [f"model={source}", f"train_data={rows}", "method=lomo", "device=cpu", "dtype=bfloat16", "batch_size=1"]
    words += ["max_steps=1", "save_steps=1", f"chat_template={template}", f"output_dir={out}"]
    assert main(["train", *words]) == 0
    assert "edited beside the weights: generation_config.json (eos_token_id)" in capsys.readouterr().out
    expected = {"chat_template.jinja": template, "tokenizer_config.json": {"chat_template": template}}
    for place in (out, checkpoints(out)[0]):
        assert edits(source, place) == expected | {"generation_config.json": {"eos_token_id": [0, 1]}}
    keyhole.load(out, device="cpu").save_pretrained(tmp_path / "again")
    assert edits(out, tmp_path / "again") == {}


def test_what_a_caller_changes_is_edited_by_key(source: Path, tmp_path: Path) -> None:
    """A head with its labels; end tokens, in the config if there is no other file; and nothing of an earlier save."""
    labels = {"id2label": {str(i): f"LABEL_{i}" for i in range(3)}, "label2id": {f"LABEL_{i}": i for i in range(3)}}
    keyhole.load(source, device="cpu", head="classification", num_labels=3).save_pretrained(tmp_path / "head")
    named = {"architectures": ["LlamaForSequenceClassification"]}
    assert edits(source, tmp_path / "head") == {"config.json": named | labels}
    keyhole.load(source, device="cpu").save_pretrained(out := tmp_path / "out")
    (source / "generation_config.json").unlink()
    model = keyhole.load(source, device="cpu")
    model.save_pretrained(out)
    assert edits(source, out) == {}
    model.module.generation_config.eos_token_id = [1, 3, 9]
    model.save_pretrained(out)
    assert edits(source, out) == {"config.json": {"eos_token_id": [1, 3, 9]}}
    model.tokenizer.save_pretrained(tmp_path / "theirs")  # nothing of the call that read it is published
    assert "local_files_only" not in (tmp_path / "theirs" / "tokenizer_config.json").read_text()


def test_the_dtype_is_edited_by_key_however_it_is_written(llama: Path, tmp_path: Path) -> None:
    """Also with an escape, twice, or in a config within; the text of another key is not touched."""
    shutil.copytree(llama, tmp_path / "model")
    path, out = tmp_path / "model" / "config.json", tmp_path / "out" / "config.json"
    about = {key: value for key, value in json.loads(path.read_text()).items() if "dtype" not in key}
    text = json.dumps(about | {"inner": {"dtype": "float32"}, "note": '"dtype": "float32"'}, indent=2)[:-2]
    path.write_text(text + ',\n  "torch_dtype": "float16",\n  "torch\\u005fdtype": "float32"\n}')
    keyhole.load(tmp_path / "model", device="cpu", dtype="bfloat16").save_pretrained(out.parent)
    changed = [(a, b) for a, b in zip(path.read_text().split("\n"), out.read_text().split("\n"), strict=True) if a != b]
    assert changed == [(line, line.replace("float32", "bfloat16")) for line, _ in changed]
    assert [line.split(":")[0].strip() for line, _ in changed] == ['"dtype"', '"torch\\u005fdtype"']


def test_a_trainer_writes_what_was_changed_of_its_tokenizer(source: Path, tmp_path: Path) -> None:
    """By key; anew, if it has other tokens."""
    made, tokenizer = trainer(source, tmp_path / "run", [], max_steps=1), AutoTokenizer.from_pretrained(source)
    made.processing_class, tokenizer.pad_token, tokenizer.chat_template = tokenizer, TURN, "{{ messages }}"
    made.save_model(str(tmp_path / "out"))
    keys = {"special_tokens_map.json": {"pad_token": TURN}, "chat_template.jinja": "{{ messages }}"}
    said = {"pad_token": TURN, "chat_template": "{{ messages }}"}
    assert edits(source, tmp_path / "out") == keys | {"tokenizer_config.json": said}
    tokenizer.add_tokens(["<new>"])
    made.save_model(str(tmp_path / "anew"))
    assert {"tokenizer.json", "tokenizer_config.json"} <= edits(source, tmp_path / "anew").keys()
    assert len(AutoTokenizer.from_pretrained(tmp_path / "anew")) == len(tokenizer)


def test_weights_that_were_unpacked_are_said_to_be_plain(tiny_model: Path, tmp_path: Path) -> None:
    """The config forgets the quantization, with the file that repeats it, or names the GGUF file."""
    write_gguf(tiny_model, tmp_path / "gguf")
    write_ints(tiny_model, tmp_path / "gptq", "gptq", True)
    (tmp_path / "gptq" / "quantize_config.json").write_text("{}")
    gone = {"config.json": {"quantization_config": None}, "quantize_config.json": None}
    for kind, expected in (("gguf", {"config.json": {"_name_or_path": "model.gguf"}}), ("gptq", gone)):
        keyhole.load(tmp_path / kind, device="cpu", dtype="float32").save_pretrained(tmp_path / f"{kind}-out")
        assert edits(tmp_path / kind, tmp_path / f"{kind}-out") == expected
