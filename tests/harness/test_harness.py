"""lm-evaluation-harness with its own `hf` model and with ours: five tasks, all kinds of requests, the same answers."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from keyhole import assets
from keyhole.cli import main
from tests.harness.tasks import TASKS, write_tasks

lm_eval = pytest.importorskip("lm_eval")


@pytest.fixture(scope="module", autouse=True)
def offline(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
            patch.setenv(name, "1")
        patch.setenv("HF_DATASETS_CACHE", str(tmp_path_factory.mktemp("datasets")))
        yield


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return write_tasks(tmp_path_factory.mktemp("tasks"))


def evaluated(model: str, tasks: list[str], **args: Any) -> dict[str, Any]:
    from lm_eval.tasks import TaskManager

    import keyhole.harness  # noqa: F401  registers the model

    args |= {"pretrained": str(assets.MODEL), "dtype": "float32"}
    manager = TaskManager(include_defaults=False)
    how = {"bootstrap_iters": 0, "device": "cpu", "task_manager": manager}
    return lm_eval.simple_evaluate(model, args, tasks=tasks, **how)


@pytest.fixture(scope="module")
def theirs(tasks: list[str]) -> dict[str, Any]:
    return evaluated("hf", tasks, batch_size=4)


@pytest.mark.parametrize("args", [{}, {"placement": "stream"}, {"placement": "stream", "batch_tokens": 64}])
def test_the_answers_are_those_of_the_model_hf(theirs: dict[str, Any], tasks: list[str], args: dict) -> None:
    """Equal accuracies and texts; every log-likelihood within rounding, and the same ones are greedy."""
    ours = evaluated("keyhole", tasks, **args)
    kinds = set()
    for task in TASKS:
        for theirs_one, ours_one in zip(theirs["samples"][task], ours["samples"][task], strict=True):
            assert theirs_one["arguments"] == ours_one["arguments"]
            for (expected,), (found,) in zip(theirs_one["resps"], ours_one["resps"], strict=True):
                kinds.add(type(expected))
                if isinstance(expected, str):
                    assert found == expected
                elif isinstance(expected, tuple):
                    assert found[0] == pytest.approx(expected[0], abs=1e-4) and found[1] == expected[1]
                else:
                    assert found == pytest.approx(expected, abs=2e-3)
        for metric, value in theirs["results"][task].items():
            if isinstance(value, float):
                assert ours["results"][task][metric] == pytest.approx(value, rel=1e-4 if "ppl" in metric else 1e-5)
    assert kinds == {str, tuple, float}
    for metric in ("acc,none", "acc_norm,none"):
        assert all(ours["results"][t][metric] == theirs["results"][t][metric] for t in ("letters", "phrases"))


def test_long_texts_are_cut_as_hf_cuts_them(tasks: list[str]) -> None:
    """A context beyond max_length loses its beginning; a long text is scored in windows."""
    some = [task for task in tasks if not task.endswith("written.yaml")]
    theirs, ours = (evaluated(model, some, max_length=24) for model in ("hf", "keyhole"))
    for task in ("last_word", "stream_of_text", "phrases"):
        for theirs_one, ours_one in zip(theirs["samples"][task], ours["samples"][task], strict=True):
            for (expected,), (found,) in zip(theirs_one["resps"], ours_one["resps"], strict=True):
                numbers = [x[0] if isinstance(x, tuple) else x for x in (found, expected)]
                assert numbers[0] == pytest.approx(numbers[1], abs=2e-3)


def test_the_command_prints_the_table_and_writes_the_results(tasks: list[str], tmp_path: Path, capsys: Any) -> None:
    """keyhole eval --harness with a file of a task, streamed."""
    out = tmp_path / "results.json"
    words = ["eval", "demo", "--harness", tasks[0], "--limit", "3", "--json", str(out)]
    assert main([*words, "placement=stream", "device=cpu"]) == 0
    assert "letters" in capsys.readouterr().out
    found = json.loads(out.read_text())
    assert "acc,none" in found["results"]["letters"] and len(found["samples"]["letters"]) == 3
    assert found["config"]["model"] == "keyhole"


def test_unknown_tasks_are_refused_before_the_model_is_loaded(capsys: Any) -> None:
    assert main(["eval", "demo", "--harness", "hellaswagg"]) == 2
    assert "did you mean hellaswag?" in capsys.readouterr().err


def test_what_the_model_cannot_be_asked_is_refused() -> None:
    from keyhole.errors import UserError
    from keyhole.harness.lm import KeyholeLM

    lm = KeyholeLM(str(assets.MODEL), device="cpu", dtype="float32")
    request = type("Request", (), {"args": ("The soup", {"max_gen_toks": 10**6})})()
    with pytest.raises(UserError, match="ask for fewer tokens"):
        lm.generate_until([request])


def test_an_empty_context_is_continued_from_the_first_token() -> None:
    """Alone, and beside others in a batch."""
    from keyhole.harness.lm import KeyholeLM

    lm = KeyholeLM(str(assets.MODEL), device="cpu", dtype="float32")
    empty, other = (
        type("Request", (), {"args": (text, {"until": ["\n"], "max_gen_toks": 4})})() for text in ("", "The soup")
    )
    assert lm.generate_until([empty]) == lm.generate_until([empty, other])[:1] != [""]
