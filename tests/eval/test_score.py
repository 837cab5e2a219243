"""One call for every task: chosen, generated, measured; and HumanEval against known solutions."""

import json
import math
from functools import partial
from pathlib import Path

import pytest
import torch

import keyhole
from keyhole.data.tasks.draw import Numbers, load_task
from keyhole.data.tasks.encode import Encoder
from keyhole.data.tasks.parse import read_spec
from keyhole.data.tasks.question import Question, Task
from keyhole.errors import UserError
from keyhole.eval.asked import asked_names
from keyhole.eval.evaluate import evaluate, table
from keyhole.eval.programs import run_program
from keyhole.eval.score import AnswerScore, DataScore, TaskScore, metric_of, score, verdicts
from tests.data.tasks.rows import CASES
from tests.model.decoders import hf_nll


def read(task: str, folder: Path, *rows: dict) -> Task:
    name, text = next(iter(CASES[task].files.items()))
    (folder / task).mkdir()
    (folder / task / name).write_text("".join(json.dumps(row) + "\n" for row in rows) or text)
    return load_task(task, str(folder), Numbers(), training=False)["test"]


@pytest.mark.parametrize(
    ("task", "kind"),
    [("sst2", TaskScore), ("stsb", TaskScore), ("cola", TaskScore), ("record", TaskScore), ("cb", TaskScore),
     ("squad", AnswerScore), ("drop", AnswerScore), ("gsm8k", AnswerScore), ("alpaca", DataScore)],
)  # fmt: skip
def test_every_kind_of_task_has_its_metrics(task: str, kind: type, tmp_path: Path, tiny_model: Path) -> None:
    """The result has the metrics that the task file names, the first as its value."""
    model = keyhole.load(tiny_model, device="cpu")
    found = score(model, read(task, tmp_path), max_length=200 if task == "gsm8k" else None)
    assert isinstance(found, kind) and tuple(found.metrics) == read_spec(task).metrics
    assert math.isfinite(found.value)
    assert task in table([found])


def test_perplexity_is_that_of_the_answers(tmp_path: Path, tiny_model: Path) -> None:
    """exp of the NLL of the answers' tokens, the end token among them, by Hugging Face alone."""
    model = keyhole.load(tiny_model, device="cpu")
    task = read("alpaca", tmp_path, {"instruction": "a", "output": "bc"}, {"instruction": "d", "output": "e"})
    rows = [rows[0] for rows in Encoder(model.tokenizer).encode(task.questions, end_token=True)]
    nll = sum(
        float(hf_nll(model.module, {"input_ids": torch.tensor([r.input_ids]), "labels": torch.tensor([r.labels])}))
        for r in rows
    )
    found = score(model, task)
    assert found.tokens == 3 + 2 and found.perplexity == pytest.approx(math.exp(nll / 5), rel=1e-5)


def test_any_right_candidate_counts() -> None:
    """ReCoRD: a second spelling of the answer is as right as the first."""
    questions = [Question("x", ("a", "b", "c"), 0, also=(2,))] * 3
    assert metric_of("accuracy", questions, [0, 2, 1]) == pytest.approx(2 / 3)


SOLUTIONS = [
    ("    return x\n", 1.0),
    ("    return x + 1\n", 0.0),
    ("    while True:\n        pass\n", 0.0),
    ("    import os\n    os._exit(0)\n", 0.0),
    ("    raise SystemExit\n", 0.0),
    ("  return (\n", 0.0),
    ("", 0.0),
]


def test_humaneval_tells_right_from_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A known solution passes its tests; wrong, endless, exiting and broken ones do not."""
    monkeypatch.setattr("keyhole.eval.score.run_program", partial(run_program, seconds=2.0))
    question = read("humaneval", tmp_path).questions[0]
    task = Task("humaneval", [question] * len(SOLUTIONS), read_spec("humaneval"))
    assert verdicts(task, [text for text, _ in SOLUTIONS]) == {"pass@1": [worth for _, worth in SOLUTIONS]}


def test_code_runs_only_where_it_is_allowed(tmp_path: Path, tiny_model: Path) -> None:
    task = read("humaneval", tmp_path)
    with pytest.raises(UserError, match="--allow-code-execution"):
        score(None, task)
    with pytest.raises(UserError, match="--allow-code-execution"):
        evaluate("no/such/model", ["humaneval"], task_data=str(tmp_path), say=str)
    model = keyhole.load(tiny_model, device="cpu")
    found = score(model, task, allow_code_execution=True)
    assert found.metrics == {"pass@1": 0.0}


def test_tasks_by_name_in_one_table(tmp_path: Path, tiny_model: Path) -> None:
    """Names with a comma between them, a task file of one's own, and a data file; the draw is printed."""
    read("sst2", tmp_path), read("squad", tmp_path)
    own = tmp_path / "own.yaml"
    own.write_text(
        "columns: {sentence: sentence, label: label}\nprompt: '{{ sentence }}'\ncandidates: [' a', ' b']\n"
        "metric: [macro_f1, accuracy]\nfolders: [sst2]\n"
    )
    said: list[str] = []
    text = evaluate(
        str(tiny_model), ["sst2,squad", str(own)], task_data=str(tmp_path), device="cpu",
        json_path=tmp_path / "o.json", say=said.append,
    )  # fmt: skip
    results = json.loads((tmp_path / "o.json").read_text())["results"]
    assert [result["metric"] for result in results] == ["accuracy", "token_f1", "macro_f1"]
    assert "| sst2" in text and "token_f1" in text and "own: macro_f1" in text
    assert said[0].startswith("task sst2: all 1 rows of validation.jsonl (")
    with pytest.raises(UserError, match="none of demo is a task by name"):
        evaluate(str(tiny_model), ["demo"], task_data=str(tmp_path))


def test_a_limit_is_told_with_the_fingerprint_of_what_is_left(tmp_path: Path, tiny_model: Path) -> None:
    """Other questions than without the limit, so another fingerprint."""
    (tmp_path / "sst2").mkdir()
    rows = "".join(json.dumps({"sentence": f"film {i}", "label": i % 2}) + "\n" for i in range(5))
    (tmp_path / "sst2" / "validation.jsonl").write_text(rows)
    said: list[str] = []
    for limit in (None, 3, 5):
        evaluate(str(tiny_model), ["sst2"], task_data=str(tmp_path), device="cpu", limit=limit, say=said.append)
    whole, three, five = (line for line in said if line.startswith("task sst2"))
    assert three.startswith("task sst2: the first 3 of all 5 rows of validation.jsonl (") and whole == five
    assert three.partition("(")[2] != whole.partition("(")[2]


def test_names_of_tasks_are_read_as_folders_are(tmp_path: Path, tiny_model: Path) -> None:
    """SST-2 is sst2; a mistyped name is told as one, and nothing else is blamed."""
    read("sst2", tmp_path)
    assert "| sst2" in evaluate(
        str(tiny_model), ["SST-2"], task_data=str(tmp_path), device="cpu", say=lambda line: None
    )
    for words in (["stt2"], ["sst2,stt2"]):
        with pytest.raises(UserError, match="^--tasks: no task `stt2`; did you mean `sst2`"):
            evaluate(str(tiny_model), words, task_data=str(tmp_path))
    with pytest.raises(UserError, match="^--tasks: no task `stt2`; did you mean `sst2`"):
        evaluate(str(tiny_model), ["stt2"])


def test_a_word_that_can_be_nothing_else_is_an_unknown_task(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without `datasets` no hub id is read, so the tasks there are help more than advice on the hub."""
    monkeypatch.setattr("keyhole.eval.asked.find_spec", lambda name: object())
    assert asked_names(["nope"]) == ["nope"]
    monkeypatch.setattr("keyhole.eval.asked.find_spec", lambda name: None)
    with pytest.raises(UserError, match="^--tasks: no task `nope`; there are .*sst2.*; nor is there a file"):
        asked_names(["nope"])


def test_an_answer_without_a_match_is_wrong(tmp_path: Path) -> None:
    """Also where the reference has none: nothing is not equal to nothing."""
    (tmp_path / "own.yaml").write_text(
        'columns: {q: q, a: a}\nprompt: "{{ q }}"\nanswer: "{{ a }}"\nextract: "x(y)?"\nmetric: exact_match\n'
    )
    (tmp_path / "dev.jsonl").write_text(json.dumps({"q": "so", "a": "x"}) + "\n")
    task = load_task(str(tmp_path / "own.yaml"), str(tmp_path), Numbers(), training=False)["test"]
    assert verdicts(task, ["x"]) == {"exact_match": [0.0]}
