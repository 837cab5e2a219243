"""keyhole eval and keyhole chat: what reaches the library."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from keyhole.cli import main


@pytest.fixture
def calls(monkeypatch: Any) -> list[Any]:
    """Records what evaluate and chat are called with; the files that are named need not exist."""
    seen: list[Any] = []

    def record(*args: Any, **options: Any) -> str:
        seen.append((args, options))
        return "| the table |"

    monkeypatch.setitem(sys.modules, "keyhole.eval.evaluate", SimpleNamespace(evaluate=record))
    monkeypatch.setitem(sys.modules, "keyhole.eval.asked", SimpleNamespace(asked_names=lambda *asked: []))
    monkeypatch.setitem(sys.modules, "keyhole.eval.conversation", SimpleNamespace(chat=record))
    return seen


def test_eval_passes_files_and_settings(calls: list[Any], capsys: Any) -> None:
    """All files, typed settings and options arrive, and the table is printed."""
    words = ["eval", "some/out", "--tasks", "a.jsonl", "b=c.jsonl", "gpu_memory=8GiB", "max_length=99"]
    assert main([*words, "--limit", "7", "--json", "r.json"]) == 0
    assert capsys.readouterr().out == "| the table |\n"
    (args, options) = calls[0]
    assert args == ("some/out", ["a.jsonl", "b=c.jsonl"])
    assert options == {"limit": 7, "json_path": "r.json", "gpu_memory": 8 * 2**30, "max_length": 99}


def test_eval_passes_tasks_by_name(calls: list[Any]) -> None:
    """Names, their directory, how many questions, and the permission to run programs."""
    words = ["eval", "some/out", "--tasks", "sst2,rte", "--task-data", "data", "--allow-code-execution"]
    assert main([*words, "num_eval=50", "task_splits={test: 'val[:9]'}"]) == 0
    (args, options) = calls[0]
    assert args == ("some/out", ["sst2,rte"])
    assert options.pop("allow_code_execution") is True and options.pop("num_eval") == 50
    assert options.pop("task_data") == "data" and options.pop("task_splits") == {"test": "val[:9]"}


def test_chat_passes_settings(calls: list[Any]) -> None:
    assert main(["chat", "some/out", "placement=stream", "--system", "be brief"]) == 0
    assert main(["chat", "some/out", "--plain", "--max-new-tokens", "3"]) == 0
    chatted = {"system": "be brief", "max_new_tokens": None, "plain": False, "placement": "stream"}
    assert calls[0] == (("some/out",), chatted)
    assert calls[1] == (("some/out",), {"system": None, "max_new_tokens": 3, "plain": True})


BAD = [
    (["eval", "out"], "--tasks"),
    (["eval", "out", "--tasks", "a", "--harness", "b"], "give one of them"),
    (["eval", "out", "--tasks", ""], "give one of them"),
    (["eval", "out", "--tasks", "a", "--num-fewshot", "3"], "--num-fewshot: not used with --tasks"),
    (["eval", "demo", "--harness", "b", "--task-data", "x"], "--task-data: not used with --harness"),
    (["eval", "out", "--tasks", "a", "seed=3"], "seed: not used here; this command takes device, dtype"),
    (["eval", "out", "--tasks", "a", "gpu_memory=8"], "such as 8GiB"),
    (["eval", "out", "--gpu-memory", "8GiB", "--tasks", "a"], "write gpu_memory=8GiB"),
    (["chat", "out", "plcement=stream"], "did you mean `placement`?"),
    (["chat", "out", "hello"], "write key=value"),
    (["chat"], "DIR"),
]


@pytest.mark.parametrize(("args", "says"), BAD)
def test_mistakes_are_exit_2(args: list[str], says: str, calls: list[Any], capsys: Any) -> None:
    """A missing file list, a setting that is not used, a bad value or style: told, and nothing is loaded."""
    assert main(args) == 2
    message = capsys.readouterr().err
    assert says in message and "Traceback" not in message and not calls


def test_without_the_harness_the_command_to_install_it_is_told(monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["eval", "demo", "--harness", "hellaswag"]) == 2
    assert "pip install lm_eval" in capsys.readouterr().err
