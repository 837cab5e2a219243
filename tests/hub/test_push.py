"""Models out to the hub, against a server on this machine: what arrives, with which card, and what is refused when."""

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from huggingface_hub import constants

from keyhole.checkpoint.state import State
from keyhole.checkpoint.writer import write_state
from keyhole.cli import main
from keyhole.errors import UserError
from keyhole.hub import push as pushing
from keyhole.hub.card import card
from keyhole.hub.push import files_of, push
from keyhole.model.structure import source
from tests.hub.server import TOKEN, Hub, hub_here


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """The hub of this process, with a token that it knows."""
    with hub_here() as found:
        monkeypatch.setattr(constants, "ENDPOINT", found.url)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr("huggingface_hub._commit_api.is_xet_available", lambda: False, raising=False)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        monkeypatch.setenv("NO_PROXY", "*")
        source.hub_answers.cache_clear()
        yield found
        source.hub_answers.cache_clear()


def write_run(directory: Path, **settings: Any) -> Path:
    """What a run leaves beside its model, as far as a card reads it."""
    config = {"model": "owner/base", "method": "lomo", "train_data": "/home/me/secret-folder/train.jsonl"}
    config |= {"batch_size": 4, "gradient_accumulation_steps": 2, "learning_rate": 0.01, "lr_scheduler_type": "linear"}
    config |= {"train_on": "answers", "loss": "tokens", "max_steps": 30, "seed": 0, "rounding": "nearest"}
    config |= {"output_dir": "/home/me/out"}
    run = directory / "run"
    run.mkdir(exist_ok=True)
    (run / "config.yaml").write_text(yaml.safe_dump(config | settings))
    steps = [{"step": i, "loss": 3.0 - i / 20, "tokens_per_second": 100.0 + i, "gpu_gib": 2.5} for i in range(1, 31)]
    steps += [{"step": 30, "eval_loss": 1.25, "perplexity": 3.49, "eval_accuracy": 0.75, "eval_tokens": 9}]
    steps += [{"step": 30, "test_accuracy": 0.875, "test_questions": 8}]
    (run / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps) + '{"step": 31, "lo')
    (run / "env.json").write_text(
        json.dumps({"versions": {"keyhole": "9.9", "torch": "2.13"}, "gpus": [{"name": "H"}]})
    )
    return directory


@pytest.fixture
def trained(tiny_model: Path, tmp_path: Path) -> Path:
    return write_run(Path(shutil.copytree(tiny_model, tmp_path / "out")))


def test_a_card_states_method_data_settings_figures_and_versions(trained: Path) -> None:
    text = card(trained, "me/tuned")
    assert "`train.jsonl`" in text and "loss over: answers" in text and "secret-folder" not in text
    splits = {"train": "/home/me/secret-folder/a.jsonl+~/secret-folder/b.jsonl", "sst2.test": "secret-folder/v[:50%]"}
    text = card(write_run(trained, task="sst2", train_data=None, task_splits=splits), "me/tuned")
    assert "train: a.jsonl+b.jsonl" in text and "sst2.test: v[:50%]" in text and "secret-folder" not in text
    _, head, body = text.split("---\n", 2)
    found = yaml.safe_load(head)
    assert found["base_model"] == "owner/base" and found["tags"] == ["keyhole", "lomo"]
    assert found["library_name"] == "transformers" and found["pipeline_tag"] == "text-generation"
    result = found["model-index"][0]["results"][0]
    assert result["dataset"]["name"] == "sst2" and result["metrics"] == [{"type": "accuracy", "value": 0.875}]
    for says in (
        "method: `lomo`, 30 steps of 8 rows",
        "2.9500 at the first step, 1.5500 over the last 3 that were logged",
        "loss over: tokens",
        "evaluation of step 30: loss 1.2500, perplexity 3.4900, accuracy 0.7500",
        "max_steps: 30",
        "rounding: nearest",
        "keyhole 9.9, torch 2.13; H",
        'from_pretrained("me/tuned")',
    ):
        assert says in body, says
    (trained / "config.json").write_text('{"architectures": ["BertForSequenceClassification"]}')
    text = card(trained, "me/tuned")
    assert "loss over: labels" in text and "pipeline_tag: text-classification" in text


def test_the_card_of_a_model_with_adapters_says_how_to_load_them(trained: Path) -> None:
    """A plain load leaves them out, silently."""
    assert "peft" not in card(trained, "me/tuned")
    (trained / "adapter").mkdir()
    (trained / "adapter" / "adapter_config.json").write_text("{}")
    text = card(trained, "me/tuned")
    assert "from peft import PeftModel" in text
    assert 'model = PeftModel.from_pretrained(model, "me/tuned", subfolder="adapter")' in text


def test_a_directory_without_weights_is_refused_by_a_dry_run_too(trained: Path) -> None:
    """A run that has not ended, and a light checkpoint, whose card would promise a model."""
    (trained / "model.safetensors").unlink()
    with pytest.raises(UserError, match=r"has no weights .*; has its run ended\?"):
        files_of(trained)
    (trained / "optimizer.safetensors").write_bytes(b"")
    with pytest.raises(UserError, match=r"holds only what was learned \(zo.fold=false\); push the output_dir"):
        files_of(trained)


def test_the_card_of_a_checkpoint_tells_of_its_own_steps(trained: Path) -> None:
    """Not of what came after it: other losses, a test of other weights, a loss that is not a number."""
    with (trained / "run" / "metrics.jsonl").open("w") as file:
        rows = [{"step": i, "loss": 3.0 if i < 20 else 9.0} for i in range(1, 30)] + [{"step": 30, "loss": None}]
        rows += [{"step": 10, "eval_loss": 1.5}, {"step": 20, "eval_loss": 7.5}]
        rows += [{"step": 29, "test_accuracy": 0.125, "test_questions": 8}]
        file.writelines(json.dumps(row) + "\n" for row in rows)
    text = card(Path(shutil.copytree(trained, trained / "checkpoint-19")), "me/tuned")
    for says in ("19 steps of 8 rows", "3.0000 over the last 1", "evaluation of step 10: loss 1.5000"):
        assert says in text
    assert "7.5" not in text and "0.125" not in text and "9.0" not in text
    whole = card(trained, "me/tuned")
    assert "30 steps of 8 rows" in whole and "test of step 29: accuracy 0.1250" in whole


@pytest.mark.parametrize("path", ["folder/train.jsonl.gz", "folder/train.tsv", "folder/*", "~/folder"])
def test_a_path_that_is_not_here_is_no_hub_id(trained: Path, path: str) -> None:
    """Of a file that was moved, or is looked for from elsewhere, only the name is told; of a task file, too."""
    text = card(write_run(trained, train_data=path), "me/tuned")
    assert "folder/" not in text and "datasets:" not in text
    text = card(write_run(trained, train_data=None, task="folder/mine.yaml"), "me/tuned")
    assert "folder/" not in text and "`mine.yaml`" in text


@pytest.mark.parametrize("name", ["run/config.yaml", "run/env.json", "run/metrics.jsonl", "config.json"])
@pytest.mark.parametrize("text", ["[1, 2]", "{", "a: [", "\x00", "", "7", "null", '"x"', "[" * 1000, None])
def test_files_that_make_no_card_are_told(trained: Path, name: str, text: str | None) -> None:
    (trained / name).unlink()
    (trained / name).mkdir() if text is None else (trained / name).write_text(text)
    with pytest.raises(UserError, match="README.md of your own") as caught:
        card(trained, "me/tuned")
    assert str(trained / name) in str(caught.value)
    assert not re.search(r"Error|object has no|object is not|NoneType|int\b", str(caught.value)), caught.value


def test_settings_of_a_wrong_type_make_no_card(trained: Path) -> None:
    for key, value in [("batch_size", [1, 2]), ("method", {"a": 1}), ("learning_rate", "much"), ("lomo", [1])]:
        with pytest.raises(UserError, match="README.md of your own") as caught:
            card(write_run(trained, **{key: value}), "me/tuned")
        assert str(trained / "run" / "config.yaml") in str(caught.value) and f"{key}: " in str(caught.value)


def test_odd_metrics_are_left_out_of_the_card(trained: Path) -> None:
    before = card(trained, "me/tuned")
    odd = ['{"step": "x", "loss": 1}', '{"step": 4, "loss": [1], "gpu_gib": "a"}', '{"step": true}', "7", "[]", "\0"]
    with (trained / "run" / "metrics.jsonl").open("a") as file:
        file.write("\n" + "\n".join(odd))
    assert card(trained, "me/tuned") == before


def test_damaged_weights_are_not_published(trained: Path) -> None:
    """Truncated ones, by their header; a flipped bit in a checkpoint, by its checksum. A dry run says so too."""
    weights = trained / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:-100])
    with pytest.raises(UserError, match=r"model.safetensors cannot be read, it may be damaged"):
        pushing.check(trained)
    weights.write_bytes(content)
    write_state(trained, State(3))
    pushing.check(trained)
    weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(UserError, match=r"is damaged: model.safetensors was changed"):
        push(trained, "me/tuned")
    assert main(["push", str(trained), "me/tuned", "--dry-run"]) == 2


def test_a_card_of_ones_own_that_is_no_text(trained: Path) -> None:
    (trained / "README.md").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match=r"README.md is no text .*; mend it, or delete it"):
        push(trained, "me/tuned")


def test_a_push_is_one_commit_with_model_and_card(hub: Hub, trained: Path) -> None:
    """Small files in the commit, large ones by themselves; what only a run can use stays here."""
    write_state(trained, State(30))
    (trained / "checkpoint-30").mkdir()
    (trained / "checkpoint-30" / "model.safetensors").write_bytes(b"x")
    assert push(trained, "me/tuned", private=True) == f"{hub.url}/me/tuned"
    repo = hub.repos["me/tuned"]
    assert repo.private and repo.commits == 1
    assert {"README.md", "config.json", "model.safetensors", "tokenizer.json"} <= set(repo.files)
    assert not any(name.startswith(("run", "checkpoint", "keyhole_state")) for name in repo.files)
    assert repo.files["model.safetensors"] == (trained / "model.safetensors").read_bytes()
    assert len(hub.large) >= 1 and b"base_model: owner/base" in repo.files["README.md"]


@pytest.mark.parametrize(
    ("base", "sent"), [("/home/me/secret", "me/tuned"), ("owner/base", "owner/base"), (None, None)]
)
def test_an_adapter_names_a_base_that_others_find(hub: Hub, trained: Path, base: str | None, sent: str | None) -> None:
    file = trained / "adapter" / "adapter_config.json"
    file.parent.mkdir()
    file.write_text(json.dumps({"base_model_name_or_path": base, "r": 8}))
    push(trained, "me/tuned")
    found = json.loads(hub.repos["me/tuned"].files["adapter/adapter_config.json"])
    assert found == {"base_model_name_or_path": sent, "r": 8}
    assert json.loads(file.read_text())["base_model_name_or_path"] == base


@pytest.mark.parametrize("text", ["{", "[1]", "\x00"])
def test_a_broken_adapter_is_no_fault_of_the_hub(hub: Hub, trained: Path, text: str) -> None:
    file = trained / "adapter" / "adapter_config.json"
    file.parent.mkdir()
    file.write_text(text)
    with pytest.raises(UserError, match="adapter_config.json is no JSON object"):
        push(trained, "me/tuned")
    assert "model.safetensors" not in hub.repos["me/tuned"].files


def test_a_second_push_replaces_weights_in_other_files(hub: Hub, trained: Path) -> None:
    """Shards of an earlier push do not stay beside the new ones; the user's own card is kept as it is."""
    push(trained, "me/tuned")
    hub.repos["me/tuned"].files |= {"model-00001-of-00002.safetensors": b"old", "notes.txt": b"mine"}
    (trained / "README.md").write_text("---\nlicense: mit\n---\nmy own words\n")
    push(trained, "me/tuned")
    files = hub.repos["me/tuned"].files
    assert "model-00001-of-00002.safetensors" not in files and files["notes.txt"] == b"mine"
    assert b"my own words" in files["README.md"]


def test_what_the_hub_refuses_is_told(hub: Hub, trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="someone-else/x: the hub refuses: your token may not write there"):
        push(trained, "someone-else/x")
    with pytest.raises(UserError, match="is no name of a model on the hub"):
        push(trained, "a/b/c")
    monkeypatch.setenv("HF_TOKEN", "hf_old")
    with pytest.raises(UserError, match="does not accept your token"):
        push(trained, "me/tuned")
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    with pytest.raises(UserError, match="no token for the hub; hf auth login"):
        push(trained, "me/tuned")
    assert hub.repos == {}


def train_and_push(model: Path, data: Path, out: Path, hub_id: str) -> int:
    """The exit code of two steps with push_to_hub."""
    words = [f"model={model}", "method=lomo", f"train_data={data}", f"output_dir={out}", "max_steps=2", "device=cpu"]
    return main(["train", *words, "push_to_hub=true", f"hub_model_id={hub_id}"])


def test_a_run_is_published_at_its_end(
    hub: Hub, tiny_model: Path, tiny_data: Path, tmp_path: Path, capsys: Any
) -> None:
    out = tmp_path / "mine"
    assert train_and_push(tiny_model, tiny_data, out, "me/mine") == 0
    assert f"pushed: {hub.url}/me/mine" in capsys.readouterr().out
    files = hub.repos["me/mine"].files
    assert files["model.safetensors"] == (out / "model.safetensors").read_bytes()
    assert b"method: `lomo`, 2 steps" in files["README.md"] and str(tmp_path).encode() not in files["README.md"]


def test_a_name_that_cannot_be_had_is_known_before_training(
    hub: Hub, tiny_model: Path, tiny_data: Path, tmp_path: Path, capsys: Any
) -> None:
    out = tmp_path / "mine"
    assert train_and_push(tiny_model, tiny_data, out, "someone-else/mine") == 2
    assert "your token may not write there" in capsys.readouterr().err and not out.exists()


def test_a_push_that_fails_at_the_end_says_how_to_do_it_later(
    hub: Hub, tiny_model: Path, tiny_data: Path, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:

    def fail(*args: Any, **options: Any) -> str:
        raise UserError("push: me/mine: the hub refuses: no room")

    monkeypatch.setattr(pushing, "push", fail)
    out = tmp_path / "mine"
    assert train_and_push(tiny_model, tiny_data, out, "me/mine") == 2
    assert f"keyhole push {out} me/mine" in capsys.readouterr().err and (out / "model.safetensors").exists()


def test_a_dry_run_of_push_asks_nobody(trained: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pushing, "prepare", lambda *args: pytest.fail("the hub was asked"))
    assert main(["push", str(trained), "me/tuned", "--dry-run"]) == 0
    found = capsys.readouterr()
    assert "base_model: owner/base" in found.out and "model.safetensors" in found.err
    assert main(["push", "no/such", "me/tuned", "--dry-run"]) == 2


def test_without_a_network_the_command_for_later_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("keyhole.hub.push.hub_answers", lambda: False)
    with pytest.raises(UserError, match="cannot be reached from here .*push later: keyhole push DIR me/model"):
        pushing.prepare("me/model", None)
