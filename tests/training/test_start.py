"""What can be refused without the model is refused before torch is imported: import, not time, is what is tested."""

import fcntl
import json
import subprocess
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from keyhole.assets import MODEL, TRAIN
from keyhole.checkpoint.state import FORMAT, dump
from tests.training.test_rundir import contents

HEAVY = ("torch", "transformers", "numpy", "safetensors", "urllib.request")
PROGRAM = """
import contextlib, io, json, sys
from keyhole.cli import main
told = []
for words in json.load(sys.stdin):
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
        code = main(words)
    told.append([code, said.getvalue(), [name for name in %r if name in sys.modules]])
json.dump(told, sys.stdout)
"""


def commands(*words: list[str]) -> list[tuple[int, str, list[str]]]:
    """(exit code, what was printed, heavy modules imported so far) of each command, one after the other."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM % (HEAVY,)], input=json.dumps(words), capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return [tuple(row) for row in json.loads(done.stdout)]


def crc(path: Path) -> dict[str, object]:
    return {"bytes": path.stat().st_size, "crc32": f"{zlib.crc32(path.read_bytes()):08x}"}


def run_of(root: Path, **config: object) -> Path:
    """A directory with a checkpoint of a run, as far as it is looked at before torch is imported."""
    checkpoint = root / "checkpoint-3"
    checkpoint.mkdir(parents=True)
    (root / "run").mkdir()
    (root / "run" / "keyhole.json").write_text(json.dumps({"format": 1, "keyhole": "0.2.0", "run": "a"}))
    (checkpoint / "config.json").write_text("{}")
    (checkpoint / "model.safetensors").write_bytes(b"weights")
    loader = {"epoch": 0, "offset": 3, "rows": 9, "fingerprint": "0", "seed": 0, "shuffle": True}
    files = {name: crc(checkpoint / name) for name in ("config.json", "model.safetensors")}
    about = {"step": 3, "loader": loader, "method": {}, "config": config, "versions": {}, "files": files}
    (checkpoint / "keyhole_state.json").write_text(dump(about | {"format": FORMAT, "run": "a"}))
    return root


@pytest.fixture
def held(tmp_path: Path) -> Iterator[Path]:
    """An output_dir that another process (this one) trains into."""
    (tmp_path / "held" / "run").mkdir(parents=True)
    with open(tmp_path / "held" / "run" / "lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield tmp_path / "held"


def test_refusals_come_before_torch(tmp_path: Path, held: Path) -> None:
    """Each mistake is named, with exit code 2, while neither torch nor transformers nor numpy has been imported."""
    (tmp_path / "bad.yaml").write_text("model: demo\nmethod: zo\nlerning_rate: 1\n")
    (tmp_path / "others").mkdir()
    (tmp_path / "others" / "thesis.txt").write_text("mine")
    (tmp_path / "tasks").mkdir()
    (tmp_path / "bare").mkdir()
    (tmp_path / "journal").write_bytes(b"")
    (tmp_path / "bare" / "config.json").write_text("{}")
    asked = {"model": str(MODEL), "method": "zo", "train_data": str(TRAIN), "output_dir": str(tmp_path / "used")}
    run_of(tmp_path / "used", **asked, max_steps=3, batch_size=4)
    (tmp_path / "good.yaml").write_text(
        f"model: demo\nmethod: zo\ntrain_data: demo\nmax_steps: 3\noutput_dir: {tmp_path / 'out'}\n"
    )
    (tmp_path / "empty.tsv").write_text("sentence\tlabel\n")
    (tmp_path / "words.jsonl").write_text("\nhello\n")
    (tmp_path / "table.csv").write_text("sentence,label\ngood,1\n")
    (tmp_path / "numbers.jsonl").write_text('{"text": 3}\n')
    (tmp_path / "squad").mkdir()
    for split in ("train", "dev"):
        (tmp_path / "squad" / f"{split}.json").write_text('{"data": []}')
    squad = ["train_data=null", "task=squad", f"task_data={tmp_path}"]
    run = ["train", str(tmp_path / "good.yaml")]
    cases = {
        "unknown key": (["train", str(tmp_path / "bad.yaml")], "lerning_rate"),
        "value": ([*run, "batch_size=0"], "batch_size"),
        "no config": (["train", str(tmp_path / "absent.yaml")], "absent.yaml"),
        "no model": ([*run, f"model={tmp_path}/absent"], "model: "),
        "no model in it": ([*run, f"model={tmp_path}/tasks"], "has no config.json"),
        "no weights in it": ([*run, f"model={tmp_path}/bare"], "has no weights"),
        "no data": ([*run, f"train_data={tmp_path}/absent.jsonl"], "absent.jsonl: no such file"),
        "no data, of several": ([*run, f"train_data=[demo, {tmp_path}/absent.jsonl]"], "absent.jsonl: no such file"),
        "no eval data": ([*run, f"eval_data={tmp_path}/*.parquet"], "no file matches"),
        "no rows": ([*run, f"train_data={tmp_path}/empty.tsv"], "empty.tsv: the file holds no rows"),
        "no JSON": ([*run, f"train_data={tmp_path}/words.jsonl"], "words.jsonl, line 2: not valid JSON"),
        "other columns": ([*run, f"eval_data={tmp_path}/table.csv"], "cannot tell the data format from the columns"),
        "no such column": (
            [*run, f"train_data={tmp_path}/table.csv", "columns={text: sentnce}"],
            "the data have no column sentnce; found: sentence, label",
        ),
        "no such column in a prompt": (
            [*run, f"train_data={tmp_path}/table.csv", "prompt={sentense}", "completion={label}"],
            "did you mean {sentence}?",
        ),
        "no text": ([*run, f"train_data={tmp_path}/numbers.jsonl"], "numbers.jsonl, line 1"),
        "no template": ([*run, f"chat_template={tmp_path}/absent.jinja"], "chat_template"),
        "no such task": ([*run, "train_data=null", "task=sst22"], "sst2"),
        "no task data": ([*run, "train_data=null", "task=sst2", f"task_data={tmp_path}/tasks"], "task_data"),
        "strangers": ([*run, f"output_dir={tmp_path}/others"], "thesis.txt"),
        "a run of before": ([*run, f"output_dir={tmp_path}/used"], "--resume"),
        "in use": ([*run, f"output_dir={held}"], "is training into"),
        "no checkpoint": ([*run, "--resume", f"{tmp_path}/absent"], "--resume"),
        "other settings": ([*run, f"output_dir={tmp_path}/used", "--resume"], "batch_size: the run has 4"),
        "keyhole data": (["data", *run[1:], f"train_data={tmp_path}/absent.jsonl"], "absent.jsonl: no such file"),
        "loss of a choice": ([*run, *squad, "loss=candidates"], "loss: candidates needs a choice"),
        "no place for files": ([*run, "output_dir=/proc/x"], "output_dir: '/proc/x' is not possible"),
        "plan --gpu": (["plan", "demo", "--gpu", "8"], "--gpu: '8' is not a size"),
        "plan --ram": (["plan", "demo", "--ram", "x"], "--ram: 'x' is not a size"),
        "plan --link": (["plan", "demo", "--link", "0GB/s"], "--link: '0GB/s' is no rate"),
        "plan --tokens": (["plan", "demo", "--tokens", "4by3"], "--tokens: found '4by3'"),
        "plan --machine": (["plan", "demo", "--machine", "cray"], "--machine: 'cray' is not one of"),
        "plan key": (["plan", "demo", "lerning_rate=1"], "lerning_rate"),
        "plan no model": (["plan", f"{tmp_path}/absent"], "model: "),
        "eval no task": (["eval", "demo", "--tasks", "sst22"], "--tasks: no task `sst22`"),
        "eval no data": (["eval", "demo", "--tasks", "sst2", "--task-data", f"{tmp_path}/others"], "task_data: "),
        "replay no journal": (["replay", "demo", f"{tmp_path}/absent", f"{tmp_path}/x"], "JOURNAL: "),
        "replay onto a model": (["replay", "demo", f"{tmp_path}/journal", f"{tmp_path}/others"], "OUT: "),
        "no such config": (["train", "no-such.yaml"], "no such config file"),
        "setting as an option": (["train", "demo-zo", "--seed", "3"], "write seed=3"),
        "no run": (["report", "no-such-run"], "no run is here"),
        "size": (["eval", "out", "--tasks", "a", "gpu_memory=8"], "such as 8GiB"),
        "eval no model": (["eval", "/no/such/model", "--tasks", "a"], "/no/such/model is not a directory here"),
        "path from here": (["train", "demo-zo", "model=./mistyped"], "./mistyped is not a directory here"),
        "path from home": (["data", "demo-zo", "model=~/mistyped"], "mistyped is not a directory here"),
        "dry run": ([*run, "--dry-run", f"train_data={tmp_path}/absent.jsonl"], "absent.jsonl: no such file"),
    }
    before = contents(tmp_path).keys() | {"used/run/lock"}
    told = dict(zip(cases, commands(*(words for words, _ in cases.values())), strict=True))
    assert contents(tmp_path).keys() == before, "something was written"
    for name, (code, said, heavy) in told.items():
        assert code == 2 and cases[name][1] in said, (name, said)
        assert heavy == [] and "Traceback" not in said, (name, said)
        assert len(said.splitlines()) < (12 if name != "other settings" else 50), name


def test_help_and_recipes_need_no_torch() -> None:
    """`--help`, of every verb too, the list of recipes and a recipe are printed without torch."""
    verbs = ("train", "plan", "data", "eval", "chat", "compare", "replay", "bench", "config", "demo", "env")
    asked = [["--help"], ["--version"], ["config", "ls"], ["config", "show"], ["config", "show", "demo-zo"]]
    told = commands(*asked, ["compare"], *([verb, "--help"] for verb in verbs))
    assert [code for code, _, _ in told] == [0] * len(told)
    assert told[-1][2] == []
