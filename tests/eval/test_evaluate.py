"""The table of `keyhole eval`: tasks and data files, our directories and any other."""

import json
import math
from pathlib import Path

import pytest
import torch

import keyhole
from keyhole.errors import UserError
from keyhole.eval.evaluate import evaluate, score_data, table
from keyhole.eval.score import DataScore
from tests.model.decoders import hf_nll


@pytest.fixture
def task(tmp_path: Path) -> str:
    """Eight sums, the right answer second."""
    path = tmp_path / "sums" / "val.jsonl"
    path.parent.mkdir()
    rows = [{"prompt": f"{a}+{a}=", "candidates": [str(2 * a + 1), str(2 * a)], "answer": 1} for a in range(8)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.mark.parametrize("placement", ["auto", "stream"])
def test_tasks_and_data_in_one_table(
    tiny_model: Path, tiny_data: Path, task: str, tmp_path: Path, placement: str
) -> None:
    """One line a file; the same numbers go to the JSON file, whatever the placement."""
    lines: list[str] = []
    how = {"placement": placement, "device": "cpu", "json_path": tmp_path / "out.json"}
    text = evaluate(str(tiny_model), [task, str(tiny_data)], say=lines.append, **how)
    found = json.loads((tmp_path / "out.json").read_text())
    first, second = found["results"]
    assert first["name"] == "sums/val" and first["questions"] == 8 and len(first["predictions"]) == 8
    assert second["samples"] == 24 and second["perplexity"] == pytest.approx(math.exp(second["loss"]))
    rows = [line for line in text.splitlines() if "sums" in line]
    assert f"{100 * first['accuracy']:.1f}%" in rows[0] and f"{second['loss']:.4f}" in rows[1]
    assert text.isascii() and any("placement" in line for line in lines)
    assert found["dtype"] == "float32" and found["device"] == "cpu"


def test_a_perplexity_beyond_all_numbers_is_null_in_the_file(tiny_model: Path, tiny_data: Path, tmp_path: Path) -> None:
    """exp(710) is no double: the table says inf, and the file stays JSON."""
    model = keyhole.load(tiny_model, device="cpu")
    with torch.no_grad():
        model.module.lm_head.weight.mul_(1e5)
    model.save_pretrained(tmp_path / "large")
    text = evaluate(
        str(tmp_path / "large"), [str(tiny_data)], device="cpu", json_path=tmp_path / "out.json", say=lambda line: None
    )
    (found,) = json.loads((tmp_path / "out.json").read_text(), parse_constant=lambda name: pytest.fail(name))["results"]
    assert found["loss"] > 710 and found["perplexity"] is None and found["metrics"] == {"perplexity": None}
    assert " inf |" in text


def test_loss_is_that_of_training(tiny_model: Path, tiny_data: Path) -> None:
    """Validation loss is the NLL over all trained tokens by their number, not a mean of rows or batches."""
    model = keyhole.load(tiny_model, device="cpu", placement="stream")
    score = score_data(model, str(tiny_data), batch_tokens=64)
    nll, count = 0.0, 0
    for row in map(json.loads, tiny_data.read_text().splitlines()):
        prompt, answer = (model.tokenizer(row[key]).input_ids for key in ("prompt", "completion"))
        answer.append(model.tokenizer.eos_token_id)
        labels = torch.tensor([[-100] * len(prompt) + answer])
        nll += float(hf_nll(model.module, {"input_ids": torch.tensor([prompt + answer]), "labels": labels}))
        count += len(answer)
    assert score.tokens == count and score.loss == pytest.approx(nll / count, rel=1e-5)


def test_what_was_left_out_of_a_file_is_said(tiny_model: Path, tmp_path: Path) -> None:
    """Rows without anything to score are counted under the table and in the JSON, not only those that were cut."""
    asked, calls = {"role": "user", "content": "Hi"}, [{"function": {"name": "clock", "arguments": {}}}]
    rows = [[asked, {"role": "assistant", "content": "A."}], [asked, {"role": "assistant", "tool_calls": calls}]]
    (tmp_path / "d.jsonl").write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    text = evaluate(str(tiny_model), [str(tmp_path / "d.jsonl")], device="cpu", json_path=tmp_path / "o.json", say=str)
    assert "d: dropped: 1 sample with nothing to train on" in text and "d: 1 answers call tools" in text
    (found,) = json.loads((tmp_path / "o.json").read_text())["results"]
    assert found["samples"] == 1 and len(found["losses"]) == 2


def test_what_was_scored_before_an_error_is_shown(tiny_model: Path, task: str, tmp_path: Path) -> None:
    """The second file cannot be scored, which only its tokens show; the numbers of the first are not lost."""
    long = tmp_path / "long.jsonl"
    long.write_text(json.dumps({"prompt": "a", "candidates": ["b" * 5000, "c"], "answer": 0}) + "\n")
    lines: list[str] = []
    with pytest.raises(UserError, match="a candidate has"):
        evaluate(str(tiny_model), [task, str(long)], device="cpu", say=lines.append)
    assert any(line.startswith("| sums/val |") and "accuracy" in line for line in lines)


def test_mistakes_come_before_the_model(tmp_path: Path, task: str) -> None:
    """A bad task file is reported even where the model does not exist: nothing was loaded."""
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"prompt": "a", "candidates": ["b"], "answer": 0}\n')
    with pytest.raises(UserError, match="bad.jsonl, line 1"):
        evaluate("no/such/model", [task, str(bad)])
    with pytest.raises(UserError, match="missing.jsonl"):
        evaluate("no/such/model", [task, str(tmp_path / "missing.jsonl")])
    with pytest.raises(UserError, match="not a directory"):
        evaluate("no/such/model", [task])
    with pytest.raises(UserError, match="at least one"):
        evaluate("no/such/model", [])


def test_a_directory_without_a_tokenizer(tiny_model: Path, tiny_data: Path, task: str, tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((tiny_model / name).read_bytes())
    for source in (task, str(tiny_data)):
        with pytest.raises(UserError, match="no tokenizer"):
            evaluate(str(tmp_path), [source], device="cpu", say=str)


@pytest.mark.parametrize("name", ["a" * 120 + "/val", "data/[ab]*", "[/b]", "two\nlines"])
def test_every_number_is_shown_whatever_the_name(name: str) -> None:
    """A long name takes no room from the numbers, and brackets in a name are no markup."""
    found = DataScore(
        name=name, metric="perplexity", metrics={"perplexity": 3.4371}, truncated=0, samples=1234, tokens=5678,
        loss=1.23456, perplexity=3.4371,
    )  # fmt: skip
    *_, row = table([found]).splitlines()
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells == [name.replace("\n", "\\n"), "1,234", "-", "-", "-", "-", "1.2346", "3.437"]


def test_the_word_demo_is_the_embedded_model_and_task() -> None:
    """Both work without a path, and the untrained model does not know the answers."""
    text = evaluate("demo", ["demo"], device="cpu", limit=40, say=str)
    accuracy = float(next(line for line in text.splitlines() if "demo" in line).split("|")[3].split()[1].strip("%"))
    assert 25 < accuracy < 75


def test_a_loss_that_is_not_finite_is_refused(tiny_model: Path, tiny_data: Path) -> None:
    """A table with nan in it would look like a result; the file and the first bad tensor are named."""
    model = keyhole.load(tiny_model, device="cpu")
    tensor = model.layout.common.tensors[0]
    model.home(tensor).fill_(float("nan"))
    with pytest.raises(UserError, match=rf"{tiny_data}: the loss is nan: .* {tensor.name} has NaN"):
        score_data(model, str(tiny_data))
